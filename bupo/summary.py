"""summary.json and the closing table: before and after, on the same seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bupo.evaluate import Evaluation
from bupo.evaluator import mean_null_kl, mean_pairwise_kl
from bupo.measures import StageResult
from bupo.records import Scorecard
from bupo.tracking import Tracker

EVALUATION = "evaluation"
YARDSTICK = "linear"
SHOWN = ("payoff", "agreement_rate", "rounds", "irrational_deals", "opponent_payoff", "valid_message_rate")


def save_stage(run_dir: Path, stage: str, result: StageResult) -> None:
    """Keeps a stage's dialogues by dialogue, for paired differences after a resume."""
    folder = run_dir / EVALUATION
    folder.mkdir(exist_ok=True)
    (folder / f"{stage}.json").write_text(json.dumps(result.state_dict()))


def load_stage(run_dir: Path, stage: str) -> StageResult | None:
    """A stage that an earlier part of the run has played, None if there is none."""
    path = run_dir / EVALUATION / f"{stage}.json"
    return StageResult.from_state(json.loads(path.read_text())) if path.is_file() else None


def build_summary(
    evaluation: Evaluation,
    stages: Mapping[str, StageResult],
    *,
    complete: bool,
    iterations: int,
    seconds: Mapping[str, float],
    tokens_trained: int,
    card: Scorecard | None,
) -> dict[str, Any]:
    """The content of summary.json (definitions: docs/metrics.md).

    Args:
        evaluation: The protocol.
        stages: Results by stage.
        complete: Whether the run reached its end.
        iterations: Finished iterations.
        seconds: Time by phase.
        tokens_trained: Own tokens that PPO learnt from.
        card: The last scorecard.
    """
    yardstick = evaluation.yardstick(YARDSTICK)
    summary: dict[str, Any] = {
        "complete": complete,
        "iterations": iterations,
        "tokens_trained": tokens_trained,
        "scenario_set": {"size": evaluation.config.size, "hash": evaluation.protocol.hash},
        "stages": {stage: result.summary() for stage, result in stages.items()},
        "self_play": {stage: result.self_play.summary() for stage, result in stages.items()},
        "scripted_linear": yardstick.summary(),
        "ceiling": evaluation.ceiling(),
        "seconds": dict(seconds),
    }
    if "final" in stages:
        summary["paired_difference"] = evaluation.paired(stages["sft"], stages["final"])
    if card is not None:
        summary["effective_policies"] = math.exp(card.jsd)
        summary["mean_pairwise_kl"] = mean_pairwise_kl(card)
        summary["mean_pairwise_kl_null"] = mean_null_kl(card)
    return summary


def _cell(entry: Mapping[str, Any]) -> str:
    mean, (low, high) = entry["mean"], entry["ci95"]
    if mean is None:
        return "-"
    return f"{mean:.3f}" if low is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def show_summary(tracker: Tracker, summary: Mapping[str, Any]) -> None:
    """Prints the stages side by side, the paired difference, and the yardsticks."""
    stages = summary["stages"]
    rows = []
    paired = summary.get("paired_difference", {})
    for key in SHOWN:
        rows.append(
            [key, *(_cell(stages[stage][key]) for stage in stages), _cell(paired[key]) if key in paired else ""]
        )
    rows.append(
        ["self-play agreement", *(_cell(summary["self_play"][stage]["agreement_rate"]) for stage in stages), ""]
    )
    tracker.table("Against opponents never trained on (mean [95% interval])", ["measure", *stages, "final - sft"], rows)
    linear, ceiling = _cell(summary["scripted_linear"]["payoff"]), _cell(summary["ceiling"])
    tracker.say(f"payoff of the scripted Linear player: {linear}; of perfect play (ceiling): {ceiling}")
    if "effective_policies" in summary:
        tracker.say(
            f"effective policies {summary['effective_policies']:.3f}; pairwise KL {summary['mean_pairwise_kl']:.4f} "
            f"nats/token, null {summary['mean_pairwise_kl_null']:.4f}"
        )
