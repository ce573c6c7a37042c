"""The joint PPO update: one ratio of the executed mixture, back-propagated through the coordinator into every adapter.

Shape legend: K sub-policies, B rows, T tokens, N action tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bupo.config import at_least, in_range, one_of, positive, raise_problems
from bupo.coordinators.base import GameCoordinator
from bupo.learn.advantages import SCALES
from bupo.learn.objectives import clipped_surrogate, entropy, jensen_shannon, kl
from bupo.learn.optimizer import PolicyOptimizer
from bupo.policies.lockstep import Lockstep, Stacks
from bupo.policies.packing import Packing, families, pack
from bupo.records import Proposal, TokenBatch

ADVANTAGES = ("turn", "group", "role")


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """The update.

    Attributes:
        lr: Learning rate of the adapters (Adam); 0 for 5e-3 on nano and 3e-4 on a public base, which 5e-3 breaks.
        warmup: Iterations over which the learning rate rises to `lr`: Adam's first steps are as long as its later ones
            though it knows little yet, and what they break has to be learnt again.
        final_lr: Learning rate of the last iteration as a share of `lr`; linear decay.
        clip: Half-width of the trusted range of the mixture's ratio.
        epochs: Passes over an iteration's tokens.
        minibatches: Optimizer steps a pass.
        micro_tokens: Most tokens in one forward; smaller saves memory and changes no number.
        advantage: `group`: reward less the mean of the same scenario, role and opponent, for all own tokens alike;
            `turn`: each own message by a critic of what it and the reply to it changed (bupo/learn/critic.py), on top
            of that mean; `role`: less a running mean of the role.
        lam: Lambda of `turn`, for one message; 1 trusts only final rewards, less trusts the critic more.
        critic_window: Iterations whose dialogues the critic of `turn` is fitted on.
        scale: What advantages are divided by: the standard deviation of each `group`, of the `batch`, or `none`.
        keep: Share of each group's rows that are learnt from: those with the most extreme advantages.
        kl_reference: Weight of KL(mu || reference), exact over the vocabulary.
        kl_old: Weight of the mean over sub-policies of KL(pi_k,old || pi_k): the clip alone does not bound a policy
            that holds little responsibility.
        entropy: Weight of the entropy bonus of the mixture.
        diversity: Weight of c (1 - exp(-JSD / c)), with the weighted Jensen-Shannon divergence of the proposals at a
            token: one advantage for all gives sub-policies one direction, and the reference pulls what differs back.
            It acts on the proposals, so the mixture may stay what it is.
        diversity_cap: c above, in nats: a token at which sub-policies differ by more earns little by more still.
        max_grad_norm: Gradient norm of each sub-policy is clipped to this.
        temperature: Divides the logits of each proposal, in rollouts and updates alike.
    """

    lr: float = 0.0
    warmup: int = 3
    final_lr: float = 0.2
    clip: float = 0.2
    epochs: int = 1
    minibatches: int = 6
    micro_tokens: int = 2048
    advantage: str = "turn"
    lam: float = 0.8
    critic_window: int = 8
    scale: str = "batch"
    keep: float = 0.5
    kl_reference: float = 0.15
    kl_old: float = 0.1
    entropy: float = 0.0
    diversity: float = 0.15
    diversity_cap: float = 0.1
    max_grad_norm: float = 1.0
    temperature: float = 0.7

    def __post_init__(self) -> None:
        """Checks the values."""
        raise_problems(
            [
                at_least("lr", self.lr, 0),
                at_least("warmup", self.warmup, 0),
                in_range("final_lr", self.final_lr, 0, 1),
                in_range("clip", self.clip, 0, 1, include_low=False),
                at_least("epochs", self.epochs, 1),
                at_least("minibatches", self.minibatches, 1),
                at_least("micro_tokens", self.micro_tokens, 64),
                one_of("advantage", self.advantage, ADVANTAGES),
                in_range("lam", self.lam, 0, 1),
                at_least("critic_window", self.critic_window, 1),
                one_of("scale", self.scale, SCALES),
                in_range("keep", self.keep, 0, 1, include_low=False),
                at_least("kl_reference", self.kl_reference, 0),
                at_least("kl_old", self.kl_old, 0),
                at_least("entropy", self.entropy, 0),
                at_least("diversity", self.diversity, 0),
                positive("diversity_cap", self.diversity_cap),
                positive("max_grad_norm", self.max_grad_norm),
                positive("temperature", self.temperature),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Proposals at the action tokens of some rows.

    Attributes:
        logp_KNV: Log-probabilities of each policy of the stack.
        ids_N: The executed tokens.
        row_N: Row of each token.
    """

    logp_KNV: torch.Tensor
    ids_N: torch.Tensor
    row_N: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """What every `score` of the same rows starts from.

    Attributes:
        packing: The rows' tokens as one list.
        h_1ND: Output of the shared lower layers.
    """

    packing: Packing
    h_1ND: torch.Tensor


def trunk_of(lockstep: Lockstep, batch: TokenBatch) -> Trunk:
    """Runs the shared lower layers on whole rows, on each shared beginning once."""
    lists = (batch.length_B.tolist(), batch.family_B.tolist(), batch.shared_B.tolist())
    packing = pack(*lists, batch.ids_BT.shape[1]).to(lockstep.device)
    ids_1N = batch.ids_BT.to(lockstep.device).flatten()[packing.source_N][None]
    return Trunk(packing=packing, h_1ND=lockstep.trunk(ids_1N, packing.position_1N, packing=packing))


def score(
    lockstep: Lockstep, batch: TokenBatch, stacks: Stacks, temperature: float, trunk: Trunk | None = None
) -> Scored:
    """Teacher-forced proposals at the action tokens: the same forward as the rollout's.

    Args:
        lockstep: The forward.
        batch: Rows to score.
        stacks: The policies.
        temperature: As in the rollout.
        trunk: The rows' trunk, if it is known already.

    Returns:
        Proposals at each action token, in row-major order.
    """
    row_N, column_N = batch.action_BT.to(lockstep.device).nonzero(as_tuple=True)
    trunk = trunk_of(lockstep, batch) if trunk is None else trunk
    # The distribution of a token stands at the position before it.
    place_N = trunk.packing.place_BT[row_N, column_N - 1]
    select = (torch.zeros_like(place_N), place_N)
    h_KND = lockstep.branches(trunk.h_1ND, trunk.packing.position_1N, stacks, select=select, packing=trunk.packing)
    logp_KNV = lockstep.logp(h_KND, temperature)
    return Scored(logp_KNV=logp_KNV, ids_N=batch.ids_BT.to(lockstep.device)[row_N, column_N], row_N=row_N)


def shuffled_families(batch: TokenBatch, generator: torch.Generator) -> torch.Tensor:
    """All rows in random order of families, so that a minibatch holds whole families: they share what is computed."""
    rank = torch.randperm(int(batch.family_B.max()) + 1, generator=generator)
    return rank[batch.family_B].argsort(stable=True)


def micro_batches(batch: TokenBatch, rows: torch.Tensor, micro_tokens: int) -> Iterator[TokenBatch]:
    """Cuts rows into pieces of at most `micro_tokens` tokens (a longer row is alone), families together."""
    rows = rows[batch.family_B[rows].argsort(stable=True)]
    start = size = 0
    family = -1
    for place, row in enumerate(rows.tolist()):
        own, shared = int(batch.length_B[row] - batch.shared_B[row]), int(batch.shared_B[row])
        extra = own + (shared if batch.family_B[row] != family else 0)
        if place > start and size + extra > micro_tokens:
            yield batch.rows(rows[start:place])
            start, size, extra = place, 0, own + shared
        family, size = int(batch.family_B[row]), size + extra
    yield batch.rows(rows[start:])


def _gather(logp_NV: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    return logp_NV.gather(-1, ids_N[:, None])[:, 0]


def update(
    lockstep: Lockstep,
    coordinator: GameCoordinator,
    optimizer: PolicyOptimizer,
    batch: TokenBatch,
    config: PPOConfig,
    *,
    learning_rate: float,
    generator: torch.Generator,
    on_step: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """One iteration's PPO epochs over a batch.

    The old policy is a frozen copy of the adapters at the start of the update; its distributions are recomputed micro
    batch by micro batch, so [K, B, T, V] never exists whole. Every loss term is a mean over the action tokens of the
    minibatch, however it is cut.

    Args:
        lockstep: The forward.
        coordinator: The mixture that was sampled.
        optimizer: Steps the adapters.
        batch: Own tokens with advantages.
        config: The update's settings.
        learning_rate: Adam's learning rate now.
        generator: Shuffles rows.
        on_step: Told the number of tokens done after each optimizer step.

    Returns:
        Diagnostics (docs/metrics.md).

    Raises:
        FloatingPointError: The loss or a gradient is not finite.
    """
    old = lockstep.stacks(reference=True)
    sums: dict[str, float] = {}
    norms: dict[str, float] = {}
    first_ratio: float | None = None
    tokens = steps = 0
    for _ in range(config.epochs):
        shuffled = shuffled_families(batch, generator)
        for rows in shuffled.chunk(config.minibatches):
            total = int(batch.action_BT[rows].sum())
            for micro in micro_batches(batch, rows, config.micro_tokens):
                loss, parts = _loss(lockstep, coordinator, micro, old, config)
                if not torch.isfinite(loss):
                    raise FloatingPointError(f"the PPO loss is not finite: {parts}; lower ppo.lr or check the reward")
                (loss / total).backward()
                for key, value in parts.items():
                    sums[key] = sums.get(key, 0.0) + value
                tokens += int(micro.action_BT.sum())
                if first_ratio is None:
                    first_ratio = parts["ratio_deviation"] / int(micro.action_BT.sum())
            for name, norm in optimizer.step(learning_rate).items():
                norms[name] = norms.get(name, 0.0) + norm
            steps += 1
            if on_step is not None:
                on_step(tokens)
    metrics = {f"ppo/{key}": value / tokens for key, value in sums.items()}
    metrics["ppo/first_ratio_deviation"] = first_ratio or 0.0
    metrics["ppo/learning_rate"] = learning_rate
    return metrics | {f"gradient_norm/{name}": norm / steps for name, norm in norms.items()}


def _loss(
    lockstep: Lockstep, coordinator: GameCoordinator, micro: TokenBatch, old: Stacks, config: PPOConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Summed loss of a micro batch, and summed diagnostics."""
    trunk = trunk_of(lockstep, micro)
    with torch.no_grad():
        before = score(lockstep, micro, old, config.temperature, trunk)
        old_KNV, reference_NV = before.logp_KNV[:-1], before.logp_KNV[-1]
        old_N = _gather(coordinator.combine(Proposal(logp_KNV=old_KNV)).logp_NV, before.ids_N)
    now = score(lockstep, micro, lockstep.stacks(grad=True), config.temperature, trunk)
    mixture = coordinator.combine(Proposal(logp_KNV=now.logp_KNV))
    logp_N = _gather(mixture.logp_NV, now.ids_N)
    action_BT = micro.action_BT.to(logp_N.device)
    advantage_N = micro.advantage_BT.to(logp_N)[action_BT]
    surrogate_N, ratio_N = clipped_surrogate(logp_N, old_N, advantage_N, config.clip)
    kl_reference_N = kl(mixture.logp_NV, reference_NV)
    kl_old_N = kl(old_KNV, now.logp_KNV).mean(0)
    entropy_N = entropy(mixture.logp_NV)
    jsd_N = jensen_shannon(now.logp_KNV, mixture.weights_NK)
    diversity_N = config.diversity_cap * (1 - torch.exp(-jsd_N / config.diversity_cap))
    loss = (
        surrogate_N
        + config.kl_reference * kl_reference_N
        + config.kl_old * kl_old_N
        - config.entropy * entropy_N
        - config.diversity * diversity_N
    ).sum()
    with torch.no_grad():
        clipped_N = ((ratio_N - 1).abs() > config.clip).float()
        rollout_N = micro.logp_rollout_BT.to(logp_N)[action_BT]
        parts = {
            "loss": loss.detach(),
            "surrogate": surrogate_N.sum(),
            "kl_reference": kl_reference_N.sum(),
            "kl_old": kl_old_N.sum(),
            "entropy": entropy_N.sum(),
            "jensen_shannon": jsd_N.sum(),
            "ratio": ratio_N.sum(),
            "ratio_deviation": (ratio_N - 1).abs().sum(),
            "clip_fraction": clipped_N.sum(),
            "rollout_mismatch": (old_N - rollout_N).abs().sum(),
        }
    return loss, {key: float(value) for key, value in parts.items()}


def scheduled_lr(config: PPOConfig, iteration: int, iterations: int) -> float:
    """Learning rate of an iteration (from 0): a rise, then linear from `lr` to `final_lr * lr` at the last one."""
    progress = iteration / max(iterations - 1, 1)
    rise = min((iteration + 1) / (config.warmup + 1), 1.0)
    return config.lr * rise * (1 - (1 - config.final_lr) * progress)


def token_batch(
    rows: Sequence[tuple[Sequence[int], Sequence[bool], Sequence[float]]],
    advantages: Sequence[float | Sequence[float]],
) -> TokenBatch:
    """Pads rows into a batch.

    Args:
        rows: Ids, action mask and rollout log-probabilities of each row.
        advantages: Advantage of each row, one number or one for each of its own tokens.

    Returns:
        The right-padded batch.
    """
    width = max(len(ids) for ids, _, _ in rows)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    action_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    logp_BT = torch.zeros(len(rows), width)
    advantage_BT = torch.zeros(len(rows), width)
    for i, (ids, action, logp) in enumerate(rows):
        ids_BT[i, : len(ids)] = torch.tensor(ids)
        action_BT[i, : len(ids)] = torch.tensor(action)
        logp_BT[i, : len(ids)] = torch.tensor(logp)
        advantage_BT[i, action_BT[i]] = torch.tensor(advantages[i], dtype=torch.float32)
    # What predicts the first own token is computed in each row, so that there is a row for it to be in.
    most = [action.index(True) - 1 if True in action else len(ids) - 1 for ids, action, _ in rows]
    family, shared = families([ids for ids, _, _ in rows], most)
    return TokenBatch(
        ids_BT=ids_BT,
        action_BT=action_BT,
        length_B=torch.tensor([len(ids) for ids, _, _ in rows]),
        family_B=torch.tensor(family),
        shared_B=torch.tensor(shared),
        advantage_BT=advantage_BT,
        logp_rollout_BT=logp_BT,
    )
