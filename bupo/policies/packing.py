"""Ragged rows as one list of tokens, in which rows that begin alike share their beginning.

Dialogues of one group (same scenario, role and opponent) open with the same prompt. Its keys and values are the same
for all of them, so it is computed once a group; and nothing is computed for padding but attention.

Shape legend: B rows, T tokens of a row, N packed tokens, U shared beginnings (prefixes) of at most P tokens, S tokens
of the longest rest (suffix), C = P + S keys of a suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading items that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def families(sequences: Sequence[Sequence[int]], most: Sequence[int]) -> tuple[list[int], list[int]]:
    """Groups sequences that begin alike, so that as few tokens as possible remain when beginnings are shared.

    Sorted, relatives are neighbours; a family is a run of neighbours with at least so many tokens in common, and the
    least total over all such thresholds is taken.

    Args:
        sequences: Token ids.
        most: How many leading tokens each sequence may share.

    Returns:
        Family of each sequence (numbered from 0), and how many leading tokens its family shares: `most` for one that
        is alone.
    """
    order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]))
    joint = [min(common_length(sequences[a], sequences[b]), most[a], most[b]) for a, b in pairwise(order)]

    def split(threshold: int) -> list[tuple[list[int], int]]:
        runs: list[tuple[list[int], int]] = []
        for place, index in enumerate(order):
            if place and joint[place - 1] >= threshold:
                members, length = runs[-1]
                members.append(index)
                runs[-1] = (members, min(length, joint[place - 1]))
            else:
                runs.append(([index], most[index]))
        return runs

    def saved(runs: list[tuple[list[int], int]]) -> int:
        return sum((len(members) - 1) * length for members, length in runs)

    best = max((split(threshold) for threshold in {*joint, max(most, default=0) + 1}), key=saved)
    family, length = [0] * len(sequences), [0] * len(sequences)
    for number, (members, shared) in enumerate(best):
        for index in members:
            family[index], length[index] = number, shared
    return family, length


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where each token of a right-padded batch is in the packed list, and who attends to whom.

    Attributes:
        source_N: Index of each packed token into the flattened batch.
        position_1N: Its position in its row.
        place_BT: Index of each real token of the batch into the packed list.
        prefix_UP: Packed tokens of each prefix, 0 where it is shorter.
        suffix_BS: Packed tokens of the rest of each row, 0 where it is shorter.
        prefix_U: Tokens of each prefix.
        suffix_B: Tokens of the rest of each row.
        owner_B: Prefix of each row.
        mask_B1SC: True where a suffix token may look at a key of its prefix or suffix.
        restore_N: Place of each packed token in the list of all prefix and then all suffix slots.
    """

    source_N: torch.Tensor
    position_1N: torch.Tensor
    place_BT: torch.Tensor
    prefix_UP: torch.Tensor
    suffix_BS: torch.Tensor
    prefix_U: torch.Tensor
    suffix_B: torch.Tensor
    owner_B: torch.Tensor
    mask_B1SC: torch.Tensor
    restore_N: torch.Tensor

    def to(self, device: torch.device) -> Packing:
        """The packing on a device."""
        return Packing(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def pack(length_B: Sequence[int], family_B: Sequence[int], shared_B: Sequence[int], width: int) -> Packing:
    """Plans the packing of rows.

    Args:
        length_B: Tokens of each row.
        family_B: Rows of one family begin with the same tokens.
        shared_B: How many; less than the row's length.
        width: Columns of the padded batch.

    Returns:
        The packing, on the CPU.
    """
    first = {family: row for row, family in reversed(list(enumerate(family_B)))}
    heads = [first[family] for family in dict.fromkeys(family_B)]
    owner = {family_B[row]: place for place, row in enumerate(heads)}
    prefix = [shared_B[row] for row in heads]
    suffix = [length - shared for length, shared in zip(length_B, shared_B, strict=True)]
    prefix_UP = np.zeros((len(heads), max(prefix)), dtype=np.int64)
    suffix_BS = np.zeros((len(length_B), max(suffix)), dtype=np.int64)
    place_BT = np.zeros((len(length_B), width), dtype=np.int64)
    source, position, restore = [], [], []
    done = 0

    def add(row: int, start: int, slots: np.ndarray, slot: int) -> None:
        nonlocal done
        columns = np.arange(start, start + len(slots))
        slots[:] = np.arange(done, done + len(slots))
        source.append(row * width + columns)
        position.append(columns)
        restore.append(slot + np.arange(len(slots)))
        done += len(slots)

    for place, (row, length) in enumerate(zip(heads, prefix, strict=True)):
        add(row, 0, prefix_UP[place, :length], place * prefix_UP.shape[1])
    for row, length in enumerate(suffix):
        add(row, shared_B[row], suffix_BS[row, :length], prefix_UP.size + row * suffix_BS.shape[1])
        place_BT[row, : shared_B[row]] = prefix_UP[owner[family_B[row]], : shared_B[row]]
        place_BT[row, shared_B[row] : length_B[row]] = suffix_BS[row, :length]
    known = np.arange(prefix_UP.shape[1]) < np.asarray(shared_B)[:, None]
    steps = suffix_BS.shape[1]
    mask_BSC = np.concatenate(
        [
            np.broadcast_to(known[:, None], (len(suffix), steps, known.shape[1])),
            np.broadcast_to(np.tri(steps, dtype=bool), (len(suffix), steps, steps)),
        ],
        axis=2,
    )
    return Packing(
        source_N=torch.from_numpy(np.concatenate(source)),
        position_1N=torch.from_numpy(np.concatenate(position))[None],
        place_BT=torch.from_numpy(place_BT),
        prefix_UP=torch.from_numpy(prefix_UP),
        suffix_BS=torch.from_numpy(suffix_BS),
        prefix_U=torch.tensor(prefix),
        suffix_B=torch.tensor(suffix),
        owner_B=torch.tensor([owner[family] for family in family_B]),
        mask_B1SC=torch.from_numpy(mask_BSC)[:, None],
        restore_N=torch.from_numpy(np.concatenate(restore)),
    )
