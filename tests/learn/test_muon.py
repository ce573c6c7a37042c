"""The optimizer of a base trained from scratch, against SVD, torch's Muon and torch's AdamW."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

from bupo.learn.muon import MuonAdamW, orthogonalise


def model() -> torch.nn.Module:
    return tiny.model().requires_grad_(True)


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 8, 20), (2, 20, 8)])
def test_orthogonalise_keeps_singular_vectors_and_levels_singular_values(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ orthogonalise(x) @ vh.mT
    values = torch.diagonal(inner, dim1=1, dim2=2)
    torch.testing.assert_close(inner, torch.diag_embed(values), atol=1e-9, rtol=0)
    # A quintic from a random matrix's smallest singular values has not quite converged after five iterations.
    assert values.min() > 0.3
    assert values.max() < 1.25


def test_a_zero_gradient_moves_nothing() -> None:
    assert orthogonalise(torch.zeros(1, 4, 6)).abs().max() == 0


def test_steps_equal_torchs_muon_on_matrices_and_torchs_adamw_on_the_rest() -> None:
    ours, theirs = model(), model()
    kinds = {name: p.ndim == 2 and "embed" not in name for name, p in theirs.named_parameters()}
    assert sum(kinds.values()) == tiny.LAYERS * 7
    optimizer = MuonAdamW(ours, lr=0.02, betas=(0.9, 0.98), weight_decay=0.1)
    named = dict(theirs.named_parameters())
    muon = torch.optim.Muon(
        [named[name] for name, matrix in kinds.items() if matrix],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [named[name] for name, matrix in kinds.items() if not matrix], lr=0.02, betas=(0.9, 0.98), weight_decay=0.1
    )
    before = copy.deepcopy(ours.state_dict())
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    for name, a in ours.named_parameters():
        moved = (a - before[name]).abs().mean()
        difference = (a - named[name]).abs().mean()
        # torch iterates in bfloat16, hence 3%.
        assert difference < (0.03 if kinds[name] else 1e-6) * moved, name


def test_gradients_of_matrices_are_used_up_once() -> None:
    net = model()
    optimizer = MuonAdamW(net, lr=0.01, betas=(0.9, 0.98), weight_decay=0.0)
    net(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after = copy.deepcopy(net.state_dict())
    optimizer.step()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, after[name]), name
