"""Loss terms of PPO through a mixture, as pure functions of log-probabilities.

Shape legend: K sub-policies, N action tokens, V vocabulary.
"""

from __future__ import annotations

import torch


def clipped_surrogate(
    logp_N: torch.Tensor, logp_old_N: torch.Tensor, advantage_N: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate as a loss (Schulman et al. 2017, eq. 7).

    With mu a mixture, d log mu(a)/d logits_k = r_k (e_a - pi_k) for the linear pool, so one ratio of the executed
    distribution trains every sub-policy in proportion to its responsibility.

    Args:
        logp_N: log mu(a) now.
        logp_old_N: log mu(a) at the start of the update.
        advantage_N: Advantage of each token.
        clip: Half-width of the trusted range of the ratio.

    Returns:
        Loss of each token [N], and the ratio [N].
    """
    ratio_N = (logp_N - logp_old_N).exp()
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N), ratio_N


def kl(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats, exact over the vocabulary: [..., V] and [..., V] -> [...]."""
    return (logp.exp() * (logp - logq)).sum(-1)


def entropy(logp: torch.Tensor) -> torch.Tensor:
    """Entropy in nats: [..., V] -> [...]."""
    return -(logp.exp() * logp).sum(-1)


def pairwise_kl(logp_KNV: torch.Tensor) -> torch.Tensor:
    """Mean over positions of KL(pi_i || pi_j) for all pairs, [K, K].

    KL_ij = -H(pi_i) - E_i[log pi_j], so one product of probabilities and log-probabilities gives all pairs.
    """
    probabilities = logp_KNV.exp()
    cross_KK = torch.einsum("inv,jnv->ij", probabilities, logp_KNV) / logp_KNV.shape[1]
    return (cross_KK.diagonal()[:, None] - cross_KK).clamp_min(0)


def jensen_shannon(logp_KNV: torch.Tensor, weights_NK: torch.Tensor | None = None) -> torch.Tensor:
    """Weighted JSD at each position, H(sum_k w_k pi_k) - sum_k w_k H(pi_k), nats, [N]; equal weights by default."""
    if weights_NK is None:
        weights_NK = logp_KNV.new_full((logp_KNV.shape[1], logp_KNV.shape[0]), 1 / logp_KNV.shape[0])
    weights_KN = weights_NK.T
    mean_NV = torch.logsumexp(logp_KNV + weights_KN.log()[..., None], dim=0)
    return entropy(mean_NV) - (weights_KN * entropy(logp_KNV)).sum(0)


def difference_credit(
    advantage_N: torch.Tensor, responsibility_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """Difference credit A (r_k - w_k) / (1 - w_k), [N, K].

    Under a ~ mu its mean is E_mu[A] - E_mu_-k[A], what the mixture gains by having policy k, with
    mu_-k = (mu - w_k pi_k) / (1 - w_k). NaN where w_k = 1: there is no mixture without k.
    """
    rest_NK = 1 - weights_NK
    credit_NK = advantage_N[:, None] * (responsibility_NK - weights_NK) / rest_NK
    return torch.where(rest_NK > 1e-6, credit_NK, torch.nan)
