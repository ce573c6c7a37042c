"""Decoding through the mixture: sessions of many dialogues that grow turn by turn on one cache.

Shape legend: K sub-policies, A acting rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bupo.coordinators.base import GameCoordinator
from bupo.policies.cache import DialogueCache
from bupo.policies.lockstep import Lockstep
from bupo.policies.packing import families
from bupo.policies.stacks import Stacks
from bupo.records import Proposal, TokenSpan

FIRST_SLOTS = 256
SLOT_STEP = 64
COMPACT_BELOW = 0.6
BACKEND = "inductor"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How messages are sampled.

    Attributes:
        temperature: Divides the logits of each proposal before they are combined.
        max_tokens: Longest message in tokens; longer ones are cut.
        stop_ids: Token ids that end a message.
        shortcut: Whether, where the coordinator's weights are known beforehand, a sub-policy is drawn first and the
            token from its proposal alone. The same distribution for one head a row instead of K; log mu is unknown
            (NaN) then.
        compiled: Whether decode steps are compiled (`torch.compile`).
    """

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    shortcut: bool = False
    compiled: bool = False


def forward(
    lockstep: Lockstep,
    pools: Sequence[Stacks],
    ids_AT: torch.Tensor,
    positions_AT: torch.Tensor,
    cache: DialogueCache,
    used: int,
    last_A: torch.Tensor,
    count_A: torch.Tensor,
) -> list[torch.Tensor]:
    """Final hidden state of each row's last real token for every policy of its pool, [K, A, D] a pool."""
    h_ATD = lockstep.trunk(ids_AT, positions_AT, cache, used, count_A)
    return lockstep.branches_by_pool(h_ATD, positions_AT, pools, cache, used, last_A, count_A)


def stepped(slots: int) -> int:
    """The next multiple of `SLOT_STEP`."""
    return -(-slots // SLOT_STEP) * SLOT_STEP


@functools.cache
def compiled_forward(device: str) -> Callable[..., list[torch.Tensor]]:
    """`forward` compiled, once a kind of device: fused kernels on a CPU, CUDA graphs besides on a GPU."""
    return torch.compile(forward, backend=BACKEND, mode="reduce-overhead" if device == "cuda" else None)


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


def choose(weights_NK: torch.Tensor, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one of K a row, [N], and what is left of the random number: again uniform in [0, 1), and independent."""
    weights_NK = weights_NK.to(uniform_N) / weights_NK.to(uniform_N).sum(-1, keepdim=True)
    chosen_N = draw(weights_NK.log(), uniform_N)
    below_NK = weights_NK.cumsum(-1) - weights_NK
    weight_N, below_N = (x_NK.gather(1, chosen_N[:, None])[:, 0] for x_NK in (weights_NK, below_NK))
    return chosen_N, ((uniform_N - below_N) / weight_N).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A pool that speaks in some of a session's dialogues.

    Attributes:
        stacks: Its policies (without the reference).
        coordinator: Combines their proposals.
        streams: Randomness of each of its dialogues. A message takes `max_tokens` numbers however long it is, so that
            what a dialogue draws depends neither on its company nor on the length of what was said before.
    """

    stacks: Stacks
    coordinator: GameCoordinator
    streams: Sequence[np.random.Generator]


class Session:
    """Dialogues of one or several pools: each keeps its own cache rows and continues them at every turn.

    All rows run through the trunk together, and through the branches as one batch grouped by pool.
    """

    def __init__(self, lockstep: Lockstep, speakers: Sequence[Speaker], decoding: Decoding) -> None:
        """Opens a session.

        Args:
            lockstep: The forward.
            speakers: The pools; rows are numbered through them, first those of the first.
            decoding: How to sample.
        """
        self.lockstep = lockstep
        self.speakers = speakers
        self.streams = [stream for speaker in speakers for stream in speaker.streams]
        self.rows = len(self.streams)
        self.decoding = decoding
        self.slots = FIRST_SLOTS
        self.sizes = [len(speaker.stacks) for speaker in speakers]
        self.cache = lockstep.new_cache([len(speaker.streams) for speaker in speakers], self.sizes, self.slots)
        self.length = [0] * self.rows
        self.pending: list[list[int]] = [[] for _ in range(self.rows)]

    def last_id(self, row: int) -> int | None:
        """The last sampled token of a row, None before its first message."""
        return self.pending[row][-1] if self.pending[row] else None

    def speak(self, rows: Sequence[int], context: Sequence[Sequence[int]]) -> list[TokenSpan]:
        """Feeds new context to some rows and samples a message for each.

        Args:
            rows: The rows that act.
            context: New ids of each row since its last message.

        Returns:
            One span a row.
        """
        order = sorted(range(len(rows)), key=lambda i: rows[i])
        spans = self._speak([rows[i] for i in order], [context[i] for i in order])
        places = sorted(range(len(rows)), key=lambda i: order[i])
        return [spans[place] for place in places]

    @torch.no_grad()
    def _speak(self, rows: Sequence[int], context: Sequence[Sequence[int]]) -> list[TokenSpan]:
        """`speak` for rows in ascending order, which groups them by pool."""
        device = self.lockstep.device
        chunks = self._open(rows, [[*self.pending[row], *ids] for row, ids in zip(rows, context, strict=True)])
        lengths = [self.length[row] for row in rows]
        width = max(map(len, chunks))
        # A padded chunk writes up to `width` past every row's length, whatever that row's own chunk.
        room = stepped(max(lengths) + width + self.decoding.max_tokens)
        self._reserve(room)
        filled = max(lengths)
        acting = list(rows)
        cache = self.cache if len(rows) == self.rows else self.cache.take(acting, filled, room, device)

        ids_AT = torch.zeros(len(rows), width, dtype=torch.long)
        for i, chunk in enumerate(chunks):
            ids_AT[i, : len(chunk)] = torch.tensor(chunk)
        start_A = torch.tensor(lengths)
        positions_AT = start_A[:, None] + torch.arange(width)
        last_A = torch.tensor([len(chunk) - 1 for chunk in chunks])
        hidden = self._forward(ids_AT.to(device), positions_AT, cache, filled + width, last_A, last_A + 1)
        position_A = start_A + last_A + 1

        uniform_AT = torch.from_numpy(np.stack([self.streams[row].random(self.decoding.max_tokens) for row in rows]))
        uniform_AT = uniform_AT.to(device, torch.promote_types(self.lockstep.dtype, torch.float32))
        sampled: list[list[int]] = [[] for _ in rows]
        logps: list[list[float]] = [[] for _ in rows]
        active = list(range(len(rows)))  # which of `rows` each row of `cache` belongs to
        done = [False] * len(rows)
        for step in range(self.decoding.max_tokens):
            ids_A, logp_A = self._sample(hidden, uniform_AT[:, step])
            taken_A, chosen = logp_A.tolist(), ids_A.tolist()
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
                self._store(acting, cache, used)
                active = [active[slot] for slot in waiting]
                acting = [rows[i] for i in active]
                cache = self.cache.take(acting, used, room, device)
                position_A, ids_A, uniform_AT = position_A[waiting], ids_A[waiting], uniform_AT[waiting]
            used = int(position_A.max()) + 1
            # A finished row keeps writing to the slot after its last token, which its next turn overwrites.
            going_A = torch.tensor([not done[i] for i in active], dtype=torch.long)
            hidden = self._forward(
                ids_A[:, None], position_A[:, None], cache, used, going_A * 0, going_A, compiled=self.decoding.compiled
            )
            position_A = position_A + going_A
        self._store(acting, cache, min(int(position_A.max()) + 1, room))

        spans = []
        for i, row in enumerate(rows):
            self.length[row] = lengths[i] + len(chunks[i]) + len(sampled[i]) - 1
            self.pending[row] = [sampled[i][-1]]
            spans.append(
                TokenSpan(context_ids=tuple(context[i]), action_ids=tuple(sampled[i]), logp_mu=tuple(logps[i]))
            )
        return spans

    def _open(self, rows: Sequence[int], chunks: list[list[int]]) -> list[list[int]]:
        """Computes the beginnings that new rows of a pool share once each; what remains of every chunk is returned."""
        heads: list[list[int]] = []
        counts: list[int] = []
        owner: list[int] = []
        opened: list[tuple[int, int]] = []
        first = 0
        for pool in self.cache.rows:
            new = [i for i, row in enumerate(rows) if first <= row < first + pool and self.length[row] == 0]
            first += pool
            family, shared = families([chunks[i] for i in new], [len(chunks[i]) - 1 for i in new])
            found = {number: chunks[i][:count] for number, i, count in zip(family, new, shared, strict=True)}
            places = {number: len(heads) + place for place, number in enumerate(found)}
            heads += found.values()
            counts.append(len(found))
            owner += [places[number] for number in family]
            opened += zip(new, shared, strict=True)
        width = max(map(len, heads), default=0)
        if width == 0 or len(opened) < 2:
            return chunks
        device = self.lockstep.device
        self._reserve(width)
        ids_UP = torch.zeros(len(heads), width, dtype=torch.long)
        for place, ids in enumerate(heads):
            ids_UP[place, : len(ids)] = torch.tensor(ids)
        count_U = torch.tensor([len(ids) for ids in heads])
        cache = self.lockstep.new_cache(counts, self.sizes, width)
        positions_UP = torch.arange(width).expand_as(ids_UP)
        # Only keys and values are wanted; one state a row comes with them.
        self._forward(ids_UP.to(device), positions_UP, cache, width, count_U * 0, count_U)
        spread = cache.take(owner, width, width, device)
        self.cache.put([rows[i] for i, _ in opened], spread, width, device)
        rest = list(chunks)
        for i, count in opened:
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
        count_A: torch.Tensor,
        *,
        compiled: bool = False,
    ) -> list[torch.Tensor]:
        positions_AT, last_A, count_A = (x.to(self.lockstep.device) for x in (positions_AT, last_A, count_A))
        pools = [speaker.stacks for speaker in self.speakers]
        run = forward
        if compiled:
            # What lies beyond is masked, and fewer lengths need fewer graphs.
            run, used = compiled_forward(self.lockstep.device.type), stepped(used)
        return run(self.lockstep, pools, ids_AT, positions_AT, cache, used, last_A, count_A)

    def _sample(self, hidden: Sequence[torch.Tensor], uniform_A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row by its own pool, [A], and its log-probability under mu, [A]."""
        ids, logps = [], []
        uniforms = uniform_A.split([h_KAD.shape[1] for h_KAD in hidden])
        for speaker, h_KAD, uniform_N in zip(self.speakers, hidden, uniforms, strict=True):
            weights_NK = speaker.coordinator.gate(len(uniform_N)) if self.decoding.shortcut else None
            if weights_NK is None:
                proposal = Proposal(logp_KNV=self.lockstep.logp(h_KAD, self.decoding.temperature))
                logp_NV = speaker.coordinator.combine(proposal).logp_NV
                ids_N = draw(logp_NV, uniform_N)
                logps.append(logp_NV.gather(1, ids_N[:, None])[:, 0])
            else:
                chosen_N, rest_N = choose(weights_NK, uniform_N)
                h_ND = h_KAD[chosen_N, torch.arange(len(chosen_N), device=h_KAD.device)]
                ids_N = draw(self.lockstep.logp(h_ND, self.decoding.temperature), rest_N)
                logps.append(torch.full_like(rest_N, torch.nan))
            ids.append(ids_N)
        return torch.cat(ids), torch.cat(logps)

    def _store(self, rows: Sequence[int], cache: DialogueCache, used: int) -> None:
        if cache is not self.cache:
            self.cache.put(rows, cache, used, self.lockstep.device)

    def _reserve(self, slots: int) -> None:
        if slots > self.slots:
            used = self.slots
            self.slots = stepped(max(slots, 2 * self.slots))
            self.cache = self.cache.take(range(self.rows), used, self.slots, self.lockstep.device)
