"""Episode-level advantages: pure functions of rewards and groups.

Shape legend: B rows (one a learner-played seat).
"""

from __future__ import annotations

import numpy as np


def group_advantages(reward_B: np.ndarray, group_B: np.ndarray, *, scale_by_std: bool) -> np.ndarray:
    """Reward less the mean of the row's group: the same scenario, role and opponent (GRPO, arXiv 2402.03300).

    Args:
        reward_B: Rewards.
        group_B: Group of each row.
        scale_by_std: Whether to divide by the standard deviation over the whole batch. One scale for all groups:
            dividing by each group's own would blow up groups in which almost nothing differs (arXiv 2503.20783).

    Returns:
        Advantages; zeros where a group's rewards are equal.

    Raises:
        ValueError: A group of one: its advantage would always be zero, so the row would teach nothing.
    """
    groups, index, count = np.unique(group_B, return_inverse=True, return_counts=True)
    if count.min() < 2:
        alone = groups[count.argmin()]
        raise ValueError(f"group {str(alone)!r} has one row; group advantages need interact.group_size >= 2")
    mean = np.bincount(index, weights=reward_B) / count
    advantage = reward_B - mean[index]
    return _scaled(advantage, scale_by_std)


def role_advantages(
    reward_B: np.ndarray, role_B: np.ndarray, baselines: dict[str, float], *, scale_by_std: bool, decay: float = 0.95
) -> np.ndarray:
    """Reward less a running mean of the role (role-conditioned advantage, SPIRAL, arXiv 2506.24119).

    Args:
        reward_B: Rewards.
        role_B: Role of each row (for instance `buyer/self`).
        baselines: Running means by role, updated in place; read before they are updated. A role's first batch uses
            its own mean.
        scale_by_std: Whether to divide by the standard deviation over the batch.
        decay: Decay of the running means.

    Returns:
        Advantages.
    """
    advantage = np.empty_like(reward_B)
    for role in np.unique(role_B):
        mine = role_B == role
        mean = float(reward_B[mine].mean())
        baseline = baselines.get(str(role), mean)
        advantage[mine] = reward_B[mine] - baseline
        baselines[str(role)] = decay * baseline + (1 - decay) * mean
    return _scaled(advantage, scale_by_std)


def _scaled(advantage_B: np.ndarray, scale_by_std: bool) -> np.ndarray:
    deviation = float(advantage_B.std())
    return advantage_B / deviation if scale_by_std and deviation > 1e-8 else advantage_B
