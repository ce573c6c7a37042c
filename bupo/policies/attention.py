"""Attention and the preallocated cache behind the lockstep forward.

Shape legend: N rows (sub-policies folded into rows where a tensor is [K*B, ...]), H query heads, G key/value heads,
T new tokens, S cached tokens, d head width; in packed batches K policies, N packed tokens, U prefixes of P tokens, B
rows with suffixes of S tokens, C = P + S keys of a suffix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bupo.policies.packing import Packing

NAME = "bupo_lockstep"


def attend(
    query_NHTd: torch.Tensor,
    key_NGSd: torch.Tensor,
    value_NGSd: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention by torch's fused kernel, or by plain products where scores are capped, [N, T, H, d].

    Args:
        query_NHTd: Queries.
        key_NGSd: Keys, G dividing H.
        value_NGSd: Values.
        mask: True where a query may look, [N, 1, T, S] or [T, S]; None for causal attention of T = S tokens.
        scale: Factor on the scores.
        softcap: c in c tanh(score / c) (Gemma 2), None for none.
    """
    if softcap is None:
        grouped = key_NGSd.shape[1] != query_NHTd.shape[1]
        out_NHTd = F.scaled_dot_product_attention(
            query_NHTd, key_NGSd, value_NGSd, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return out_NHTd.transpose(1, 2)
    if mask is None:
        steps = query_NHTd.shape[2]
        mask = band(steps, steps, query_NHTd.device)
    additive = torch.zeros(mask.shape, dtype=query_NHTd.dtype, device=query_NHTd.device)
    additive = additive.masked_fill_(~mask, torch.finfo(query_NHTd.dtype).min)
    return attend_in_groups(query_NHTd, key_NGSd, value_NGSd, additive, scale, softcap)


def attend_in_groups(
    query_NHTd: torch.Tensor,
    key_NGSd: torch.Tensor,
    value_NGSd: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention with the query heads of a group folded into rows of one product: keys are never repeated, [N, T, H, d].

    Args:
        query_NHTd: Queries.
        key_NGSd: Keys, G dividing H.
        value_NGSd: Values.
        mask: What is added to the scores, [N, 1, T, S] or [T, S].
        scale: Factor on the scores.
        softcap: As in `attend`.
    """
    batch, heads, steps, width = query_NHTd.shape
    groups = key_NGSd.shape[1]
    fold = heads // groups
    query = query_NHTd.reshape(batch, groups, fold * steps, width)
    scores = torch.matmul(query * scale, key_NGSd.transpose(2, 3)).view(batch, groups, fold, steps, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + (mask.unsqueeze(2) if mask.dim() == 4 else mask)
    probabilities = torch.softmax(scores, dim=-1).view(batch, groups, fold * steps, -1)
    out = torch.matmul(probabilities, value_NGSd).view(batch, heads, steps, width)
    return out.transpose(1, 2)


def lockstep_attention(
    module: nn.Module,
    query_NHTd: torch.Tensor,
    key_NGSd: torch.Tensor,
    value_NGSd: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_ids: torch.Tensor | None = None,
    packing: Packing | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention in the signature of transformers' attention interface.

    Without a mask the rows are causal and right-padded, and the fused kernel is used; with one (cached decoding) groups
    are folded. With a packing the tokens of many rows are one list (bupo/policies/packing.py).

    Args:
        module: The attention layer (unused beyond its head width).
        query_NHTd: Queries.
        key_NGSd: Keys, G dividing H.
        value_NGSd: Values.
        attention_mask: Additive causal mask [N, 1, T, S], or None for plain causal attention.
        scaling: Factor on the scores; 1/sqrt(d) if None.
        dropout: Must be 0: dropout would make the PPO ratio differ from 1.
        sliding_window: How many tokens back a token sees, itself included; None for all.
        softcap: c in c tanh(score / c) (Gemma 2), None for none.
        position_ids: Position of each query, [N, T]; needed with a mask and a window.
        packing: Which row each token belongs to, where the batch is packed.
        **kwargs: Further arguments of the interface, unused.

    Returns:
        The output [N, T, H, d], and None for the attention weights.
    """
    scale = query_NHTd.shape[-1] ** -0.5 if scaling is None else scaling
    keys = key_NGSd.shape[2]
    if packing is not None:
        return packed_attention(query_NHTd, key_NGSd, value_NGSd, packing, scale, sliding_window, softcap), None
    window = None if sliding_window is None or keys <= sliding_window else sliding_window
    if attention_mask is None:
        mask = None if window is None else band(keys, window, query_NHTd.device)
        return attend(query_NHTd, key_NGSd, value_NGSd, mask, scale, softcap), None
    if window is not None:
        assert position_ids is not None
        key_S = torch.arange(keys, device=query_NHTd.device)
        gone_NTS = key_S <= position_ids[:, :, None] - window
        attention_mask = attention_mask.masked_fill(gone_NTS.unsqueeze(1), torch.finfo(query_NHTd.dtype).min)
    return attend_in_groups(query_NHTd, key_NGSd, value_NGSd, attention_mask, scale, softcap), None


def band(steps: int, window: int, device: torch.device) -> torch.Tensor:
    """The causal mask [T, T] of the last `window` tokens, the own one included."""
    return torch.ones(steps, steps, dtype=torch.bool, device=device).tril().triu(1 - window)


def packed_attention(
    query_KHNd: torch.Tensor,
    key_KGNd: torch.Tensor,
    value_KGNd: torch.Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention within each row of a packed batch, [K, N, H, d].

    Policies fold into heads, so that prefixes and rows are the batch and no mask is repeated for each policy.
    """
    policies, heads, _, width = query_KHNd.shape

    def rows(x_KXNd: torch.Tensor, index_RT: torch.Tensor) -> torch.Tensor:
        picked = x_KXNd.permute(2, 0, 1, 3).index_select(0, index_RT.flatten())
        return picked.view(*index_RT.shape, policies * x_KXNd.shape[1], width).transpose(1, 2)

    def tokens(out_RTHd: torch.Tensor) -> torch.Tensor:
        return out_RTHd.reshape(-1, policies, heads, width)

    key_U, value_U = rows(key_KGNd, packing.prefix_UP), rows(value_KGNd, packing.prefix_UP)
    key_B, value_B = (
        torch.cat([shared.index_select(0, packing.owner_B), rows(own, packing.suffix_BS)], dim=2)
        for shared, own in ((key_U, key_KGNd), (value_U, value_KGNd))
    )
    mask_B1SC, shared = packing.mask_B1SC, packing.prefix_UP.shape[1]
    if window is not None and key_B.shape[2] > window:
        query_BS = packing.position_1N[0][packing.suffix_BS]
        key_BC = torch.cat([packing.position_1N[0][packing.prefix_UP][packing.owner_B], query_BS], dim=1)
        mask_B1SC = mask_B1SC & (query_BS[:, :, None] - key_BC[:, None] < window).unsqueeze(1)
    parts = [tokens(attend(rows(query_KHNd, packing.suffix_BS), key_B, value_B, mask_B1SC, scale, softcap))]
    if shared:
        mask = None if window is None or shared <= window else band(shared, window, key_U.device)
        parts.insert(0, tokens(attend(rows(query_KHNd, packing.prefix_UP), key_U, value_U, mask, scale, softcap)))
    return torch.cat(parts).index_select(0, packing.restore_N).transpose(0, 1)


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

    def at(self, positions_NT: torch.Tensor, used: int, count_N: torch.Tensor | None = None) -> LayerCache:
        """Sets where the next forward writes.

        Args:
            positions_NT: Position of each new token of each row.
            used: Highest position plus one; what attention reads.
            count_N: Real tokens of each row, of no concern here: what is written past them is never read.
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
                fresh = tensor.new_empty((len(rows), tensor.shape[1], slots, tensor.shape[3]))
                fresh[:, :, :used] = tensor[rows, :, :used]
                fresh[:, :, used:] = 0  # never read as such, but masked products need finite numbers
                store[layer] = fresh
        return taken

    def put(self, rows: torch.Tensor, other: LayerCache, used: int) -> None:
        """Writes the first `used` tokens of a compact copy back to its rows."""
        for store, source in ((self.keys, other.keys), (self.values, other.values)):
            for layer, tensor in source.items():
                store[layer][rows, :, :used] = tensor[:, :, :used]
