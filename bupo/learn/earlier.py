"""What the policies said before an update: their final hidden states at action tokens, computed once a row.

Shape legend: K sub-policies (here and below one row more, the reference), B rows, N action tokens, D width.
"""

from __future__ import annotations

import torch

from bupo.learn.scoring import Trunk, hidden
from bupo.policies.lockstep import Lockstep
from bupo.policies.pool import REFERENCE
from bupo.records import TokenBatch


class EarlierStates:
    """Final hidden states of the old policies and of the reference, from which their distributions are recomputed.

    The old policies are a frozen copy of the adapters at the start of an update. A state is D numbers where a
    distribution is V, so those of the first epoch are kept for the later ones, if they fit.
    """

    def __init__(self, lockstep: Lockstep, batch: TokenBatch, *, epochs: int, most_mb: float) -> None:
        """Copies the policies.

        Args:
            lockstep: The forward.
            batch: All rows of the update.
            epochs: Passes over them; a single one needs nothing twice.
            most_mb: Most megabytes to keep; above, every epoch computes its own.
        """
        self.lockstep = lockstep
        self.old = lockstep.stacks(reference=True)
        self.reference = self.old.select([REFERENCE])
        count_B = batch.action_BT.sum(1)
        self.first_B = count_B.cumsum(0) - count_B
        self.known_B = torch.zeros(len(batch), dtype=torch.bool)
        self.kept_KND: torch.Tensor | None = None
        shape = (len(self.old), int(count_B.sum()), lockstep.family.width)
        if epochs > 1 and torch.Size(shape).numel() * lockstep.dtype.itemsize <= most_mb * 2**20:
            self.kept_KND = torch.zeros(shape, dtype=lockstep.dtype, device=lockstep.device)

    @torch.no_grad()
    def at(self, rows: torch.Tensor, micro: TokenBatch, trunk: Trunk) -> torch.Tensor:
        """States that predict the action tokens of some rows, the reference last, [K, N, D].

        Args:
            rows: Which rows of the batch.
            micro: These rows.
            trunk: Their trunk.
        """
        if self.kept_KND is not None and bool(self.known_B[rows].all()):
            return self.kept_KND[:, self._places(rows, micro)]
        return self._keep(rows, micro, hidden(self.lockstep, micro, self.old, trunk))

    @torch.no_grad()
    def at_first(self, rows: torch.Tensor, micro: TokenBatch, trunk: Trunk, now_KND: torch.Tensor) -> torch.Tensor:
        """The same before the first optimizer step: the present policies, whose states are given, are the old ones."""
        reference_KND = hidden(self.lockstep, micro, self.reference, trunk)
        return self._keep(rows, micro, torch.cat([now_KND.detach(), reference_KND]))

    def _keep(self, rows: torch.Tensor, micro: TokenBatch, before_KND: torch.Tensor) -> torch.Tensor:
        if self.kept_KND is not None:
            self.kept_KND[:, self._places(rows, micro)] = before_KND
            self.known_B[rows] = True
        return before_KND

    def _places(self, rows: torch.Tensor, micro: TokenBatch) -> torch.Tensor:
        """Where the action tokens of some rows are kept, [N]."""
        owner_N, column_N = micro.action_BT.nonzero(as_tuple=True)
        rank_N = micro.action_BT.cumsum(1)[owner_N, column_N] - 1
        return (self.first_B[rows][owner_N] + rank_N).to(self.lockstep.device)
