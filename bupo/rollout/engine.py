"""Decoding through the mixture: sessions of many dialogues that grow turn by turn on one cache.

Shape legend: K sub-policies, A acting rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bupo.coordinators.base import GameCoordinator
from bupo.policies.lockstep import DialogueCache, Lockstep, Stacks
from bupo.policies.packing import families
from bupo.records import Proposal, TokenSpan

FIRST_SLOTS = 256
COMPACT_BELOW = 0.6


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How messages are sampled.

    Attributes:
        temperature: Divides the logits of each proposal before they are combined.
        max_tokens: Longest message in tokens; longer ones are cut.
        stop_ids: Token ids that end a message.
    """

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]


def draw(logp_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """Samples an id a row by inversion, [N]: the first whose cumulative probability is above a number in [0, 1).

    With equal numbers similar distributions mostly give equal ids, which makes comparisons of policies sharper (common
    random numbers).
    """
    cumulative_NV = logp_NV.exp().cumsum(-1)
    total_N = cumulative_NV[:, -1]
    # Below the total even where a number was rounded up to 1, and to the right of equal sums: an id of probability 0 is
    # never drawn.
    mark_N = torch.minimum(uniform_N.to(total_N) * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    return torch.searchsorted(cumulative_NV, mark_N[:, None], right=True)[:, 0]


class Session:
    """The dialogues of one pool: each keeps its own cache rows and continues them at every turn."""

    def __init__(
        self,
        lockstep: Lockstep,
        coordinator: GameCoordinator,
        stacks: Stacks,
        streams: Sequence[np.random.Generator],
        decoding: Decoding,
    ) -> None:
        """Opens a session.

        Args:
            lockstep: The forward.
            coordinator: Combines the proposals of the stack's policies.
            stacks: The pool that speaks (without the reference).
            streams: Randomness of each dialogue. A message takes `max_tokens` numbers however long it is, so that
                what a dialogue draws depends neither on its company nor on the length of what was said before.
            decoding: How to sample.
        """
        self.lockstep = lockstep
        self.coordinator = coordinator
        self.stacks = stacks
        self.rows = rows = len(streams)
        self.streams = streams
        self.decoding = decoding
        self.slots = FIRST_SLOTS
        self.cache = lockstep.new_cache(rows, len(stacks), self.slots)
        self.length = [0] * rows
        self.pending: list[list[int]] = [[] for _ in range(rows)]

    def last_id(self, row: int) -> int | None:
        """The last sampled token of a row, None before its first message."""
        return self.pending[row][-1] if self.pending[row] else None

    @torch.no_grad()
    def speak(self, rows: Sequence[int], context: Sequence[Sequence[int]]) -> list[TokenSpan]:
        """Feeds new context to some rows and samples a message for each.

        Args:
            rows: The rows that act.
            context: New ids of each row since its last message.

        Returns:
            One span a row.
        """
        device = self.lockstep.device
        chunks = self._open(rows, [[*self.pending[row], *ids] for row, ids in zip(rows, context, strict=True)])
        lengths = [self.length[row] for row in rows]
        width = max(map(len, chunks))
        # A padded chunk writes up to `width` past every row's length, whatever that row's own chunk.
        self._reserve(max(lengths) + width + self.decoding.max_tokens)
        index = torch.tensor(rows, device=device)
        whole = list(rows) == list(range(self.rows))
        filled = max(lengths)
        cache = self.cache if whole else self.cache.take(index, self.rows, filled, self.slots)

        ids_AT = torch.zeros(len(rows), width, dtype=torch.long)
        for i, chunk in enumerate(chunks):
            ids_AT[i, : len(chunk)] = torch.tensor(chunk)
        start_A = torch.tensor(lengths)
        positions_AT = start_A[:, None] + torch.arange(width)
        last_A = torch.tensor([len(chunk) - 1 for chunk in chunks], device=device)
        h_KAD = self._forward(ids_AT.to(device), positions_AT.to(device), cache, filled + width, last_A)
        position_A = start_A + last_A.cpu() + 1

        uniform_AT = torch.from_numpy(np.stack([self.streams[row].random(self.decoding.max_tokens) for row in rows]))
        uniform_AT = uniform_AT.to(device, torch.promote_types(self.lockstep.dtype, torch.float32))
        sampled: list[list[int]] = [[] for _ in rows]
        logps: list[list[float]] = [[] for _ in rows]
        active = list(range(len(rows)))  # which of `rows` each row of `cache` belongs to
        done = [False] * len(rows)
        for step in range(self.decoding.max_tokens):
            logp_KAV = self.lockstep.logp(h_KAD, self.decoding.temperature)
            mixture = self.coordinator.combine(Proposal(logp_KNV=logp_KAV))
            ids_A = draw(mixture.logp_NV, uniform_AT[:, step])
            taken_A = mixture.logp_NV.gather(1, ids_A[:, None])[:, 0].tolist()
            chosen = ids_A.tolist()
            for slot, i in enumerate(active):
                if not done[i]:
                    sampled[i].append(chosen[slot])
                    logps[i].append(taken_A[slot])
                    done[i] = chosen[slot] in self.decoding.stop_ids
            waiting = [slot for slot, i in enumerate(active) if not done[i]]
            if not waiting or step + 1 == self.decoding.max_tokens:
                break
            if len(waiting) < COMPACT_BELOW * len(active):
                used = int(position_A.max())
                self._store(index, [rows[i] for i in active], cache, used)
                active = [active[slot] for slot in waiting]
                index = torch.tensor([rows[i] for i in active], device=device)
                cache = self.cache.take(index, self.rows, used, self.slots)
                position_A, ids_A, uniform_AT = position_A[waiting], ids_A[waiting], uniform_AT[waiting]
            used = int(position_A.max()) + 1
            ones = torch.zeros(len(active), dtype=torch.long, device=device)
            h_KAD = self._forward(ids_A[:, None], position_A[:, None].to(device), cache, used, ones)
            # A finished row keeps writing to the slot after its last token, which its next turn overwrites.
            position_A = position_A + torch.tensor([not done[i] for i in active], dtype=torch.long)
        self._store(index, [rows[i] for i in active], cache, min(int(position_A.max()) + 1, self.slots))

        spans = []
        for i, row in enumerate(rows):
            self.length[row] = lengths[i] + len(chunks[i]) + len(sampled[i]) - 1
            self.pending[row] = [sampled[i][-1]]
            spans.append(
                TokenSpan(context_ids=tuple(context[i]), action_ids=tuple(sampled[i]), logp_mu=tuple(logps[i]))
            )
        return spans

    def _open(self, rows: Sequence[int], chunks: list[list[int]]) -> list[list[int]]:
        """Computes the beginnings that new rows share once each; what remains of every chunk is returned."""
        new = [i for i, row in enumerate(rows) if self.length[row] == 0]
        if len(new) < 2:
            return chunks
        family, shared = families([chunks[i] for i in new], [len(chunks[i]) - 1 for i in new])
        heads = {number: chunks[i][:count] for number, i, count in zip(family, new, shared, strict=True)}
        width = max(shared)
        if width == 0:
            return chunks
        device = self.lockstep.device
        self._reserve(width)
        ids_UP = torch.zeros(len(heads), width, dtype=torch.long, device=device)
        for place, ids in enumerate(heads.values()):
            ids_UP[place, : len(ids)] = torch.tensor(ids)
        positions_UP = torch.arange(width, device=device).expand_as(ids_UP)
        cache = self.lockstep.new_cache(len(heads), len(self.stacks), width)
        h_UPD = self.lockstep.trunk(ids_UP, positions_UP, cache, width)
        nothing = torch.zeros(0, dtype=torch.long, device=device)  # only keys and values are wanted
        self.lockstep.branches(h_UPD, positions_UP, self.stacks, cache, width, (nothing, nothing))
        places = {number: place for place, number in enumerate(heads)}
        owner = torch.tensor([places[number] for number in family], device=device)
        index = torch.tensor([rows[i] for i in new], device=device)
        self.cache.put(index, self.rows, cache.take(owner, len(heads), width, width), width)
        rest = list(chunks)
        for i, count in zip(new, shared, strict=True):
            self.length[rows[i]] = count
            rest[i] = chunks[i][count:]
        return rest

    def _forward(
        self,
        ids_AT: torch.Tensor,
        positions_AT: torch.Tensor,
        cache: DialogueCache,
        used: int,
        last_A: torch.Tensor,
    ) -> torch.Tensor:
        """Final hidden state of each row's last real token for every policy, [K, A, D]."""
        h_ATD = self.lockstep.trunk(ids_AT, positions_AT, cache, used)
        select = (torch.arange(len(last_A), device=last_A.device), last_A)
        return self.lockstep.branches(h_ATD, positions_AT, self.stacks, cache, used, select)

    def _store(self, index: torch.Tensor, rows: list[int], cache: DialogueCache, used: int) -> None:
        if cache is not self.cache:
            self.cache.put(index, self.rows, cache, used)

    def _reserve(self, slots: int) -> None:
        if slots > self.slots:
            used = self.slots
            self.slots = max(slots, 2 * self.slots)
            every = torch.arange(self.rows, device=self.lockstep.device)
            self.cache = self.cache.take(every, self.rows, used, self.slots)
