"""DynamicEvaluator: how different the sub-policies are on executed prefixes, and what each adds to the mixture.

Shape legend: K sub-policies, N action tokens, B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bupo.config import at_least, raise_problems
from bupo.coordinators.base import GameCoordinator
from bupo.intervals import clustered_bootstrap
from bupo.learn.objectives import difference_credit, entropy, jensen_shannon, kl, pairwise_kl
from bupo.learn.scoring import micro_batches, score, trunk_of
from bupo.policies.lockstep import Lockstep
from bupo.policies.stacks import Stacks
from bupo.records import Credit, Proposal, Scorecard, TokenBatch


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    """The evaluator.

    Attributes:
        rows: Seats of the iteration that are looked at; more cost time and narrow the intervals.
    """

    rows: int = 20

    def __post_init__(self) -> None:
        """Checks the size."""
        raise_problems([at_least("rows", self.rows, 2)])


class DynamicEvaluator:
    """Looks at the pool between iterations. Diversity is measured on the present pool; credit on the one that acted."""

    def __init__(self, config: EvaluatorConfig, micro_tokens: int, temperature: float) -> None:
        """Sets the sizes.

        Args:
            config: The evaluator's settings.
            micro_tokens: Most tokens in one forward.
            temperature: As in rollouts.
        """
        self.config = config
        self.micro_tokens = micro_tokens
        self.temperature = temperature

    @torch.no_grad()
    def scorecard(
        self,
        lockstep: Lockstep,
        coordinator: GameCoordinator,
        batch: TokenBatch,
        acted: Stacks,
        generator: torch.Generator,
    ) -> Scorecard:
        """Scores the pool on some of the iteration's rows.

        Args:
            lockstep: The forward.
            coordinator: The mixture.
            batch: The iteration's rows with their advantages.
            acted: The pool's weights when it acted, before the update; also the earlier selves that the null needs.
            generator: Draws the rows.

        Returns:
            The scorecard of the present pool.
        """
        names = lockstep.pool.names
        rows = torch.randperm(len(batch), generator=generator)[: self.config.rows]
        now = lockstep.stacks()
        sums: dict[str, torch.Tensor] = {}
        credits, owners, tokens = [], [], 0
        has_responsibility = True

        def add(key: str, value: torch.Tensor) -> None:
            sums[key] = sums[key] + value if key in sums else value

        for piece, micro in enumerate(micro_batches(batch, rows, self.micro_tokens)):
            trunk = trunk_of(lockstep, micro)
            present = score(lockstep, micro, now, self.temperature, trunk)
            count = present.logp_KNV.shape[1]
            tokens += count
            mixture = coordinator.combine(Proposal(logp_KNV=present.logp_KNV))
            add("pairwise", pairwise_kl(present.logp_KNV) * count)
            add("jsd", jensen_shannon(present.logp_KNV).sum())
            add("entropy", entropy(present.logp_KNV).sum(-1))
            add("mixture_entropy", entropy(mixture.logp_NV).sum())
            weighted_KN = mixture.weights_NK.T * entropy(present.logp_KNV)
            add("weighted_entropy", weighted_KN.sum())

            past = score(lockstep, micro, acted, self.temperature, trunk)
            add("null", kl(present.logp_KNV, past.logp_KNV).sum(-1))
            proposal = Proposal(logp_KNV=past.logp_KNV)
            played = coordinator.combine(proposal)
            add("weight", played.weights_NK.sum(0))
            responsibility_NK = coordinator.responsibilities(proposal, played, past.ids_N)
            if responsibility_NK is None:
                has_responsibility = False
                continue
            add("responsibility", responsibility_NK.sum(0))
            advantage_N = micro.advantage_BT.to(responsibility_NK)[micro.action_BT.to(responsibility_NK.device)]
            credits.append(difference_credit(advantage_N, responsibility_NK, played.weights_NK))
            owners.append(past.row_N + (piece << 20))

        def per_policy(key: str) -> dict[str, float]:
            return dict(zip(names, (sums[key] / tokens).tolist(), strict=True))

        mixture_entropy = float(sums["mixture_entropy"] / tokens)
        relative: dict[str, Credit | None] = dict.fromkeys(names)
        if has_responsibility and len(names) > 1:
            credit_NK, owner_N = torch.cat(credits).cpu().numpy(), torch.cat(owners).cpu().numpy()
            for k, name in enumerate(names):
                interval = clustered_bootstrap(credit_NK[:, k], owner_N, draws=500)
                if not math.isnan(interval.mean):  # undefined where the weight is 1
                    relative[name] = Credit(mean=interval.mean, low=interval.low, high=interval.high)
        return Scorecard(
            names=names,
            pairwise_kl=tuple(tuple(row) for row in (sums["pairwise"] / tokens).tolist()),
            null_kl=per_policy("null"),
            jsd=float(sums["jsd"] / tokens),
            jsd_weighted=mixture_entropy - float(sums["weighted_entropy"] / tokens),
            entropy=per_policy("entropy"),
            mixture_entropy=mixture_entropy,
            responsibility=per_policy("responsibility") if has_responsibility else None,
            weight=per_policy("weight"),
            relative_advantage=relative,
        )


def mean_pairwise_kl(card: Scorecard) -> float:
    """Mean of KL(pi_i || pi_j) over i != j, nats per token; 0 for a single policy."""
    count = len(card.names)
    total = sum(card.pairwise_kl[i][j] for i in range(count) for j in range(count) if i != j)
    return total / (count * (count - 1)) if count > 1 else 0.0


def mean_null_kl(card: Scorecard) -> float:
    """Mean KL of the policies to themselves one iteration earlier, nats per token."""
    values = [value for value in card.null_kl.values() if value is not None]
    return sum(values) / len(values) if values else 0.0


def scorecard_metrics(card: Scorecard) -> dict[str, float]:
    """The scorecard as flat metrics (docs/metrics.md)."""
    metrics = {
        "evaluator/mean_pairwise_kl": mean_pairwise_kl(card),
        "evaluator/mean_pairwise_kl_null": mean_null_kl(card),
        "evaluator/jsd": card.jsd,
        "evaluator/jsd_weighted": card.jsd_weighted,
        "evaluator/effective_policies": float(torch.tensor(card.jsd).exp()),
        "entropy/mixture": card.mixture_entropy,
    }
    for name in card.names:
        metrics[f"entropy/{name}"] = card.entropy[name]
        metrics[f"weight/{name}"] = card.weight[name]
        if card.responsibility is not None:
            metrics[f"responsibility/{name}"] = card.responsibility[name]
        if (credit := card.relative_advantage[name]) is not None:
            metrics[f"relative_advantage/{name}"] = credit.mean
            metrics[f"relative_advantage_low/{name}"] = credit.low
            metrics[f"relative_advantage_high/{name}"] = credit.high
    return metrics
