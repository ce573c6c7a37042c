"""Teacher-forced scoring: an iteration's rows as a batch, cut into pieces, and the proposals at their action tokens.

Shape legend: K sub-policies, B rows, T tokens, N action tokens (in h_1ND: packed tokens), V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bupo.policies.lockstep import Lockstep
from bupo.policies.packing import Packing, families, pack
from bupo.policies.stacks import Stacks
from bupo.records import TokenBatch


def token_batch(
    rows: Sequence[tuple[Sequence[int], Sequence[bool], Sequence[float]]],
    advantages: Sequence[float | Sequence[float]],
) -> TokenBatch:
    """Pads rows into a batch.

    Args:
        rows: Ids, action mask and rollout log-probabilities of each row.
        advantages: Advantage of each row, one number or one for each of its own tokens.

    Returns:
        The right-padded batch.
    """
    width = max(len(ids) for ids, _, _ in rows)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    action_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    logp_BT = torch.zeros(len(rows), width)
    advantage_BT = torch.zeros(len(rows), width)
    for i, (ids, action, logp) in enumerate(rows):
        ids_BT[i, : len(ids)] = torch.tensor(ids)
        action_BT[i, : len(ids)] = torch.tensor(action)
        logp_BT[i, : len(ids)] = torch.tensor(logp)
        advantage_BT[i, action_BT[i]] = torch.tensor(advantages[i], dtype=torch.float32)
    # What predicts the first own token is computed in each row, so that there is a row for it to be in.
    most = [action.index(True) - 1 if True in action else len(ids) - 1 for ids, action, _ in rows]
    family, shared = families([ids for ids, _, _ in rows], most)
    return TokenBatch(
        ids_BT=ids_BT,
        action_BT=action_BT,
        length_B=torch.tensor([len(ids) for ids, _, _ in rows]),
        family_B=torch.tensor(family),
        shared_B=torch.tensor(shared),
        advantage_BT=advantage_BT,
        logp_rollout_BT=logp_BT,
    )


@dataclass(frozen=True, kw_only=True)
class ActionTokens:
    """The action tokens of some rows, in row-major order.

    Attributes:
        ids_N: The executed tokens.
        row_N: Row of each.
        advantage_N: Advantage of each.
        logp_rollout_N: Log mu at sampling time.
    """

    ids_N: torch.Tensor
    row_N: torch.Tensor
    advantage_N: torch.Tensor
    logp_rollout_N: torch.Tensor

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids_N)

    def part(self, some: slice) -> ActionTokens:
        """Some of the tokens."""
        return ActionTokens(
            ids_N=self.ids_N[some],
            row_N=self.row_N[some],
            advantage_N=self.advantage_N[some],
            logp_rollout_N=self.logp_rollout_N[some],
        )


def action_tokens(batch: TokenBatch, device: torch.device) -> ActionTokens:
    """The batch's action tokens on a device."""
    row_N, column_N = batch.action_BT.nonzero(as_tuple=True)
    columns = (batch.ids_BT, batch.advantage_BT, batch.logp_rollout_BT)
    ids_N, advantage_N, logp_N = (column_BT[row_N, column_N].to(device) for column_BT in columns)
    return ActionTokens(ids_N=ids_N, row_N=row_N.to(device), advantage_N=advantage_N, logp_rollout_N=logp_N)


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """What the branches of some rows start from.

    Attributes:
        packing: The rows' tokens as one list.
        h_1ND: Output of the shared lower layers.
    """

    packing: Packing
    h_1ND: torch.Tensor


def trunk_of(lockstep: Lockstep, batch: TokenBatch) -> Trunk:
    """The shared lower layers on whole rows, each shared beginning once; taken from the batch where it is kept."""
    lists = (batch.length_B.tolist(), batch.family_B.tolist(), batch.shared_B.tolist())
    packing = pack(*lists, batch.ids_BT.shape[1]).to(lockstep.device)
    if batch.trunk_BTD is not None:
        return Trunk(packing=packing, h_1ND=batch.trunk_BTD.flatten(0, 1)[packing.source_N][None])
    ids_1N = batch.ids_BT.to(lockstep.device).flatten()[packing.source_N][None]
    return Trunk(packing=packing, h_1ND=lockstep.trunk(ids_1N, packing.position_1N, packing=packing))


def keep_trunk(lockstep: Lockstep, batch: TokenBatch, micro_tokens: int, most_mb: float) -> TokenBatch:
    """The batch with its trunk computed once for all epochs, minibatches and the evaluator.

    The trunk carries no adapter, so it does not change while they learn.

    Args:
        lockstep: The forward.
        batch: An iteration's rows.
        micro_tokens: Most tokens in one forward.
        most_mb: Most megabytes to keep; above, the batch comes back as it is and pieces compute their own.

    Returns:
        The batch, with `trunk_BTD` if it fits and if there is a trunk.
    """
    (rows, width), family = batch.ids_BT.shape, lockstep.family
    if lockstep.first_branch == 0 or rows * width * family.width * family.stream_dtype.itemsize > most_mb * 2**20:
        return batch
    trunk_BTD = torch.zeros(rows, width, family.width, dtype=family.stream_dtype, device=lockstep.device)
    every = torch.arange(rows)
    for index in micro_rows(batch, every, micro_tokens):
        piece = batch.rows(index)
        trunk = trunk_of(lockstep, piece)
        trunk_BTD[index.to(lockstep.device), : piece.ids_BT.shape[1]] = trunk.h_1ND[0][trunk.packing.place_BT]
    return replace(batch, trunk_BTD=trunk_BTD)


def hidden(
    lockstep: Lockstep, batch: TokenBatch, stacks: Stacks, trunk: Trunk, *, checkpoint: bool = False
) -> torch.Tensor:
    """Final hidden states from which each action token is predicted, h_KND.

    Args:
        lockstep: The forward.
        batch: Rows to score.
        stacks: The policies.
        trunk: The rows' trunk.
        checkpoint: Whether the branches are computed again in the backward pass instead of kept.
    """
    row_N, column_N = batch.action_BT.to(lockstep.device).nonzero(as_tuple=True)
    # The distribution of a token stands at the position before it.
    place_N = trunk.packing.place_BT[row_N, column_N - 1]
    return lockstep.branches(
        trunk.h_1ND,
        trunk.packing.position_1N,
        stacks,
        select=(torch.zeros_like(place_N), place_N),
        packing=trunk.packing,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Proposals at the action tokens of some rows.

    Attributes:
        logp_KNV: Log-probabilities of each policy of the stack.
        ids_N: The executed tokens.
        row_N: Row of each token.
    """

    logp_KNV: torch.Tensor
    ids_N: torch.Tensor
    row_N: torch.Tensor


def score(
    lockstep: Lockstep, batch: TokenBatch, stacks: Stacks, temperature: float, trunk: Trunk | None = None
) -> Scored:
    """Teacher-forced proposals at the action tokens: the same forward as the rollout's.

    Args:
        lockstep: The forward.
        batch: Rows to score.
        stacks: The policies.
        temperature: As in the rollout.
        trunk: The rows' trunk, if it is known already.

    Returns:
        Proposals at each action token, in row-major order.
    """
    h_KND = hidden(lockstep, batch, stacks, trunk or trunk_of(lockstep, batch))
    own = action_tokens(batch, lockstep.device)
    return Scored(logp_KNV=lockstep.logp(h_KND, temperature), ids_N=own.ids_N, row_N=own.row_N)


def shuffled_families(batch: TokenBatch, generator: torch.Generator) -> torch.Tensor:
    """All rows in random order of families, so that a minibatch holds whole families: they share what is computed.

    Within a family the order is random too, for where all rows are one: those that share but a prompt's first words.
    """
    rank = torch.randperm(int(batch.family_B.max()) + 1, generator=generator)
    rows = torch.randperm(len(batch), generator=generator)
    return rows[rank[batch.family_B[rows]].argsort(stable=True)]


def micro_batches(batch: TokenBatch, rows: torch.Tensor, micro_tokens: int) -> Iterator[TokenBatch]:
    """Cuts rows into pieces of at most `micro_tokens` tokens (a longer row is alone), families together."""
    return (batch.rows(index) for index in micro_rows(batch, rows, micro_tokens))


def micro_rows(batch: TokenBatch, rows: torch.Tensor, micro_tokens: int) -> Iterator[torch.Tensor]:
    """The rows of each piece of `micro_batches`."""
    rows = rows[batch.family_B[rows].argsort(stable=True)]
    start = size = 0
    family = -1
    for place, row in enumerate(rows.tolist()):
        own, shared = int(batch.length_B[row] - batch.shared_B[row]), int(batch.shared_B[row])
        extra = own + (shared if batch.family_B[row] != family else 0)
        if place > start and size + extra > micro_tokens:
            yield rows[start:place]
            start, size, extra = place, 0, own + shared
        family, size = int(batch.family_B[row]), size + extra
    yield rows[start:]
