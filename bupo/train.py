"""The loop, read top to bottom: initialise, interact, update, balance (initialise: bupo/run.py).

Shape legend: K sub-policies, B rows (one a learner-played seat), T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bupo.balancer import apply_balance, plan_balance
from bupo.checkpoint import checkpoints
from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.coordinators.base import GameCoordinator
from bupo.evaluate import Evaluation
from bupo.evaluator import scorecard_metrics
from bupo.learn.advantages import group_advantages, most_informative, role_advantages
from bupo.learn.critic import fit_values, turn_advantages
from bupo.learn.ppo import PPOConfig, scheduled_lr, token_batch, update
from bupo.measures import StageResult
from bupo.negotiation.rewards import PARTS, Reward, reward
from bupo.negotiation.scenario import ROLES
from bupo.negotiation.states import turn_states
from bupo.policies.lockstep import Stacks
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
                    update_metrics = learn(run, interaction.batch, bar)
                with run.timed("balance"):
                    balance_metrics = balance(run, interaction.batch, acted)
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
        stacks = run.league.members[name].to(run.lockstep.device)
        past = build_coordinator(config.coordinator, len(stacks)).to(run.lockstep.device)
        pools[name] = (stacks, past)

    def told(done: int) -> None:
        bar.update(advance=0, note=f"interact {done}/{len(seatings)} dialogues")

    episodes = play_dialogues(run.table, seatings, pools, run.sampler, told)
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
    if config.ppo.advantage == "role":
        advantage_B = role_advantages(reward_B, np.array(roles), run.baselines, scale=config.ppo.scale)
    else:
        # A seat never speaks where the other side's refused messages end the talk at once; a copy that is left alone
        # by that has nothing to be compared with.
        _, index, count = np.unique(group_B, return_inverse=True, return_counts=True)
        compared = count[index] > 1
        advantage_B = np.zeros_like(reward_B)
        if compared.any():
            advantage_B[compared] = group_advantages(reward_B[compared], group_B[compared], scale=config.ppo.scale)
    kept = most_informative(advantage_B, group_B, config.ppo.keep)
    advantages: list[float] | list[list[float]] = advantage_B.tolist()
    explained = None
    if config.ppo.advantage == "turn":
        advantages, explained = by_turn(records, reward_B, advantage_B, group_B, config.ppo)
    batch = token_batch([rows[row] for row in kept], [advantages[row] for row in kept])
    own = sum(sum(action) for _, action, _ in rows)
    metrics = interact_metrics(records) | {"interact/own_tokens": own, "interact/kept_rows": len(kept) / len(rows)}
    metrics["interact/explained_variance"] = explained
    return Interaction(batch=batch, metrics=metrics | {"seconds/interact": time.perf_counter() - started})


def by_turn(
    records: Sequence[tuple[Seating, Episode, int, Reward]],
    reward_B: np.ndarray,
    advantage_B: np.ndarray,
    group_B: np.ndarray,
    config: PPOConfig,
) -> tuple[list[list[float]], float]:
    """Turn-level advantages, one for each own token, in the scale of the group advantages.

    Returns:
        Advantages by row and own token, and the share of the variance within groups that the critic explains.
    """
    _, index, count = np.unique(group_B, return_inverse=True, return_counts=True)
    mean_B = (np.bincount(index, weights=reward_B) / count)[index]
    # The group advantage tells by what its group was divided; where nothing differed there is nothing to scale.
    gain_B = reward_B - mean_B
    scale_B = np.where(np.abs(gain_B) > 1e-9, advantage_B / np.where(gain_B == 0, 1.0, gain_B), 0.0)
    group_scale = np.zeros(len(count))
    np.maximum.at(group_scale, index, scale_B)
    states = [turn_states(seating.scenario, episode, seat) for seating, episode, seat, _ in records]
    values = fit_values(reward_B, mean_B, states)
    turns = turn_advantages(reward_B, values, config.lam)
    lengths = [len(state) for state in states]
    error = np.repeat(reward_B, lengths) - np.concatenate(values)
    explained = 1 - float((error**2).sum() / max((np.repeat(gain_B, lengths) ** 2).sum(), 1e-12))
    spans = [
        [len(turn.tokens.action_ids) for turn in episode.turns if turn.seat == seat and turn.tokens is not None]
        for _, episode, seat, _ in records
    ]
    scaled = [advantage * group_scale[index[row]] for row, advantage in enumerate(turns)]
    return [np.repeat(advantage, spans[row]).tolist() for row, advantage in enumerate(scaled)], explained


def learn(run: Run, batch: TokenBatch, bar: Any) -> dict[str, float]:
    """Phase 3: joint PPO through the coordinator."""
    started = time.perf_counter()
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
    return metrics | {"seconds/update": time.perf_counter() - started}


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
