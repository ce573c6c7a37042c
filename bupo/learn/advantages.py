"""Advantages as pure functions of rewards and groups (turn-level ones come from bupo/learn/critic.py).

Shape legend: B rows (one a learner-played seat), T own turns of a row, N turns of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SCALES = ("group", "batch", "none")


def group_advantages(reward_B: np.ndarray, group_B: np.ndarray, *, scale: str) -> np.ndarray:
    """Reward less the mean of the row's group: the same scenario, role and opponent (GRPO, arXiv 2402.03300).

    Args:
        reward_B: Rewards.
        group_B: Group of each row.
        scale: What to divide by: the standard deviation of each `group` (GRPO: every group counts alike, also those
            in which little is at stake), of the whole `batch`, or `none` (arXiv 2503.20783).

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
    if scale == "group":
        deviation = np.sqrt(np.bincount(index, weights=advantage**2) / count)
        return np.where(deviation[index] > 1e-6, advantage / np.maximum(deviation[index], 1e-6), 0.0)
    return _scaled(advantage, scale)


def role_advantages(
    reward_B: np.ndarray, role_B: np.ndarray, baselines: dict[str, float], *, scale: str, decay: float = 0.95
) -> np.ndarray:
    """Reward less a running mean of the role (role-conditioned advantage, SPIRAL, arXiv 2506.24119).

    Args:
        reward_B: Rewards.
        role_B: Role of each row (for instance `buyer/self`).
        baselines: Running means by role, updated in place; read before they are updated. A role's first batch uses
            its own mean.
        scale: `none`, or the standard deviation over the `batch`; a role is no group of comparable dialogues, so
            `group` means the batch too.
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
    return _scaled(advantage, scale)


def scaled_turns(advantages_BT: Sequence[np.ndarray], index_B: np.ndarray, *, scale: str) -> list[np.ndarray]:
    """Divides turn-level advantages by their root mean square: over each group's turns, over all, or not at all.

    Args:
        advantages_BT: Advantage of each own turn, by row; their mean is left where the critic put it.
        index_B: Number of each row's group, from 0.
        scale: `group`, `batch` or `none`.

    Returns:
        Scaled advantages; zeros where a group's are all zero.
    """
    if scale == "none" or not advantages_BT:
        return list(advantages_BT)
    where = index_B if scale == "group" else np.zeros_like(index_B)
    turn_N = np.repeat(where, [len(turns) for turns in advantages_BT])
    square = np.bincount(turn_N, weights=np.concatenate(advantages_BT) ** 2) / np.maximum(np.bincount(turn_N), 1)
    size = np.where(square > 1e-12, np.sqrt(square), np.inf)
    return [turns / size[group] for turns, group in zip(advantages_BT, where, strict=True)]


def most_informative(advantage_B: np.ndarray, group_B: np.ndarray, share: float) -> np.ndarray:
    """The rows of each group whose advantages lie furthest apart (max-variance down-sampling, arXiv 2504.13818).

    Baselines come from all rows, the update from the extremes: playing is cheaper than learning, and rows near their
    group's mean teach little. Rows with advantage 0 are left out.

    Args:
        advantage_B: Advantages.
        group_B: Group of each row.
        share: Share of each group's rows to keep, rounded up, half from either end; 1 keeps all.

    Returns:
        Indices of the kept rows, ascending; all rows if every advantage is 0.
    """
    kept: list[int] = []
    for group in np.unique(group_B):
        rows = np.flatnonzero(group_B == group)
        ordered = rows[np.argsort(advantage_B[rows], kind="stable")]
        count = int(np.ceil(share * len(ordered) - 1e-9))
        low = count // 2
        kept += [*ordered[:low], *ordered[len(ordered) - (count - low) :]]
    useful = np.array(sorted(row for row in kept if advantage_B[row] != 0), dtype=int)
    return useful if len(useful) else np.arange(len(advantage_B))


def _scaled(advantage_B: np.ndarray, scale: str) -> np.ndarray:
    deviation = float(advantage_B.std())
    return advantage_B / deviation if scale != "none" and deviation > 1e-8 else advantage_B
