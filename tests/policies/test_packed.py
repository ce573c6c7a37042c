"""bupo.policies.packed: the same products from another layout, only where it is meant for."""

import pytest
import tiny
import torch
from torch import nn

from bupo.policies import packed
from bupo.policies.lockstep import Lockstep
from bupo.policies.packed import PackedLinears


def layers(*shapes, most_mb=64.0, bias=False, dtype=torch.float32):
    made = [nn.Linear(width, out, bias=bias, dtype=dtype).requires_grad_(False) for width, out in shapes]
    pack = PackedLinears(most_mb)
    for layer in made:
        pack.take_over(layer)
    return pack, made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 512), (3, 2, 512), (128, 512), (0, 512)])
def test_a_packed_layer_gives_the_same_product(shape, bias):
    pack, (layer,) = layers((512, 700), bias=bias)
    x = torch.randn(*shape)
    with torch.no_grad():
        got = layer(x)
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    assert list(pack.copies) == [layer]


@pytest.mark.parametrize("why", ["gradients", "many rows", "small", "half precision", "double precision", "no room"])
def test_a_layer_stays_as_it_is_where_the_layout_is_not_meant_for_it(why):
    dtype = {"half precision": torch.bfloat16, "double precision": torch.float64}.get(why, torch.float32)
    shape = (64, 64) if why == "small" else (512, 700)
    pack, (layer,) = layers(shape, dtype=dtype, most_mb=1.0 if why == "no room" else 64.0)
    x = torch.randn(packed.MOST_ROWS + (why == "many rows"), shape[0], dtype=dtype)
    with torch.set_grad_enabled(why == "gradients"):
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))
    assert not pack.copies


def test_gradients_reach_what_comes_before_a_packed_layer():
    _, (layer,) = layers((512, 700))
    with torch.no_grad():
        layer(torch.randn(2, 512))
    x = torch.randn(2, 512, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, -1))


def test_a_weight_that_changed_is_packed_again_within_the_same_memory():
    pack, (layer,) = layers((512, 700), most_mb=2.0)
    x = torch.randn(4, 512)
    with torch.no_grad():
        layer(x)
        left = pack.left
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), x @ layer.weight.T, atol=1e-4, rtol=1e-5)
    assert pack.left == left


def test_memory_is_bounded_over_all_layers():
    pack, made = layers((512, 512), (512, 512), (512, 512), most_mb=2.5)
    with torch.no_grad():
        for layer in made:
            layer(torch.randn(2, 512))
    assert list(pack.copies) == made[:2]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_equal_peft_with_every_layer_of_the_base_packed(monkeypatch, family):
    monkeypatch.setattr(packed, "LEAST_WEIGHTS", 1)
    pool = tiny.pool(family)
    twin, forward = tiny.peft_twin(pool, family), Lockstep(pool)
    used = []
    real = PackedLinears._copy
    monkeypatch.setattr(PackedLinears, "_copy", lambda self, layer: used.append(layer) or real(self, layer))
    ids = torch.tensor([tiny.random_ids(9, seed) for seed in range(3)])
    positions = torch.arange(9).expand(3, -1)
    with torch.no_grad():
        ours = forward.logits(forward.branches(forward.trunk(ids, positions), positions, forward.stacks()))
        for k, name in enumerate(pool.names):
            twin.set_adapter(name)
            torch.testing.assert_close(ours[k], twin(ids).logits, atol=5e-5, rtol=1e-5)
    assert len(set(used)) > len(pool.modules()) / 2
    assert pool.base.model.lm_head in used
