"""Turn-level advantages with a linear critic, fitted anew in each iteration.

Shape legend: B rows (one a learner-played seat), T own turns of a row, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RIDGE = 1e-2


def fit_values(reward_B: np.ndarray, mean_B: np.ndarray, states_BTF: Sequence[np.ndarray]) -> list[np.ndarray]:
    """State values by ridge regression: V(s) = mean of the row's group + w (phi(s) - mean phi).

    Every turn of a row has the row's reward as its target (Monte Carlo); a baseline that depends on the state alone
    leaves the policy gradient unbiased, up to the few degrees of freedom that are fitted on the same rows.

    Args:
        reward_B: Reward of each row.
        mean_B: Mean reward of each row's group.
        states_BTF: Features of each own turn of each row.

    Returns:
        Values of each turn, by row.
    """
    lengths = [len(states) for states in states_BTF]
    phi = np.concatenate(states_BTF)
    target = np.repeat(reward_B - mean_B, lengths)
    center, spread = phi.mean(0), phi.std(0)
    scaled = (phi - center) / np.where(spread > 1e-8, spread, 1.0)
    gram = scaled.T @ scaled + RIDGE * len(scaled) * np.eye(scaled.shape[1])
    weights = np.linalg.solve(gram, scaled.T @ target)
    values = np.repeat(mean_B, lengths) + scaled @ weights
    return np.split(values, np.cumsum(lengths)[:-1])


def turn_advantages(reward_B: np.ndarray, values_BT: Sequence[np.ndarray], lam: float) -> list[np.ndarray]:
    """Generalised advantage estimation over own turns (arXiv 1506.02438; turns as steps: Turn-PPO, arXiv 2512.17008).

    The reward comes with the last turn, without discount: delta_t = V(s_t+1) - V(s_t), at the end R - V(s_T), and
    A_t = sum_l lam^l delta_t+l. With lam = 1, A_t = R - V(s_t).

    Args:
        reward_B: Reward of each row.
        values_BT: Value of the state before each own turn.
        lam: Lambda in [0, 1].

    Returns:
        Advantage of each turn, by row.
    """
    advantages = []
    for reward, values in zip(reward_B, values_BT, strict=True):
        deltas = np.append(values[1:], reward) - values
        running, out = 0.0, np.empty(len(values))
        for t in range(len(values) - 1, -1, -1):
            running = deltas[t] + lam * running
            out[t] = running
        advantages.append(out)
    return advantages
