"""The joint PPO update: one ratio of the executed mixture, back-propagated through the coordinator into every adapter.

Shape legend: K sub-policies, B rows, T tokens, N action tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bupo.config import at_least, in_range, one_of, positive, raise_problems
from bupo.coordinators.base import GameCoordinator
from bupo.learn.advantages import SCALES
from bupo.learn.earlier import EarlierStates
from bupo.learn.objectives import clipped_surrogate, entropy, jensen_shannon, kl
from bupo.learn.optimizer import PolicyOptimizer
from bupo.learn.scoring import ActionTokens, action_tokens, hidden, micro_rows, shuffled_families, trunk_of
from bupo.policies.lockstep import Lockstep
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
        logit_tokens: Most action tokens whose distributions over the vocabulary exist at once; likewise.
        trunk_mb: Most megabytes of trunk activations kept for an iteration; above, they are computed when needed.
        earlier_mb: Most megabytes of the old policies' final states kept from the first epoch for the later ones;
            likewise.
        checkpoint: Whether the branches are computed again in the backward pass instead of kept: less memory, more
            time, the same numbers.
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
    logit_tokens: int = 512
    trunk_mb: float = 1024.0
    earlier_mb: float = 1024.0
    checkpoint: bool = False
    advantage: str = "turn"
    lam: float = 0.8
    critic_window: int = 8
    scale: str = "batch"
    keep: float = 0.5
    kl_reference: float = 0.25
    kl_old: float = 0.1
    entropy: float = 0.0
    diversity: float = 0.2
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
                at_least("logit_tokens", self.logit_tokens, 1),
                at_least("trunk_mb", self.trunk_mb, 0),
                at_least("earlier_mb", self.earlier_mb, 0),
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

    The old policy is a frozen copy of the adapters at the start of the update; its distributions are recomputed from
    hidden states, chunk by chunk, so [K, B, T, V] never exists whole. Every loss term is a mean over the action tokens
    of the minibatch, however it is cut.

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
    earlier = EarlierStates(lockstep, batch, epochs=config.epochs, most_mb=config.earlier_mb)
    sums: dict[str, float] = {}
    norms: dict[str, float] = {}
    tokens = steps = 0
    for _ in range(config.epochs):
        shuffled = shuffled_families(batch, generator)
        for rows in shuffled.chunk(config.minibatches):
            total = int(batch.action_BT[rows].sum())
            for index in micro_rows(batch, rows, config.micro_tokens):
                micro = batch.rows(index)
                own = action_tokens(micro, lockstep.device)
                trunk = trunk_of(lockstep, micro)
                before_KND = earlier.at(index, micro, trunk) if steps else None
                now_KND = hidden(lockstep, micro, lockstep.stacks(grad=True), trunk, checkpoint=config.checkpoint)
                if before_KND is None:
                    before_KND = earlier.at_first(index, micro, trunk, now_KND)
                # Distributions over the vocabulary exist for a chunk of tokens at a time: its gradient is taken as far
                # as the hidden states, and goes on from there once for all chunks.
                leaf_KND = now_KND.detach().requires_grad_()
                for start in range(0, len(own), config.logit_tokens):
                    some = slice(start, start + config.logit_tokens)
                    part = own.part(some)
                    loss, parts = _loss(lockstep, coordinator, before_KND[:, some], leaf_KND[:, some], part, config)
                    if not torch.isfinite(loss):
                        raise FloatingPointError(
                            f"the PPO loss is not finite: {parts}; lower ppo.lr or check the reward"
                        )
                    (loss / total).backward()
                    for key, value in parts.items():
                        sums[key] = sums.get(key, 0.0) + value
                now_KND.backward(leaf_KND.grad)
                tokens += len(own)
            for name, norm in optimizer.step(learning_rate).items():
                norms[name] = norms.get(name, 0.0) + norm
            steps += 1
            if on_step is not None:
                on_step(tokens)
    metrics = {f"ppo/{key}": value / tokens for key, value in sums.items()}
    metrics["ppo/learning_rate"] = learning_rate
    return metrics | {f"gradient_norm/{name}": norm / steps for name, norm in norms.items()}


def _loss(
    lockstep: Lockstep,
    coordinator: GameCoordinator,
    before_KND: torch.Tensor,
    now_KND: torch.Tensor,
    own: ActionTokens,
    config: PPOConfig,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Summed loss of some action tokens, and summed diagnostics; the last row of `before_KND` is the reference."""
    with torch.no_grad():
        before_KNV = lockstep.logp(before_KND, config.temperature)
        old_KNV, reference_NV = before_KNV[:-1], before_KNV[-1]
        old_N = _gather(coordinator.combine(Proposal(logp_KNV=old_KNV)).logp_NV, own.ids_N)
    logp_KNV = lockstep.logp(now_KND, config.temperature)
    mixture = coordinator.combine(Proposal(logp_KNV=logp_KNV))
    # Terms of no weight are only reported: no graph holds distributions over the vocabulary for them, and what they
    # need is gone before the others' graphs are there.
    with torch.set_grad_enabled(config.entropy > 0):
        entropy_N = entropy(mixture.logp_NV)
    with torch.set_grad_enabled(config.diversity > 0):
        jsd_N = jensen_shannon(logp_KNV, mixture.weights_NK)
    logp_N = _gather(mixture.logp_NV, own.ids_N)
    advantage_N, rollout_N = own.advantage_N.to(logp_N), own.logp_rollout_N.to(logp_N)
    surrogate_N, ratio_N = clipped_surrogate(logp_N, old_N, advantage_N, config.clip)
    kl_reference_N = kl(mixture.logp_NV, reference_NV)
    kl_old_N = kl(old_KNV, logp_KNV).mean(0)
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
