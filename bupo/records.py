"""What flows between the floors: plain frozen records, no behaviour beyond derived properties.

Shape legend: K sub-policies, B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Outcome = tuple[int, ...]
"""One value index per issue."""

ActionKind = Literal["offer", "accept", "walk", "invalid"]
Status = Literal["deal", "walk", "timeout", "invalid"]


@dataclass(frozen=True, kw_only=True)
class Action:
    """What the protocol read from one message.

    Attributes:
        kind: The act; `invalid` means that nothing was done.
        outcome: The package offered (offers only).
        problem: Why the message was refused (invalid only), in words that can be shown to its author.
    """

    kind: ActionKind
    outcome: Outcome | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """The sampled tokens of one own turn, as the policy saw them: ids stay ids, nothing is re-tokenised.

    Attributes:
        context_ids: Tokens fed before the first sampled one since the previous span (prompt, other side's text).
        action_ids: The sampled tokens, end-of-turn token included where it was sampled.
        logp_mu: Log-probability of each sampled token under the executed distribution; diagnostic only.
    """

    context_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    logp_mu: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of a dialogue and what the mechanism made of it.

    Attributes:
        seat: Which seat spoke (0 buyer, 1 supplier).
        text: The message as the other side reads it.
        action: The act that was read from it.
        tokens: The sampled tokens when a policy pool spoke; None for scripted players.
    """

    seat: int
    text: str
    action: Action
    tokens: TokenSpan | None = None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished dialogue. A dialogue that went wrong is data with a status, never an exception.

    Attributes:
        scenario: Name of the scenario (unique for its generator settings and seed).
        players: Name of the player in each seat.
        opener: The seat that spoke first.
        status: `deal`, `walk`, `timeout` (deadline passed) or `invalid` (too many refused messages).
        deal: The agreed outcome, None without a deal.
        blame: The seat that walked away or sent the refused messages, None for deal and timeout.
        rounds: Rounds used; a round is one message of each side, so half rounds occur.
        turns: All messages in order.
        utilities: Own utility of each seat in [0, 1]; the reservation value without a deal.
        surplus: Each seat's surplus share, (u - reservation) / (ideal - reservation); 0 without a deal.
    """

    scenario: str
    players: tuple[str, str]
    opener: int
    status: Status
    deal: Outcome | None
    blame: int | None
    rounds: float
    turns: tuple[Turn, ...]
    utilities: tuple[float, float]
    surplus: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the coordinator is asked to combine at some positions.

    Attributes:
        logp_KNV: Log-probabilities of each sub-policy, temperature already applied, [K, N, V].
        context_ND: Shared hidden state at those positions for coordinators that look at it, [N, D]; may be None.
    """

    logp_KNV: torch.Tensor
    context_ND: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The coordinator's answer.

    Attributes:
        logp_NV: Log-probabilities of the executed distribution mu, [N, V].
        weights_NK: Weight of each sub-policy, rows sum to 1, [N, K].
    """

    logp_NV: torch.Tensor
    weights_NK: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The own tokens of many seats, right-padded, ready for `score` and PPO.

    Attributes:
        ids_BT: Token ids, [B, T].
        action_BT: True where the token was sampled by the learner, [B, T]; never true at position 0.
        length_B: Number of real tokens of each row, [B].
        family_B: Rows of one family begin with the same tokens, [B].
        shared_B: How many of them; fewer than come before the first action token, [B].
        advantage_BT: Advantage of each action token, zero elsewhere, [B, T].
        logp_rollout_BT: Log mu at sampling time, zero elsewhere, [B, T]; diagnostic only.
        trunk_BTD: The shared lower layers' output, if it is kept, [B, T, D].
    """

    ids_BT: torch.Tensor
    action_BT: torch.Tensor
    length_B: torch.Tensor
    family_B: torch.Tensor
    shared_B: torch.Tensor
    advantage_BT: torch.Tensor
    logp_rollout_BT: torch.Tensor
    trunk_BTD: torch.Tensor | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return self.ids_BT.shape[0]

    def rows(self, index: torch.Tensor) -> TokenBatch:
        """The sub-batch of these rows, cut to its longest row."""
        width = int(self.length_B[index].max())
        return TokenBatch(
            ids_BT=self.ids_BT[index, :width],
            action_BT=self.action_BT[index, :width],
            length_B=self.length_B[index],
            family_B=self.family_B[index],
            shared_B=self.shared_B[index],
            advantage_BT=self.advantage_BT[index, :width],
            logp_rollout_BT=self.logp_rollout_BT[index, :width],
            trunk_BTD=None if self.trunk_BTD is None else self.trunk_BTD[index, :width],
        )


@dataclass(frozen=True, kw_only=True)
class Credit:
    """One policy's relative advantage: mean difference credit and its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Scorecard:
    """What the DynamicEvaluator saw in one iteration (definitions: docs/metrics.md).

    Attributes:
        names: The sub-policies, in row order.
        pairwise_kl: KL(pi_i || pi_j) in nats per token on executed prefixes, names x names.
        null_kl: KL of each policy to itself some updates earlier; None until there is an earlier self.
        jsd: Jensen-Shannon divergence of the uniform mixture, nats.
        jsd_weighted: The same under the coordinator's weights, E_mu[sum r log(r/w)], nats.
        entropy: Mean entropy of each proposal, nats.
        mixture_entropy: Mean entropy of the executed distribution, nats.
        responsibility: Mean responsibility of each policy; None where the coordinator defines none.
        weight: Mean coordinator weight of each policy.
        relative_advantage: Difference credit of each policy; None where it is undefined.
    """

    names: tuple[str, ...]
    pairwise_kl: tuple[tuple[float, ...], ...]
    null_kl: Mapping[str, float | None]
    jsd: float
    jsd_weighted: float
    entropy: Mapping[str, float]
    mixture_entropy: float
    responsibility: Mapping[str, float] | None
    weight: Mapping[str, float]
    relative_advantage: Mapping[str, Credit | None]


@dataclass(frozen=True, kw_only=True)
class BalancePlan:
    """What the balancer decided, with the numbers that made it decide.

    Attributes:
        cull: The policy to remove, None for none.
        parent: The policy whose perturbed copy takes the place.
        reason: The decision in words and numbers; also set when nothing is done.
        numbers: The figures behind it.
    """

    cull: str | None = None
    parent: str | None = None
    reason: str = "no policy met a rule"
    numbers: Mapping[str, float] = field(default_factory=dict)
