"""The selective state space of Mamba (arXiv 2312.00752, algorithm 2) for ragged rows that continue.

transformers' own mixer starts from zero whenever it gets more than one token, and lets padding into the state. Here a
chunk of any length goes on from the state before, and tokens beyond a row's count leave the state as it is.

Shape legend: R rows (policies folded into rows), T tokens, D width, I inner width, C convolution kernel, S state size;
in packed batches K policies, N packed tokens, U prefixes, B rows, P and Q their longest prefix and rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bupo.policies.packing import Packing


class StateCache:
    """Convolution and state-space states of a run of layers, one each a row."""

    def __init__(self, layers: range, rows: int, inner: int, kernel: int, state: int, like: torch.Tensor) -> None:
        """Allocates zero states.

        Args:
            layers: Indices of the layers served.
            rows: Number of rows.
            inner: Inner width I.
            kernel: C - 1, the inputs that the convolution looks back at.
            state: State size S.
            like: Tensor whose device and type are taken; states are at least fp32.
        """
        wide = torch.promote_types(like.dtype, torch.float32)
        self.past = {layer: like.new_zeros((rows, inner, kernel)) for layer in layers}
        self.states = {layer: like.new_zeros((rows, inner, state), dtype=wide) for layer in layers}
        self.count: torch.Tensor | None = None

    def at(self, positions_NT: torch.Tensor, used: int, count_N: torch.Tensor | None = None) -> StateCache:
        """Sets how many tokens of each row are real in the next forward; positions are of no concern here."""
        self.count = count_N
        return self

    def take(self, rows: torch.Tensor, used: int, slots: int) -> StateCache:
        """A compact copy of some rows."""
        taken = StateCache(range(0), 0, 0, 0, 0, rows)
        for mine, theirs in ((taken.past, self.past), (taken.states, self.states)):
            mine.update({layer: tensor[rows] for layer, tensor in theirs.items()})
        return taken

    def put(self, rows: torch.Tensor, other: StateCache, used: int) -> None:
        """Writes a compact copy back to its rows."""
        for mine, theirs in ((self.past, other.past), (self.states, other.states)):
            for layer, tensor in mine.items():
                tensor[rows] = theirs[layer]


def mix(mixer: Any, x_RTD: torch.Tensor, cache: StateCache | None, layer: int) -> torch.Tensor:
    """A Mamba mixer on rows that start anew, or go on from a cache, [R, T, D]."""
    inner_RTJ = mixer.in_proj(x_RTD)
    if cache is None:
        past, state = empty(mixer, len(x_RTD), x_RTD)
        out_RTI, _, _ = scan(mixer, inner_RTJ, past, state, None)
    else:
        out_RTI, past, state = scan(mixer, inner_RTJ, cache.past[layer], cache.states[layer], cache.count)
        cache.past[layer].copy_(past)
        cache.states[layer].copy_(state)
    return mixer.out_proj(out_RTI)


def mix_packed(mixer: Any, x_KND: torch.Tensor, packing: Packing) -> torch.Tensor:
    """A Mamba mixer on a packed batch, [K, N, D]: rows go on from the state after the beginning that they share."""
    policies = len(x_KND)
    inner_KNJ = mixer.in_proj(x_KND)

    def run(index_RT: torch.Tensor, count_R: torch.Tensor, past: torch.Tensor, state: torch.Tensor) -> Any:
        rows = inner_KNJ[:, index_RT].flatten(0, 1)
        return scan(mixer, rows, past, state, count_R.repeat(policies))

    prefixes, longest = packing.prefix_UP.shape
    past, state = empty(mixer, policies * prefixes, x_KND)
    parts = []
    if longest:
        out, past, state = run(packing.prefix_UP, packing.prefix_U, past, state)
        parts.append(out.view(policies, -1, out.shape[-1]))
    past, state = (
        tensor.view(policies, prefixes, *tensor.shape[1:])[:, packing.owner_B].flatten(0, 1) for tensor in (past, state)
    )
    out, _, _ = run(packing.suffix_BS, packing.suffix_B, past, state)
    parts.append(out.view(policies, -1, out.shape[-1]))
    return mixer.out_proj(torch.cat(parts, dim=1)[:, packing.restore_N])


def empty(mixer: Any, rows: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of rows without a past."""
    wide = torch.promote_types(like.dtype, torch.float32)
    inner = mixer.intermediate_size
    past = like.new_zeros((rows, inner, mixer.conv_kernel_size - 1))
    return past, like.new_zeros((rows, inner, mixer.ssm_state_size), dtype=wide)


def scan(
    mixer: Any, inner_RTJ: torch.Tensor, past_RIC: torch.Tensor, state_RIS: torch.Tensor, count_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolution, selective scan and gate.

    Args:
        mixer: The layer whose weights are used.
        inner_RTJ: Output of its `in_proj`, J = 2 I.
        past_RIC: The last C - 1 inputs of the convolution.
        state_RIS: The state so far.
        count_R: Real tokens of each row; None if all are.

    Returns:
        The input of `out_proj`, [R, T, I], and both states after the last real token.
    """
    steps, look = inner_RTJ.shape[1], past_RIC.shape[2]
    x_RIT, gate_RIT = inner_RTJ.transpose(1, 2).chunk(2, dim=1)
    whole_RIT = torch.cat([past_RIC, x_RIT], dim=2)
    convolved = F.conv1d(whole_RIT, mixer.conv1d.weight, mixer.conv1d.bias, groups=x_RIT.shape[1])
    x_RTI = mixer.act(convolved).transpose(1, 2)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    rate_RTr, b_RTS, c_RTS = mixer.x_proj(x_RTI).split(sizes, dim=-1)
    wide = state_RIS.dtype
    bias = 0.0 if mixer.dt_proj.bias is None else mixer.dt_proj.bias.to(wide)
    rate_RTI = F.softplus(F.linear(rate_RTr, mixer.dt_proj.weight).to(wide) + bias)
    if count_R is None:
        past_RIC = whole_RIT[:, :, steps:]
    else:
        # A rate of 0 keeps the state and adds nothing to it.
        rate_RTI = rate_RTI * (torch.arange(steps, device=count_R.device) < count_R[:, None])[:, :, None]
        columns = count_R[:, None, None] + torch.arange(look, device=count_R.device)
        past_RIC = whole_RIT.gather(2, columns.expand(-1, whole_RIT.shape[1], -1))
    decay_IS = -torch.exp(mixer.A_log.to(wide))
    drive_RTI = rate_RTI * x_RTI.to(wide)
    out = []
    for step in range(steps):
        keep_RIS = torch.exp(rate_RTI[:, step, :, None] * decay_IS)
        state_RIS = keep_RIS * state_RIS + drive_RTI[:, step, :, None] * b_RTS[:, step, None].to(wide)
        out.append(torch.matmul(state_RIS, c_RTS[:, step, :, None].to(wide))[:, :, 0])
    y_RTI = torch.stack(out, dim=1) + x_RTI.to(wide) * mixer.D.to(wide)
    gated_RTI = y_RTI * mixer.act(gate_RIT).transpose(1, 2).to(wide)
    return gated_RTI.to(inner_RTJ.dtype), past_RIC, state_RIS
