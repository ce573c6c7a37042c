"""What dialogues keep between their turns: a trunk's cache, a row each, and the branches' cache, a row each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Cache(Protocol):
    """What a run of layers remembers of the rows so far."""

    def at(self, positions_NT: torch.Tensor, used: int, count_N: torch.Tensor | None = None) -> Any:
        """Sets where the next forward writes."""
        ...

    def take(self, rows: torch.Tensor, used: int, slots: int) -> Any:
        """A compact copy of some rows."""
        ...

    def put(self, rows: torch.Tensor, other: Any, used: int) -> None:
        """Writes a compact copy back to its rows."""
        ...


class DialogueCache:
    """Trunk and branch caches of the same dialogues: the trunk holds a row once, the branches once a policy.

    Rows are grouped by pool: first those of the first pool, then those of the second, ... In the branches the rows of a
    pool stand K times, policy by policy.
    """

    def __init__(self, trunk: Cache, branches: Cache, policies: Sequence[int], rows: Sequence[int]) -> None:
        """Joins the two.

        Args:
            trunk: Cache of the trunk layers, a row each dialogue.
            branches: Cache of the branch layers, K rows each dialogue.
            policies: K of each pool.
            rows: Dialogues of each pool.
        """
        self.trunk = trunk
        self.branches = branches
        self.policies = tuple(policies)
        self.rows = tuple(rows)

    def _branch_rows(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Branch rows of some dialogues (given pool by pool), and how many dialogues of each pool they are."""
        index: list[int] = []
        counts: list[int] = []
        first = start = 0
        for policies, count in zip(self.policies, self.rows, strict=True):
            own = [row - first for row in rows if first <= row < first + count]
            index += [start + policy * count + row for policy in range(policies) for row in own]
            counts.append(len(own))
            first, start = first + count, start + policies * count
        return index, counts

    def take(self, rows: Sequence[int], used: int, slots: int, device: torch.device) -> DialogueCache:
        """A compact copy of some dialogues, given pool by pool, with room for `slots` tokens."""
        index, counts = self._branch_rows(rows)
        trunk = self.trunk.take(torch.tensor(rows, device=device), used, slots)
        branches = self.branches.take(torch.tensor(index, device=device), used, slots)
        return DialogueCache(trunk, branches, self.policies, counts)

    def put(self, rows: Sequence[int], other: DialogueCache, used: int, device: torch.device) -> None:
        """Writes a compact copy back."""
        index, _ = self._branch_rows(rows)
        self.trunk.put(torch.tensor(rows, device=device), other.trunk, used)
        self.branches.put(torch.tensor(index, device=device), other.branches, used)
