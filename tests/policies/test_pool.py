"""bupo.policies.pool: what a perturbation does, names, and folders that PEFT alone can read."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from peft import PeftModel

from bupo.policies.lockstep import Lockstep
from bupo.policies.pool import REFERENCE, PolicyPool, PoolConfig


def tensors(pool, name):
    return [parameter.detach().clone() for parameter in pool.parameters(name)]


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def rms(value):
    return value.double().pow(2).mean().sqrt().item()


def logits(pool, name, ids):
    pool.model.set_adapter(name)
    with torch.no_grad():
        return pool.model(ids).logits


def relative_change(pool, name, parent=None):
    """RMS of the weight change (PEFT's own delta) over the RMS of the weight, by layer."""
    found = []
    for module in pool.modules().values():
        delta = module.get_delta_weight(name)
        if parent is not None:
            delta = delta - module.get_delta_weight(parent)
        found.append(rms(delta) / rms(module.base_layer.weight))
    return found


@pytest.mark.parametrize(("name", "default"), [("nano", 0.3), ("smollm2", 0.01), ("some/folder", 0.01)])
def test_a_public_base_is_perturbed_less_by_default(name, default):
    pool = PolicyPool(replace(tiny.base(), name=name), PoolConfig(size=1))
    pool.add_perturbed(generator=torch.Generator().manual_seed(0))
    found = relative_change(pool, pool.names[0])
    assert sum(found) / len(found) == pytest.approx(default, rel=0.1)


@pytest.mark.parametrize("asked", [0.03, 0.3])
@pytest.mark.parametrize("rank", [4, 16])
def test_perturbation_changes_weights_by_the_rms_asked_for(asked, rank):
    pool = tiny.pool(perturbation=asked, rank=rank)
    for name in pool.names:
        found = relative_change(pool, name)
        assert sum(found) / len(found) == pytest.approx(asked, rel=0.1)
        assert all(value == pytest.approx(asked, rel=0.35) for value in found)


def test_perturbation_does_not_depend_on_alpha():
    one, other = (tiny.pool(perturbation=0.1, alpha=alpha) for alpha in (2.0, 64.0))
    assert relative_change(one, "p00") == pytest.approx(relative_change(other, "p00"), rel=1e-4)


def test_perturbation_of_a_trained_parent_changes_it_by_the_rms_asked_for():
    pool = tiny.pool(perturbation=0.05)
    with torch.no_grad():
        for parameter in pool.parameters("p01"):
            parameter.add_(0.1 * torch.randn_like(parameter))
    before = tensors(pool, "p01")
    child = pool.add_perturbed("p01", generator=torch.Generator().manual_seed(5), iteration=7)
    found = relative_change(pool, child, parent="p01")
    assert sum(found) / len(found) == pytest.approx(0.05, rel=0.1)
    assert equal(before, tensors(pool, "p01"))
    assert pool.parents[child] == "p01"
    assert pool.born[child] == 7


def test_fresh_policies_differ_from_the_base_and_from_one_another():
    pool = tiny.pool(perturbation=0.03)
    ids = torch.tensor([tiny.random_ids(20, 0)])
    rows = [logits(pool, name, ids) for name in (*pool.names, REFERENCE)]
    for i in range(len(rows)):
        for j in range(i):
            assert (rows[i] - rows[j]).abs().max() > 1e-3


def test_reference_is_the_base_itself():
    pool = tiny.pool()
    ids = torch.tensor([tiny.random_ids(20, 0)])
    with torch.no_grad():
        expected = tiny.model()(ids).logits
    assert torch.equal(logits(pool, REFERENCE, ids), expected)


def test_equal_generators_give_equal_pools_and_other_seeds_other_ones():
    one, other = tiny.pool(), tiny.pool()
    assert all(equal(tensors(one, name), tensors(other, name)) for name in one.names)
    assert not equal(tensors(one, "p00"), tensors(one, "p01"))


def test_names_are_never_used_again():
    pool, generator = tiny.pool(size=3), torch.Generator().manual_seed(0)
    pool.remove("p02")
    assert pool.add_perturbed(generator=generator) == "p03"
    pool.remove("p00")
    assert pool.add_perturbed("p01", generator=generator) == "p04"
    assert pool.names == ("p01", "p03", "p04")
    with pytest.raises(KeyError, match=r"no sub-policy 'p00'; there are p01, p03, p04"):
        pool.remove("p00")


def test_names_are_not_used_again_after_saving_and_loading(tmp_path):
    pool = tiny.pool(size=2)
    pool.remove("p01")
    pool.save(tmp_path)
    other = tiny.pool(size=2)
    other.load(tmp_path)
    assert other.add_perturbed(generator=torch.Generator().manual_seed(0)) == "p02"


def test_adding_and_removing_leaves_other_policies_bit_identical():
    pool = tiny.pool()
    before = {name: tensors(pool, name) for name in pool.names}
    identities = {name: [id(p) for p in pool.parameters(name)] for name in pool.names}
    pool.add_perturbed("p00", generator=torch.Generator().manual_seed(9))
    pool.remove("p01")
    for name in ("p00", "p02"):
        assert equal(before[name], tensors(pool, name))
        assert identities[name] == [id(p) for p in pool.parameters(name)]


def test_members_train_and_reference_and_base_do_not():
    pool = tiny.pool()
    pool.add_perturbed(generator=torch.Generator().manual_seed(9))
    pool.remove("p00")
    training = {id(p) for p in pool.model.parameters() if p.requires_grad}
    assert training == {id(p) for name in pool.names for p in pool.parameters(name)}
    assert not pool.model.training


def test_members_are_fp32_on_a_bf16_base():
    pool = tiny.pool(dtype=torch.bfloat16)
    assert {p.dtype for name in pool.names for p in pool.parameters(name)} == {torch.float32}


@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_saved_policy_loads_with_peft_alone_and_gives_the_lockstep_logits(tmp_path, targets):
    pool = tiny.pool(targets=targets)
    pool.save(tmp_path)
    forward = Lockstep(pool)
    ids = torch.tensor([tiny.random_ids(20, seed) for seed in (0, 1)])
    positions = torch.arange(20).expand(2, 20)
    with torch.no_grad():
        ours = forward.logits(forward.branches(forward.trunk(ids, positions), positions, forward.stacks()))
        for k, name in enumerate(pool.names):
            alone = PeftModel.from_pretrained(tiny.model(), str(tmp_path / name)).eval()
            torch.testing.assert_close(ours[k], alone(ids).logits, atol=2e-5, rtol=1e-5)


def test_pool_survives_saving_and_loading_into_another_pool(tmp_path):
    pool, generator = tiny.pool(size=3), torch.Generator().manual_seed(2)
    pool.add_perturbed("p01", generator=generator, iteration=11)
    pool.remove("p00")
    pool.save(tmp_path)
    other = PolicyPool(tiny.base(), pool.config)
    other.add_perturbed(generator=generator)
    other.load(tmp_path)
    assert other.names == pool.names == ("p01", "p02", "p03")
    assert other.born == {"p01": 0, "p02": 0, "p03": 11}
    assert other.parents == {"p01": REFERENCE, "p02": REFERENCE, "p03": "p01"}
    for name in pool.names:
        assert equal(tensors(pool, name), tensors(other, name))
        assert all(p.requires_grad and p.dtype == torch.float32 for p in other.parameters(name))
    assert not any(p.requires_grad for p in other.parameters(REFERENCE))


def test_loading_from_a_folder_without_a_pool_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no saved pool"):
        tiny.pool().load(tmp_path)


def test_adapters_sit_on_the_top_layers_only():
    pool = tiny.pool(branch_layers=1)
    assert pool.first_branch == 2
    assert all(".layers.2." in name for name in pool.modules())
    assert len(pool.modules()) == 7
    assert len(tiny.pool(branch_layers="all", targets="attention").modules()) == 3 * 4


@pytest.mark.parametrize(("asked", "layers", "expected"), [(2, 8, 2), (0.5, 8, 4), (0.01, 8, 1), ("all", 8, 8)])
def test_branch_layers_by_number_fraction_and_all(asked, layers, expected):
    assert PoolConfig(branch_layers=asked).branches(layers) == expected


def test_more_branch_layers_than_layers_is_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match=r"branch_layers: 9 is more than the 8 layers .* 1 to 8"):
        PoolConfig(branch_layers=9).branches(8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"rank": 0},
        {"alpha": 0.0},
        {"targets": "mlp"},
        {"branch_layers": 1.5},
        {"branch_layers": 0},
        {"branch_layers": "half"},
        {"perturbation": -0.1},
        {"perturbation": math.nan},
    ],
)
def test_impossible_pools_are_refused_by_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PoolConfig(**wrong)
