"""The loop, read top to bottom: initialise, interact, update, balance (initialise: bupo/run.py).

Shape legend: K sub-policies, B rows (one a learner-played seat), T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bupo.balancer import apply_balance, plan_balance
from bupo.checkpoint import checkpoints
from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.coordinators.base import GameCoordinator
from bupo.evaluate import Evaluation
from bupo.evaluator import scorecard_metrics
from bupo.learn.advantages import group_advantages, most_informative, role_advantages, scaled_turns
from bupo.learn.critic import explained, turn_advantages
from bupo.learn.ppo import scheduled_lr, update
from bupo.learn.scoring import keep_trunk, token_batch
from bupo.measures import StageResult
from bupo.negotiation.rewards import PARTS, Reward, reward
from bupo.negotiation.scenario import ROLES
from bupo.negotiation.states import turn_states
from bupo.policies.stacks import Stacks
from bupo.records import BalancePlan, Episode, TokenBatch
from bupo.rollout.dialogues import Seating, play_dialogues
from bupo.run import Config, Run, initialise, save
from bupo.selfplay.matchmaking import LEARNER, draw_seatings
from bupo.summary import build_summary, load_stage, save_stage, show_summary

SHOWN_PER_ITERATION = 8
STAGES = ("sft", "initial", "final")


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """What an interact phase brought.

    Attributes:
        batch: Own tokens and advantages of the learner's seats.
        metrics: What happened, for metrics.jsonl.
    """

    batch: TokenBatch
    metrics: dict[str, float | None]


def train(config: Config) -> Path:
    """Runs the main job: initialise, evaluate, the loop, evaluate.

    Args:
        config: The run.

    Returns:
        The run folder.
    """
    run = initialise(config)
    config = run.config
    evaluation = Evaluation(config.evaluation, config.scenarios, run.tracker)
    stages = {stage: evaluate_stage(run, evaluation, stage) for stage in STAGES[:2]}
    if not checkpoints(run.folder):
        save(run)
    try:
        with run.tracker.progress("train", config.iterations, "iterations") as bar:
            bar.update(advance=run.iteration)
            while run.iteration < config.iterations:
                acted = run.lockstep.stacks()
                with run.timed("interact"):
                    interaction = interact(run, bar)
                with run.timed("update"):
                    batch, update_metrics = learn(run, interaction.batch, bar)
                with run.timed("balance"):
                    balance_metrics = balance(run, batch, acted)
                run.iteration += 1
                run.tracker.log(run.iteration, interaction.metrics | update_metrics | balance_metrics | clock(run))
                save(run)
                bar.update(advance=1, note=_note(interaction.metrics))
    except KeyboardInterrupt:
        run.tracker.warn(
            f"stopped after {run.iteration} of {config.iterations} iterations; everything so far is kept. "
            f"Continue with --resume --output_dir {run.folder}"
        )
        finish(run, evaluation, stages, complete=False)
        raise
    stages["final"] = evaluate_stage(run, evaluation, "final")
    finish(run, evaluation, stages, complete=True)
    return run.folder


def interact(run: Run, bar: Any) -> Interaction:
    """Phase 2: dialogues against ourselves, past selves and scripted players; rewards; advantages."""
    config, started = run.config, time.perf_counter()
    seatings = draw_seatings(config.interact, config.scenarios, list(run.league.members), run.rng)
    pools: dict[str, tuple[Stacks, GameCoordinator]] = {LEARNER: (run.lockstep.stacks(), run.coordinator)}
    for name in {player for seating in seatings for player in seating.players} & set(run.league.members):
        stacks = run.lockstep.merge(run.league.members[name].to(run.lockstep.device))
        past = build_coordinator(config.coordinator, len(stacks)).to(run.lockstep.device)
        pools[name] = (stacks, past)

    def told(done: int) -> None:
        bar.update(advance=0, note=f"interact {done}/{len(seatings)} dialogues")

    table = replace(run.table, decoding=replace(run.table.decoding, shortcut=config.interact.shortcut))
    episodes = play_dialogues(table, seatings, pools, int(run.rng.integers(2**31)), told)
    rows, rewards, groups, roles, records = [], [], [], [], []
    for index, (seating, episode) in enumerate(zip(seatings, episodes, strict=True)):
        scored = [reward(config.reward, seating.scenario, episode, seat) for seat in (0, 1)]
        for seat in (0, 1):
            row = seat_tokens(episode, seat) if seating.learner[seat] else None
            if row is None:
                continue
            kind = seating.players[1 - seat]
            rows.append(row)
            rewards.append(scored[seat].total)
            groups.append(f"{index // config.interact.group_size}/{seat}")
            roles.append(f"{ROLES[seat]}/{'past' if kind in run.league.members else kind}")
            records.append((seating, episode, seat, scored[seat]))
        if index % config.interact.group_size == 0 and index // config.interact.group_size < SHOWN_PER_ITERATION:
            run.tracker.append("transcripts", transcript(run.iteration + 1, "train", episode, scored))
    reward_B, group_B = np.array(rewards), np.array(groups)
    advantages, row_advantage_B, judged = credit(run, reward_B, group_B, np.array(roles), records)
    kept = most_informative(row_advantage_B, group_B, config.ppo.keep)
    batch = token_batch([rows[row] for row in kept], [advantages[row] for row in kept])
    own = sum(sum(action) for _, action, _ in rows)
    metrics = interact_metrics(records) | judged
    metrics |= {"interact/own_tokens": own, "interact/kept_rows": len(kept) / len(rows)}
    return Interaction(batch=batch, metrics=metrics | {"seconds/interact": time.perf_counter() - started})


def credit(
    run: Run,
    reward_B: np.ndarray,
    group_B: np.ndarray,
    role_B: np.ndarray,
    records: Sequence[tuple[Seating, Episode, int, Reward]],
) -> tuple[list[list[float]] | list[float], np.ndarray, dict[str, float | None]]:
    """Advantages of the own tokens, of one kind or another (`ppo.advantage`).

    Returns:
        Advantages by row (one number, or one for each own token), one number a row to choose rows by, and metrics.
    """
    config = run.config.ppo
    if config.advantage == "role":
        advantage_B = role_advantages(reward_B, role_B, run.baselines, scale=config.scale)
        return advantage_B.tolist(), advantage_B, {}
    # A seat never speaks where the other side's refused messages end the talk at once; a copy that is left alone
    # by that has nothing to be compared with.
    _, index, count = np.unique(group_B, return_inverse=True, return_counts=True)
    compared = count[index] > 1
    if config.advantage == "group":
        advantage_B = np.zeros_like(reward_B)
        if compared.any():
            advantage_B[compared] = group_advantages(reward_B[compared], group_B[compared], scale=config.scale)
        return advantage_B.tolist(), advantage_B, {}
    mean_B = (np.bincount(index, weights=reward_B) / count)[index]
    states = [turn_states(seating.scenario, episode, seat) for seating, episode, seat, _ in records]
    before, after = run.critic.judge(reward_B, mean_B, [b for b, _ in states], [a for _, a in states])
    turns = scaled_turns(turn_advantages(reward_B, before, after, config.lam), index, scale=config.scale)
    spans = [
        [len(turn.tokens.action_ids) for turn in episode.turns if turn.seat == seat and turn.tokens is not None]
        for _, episode, seat, _ in records
    ]
    turns = [advantage * alone for advantage, alone in zip(turns, compared, strict=True)]
    metrics: dict[str, float | None] = {
        "interact/explained_variance": explained(reward_B, mean_B, before),
        "interact/explained_variance_after": explained(reward_B, mean_B, after),
    }
    by_token = [np.repeat(advantage, lengths).tolist() for advantage, lengths in zip(turns, spans, strict=True)]
    return by_token, np.where(compared, reward_B - mean_B, 0.0), metrics


def learn(run: Run, batch: TokenBatch, bar: Any) -> tuple[TokenBatch, dict[str, float]]:
    """Phase 3: joint PPO through the coordinator; the batch comes back with its trunk, for the evaluator."""
    started = time.perf_counter()
    batch = keep_trunk(run.lockstep, batch, run.config.ppo.micro_tokens, run.config.ppo.trunk_mb)
    total = int(batch.action_BT.sum()) * run.config.ppo.epochs
    metrics = update(
        run.lockstep,
        run.coordinator,
        run.optimizer,
        batch,
        run.config.ppo,
        learning_rate=scheduled_lr(run.config.ppo, run.iteration, run.config.iterations),
        generator=run.shuffler,
        on_step=lambda tokens: bar.update(advance=0, note=f"update {tokens}/{total} own tokens"),
    )
    run.tokens_trained += int(batch.action_BT.sum())
    return batch, metrics | {"seconds/update": time.perf_counter() - started}


def balance(run: Run, batch: TokenBatch, acted: Stacks) -> dict[str, float | str | None]:
    """Phase 4: scorecard, then perhaps one sub-policy goes and another comes; the league takes its snapshot."""
    started = time.perf_counter()
    card = run.evaluator.scorecard(run.lockstep, run.coordinator, batch, acted, run.shuffler)
    run.cards = [*run.cards, card][-max(run.config.balancer.patience, 1) :]
    plan = plan_balance(run.cards, run.pool.born, run.iteration, run.config.balancer)
    culled, injected = apply_balance(plan, run.pool, generator=run.shuffler, iteration=run.iteration)
    if culled is not None:
        run.optimizer.sync()
        log_balance(run, plan, injected)
    if (run.iteration + 1) % run.config.interact.league_every == 0:
        run.league.add(run.iteration + 1, run.lockstep.stacks())
    return scorecard_metrics(card) | {
        "balance/culled": culled,
        "balance/injected": injected,
        "balance/reason": plan.reason,
        "seconds/balance": time.perf_counter() - started,
    }


def evaluate_stage(run: Run, evaluation: Evaluation, stage: str) -> StageResult:
    """Plays one stage of the protocol, or takes it from the folder of a resumed run."""
    if run.config.resume and (found := load_stage(run.folder, stage)) is not None:
        return found
    if stage == "sft":
        stacks = run.lockstep.stacks([], reference=True)
        coordinator = build_coordinator(CoordinatorConfig(), 1).to(run.lockstep.device)
    else:
        stacks, coordinator = run.lockstep.stacks(), run.coordinator

    def told(seating: Seating, episode: Episode) -> None:
        run.tracker.append("transcripts", transcript(run.iteration, stage, episode, None))

    with run.timed("evaluate"):
        result = evaluation.stage(stage, run.table, stacks, coordinator, seed=run.config.seed, on_episode=told)
    save_stage(run.folder, stage, result)
    return result


def finish(run: Run, evaluation: Evaluation, stages: dict[str, StageResult], *, complete: bool) -> None:
    """Leaves a usable folder: policies, summary, what the plots need, and a table on the screen."""
    run.pool.save(run.folder / "policies")
    summary = build_summary(
        evaluation,
        stages,
        complete=complete,
        iterations=run.iteration,
        seconds=run.seconds,
        tokens_trained=run.tokens_trained,
        card=run.cards[-1] if run.cards else None,
    )
    run.tracker.write_json("summary", summary)
    run.tracker.write_json("deals", evaluation.deals(stages))
    show_summary(run.tracker, summary)


def seat_tokens(episode: Episode, seat: int) -> tuple[list[int], list[bool], list[float]] | None:
    """A seat's tokens as sampled: ids, which are own, and log mu at sampling time; None if it never spoke."""
    ids: list[int] = []
    action: list[bool] = []
    logp: list[float] = []
    for turn in episode.turns:
        if turn.seat == seat and turn.tokens is not None:
            context, own = turn.tokens.context_ids, turn.tokens.action_ids
            ids += [*context, *own]
            action += [False] * len(context) + [True] * len(own)
            logp += [0.0] * len(context) + list(turn.tokens.logp_mu)
    return (ids, action, logp) if ids else None


def interact_metrics(records: Sequence[tuple[Seating, Episode, int, Reward]]) -> dict[str, float | None]:
    """Means over the learner's seats of one iteration."""
    episodes = [episode for _, episode, _, _ in records]
    seats = [seat for _, _, seat, _ in records]
    own_turns = [
        turn.action.kind != "invalid"
        for episode, seat in zip(episodes, seats, strict=True)
        for turn in episode.turns
        if turn.seat == seat
    ]
    deals = np.array([episode.deal is not None for episode in episodes])
    selfplay = np.array([all(seating.learner) for seating, _, _, _ in records])
    surplus = np.array([episode.surplus[seat] for episode, seat in zip(episodes, seats, strict=True)])
    payoff = [episode.utilities[seat] for episode, seat in zip(episodes, seats, strict=True)]
    return {
        "interact/reward": float(np.mean([scored.total for *_, scored in records])),
        **{f"reward/{part}": float(np.mean([getattr(scored, part) for *_, scored in records])) for part in PARTS},
        "interact/payoff": float(np.mean(payoff)),
        "interact/agreement_rate": float(deals.mean()),
        "interact/rounds": float(np.mean([episode.rounds for episode in episodes])),
        "interact/irrational_deals": float((deals & (surplus < 0)).mean()),
        "interact/valid_message_rate": float(np.mean(own_turns)),
        "interact/self_play_agreement": float(deals[selfplay].mean()) if selfplay.any() else None,
    }


def transcript(iteration: int, stage: str, episode: Episode, rewards: Sequence[Reward] | None) -> dict[str, Any]:
    """A dialogue as one line of transcripts.jsonl."""
    return {
        "iteration": iteration,
        "stage": stage,
        "scenario": episode.scenario,
        "players": episode.players,
        "status": episode.status,
        "deal": episode.deal,
        "rounds": episode.rounds,
        "utilities": episode.utilities,
        "rewards": None if rewards is None else [scored.as_dict() for scored in rewards],
        "turns": [
            {"seat": turn.seat, "text": turn.text, "action": turn.action.kind, "problem": turn.action.problem}
            for turn in episode.turns
        ],
    }


def log_balance(run: Run, plan: BalancePlan, injected: str | None) -> None:
    """Records a change of the pool."""
    record = asdict(plan) | {"iteration": run.iteration + 1, "injected": injected}
    run.tracker.append("balance", record)
    run.tracker.say(f"balance: {plan.reason}; {injected} is a perturbed copy of {plan.parent}")


def clock(run: Run) -> dict[str, float]:
    """Totals so far."""
    return {"tokens/trained": float(run.tokens_trained), "seconds/total": sum(run.seconds.values())}


def _note(metrics: dict[str, float | None]) -> str:
    return (
        f"reward {metrics['interact/reward']:.3f} payoff {metrics['interact/payoff']:.3f} "
        f"agreement {metrics['interact/agreement_rate']:.2f}"
    )
