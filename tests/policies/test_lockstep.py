"""bupo.policies.lockstep: each row equals PEFT running that adapter alone, values and gradients."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bupo.learn.scoring import score
from bupo.policies.lockstep import Lockstep
from bupo.policies.pool import REFERENCE, PolicyPool, PoolConfig

WIDE = torch.float64
CUTS = (0, 5, 6, 7, 8, 11, 20)
MERGED = pytest.mark.parametrize("merge_mb", [0.0, 64.0], ids=["products", "merged"])


def ids_and_positions(rows=3, width=21):
    ids = torch.tensor([tiny.random_ids(width, seed) for seed in range(rows)])
    return ids, torch.arange(width).expand(rows, width)


def logits(forward, ids, positions, stacks):
    return forward.logits(forward.branches(forward.trunk(ids, positions), positions, stacks))


def at_cuts(forward, ids, positions, stacks):
    """Logits of the last token of each chunk of `CUTS`, on a cache."""
    rows, pieces = len(ids), []
    cache = forward.new_cache([rows], [len(stacks)], 32)
    for start, end in pairwise(CUTS):
        part, where, count = ids[:, start:end], positions[:, start:end], torch.full((rows,), end - start)
        h = forward.trunk(part, where, cache, end, count)
        pieces.append(forward.logits(forward.branches_by_pool(h, where, [stacks], cache, end, count - 1, count)[0]))
    return torch.stack(pieces, dim=2)


@MERGED
@pytest.mark.parametrize("branch_layers", [1, 2, "all"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_each_row_equals_peft_with_that_adapter_set_and_the_zero_row_equals_the_base(family, branch_layers, merge_mb):
    pool = tiny.pool(family, WIDE, branch_layers=branch_layers, merge_mb=merge_mb)
    twin, forward = tiny.peft_twin(pool, family, WIDE), Lockstep(pool)
    ids, positions = ids_and_positions()
    with torch.no_grad():
        ours = logits(forward, ids, positions, forward.stacks(reference=True))
        base = tiny.model(family, WIDE)(ids).logits
        for k, name in enumerate(pool.names):
            twin.set_adapter(name)
            alone = twin(ids).logits
            torch.testing.assert_close(ours[k], alone, atol=1e-9, rtol=1e-9)
            assert (alone - base).abs().max() > 0.05, "the comparison would prove nothing"
    torch.testing.assert_close(ours[-1], base, atol=1e-9, rtol=1e-9)


@MERGED
@pytest.mark.parametrize("branch_layers", [1, "all"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_of_a_loss_on_one_row_equal_peft_alone_and_other_rows_get_none(family, branch_layers, merge_mb):
    pool = tiny.pool(family, WIDE, branch_layers=branch_layers, merge_mb=merge_mb)
    twin, forward = tiny.peft_twin(pool, family, WIDE), Lockstep(pool)
    ids, positions = ids_and_positions(2, 13)
    direction = torch.randn(2, 13, len(tiny.tokenizer()), dtype=WIDE)
    for k, name in enumerate(pool.names):
        pool.model.zero_grad()
        twin.set_adapter(name)
        twin.zero_grad()
        (torch.log_softmax(twin(ids).logits, -1) * direction).sum().backward()
        ours = logits(forward, ids, positions, forward.stacks(grad=True))[k]
        (torch.log_softmax(ours, -1) * direction).sum().backward()
        expected = [p.grad for p in tiny.adapter_parameters(twin, name)]
        for got, want in zip(pool.parameters(name), expected, strict=True):
            torch.testing.assert_close(got.grad, want, atol=1e-8, rtol=1e-8)
        others = [p.grad for other in pool.names if other != name for p in pool.parameters(other)]
        assert all(grad is None or not grad.any() for grad in others)


@MERGED
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fp32_rows_equal_peft_within_rounding_with_fused_attention(family, merge_mb):
    pool = tiny.pool(family, merge_mb=merge_mb)
    twin, forward = tiny.peft_twin(pool, family), Lockstep(pool)
    ids, positions = ids_and_positions()
    with torch.no_grad():
        ours = logits(forward, ids, positions, forward.stacks())
        for k, name in enumerate(pool.names):
            twin.set_adapter(name)
            torch.testing.assert_close(ours[k], twin(ids).logits, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_half_precision_rows_and_gradients_are_as_close_to_the_exact_ones_as_pefts_own(family, dtype):
    """Stated tolerance: RMS error at most half as much again as PEFT's, both against the same weights in fp32."""
    pool = tiny.pool(family, dtype)
    twin, forward = tiny.peft_twin(pool, family, dtype), Lockstep(pool)
    exact = copy.deepcopy(twin).float()
    ids, positions = ids_and_positions()
    ours = logits(forward, ids, positions, forward.stacks(grad=True))
    direction = torch.randn(ours.shape[1:], generator=torch.Generator().manual_seed(5))

    def error(got, want):
        return float((got.double() - want.double()).pow(2).mean().sqrt())

    for k, name in enumerate(pool.names):
        pool.model.zero_grad()
        (ours[k] * direction).sum().backward(retain_graph=True)
        found = {}
        for kind, model in (("theirs", twin), ("exact", exact)):
            model.set_adapter(name)
            model.zero_grad()
            out = model(ids).logits
            (out * direction.to(out)).sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in tiny.adapter_parameters(model, name)])
            found[kind] = (out.detach(), gradient)
        mine = (ours[k].detach(), torch.cat([p.grad.flatten() for p in pool.parameters(name)]))
        for got, theirs, want in zip(mine, found["theirs"], found["exact"], strict=True):
            assert 0 < error(got, want) < 1.5 * error(theirs, want)


def test_sft_adapter_is_the_reference_row(tmp_path):
    source = tiny.pool(size=1)
    source.save(tmp_path)
    config = replace(source.config, size=2)
    pool = PolicyPool(replace(tiny.base(), sft_adapter=tmp_path / "p00"), config)
    pool.add_perturbed(generator=torch.Generator().manual_seed(3))
    forward = Lockstep(pool)
    ids, positions = ids_and_positions()
    twin = tiny.peft_twin(source)
    with torch.no_grad():
        ours = logits(forward, ids, positions, forward.stacks(reference=True))
        torch.testing.assert_close(ours[-1], twin(ids).logits, atol=5e-5, rtol=1e-5)
        assert (ours[0] - ours[1]).abs().max() > 1e-3
    assert not any(p.requires_grad for p in pool.parameters(REFERENCE))


def test_sft_adapter_of_another_shape_is_refused(tmp_path):
    source = tiny.pool(size=1)
    source.save(tmp_path)
    with pytest.raises(ValueError, match=r"has r = 4, the pool asks for 6"):
        PolicyPool(replace(tiny.base(), sft_adapter=tmp_path / "p00"), replace(source.config, rank=6))


def test_peft_model_keeps_working_beside_the_lockstep():
    pool = tiny.pool()
    twin, forward = tiny.peft_twin(pool), Lockstep(pool)
    ids, positions = ids_and_positions()
    with torch.no_grad():
        logits(forward, ids, positions, forward.stacks())
        pool.model.set_adapter("p01")
        twin.set_adapter("p01")
        torch.testing.assert_close(pool.model(ids).logits, twin(ids).logits, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_chunked_forward_on_the_cache_equals_the_whole_sequence(family):
    forward = tiny.lockstep(family, WIDE)
    stacks = forward.stacks()
    ids, positions = ids_and_positions(2, 20)
    with torch.no_grad():
        whole = logits(forward, ids, positions, stacks)[:, :, [cut - 1 for cut in CUTS[1:]]]
        torch.testing.assert_close(at_cuts(forward, ids, positions, stacks), whole, atol=1e-9, rtol=1e-9)


def test_weights_are_merged_within_the_memory_allowed_and_never_in_half_precision():
    forward = tiny.lockstep(merge_mb=64.0)
    names = forward.pool.names
    size = sum(module.base_layer.weight.numel() * 4 for module in forward.pool.modules().values()) / 2**20
    forward.pool.config = replace(forward.pool.config, merge_mb=3.5 * size)
    assert set(forward.stacks().merged) == set(forward.layer_names)
    assert not forward.stacks(reference=True).merged  # a row more does not fit
    assert set(forward.stacks(names[:2], reference=True).select([REFERENCE]).merged) == set(forward.layer_names)
    assert not tiny.lockstep(dtype=torch.bfloat16, merge_mb=64.0).stacks().merged


def test_a_snapshot_is_kept_as_adapters_alone_and_merged_when_it_plays():
    forward = tiny.lockstep(merge_mb=64.0)
    stacks = forward.stacks()
    kept = stacks.offload().to(forward.device)
    assert stacks.merged
    assert not kept.merged
    again = forward.merge(kept)
    for key, weight in stacks.merged.items():
        assert torch.equal(weight, again.merged[key])


def test_selected_and_offloaded_stacks_give_the_same_rows():
    forward = tiny.lockstep()
    stacks = forward.stacks()
    ids, positions = ids_and_positions()
    with torch.no_grad():
        every = logits(forward, ids, positions, stacks)
        picked = logits(forward, ids, positions, stacks.select(["p02", "p00"]).offload())
    torch.testing.assert_close(picked, every[[2, 0]], atol=1e-5, rtol=1e-5)


def test_offloaded_stacks_do_not_follow_later_training():
    forward = tiny.lockstep()
    frozen = forward.stacks().offload()
    before = {key: (a.clone(), b.clone()) for key, (a, b) in frozen.weights.items()}
    with torch.no_grad():
        for parameter in forward.pool.parameters("p00"):
            parameter.add_(1.0)
    assert all(torch.equal(before[key][i], frozen.weights[key][i]) for key in before for i in (0, 1))


def test_log_probabilities_are_tempered_and_at_least_fp32():
    forward = tiny.lockstep(dtype=torch.bfloat16)
    h = torch.randn(2, 3, 64).to(torch.bfloat16)
    got = forward.logp(h, 0.5)
    assert got.dtype == torch.float32
    expected = torch.log_softmax(forward.family.head(h).double() / 0.5, -1)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def _other_base(config):
    model = AutoModelForCausalLM.from_config(config)
    return replace(tiny.base(), model=model)


def test_a_trunk_on_an_unknown_family_is_refused_with_what_works():
    config = AutoConfig.for_model("gpt2", vocab_size=320, n_embd=32, n_layer=2, n_head=2)
    with pytest.raises(ValueError, match=r"gpt2 model.*works with --pool.branch_layers all.*llama, .*, mamba take any"):
        PolicyPool(_other_base(config), PoolConfig(branch_layers=1))


def _strangers(kind):
    """Sub-policies on a base of a family that is not known layer by layer, and PEFT's copy of them."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=len(tiny.tokenizer()), **sizes, **_MORE.get(kind, {}))
    torch.manual_seed(0)
    base = replace(tiny.base(), model=AutoModelForCausalLM.from_config(config).eval())
    pool = PolicyPool(base, PoolConfig(branch_layers="all", perturbation=0.3, targets="all-linear"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        pool.add_perturbed(generator=generator)
    return pool, copy.deepcopy(pool.model)


_MORE = {
    "granite": {"logits_scaling": 4.0, "intermediate_size": 64, "num_key_value_heads": 1},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1},
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:The following .*_pattern keys")  # PEFT repairs both
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "qwen3_moe"])
def test_any_other_decoder_equals_peft_as_a_whole(kind):
    pool, twin = _strangers(kind)
    forward = Lockstep(pool)
    ids, positions = ids_and_positions(3, 20)
    with torch.no_grad():
        ours = logits(forward, ids, positions, forward.stacks(reference=True))
        cached = at_cuts(forward, ids, positions, forward.stacks(reference=True))
        for k, name in enumerate((*pool.names, REFERENCE)):
            twin.set_adapter(name)
            torch.testing.assert_close(ours[k], twin(ids).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cached, ours[:, :, [cut - 1 for cut in CUTS[1:]]], atol=1e-5, rtol=1e-5)
    assert all(p.requires_grad for p in pool.parameters("p00"))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_packed_rows_of_any_other_decoder_equal_peft_with_its_gradients():
    pool, twin = _strangers("gpt2")
    forward, batch = Lockstep(pool), tiny.batch()
    scored = score(forward, batch, forward.stacks(grad=True), 1.0)
    scored.logp_KNV[1].gather(1, scored.ids_N[:, None]).sum().backward()
    twin.set_adapter("p01")
    total = 0
    for row, length in enumerate(batch.length_B.tolist()):
        where = batch.action_BT[row].nonzero()[:, 0]
        logp = torch.log_softmax(twin(batch.ids_BT[row : row + 1, :length]).logits[0, where - 1], -1)
        torch.testing.assert_close(scored.logp_KNV[1, scored.row_N == row], logp, atol=1e-5, rtol=1e-5)
        total = total + logp.gather(1, batch.ids_BT[row, where][:, None]).sum()
    total.backward()
    for got, want in zip(pool.parameters("p01"), tiny.adapter_parameters(twin, "p01"), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-4, rtol=1e-4)


def test_a_decoder_whose_logits_are_more_than_its_heads_is_refused():
    pool, _ = _strangers("granite")
    with pytest.raises(ValueError, match=r"granite model, on which p00 in lockstep differs from PEFT's"):
        Lockstep(pool)


def test_targets_that_a_family_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"attention on a mamba base, which has none; allowed: all-linear"):
        tiny.pool("mamba", targets="attention")


def test_a_base_that_looks_ahead_is_refused():
    config = AutoConfig.for_model(
        "gemma2", vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, intermediate_size=32, use_bidirectional_attention=True,
    )  # fmt: skip
    pool = PolicyPool(_other_base(config), PoolConfig(branch_layers=1))
    with pytest.raises(ValueError, match="attends to later tokens"):
        Lockstep(pool)
