"""Turn-level advantages with a critic of states and afterstates: ridge regression on recent dialogues.

What a message is worth shows in two steps: what was said (the state before it against the state right after, Sutton and
Barto's afterstate, "Reinforcement Learning", section 6.8) and what the other side made of it. The other side's part is
most of the noise; apart from it, a message's own part is learnt from several times fewer dialogues.

Shape legend: B rows (one a learner-played seat), T own turns of a row, F features, N turns of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

RIDGE = 0.1
FEWEST = 20
"""Turns of a situation that a fit needs; with fewer, its states are judged as average."""


def ridge(features_NF: np.ndarray, target_N: np.ndarray, judged_MF: np.ndarray) -> np.ndarray:
    """Fits targets by ridge regression on standardised features and predicts.

    Args:
        features_NF: Features to fit on.
        target_N: Targets.
        judged_MF: Features to predict for.

    Returns:
        Predictions, [M].
    """
    center, spread = features_NF.mean(0), features_NF.std(0)
    spread = np.where(spread > 1e-8, spread, 1.0)
    scaled = (features_NF - center) / spread
    gram = scaled.T @ scaled + RIDGE * len(scaled) * np.eye(scaled.shape[1])
    mean = target_N.mean()
    weights = np.linalg.solve(gram, scaled.T @ (target_N - mean))
    return mean + (judged_MF - center) / spread @ weights


@dataclass
class TurnCritic:
    """Values of states and afterstates, relative to the mean reward of a row's group: one ridge fit a situation.

    Attributes:
        design: Features of states -> what the fit sees, [N, F] -> [N, F'].
        situation: Features of states -> number of the situation, [N, F] -> [N].
        window: Calls of `judge` whose rows are remembered; policies change slowly, and one iteration's rows are few.
        memory: Features before, features after and target of each turn, by call, oldest first.
    """

    design: Callable[[np.ndarray], np.ndarray]
    situation: Callable[[np.ndarray], np.ndarray]
    window: int
    memory: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def judge(
        self,
        reward_B: np.ndarray,
        mean_B: np.ndarray,
        before_BTF: Sequence[np.ndarray],
        after_BTF: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Remembers rows, fits on all that is remembered, and judges the new rows.

        Every turn has its row's reward less the mean of the group as target (Monte Carlo).

        Args:
            reward_B: Reward of each row.
            mean_B: Mean reward of each row's group.
            before_BTF: State before each own turn.
            after_BTF: State right after each own turn.

        Returns:
            Values before and after each turn, by row.
        """
        lengths = [len(states) for states in before_BTF]
        before, after = np.concatenate(before_BTF), np.concatenate(after_BTF)
        self.memory = [*self.memory, (before, after, np.repeat(reward_B - mean_B, lengths))][-self.window :]
        target = np.concatenate([entry[2] for entry in self.memory])
        cuts = np.cumsum(lengths)[:-1]
        values = []
        for part, judged in enumerate((before, after)):
            known = np.concatenate([entry[part] for entry in self.memory])
            fitted = self._fitted(known, target, judged)
            values.append(np.split(np.repeat(mean_B, lengths) + fitted, cuts))
        return values[0], values[1]

    def _fitted(self, known_NF: np.ndarray, target_N: np.ndarray, judged_MF: np.ndarray) -> np.ndarray:
        where_N, where_M = self.situation(known_NF), self.situation(judged_MF)
        fitted_M = np.zeros(len(judged_MF))
        for kind in np.unique(where_M):
            known, judged = where_N == kind, where_M == kind
            if known.sum() >= FEWEST:
                fitted_M[judged] = ridge(self.design(known_NF[known]), target_N[known], self.design(judged_MF[judged]))
        return fitted_M

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""
        return {f"{call}|{part}": array for call, entry in enumerate(self.memory) for part, array in enumerate(entry)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Takes back what `state` gave."""
        calls = len({key.partition("|")[0] for key in state})
        self.memory = [(state[f"{call}|0"], state[f"{call}|1"], state[f"{call}|2"]) for call in range(calls)]


def turn_advantages(
    reward_B: np.ndarray, before_BT: Sequence[np.ndarray], after_BT: Sequence[np.ndarray], lam: float
) -> list[np.ndarray]:
    """Generalised advantage estimation (arXiv 1506.02438) over the alternation of own messages and replies.

    With values v_t before and q_t right after own turn t, and the reward R after the last, the differences are
    q_0 - v_0, v_1 - q_0, q_1 - v_1, ..., R - q_T; A_t sums those from q_t - v_t on, each lambda times less than the one
    before. lam = 1 gives R - v_t (no trust in q), lam = 0 gives q_t - v_t (all of the credit is the critic's).

    Args:
        reward_B: Reward of each row.
        before_BT: Values before each own turn.
        after_BT: Values right after each own turn.
        lam: Lambda in [0, 1], for one message: a full turn of both sides is two.

    Returns:
        Advantage of each turn, by row.
    """
    advantages = []
    for reward, before, after in zip(reward_B, before_BT, after_BT, strict=True):
        running, following, out = 0.0, float(reward), np.empty(len(before))
        for t in range(len(before) - 1, -1, -1):
            running = (after[t] - before[t]) + lam * ((following - after[t]) + lam * running)
            out[t], following = running, float(before[t])
        advantages.append(out)
    return advantages


def explained(reward_B: np.ndarray, mean_B: np.ndarray, values_BT: Sequence[np.ndarray]) -> float:
    """Share of the variance within groups that values explain, over all turns."""
    lengths = [len(values) for values in values_BT]
    error = np.repeat(reward_B, lengths) - np.concatenate(values_BT)
    spread = np.repeat(reward_B - mean_B, lengths)
    return 1 - float((error**2).sum() / max((spread**2).sum(), 1e-12))
