"""Attention and the preallocated cache behind the lockstep forward.

Shape legend: N rows (sub-policies folded into rows where a tensor is [K*B, ...]), H query heads, G key/value heads,
T new tokens, S cached tokens, d head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bupo.policies.packing import Packing, packed_attention

NAME = "bupo_lockstep"


def lockstep_attention(
    module: nn.Module,
    query_NHTd: torch.Tensor,
    key_NGSd: torch.Tensor,
    value_NGSd: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention in the signature of transformers' attention interface.

    Without a mask the rows are causal and right-padded, and the fused kernel is used; with one (cached decoding) the
    query heads of a group are folded into rows of one product, so keys and values are never repeated. With a packing
    the tokens of many rows are one list (bupo/policies/packing.py).

    Args:
        module: The attention layer (unused beyond its head width).
        query_NHTd: Queries.
        key_NGSd: Keys, G dividing H.
        value_NGSd: Values.
        attention_mask: Additive mask [N, 1, T, S], or None for plain causal attention.
        scaling: Factor on the scores; 1/sqrt(d) if None.
        dropout: Must be 0: dropout would make the PPO ratio differ from 1.
        packing: Which row each token belongs to, where the batch is packed.
        **kwargs: Further arguments of the interface, unused.

    Returns:
        The output [N, T, H, d], and None for the attention weights.
    """
    batch, heads, steps, width = query_NHTd.shape
    groups = key_NGSd.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    if packing is not None:
        return packed_attention(query_NHTd, key_NGSd, value_NGSd, packing, scale), None
    if attention_mask is None:
        out_NHTd = F.scaled_dot_product_attention(
            query_NHTd, key_NGSd, value_NGSd, is_causal=steps > 1, scale=scale, enable_gqa=groups != heads
        )
        return out_NHTd.transpose(1, 2), None
    fold = heads // groups
    query = query_NHTd.reshape(batch, groups, fold * steps, width)
    scores = torch.matmul(query * scale, key_NGSd.transpose(2, 3)).view(batch, groups, fold, steps, -1)
    scores = scores + attention_mask.unsqueeze(2)
    probabilities = torch.softmax(scores, dim=-1).view(batch, groups, fold * steps, -1)
    out = torch.matmul(probabilities, value_NGSd).view(batch, heads, steps, width)
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, lockstep_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class LayerCache:
    """Preallocated keys and values of a run of layers, written in place at each row's own positions.

    Rows are dialogues (trunk) or sub-policy x dialogue (branches). Right padding inside a chunk is harmless: a padded
    position lies beyond the row's length and is overwritten before any mask lets it be read.
    """

    def __init__(self, layers: range, rows: int, slots: int, groups: int, width: int, like: torch.Tensor) -> None:
        """Allocates.

        Args:
            layers: Indices of the layers served.
            rows: Number of rows.
            slots: Tokens that a row can hold.
            groups: Key/value heads.
            width: Head width.
            like: Tensor whose dtype and device are taken.
        """
        shape = (rows, groups, slots, width)
        self.keys = {layer: like.new_zeros(shape) for layer in layers}
        self.values = {layer: like.new_zeros(shape) for layer in layers}
        self.slots = slots
        self._rows: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._used = 0

    def at(self, positions_NT: torch.Tensor, used: int) -> LayerCache:
        """Sets where the next forward writes.

        Args:
            positions_NT: Position of each new token of each row.
            used: Highest position plus one; what attention reads.
        """
        self._positions = positions_NT
        self._rows = torch.arange(positions_NT.shape[0], device=positions_NT.device)[:, None]
        self._used = used
        return self

    def update(
        self, key_NGTd: torch.Tensor, value_NGTd: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values, returns all of the row so far (the cache interface of transformers' layers)."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self._rows, :, self._positions] = key_NGTd.transpose(1, 2)
        values[self._rows, :, self._positions] = value_NGTd.transpose(1, 2)
        return keys[:, :, : self._used], values[:, :, : self._used]

    def take(self, rows: torch.Tensor, used: int, slots: int) -> LayerCache:
        """A compact copy of some rows with room for `slots` tokens, the first `used` of them filled."""
        first = next(iter(self.keys.values()), None)
        if first is None:  # a trunk without layers
            return LayerCache(range(0), len(rows), slots, 0, 0, rows)
        taken = LayerCache(range(0), len(rows), slots, first.shape[1], first.shape[3], first)
        for store, source in ((taken.keys, self.keys), (taken.values, self.values)):
            for layer, tensor in source.items():
                fresh = tensor.new_zeros((len(rows), tensor.shape[1], slots, tensor.shape[3]))
                fresh[:, :, :used] = tensor[rows, :, :used]
                store[layer] = fresh
        return taken

    def put(self, rows: torch.Tensor, other: LayerCache, used: int) -> None:
        """Writes the first `used` tokens of a compact copy back to its rows."""
        for store, source in ((self.keys, other.keys), (self.values, other.values)):
            for layer, tensor in source.items():
                store[layer][rows, :, :used] = tensor[:, :, :used]
