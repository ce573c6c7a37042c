"""Linear opinion pool.

Shape legend: K sub-policies, N positions, V vocabulary.
"""

from __future__ import annotations

import torch

from bupo.coordinators.base import GameCoordinator
from bupo.records import Mixture, Proposal


class LinearPool(GameCoordinator):
    """mu(a) = sum_k w_k pi_k(a), with fixed weights (uniform by default). Stone (1961).

    Gradient: d log mu(a) / d logits_k = r_k (e_a - pi_k) with the responsibility r_k = w_k pi_k(a) / mu(a), so each
    sub-policy learns from the tokens that it would itself have chosen. Limits: equal proposals give the proposal;
    K = 1 is the identity; a one-hot weight gives that policy.
    """

    def combine(self, proposal: Proposal) -> Mixture:
        """The weighted mean of the proposals, computed in log space."""
        logp_KNV = proposal.logp_KNV
        weights_K = self.fixed_K.to(logp_KNV)
        logp_NV = torch.logsumexp(logp_KNV + weights_K.log()[:, None, None], dim=0)
        return Mixture(logp_NV=logp_NV, weights_NK=weights_K.expand(logp_KNV.shape[1], -1))

    def gate(self, positions: int) -> torch.Tensor:
        """The fixed weights, [N, K]."""
        return self.fixed_K.expand(positions, -1)

    def responsibilities(self, proposal: Proposal, mixture: Mixture, actions_N: torch.Tensor) -> torch.Tensor:
        """r_k = w_k pi_k(a) / mu(a), in [0, 1], rows sum to 1."""
        index = actions_N[None, :, None].expand(proposal.logp_KNV.shape[0], -1, 1)
        logp_NK = proposal.logp_KNV.gather(-1, index)[..., 0].T + mixture.weights_NK.log()
        return torch.softmax(logp_NK, dim=-1)
