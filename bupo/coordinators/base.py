"""The interface of every game coordinator: proposals in; executed distribution, weights and responsibilities out.

Shape legend: K sub-policies, N positions, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from bupo.records import Mixture, Proposal


class GameCoordinator(nn.Module):
    """Combines K proposals into the one distribution that is sampled. A module, so that a family may learn."""

    def __init__(self, policies: int, weights: Sequence[float] = ()) -> None:
        """Sets the number of sub-policies.

        Args:
            policies: K.
            weights: Fixed weights where the family uses them; empty for uniform.

        Raises:
            ValueError: The number of weights is not K.
        """
        super().__init__()
        if weights and len(weights) != policies:
            raise ValueError(
                f"coordinator.weights has {len(weights)} numbers for {policies} sub-policies; give one each, or none"
            )
        values = torch.tensor(weights or [1.0] * policies, dtype=torch.float32)
        self.fixed_K: torch.Tensor
        self.register_buffer("fixed_K", values / values.sum())
        self.policies = policies

    @abstractmethod
    def combine(self, proposal: Proposal) -> Mixture:
        """Combines the proposals at N positions.

        Args:
            proposal: The proposals, temperature already applied: the mixture is not tempered again.

        Returns:
            Log-probabilities of mu [N, V] and the weights [N, K].
        """

    def gate(self, positions: int) -> torch.Tensor | None:
        """Weights that are known before the proposals are, where mu is the mean of the proposals by them, [N, K].

        With them a token may be drawn from the proposal of one sub-policy that was drawn first: exactly mu, for one
        head instead of K. None where there are no such weights.
        """
        return None

    def responsibilities(self, proposal: Proposal, mixture: Mixture, actions_N: torch.Tensor) -> torch.Tensor | None:
        """How much of each executed token is due to each sub-policy, [N, K], rows sum to 1.

        None where the family defines none (only mixtures that are sums do).
        """
        return None
