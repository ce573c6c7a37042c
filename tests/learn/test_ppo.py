"""bupo.learn.ppo: the invariants of facts/ppo_checklist.md, and the loss against a naive one through PEFT alone."""

from dataclasses import replace

import pytest
import tiny
import torch

from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.learn import ppo
from bupo.learn.optimizer import PolicyOptimizer
from bupo.learn.ppo import PPOConfig, scheduled_lr, update
from bupo.learn.scoring import action_tokens, hidden, keep_trunk, micro_batches, score, token_batch, trunk_of
from bupo.policies.lockstep import Lockstep
from bupo.records import TokenBatch

WIDE = torch.float64
WEIGHTS = (0.5, 0.25, 0.25)
FULL = PPOConfig(kl_reference=0.1, kl_old=0.3, entropy=0.05, diversity=0.4, diversity_cap=0.05, minibatches=1)


class Learner:
    """A pool with everything that an update needs."""

    def __init__(self, family="llama", dtype=torch.float32, *, weights=WEIGHTS, config=FULL, branch_layers=2):
        self.pool = tiny.pool(family, dtype, branch_layers=branch_layers)
        self.forward = Lockstep(self.pool)
        self.config = config
        self.mixer = build_coordinator(CoordinatorConfig(weights=weights), 3)
        self.optimizer = PolicyOptimizer(self.pool, config.max_grad_norm)

    def update(self, batch, lr=1e-2, seed=0, **settings):
        return update(
            self.forward,
            self.mixer,
            self.optimizer,
            batch,
            replace(self.config, **settings),
            learning_rate=lr,
            generator=torch.Generator().manual_seed(seed),
        )

    def with_weights(self, weights):
        self.mixer = build_coordinator(CoordinatorConfig(weights=weights), 3)
        return self

    def gradients(self, batch, *, drift=False, **settings):
        """Loss and gradients of the last optimizer step; no step is carried out, or a drift in place of each."""
        found = {}

        def catch(learning_rate):
            found.update({n: [p.grad.clone() for p in self.pool.parameters(n)] for n in self.pool.names})
            self.pool.model.zero_grad()
            if drift:
                self.drift()
            return dict.fromkeys(self.pool.names, 0.0)

        self.optimizer.step = catch
        metrics = self.update(batch, **settings)
        del self.optimizer.step
        return metrics, found

    def adapter(self, name):
        return [p.detach().clone() for p in self.pool.parameters(name)]

    def adam(self, name):
        state = self.optimizer.state_dict()
        return {(k, entry): v.clone() for k, d in state.items() if k.startswith(name) for entry, v in d.items()}

    def drift(self):
        """Moves the adapters, so that a later old policy differs from the present one."""
        with torch.no_grad():
            for name in self.pool.names:
                for parameter in self.pool.parameters(name):
                    parameter.add_(0.02 * torch.randn_like(parameter))


def assert_same(one, other, tolerance):
    for name in one:
        for a, b in zip(one[name], other[name], strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def assert_bits(one, other):
    pairs = zip(one, other, strict=True) if isinstance(one, list) else ((one[k], other[k]) for k in one | other)
    assert all(torch.equal(a, b) for a, b in pairs)


def pad(batch, extra, value=0):
    """More padding on the right, filled with any id."""

    def wide(x, fill):
        return torch.cat([x, torch.full((len(batch), extra), fill, dtype=x.dtype)], dim=1)

    return replace(
        batch,
        ids_BT=wide(batch.ids_BT, value),
        action_BT=wide(batch.action_BT, False),
        logp_rollout_BT=wide(batch.logp_rollout_BT, 0.0),
    )


# --- 1: the ratio is 1 until something is learnt --------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (WIDE, 1e-12)])
def test_ratio_is_one_in_every_epoch_and_minibatch_while_nothing_is_learnt(monkeypatch, dtype, tolerance):
    ratios, real = [], ppo.clipped_surrogate

    def spy(*args):
        loss, ratio = real(*args)
        ratios.append(ratio.detach())
        return loss, ratio

    monkeypatch.setattr(ppo, "clipped_surrogate", spy)
    metrics = Learner(dtype=dtype).update(tiny.batch(), lr=0.0, epochs=3, minibatches=3, micro_tokens=64)
    assert len(ratios) >= 9
    assert sum(len(r) for r in ratios) == 3 * int(tiny.batch().action_BT.sum())
    assert max((r - 1).abs().max().item() for r in ratios) < tolerance
    assert metrics["ppo/clip_fraction"] == 0
    assert metrics["ppo/kl_old"] < tolerance


def test_learning_rate_zero_changes_no_adapter():
    learner = Learner()
    before = {name: learner.adapter(name) for name in learner.pool.names}
    learner.update(tiny.batch(), lr=0.0, epochs=2)
    for name in learner.pool.names:
        assert_bits(before[name], learner.adapter(name))


# --- 2: padding, order, company and micro batches change nothing ----------------------------------------------------


def test_log_probabilities_do_not_depend_on_padding_order_or_company():
    forward = tiny.lockstep("qwen2", WIDE)
    batch, stacks = tiny.batch(), forward.stacks()
    with torch.no_grad():
        whole = score(forward, batch, stacks, 0.7)
        padded = score(forward, pad(batch, 13, value=9), stacks, 0.7)
        torch.testing.assert_close(padded.logp_KNV, whole.logp_KNV, atol=1e-10, rtol=0)
        order = torch.tensor([4, 2, 0, 5, 1, 3])
        mixed = score(forward, batch.rows(order), stacks, 0.7)
        for row in range(len(batch)):
            expected = whole.logp_KNV[:, whole.row_N == row]
            moved = mixed.logp_KNV[:, mixed.row_N == order.tolist().index(row)]
            alone = score(forward, batch.rows(torch.tensor([row])), stacks, 0.7).logp_KNV
            torch.testing.assert_close(moved, expected, atol=1e-10, rtol=0)
            torch.testing.assert_close(alone, expected, atol=1e-10, rtol=0)


def test_scored_tokens_are_the_own_tokens_in_row_major_order():
    batch = tiny.batch((5, 9))
    scored = score(tiny.lockstep(), batch, tiny.lockstep().stacks(), 1.0)
    expected = [(r, batch.ids_BT[r, t].item()) for r in range(2) for t in range(9) if batch.action_BT[r, t]]
    assert list(zip(scored.row_N.tolist(), scored.ids_N.tolist(), strict=True)) == expected


@pytest.mark.parametrize("branch_layers", [1, "all"])
def test_loss_and_gradients_do_not_depend_on_the_micro_batch_split(branch_layers):
    learner, batch = Learner(dtype=WIDE, branch_layers=branch_layers), tiny.batch()
    whole, gradients = learner.gradients(batch, micro_tokens=10_000)
    for micro_tokens in (64, 90):
        assert len(list(micro_batches(batch, torch.arange(6), micro_tokens))) > 1
        split, same = learner.gradients(batch, micro_tokens=micro_tokens)
        assert_same(gradients, same, 1e-10)
        assert {k: split[k] for k in split} == pytest.approx({k: whole[k] for k in split}, abs=1e-10)


def test_loss_and_gradients_do_not_depend_on_padding_or_row_order():
    learner, batch = Learner(dtype=WIDE), tiny.batch()
    metrics, gradients = learner.gradients(batch)
    for other in (pad(batch, 20, value=7), batch.rows(torch.tensor([3, 1, 5, 0, 2, 4]))):
        again, same = learner.gradients(other)
        assert_same(gradients, same, 1e-10)
        assert again["ppo/loss"] == pytest.approx(metrics["ppo/loss"], abs=1e-10)


@pytest.mark.parametrize(
    "settings",
    [{"logit_tokens": 1}, {"logit_tokens": 7}, {"checkpoint": True}, {"checkpoint": True, "micro_tokens": 64}],
    ids=str,
)
@pytest.mark.parametrize("branch_layers", [2, "all"])
def test_chunks_of_logits_and_checkpoints_change_no_number(branch_layers, settings):
    learner, batch = Learner(dtype=WIDE, branch_layers=branch_layers), tiny.batch()
    whole, gradients = learner.gradients(batch, logit_tokens=10_000)
    split, same = learner.gradients(batch, **settings)
    assert_same(gradients, same, 1e-10)
    assert {k: split[k] for k in split} == pytest.approx({k: whole[k] for k in split}, abs=1e-10)


def test_checkpointed_branches_keep_less_for_the_backward_pass():
    learner, batch = Learner(branch_layers="all"), tiny.batch()
    sizes = {}
    for checkpoint in (False, True):
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            learner.gradients(batch, checkpoint=checkpoint)
        sizes[checkpoint] = sum(kept)
    assert sizes[True] < 0.7 * sizes[False]


def test_no_more_distributions_exist_at_once_than_asked_for(monkeypatch):
    learner, seen = Learner(), []
    real = learner.forward.logp

    def spy(h_KND, temperature):
        seen.append(h_KND.shape[1])
        return real(h_KND, temperature)

    monkeypatch.setattr(learner.forward, "logp", spy)
    learner.gradients(tiny.batch(), logit_tokens=5)
    assert max(seen) == 5
    assert sum(seen) == 2 * int(tiny.batch().action_BT.sum())  # the old policies and the present ones


def test_a_kept_trunk_changes_no_number_and_is_computed_once(monkeypatch):
    learner, batch = Learner(dtype=WIDE, branch_layers=1), tiny.batch()
    metrics, gradients = learner.gradients(batch, micro_tokens=64)
    kept = keep_trunk(learner.forward, batch, 64, 1.0)
    assert kept.trunk_BTD is not None
    monkeypatch.setattr(learner.forward, "trunk", lambda *args, **kwargs: pytest.fail("the trunk ran again"))
    again, same = learner.gradients(kept, micro_tokens=64, epochs=1)
    assert_same(gradients, same, 1e-12)
    assert again == pytest.approx(metrics, abs=1e-12)


def test_a_trunk_is_not_kept_beyond_the_memory_allowed_nor_where_there_is_none():
    batch = tiny.batch()
    size = batch.ids_BT.numel() * 64 * 4 / 2**20
    forward = tiny.lockstep(branch_layers=1)
    assert keep_trunk(forward, batch, 64, 0.99 * size).trunk_BTD is None
    assert keep_trunk(forward, batch, 64, 1.01 * size).trunk_BTD is not None
    assert keep_trunk(tiny.lockstep(branch_layers="all"), batch, 64, 100.0).trunk_BTD is None


def test_micro_batches_hold_every_row_once_within_the_budget():
    batch = tiny.batch()
    pieces = list(micro_batches(batch, torch.tensor([5, 0, 2, 3]), 40))
    assert sorted(n for piece in pieces for n in piece.length_B.tolist()) == sorted([7, 17, 23, 12])
    for piece in pieces:
        assert piece.length_B.sum() <= 40 or len(piece) == 1
        assert piece.ids_BT.shape[1] == int(piece.length_B.max())
    assert len(pieces) == 2


# --- 3: what comes after the last own token does not matter ---------------------------------------------------------


def test_editing_tokens_after_the_last_own_token_changes_no_loss_and_no_gradient():
    def with_tail(seed):
        rows = []
        for index, length in enumerate((15, 22, 9)):
            ids = tiny.random_ids(length, index) + tiny.random_ids(6, 50 + index + seed)
            action = [length - 5 <= t < length for t in range(length + 6)]
            rows.append((ids, action, [0.0] * (length + 6)))
        return token_batch(rows, [1.0, -0.5, 0.25])

    learner = Learner(dtype=WIDE)
    one, other = with_tail(0), with_tail(100)
    assert not torch.equal(one.ids_BT, other.ids_BT)
    metrics, gradients = learner.gradients(one)
    again, same = learner.gradients(other)
    assert_same(gradients, same, 0.0)
    assert again == metrics


# --- 4: who gets no gradient does not move --------------------------------------------------------------------------


def test_policies_without_part_in_the_mixture_keep_tensors_and_adam_state_bit_identical():
    learner = Learner()
    learner.update(tiny.batch(), minibatches=2)  # all three now have momentum
    before = {name: (learner.adapter(name), learner.adam(name)) for name in learner.pool.names}
    assert all(adam for _, adam in before.values())
    learner.with_weights((0.0, 1.0, 0.0)).update(tiny.batch(seed=8), minibatches=3, epochs=2, kl_old=0.0)
    for name in ("p00", "p02"):
        assert_bits(before[name][0], learner.adapter(name))
        assert_bits(before[name][1], learner.adam(name))
    assert not torch.equal(before["p01"][0][0], learner.adapter("p01")[0])


def test_base_and_reference_never_change_in_an_update():
    learner = Learner()
    ours = {id(p) for name in learner.pool.names for p in learner.pool.parameters(name)}
    before = {n: p.detach().clone() for n, p in learner.pool.model.named_parameters() if id(p) not in ours}
    assert any("sft" in name for name in before)
    assert any("embed_tokens" in name for name in before)
    adapters = learner.adapter("p00")
    learner.update(tiny.batch(), epochs=2)
    assert_bits(before, {n: p for n, p in learner.pool.model.named_parameters() if id(p) not in ours})
    assert not torch.equal(adapters[0], learner.adapter("p00")[0])


# --- the loss itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_loss_and_gradients_equal_a_naive_loss_through_peft_alone(family):
    """After a drift in place of the first epoch's step.

    Row by row and adapter by adapter, probabilities instead of log-probabilities, the old policy a second model.
    """
    config = replace(FULL, temperature=0.8, clip=0.1)
    learner, batch, twins = Learner(family, WIDE, config=config), tiny.batch(), []
    first, _ = learner.gradients(batch)

    def drift():
        twins.append(tiny.peft_twin(learner.pool, family, WIDE))
        Learner.drift(learner)

    learner.drift = drift
    metrics, gradients = learner.gradients(batch, epochs=2, drift=True)
    old_twin, twin = twins  # before the first drift, and before the second
    base = tiny.model(family, WIDE)

    def proposals(model, ids, where, temperature=0.8):
        return torch.softmax(model(ids[None]).logits[0, where - 1] / temperature, -1)

    losses, ratios = [], []
    for row in range(len(batch)):
        ids = batch.ids_BT[row, : batch.length_B[row]]
        where = batch.action_BT[row].nonzero()[:, 0]
        pi, pi_old = [], []
        for name in learner.pool.names:
            twin.set_adapter(name)
            old_twin.set_adapter(name)
            pi.append(proposals(twin, ids, where))
            with torch.no_grad():
                pi_old.append(proposals(old_twin, ids, where))
        with torch.no_grad():
            reference = proposals(base, ids, where)
        mu = sum(w * p for w, p in zip(WEIGHTS, pi, strict=True))
        mu_old = sum(w * p for w, p in zip(WEIGHTS, pi_old, strict=True))
        for n, token in enumerate(ids[where].tolist()):
            ratio, advantage = mu[n, token] / mu_old[n, token], batch.advantage_BT[row][where[n]].item()
            ratios.append(ratio.item())
            clipped = ratio.clamp(0.9, 1.1)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
            loss = loss + 0.1 * (mu[n] * (mu[n] / reference[n]).log()).sum()
            loss = loss + 0.3 / 3 * sum((o[n] * (o[n] / p[n]).log()).sum() for o, p in zip(pi_old, pi, strict=True))
            # Jensen-Shannon divergence as the mean information that a token gives about who proposed it.
            jsd = sum(w * (p[n] * (p[n] / mu[n]).log()).sum() for w, p in zip(WEIGHTS, pi, strict=True))
            loss = loss - 0.4 * 0.05 * (1 - (-jsd / 0.05).exp())
            losses.append(loss + 0.05 * (mu[n] * mu[n].log()).sum())
    loss = torch.stack(losses).mean()
    second = 2 * metrics["ppo/loss"] - first["ppo/loss"]  # the metric is the mean of both epochs
    torch.testing.assert_close(torch.tensor(second, dtype=WIDE), loss.detach(), atol=1e-9, rtol=1e-9)
    assert max(ratios) > 1.1
    assert min(ratios) < 0.9
    parameters = [p for name in learner.pool.names for p in tiny.adapter_parameters(twin, name)]
    for parameter in parameters:  # PEFT switches them off when another adapter is set
        parameter.requires_grad_(True)
    expected = torch.autograd.grad(loss, parameters)
    for got, want in zip((g for n in learner.pool.names for g in gradients[n]), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-8, rtol=1e-8)


def test_gradients_equal_finite_differences():
    learner, batch = Learner(dtype=WIDE), tiny.batch()
    old = learner.forward.stacks(reference=True)
    learner.drift()
    total = int(batch.action_BT.sum())

    def loss():
        trunk = trunk_of(learner.forward, batch)
        before, now = (
            hidden(learner.forward, batch, stacks, trunk) for stacks in (old, learner.forward.stacks(grad=True))
        )
        own = action_tokens(batch, learner.forward.device)
        return ppo._loss(learner.forward, learner.mixer, before, now, own, replace(FULL, clip=0.9))[0] / total

    loss().backward()
    generator = torch.Generator().manual_seed(4)
    for name in learner.pool.names:
        for parameter in learner.pool.parameters(name)[:6]:
            direction = torch.randn(parameter.shape, generator=generator, dtype=WIDE)
            values = []
            for step in (1e-5, -1e-5):
                parameter.data.add_(step * direction)
                values.append(loss().item())
                parameter.data.sub_(step * direction)
            numeric = (values[0] - values[1]) / 2e-5
            assert (parameter.grad * direction).sum().item() == pytest.approx(numeric, rel=1e-5, abs=1e-9)


def test_updates_raise_what_was_good_and_lower_what_was_bad():
    learner, batch = Learner(config=PPOConfig(minibatches=1, kl_reference=0.0)), tiny.batch((20, 20), (1.0, -1.0))

    def likelihood():
        with torch.no_grad():
            s = score(learner.forward, batch, learner.forward.stacks(), 1.0)
            mu = torch.logsumexp(s.logp_KNV + torch.tensor(WEIGHTS).log()[:, None, None], 0)
        logp = mu.gather(1, s.ids_N[:, None])[:, 0]
        return logp[s.row_N == 0].sum().item(), logp[s.row_N == 1].sum().item()

    before = likelihood()
    learner.update(batch, lr=3e-3)
    after = likelihood()
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_rollout_mismatch_is_the_mean_gap_to_the_sampled_log_probabilities():
    learner, batch = Learner(dtype=WIDE), tiny.batch()
    with torch.no_grad():
        s = score(learner.forward, batch, learner.forward.stacks(), FULL.temperature)
        mu = torch.logsumexp(s.logp_KNV + torch.tensor(WEIGHTS, dtype=WIDE).log()[:, None, None], 0)
    rollout = torch.zeros(batch.ids_BT.shape, dtype=WIDE)
    rollout[batch.action_BT] = mu.gather(1, s.ids_N[:, None])[:, 0] + 0.125
    metrics, _ = learner.gradients(replace(batch, logp_rollout_BT=rollout))
    assert metrics["ppo/rollout_mismatch"] == pytest.approx(0.125, abs=1e-10)


# --- the optimizer --------------------------------------------------------------------------------------------------


def set_gradients(pool, scale):
    for index, name in enumerate(pool.names):
        for parameter in pool.parameters(name):
            parameter.grad = torch.full_like(parameter, scale * (index + 1))


def test_gradient_of_each_policy_is_clipped_by_its_own_norm():
    learner, clipped = Learner(), {}
    set_gradients(learner.pool, 1e-4)
    for parameter in learner.pool.parameters("p01"):
        parameter.grad.fill_(2.0)
    count = sum(p.numel() for p in learner.pool.parameters("p00"))
    real = learner.optimizer.adam.step

    def spy():
        clipped.update({n: [p.grad.clone() for p in learner.pool.parameters(n)] for n in learner.pool.names})
        real()

    learner.optimizer.adam.step = spy
    norms = learner.optimizer.step(1e-3)
    expected = {"p00": 1e-4 * count**0.5, "p01": 2.0 * count**0.5, "p02": 3e-4 * count**0.5}
    assert norms == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(g, torch.full_like(g, 1e-4)) for g in clipped["p00"])
    assert sum(g.pow(2).sum() for g in clipped["p01"]).sqrt().item() == pytest.approx(1.0, rel=1e-4)


def test_first_step_is_adams_by_hand():
    learner = Learner()
    before = learner.adapter("p02")
    set_gradients(learner.pool, 1e-3)
    learner.optimizer.step(0.01)
    for old, new in zip(before, learner.adapter("p02"), strict=True):
        # Bias-corrected moments of one gradient g are g and g^2: the step is lr * g / (|g| + eps).
        torch.testing.assert_close(new, old - 0.01 * 3e-3 / (3e-3 + 1e-8), atol=1e-6, rtol=0)
    assert all(p.grad is None for p in learner.pool.parameters("p02"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_is_an_error_naming_the_policy_and_nothing_moves(bad):
    learner = Learner()
    before = {name: learner.adapter(name) for name in learner.pool.names}
    set_gradients(learner.pool, 1e-3)
    learner.pool.parameters("p01")[3].grad[0, 0] = bad
    with pytest.raises(FloatingPointError, match="gradient of p01 is not finite"):
        learner.optimizer.step(0.01)
    for name in learner.pool.names:
        assert_bits(before[name], learner.adapter(name))


def test_loss_that_is_not_finite_is_an_error():
    batch = tiny.batch()
    with pytest.raises(FloatingPointError, match="PPO loss is not finite"):
        Learner().update(replace(batch, advantage_BT=torch.full_like(batch.advantage_BT, float("nan"))))


def test_sync_keeps_the_adam_state_of_those_who_stay_and_gives_newcomers_none():
    learner = Learner()
    learner.update(tiny.batch())
    before = {name: learner.adam(name) for name in ("p00", "p02")}
    gone = learner.pool.parameters("p01")
    learner.pool.add_perturbed("p00", generator=torch.Generator().manual_seed(0))
    learner.pool.remove("p01")
    learner.optimizer.sync()
    for name, state in before.items():
        assert_bits(state, learner.adam(name))
    assert not learner.adam("p03")
    assert not learner.adam("p01")
    assert not any(p in learner.optimizer.adam.state for p in gone)
    assert [group["name"] for group in learner.optimizer.adam.param_groups] == ["p00", "p02", "p03"]
    newcomer = learner.adapter("p03")
    learner.update(tiny.batch())
    assert not torch.equal(newcomer[0], learner.adapter("p03")[0])


def test_sync_follows_a_pool_that_was_loaded_under_the_same_names(tmp_path):
    learner = Learner()
    learner.pool.save(tmp_path)
    learner.pool.load(tmp_path)
    learner.optimizer.sync()
    before = {name: learner.adapter(name) for name in learner.pool.names}
    learner.update(tiny.batch())
    for name in learner.pool.names:
        assert not torch.equal(before[name][0], learner.adapter(name)[0])


# --- records and schedule -------------------------------------------------------------------------------------------


def test_learning_rate_falls_linearly_to_its_share():
    config = PPOConfig(lr=1.0, final_lr=0.2, warmup=0)
    assert [scheduled_lr(config, i, 5) for i in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert scheduled_lr(config, 0, 1) == 1.0


def test_learning_rate_rises_over_the_warmup():
    config = PPOConfig(lr=1.0, final_lr=1.0, warmup=3)
    assert [scheduled_lr(config, i, 6) for i in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_token_batch_pads_on_the_right():
    batch = token_batch([([7, 8, 9], [False, True, True], [0, -1, -2]), ([5], [False], [0])], [0.5, -1])
    assert isinstance(batch, TokenBatch)
    assert batch.ids_BT.tolist() == [[7, 8, 9], [5, 0, 0]]
    assert batch.action_BT.tolist() == [[False, True, True], [False, False, False]]
    assert batch.logp_rollout_BT.tolist() == [[0, -1, -2], [0, 0, 0]]
    assert batch.length_B.tolist() == [3, 1]
    assert batch.advantage_BT.tolist() == [[0, 0.5, 0.5], [0, 0, 0]]


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"clip": 0.0}, {"epochs": 0}, {"micro_tokens": 1}, {"advantage": "gae"}, {"temperature": 0.0}],
)
def test_impossible_settings_are_refused_by_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PPOConfig(**wrong)


# --- the old policies' states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_mb", [0.0, 100.0])
def test_old_distributions_are_those_of_the_weights_at_the_start_in_every_epoch(monkeypatch, most_mb):
    learner, batch, seen = Learner(dtype=WIDE), tiny.batch(), []
    real = ppo._loss

    def spy(forward, mixer, before_KND, now_KND, own, config):
        seen.append((own.ids_N.clone(), own.logp_rollout_N.clone(), before_KND.clone()))
        return real(forward, mixer, before_KND, now_KND, own, config)

    monkeypatch.setattr(ppo, "_loss", spy)
    # A token is known by its mark, whatever order it comes in.
    marks = torch.zeros_like(batch.logp_rollout_BT)
    marks[batch.action_BT] = torch.arange(int(batch.action_BT.sum()), dtype=marks.dtype)
    batch = replace(batch, logp_rollout_BT=marks)
    start = learner.forward.stacks(reference=True)
    expected_KND = hidden(learner.forward, batch, start, trunk_of(learner.forward, batch))
    learner.update(batch, epochs=3, minibatches=3, micro_tokens=64, earlier_mb=most_mb)
    assert len({tuple(mark.tolist()) for _, mark, _ in seen}) > 3
    assert sum(len(mark) for _, mark, _ in seen) == 3 * int(batch.action_BT.sum())
    for _, mark, before_KND in seen:
        torch.testing.assert_close(before_KND, expected_KND[:, mark.long()], rtol=0, atol=1e-9)


def test_kept_states_are_computed_once_and_only_within_the_memory_allowed(monkeypatch):
    learner, batch, ran = Learner(), tiny.batch(), []
    real = learner.forward.branches

    def spy(h, positions, stacks, *args, **kwargs):
        ran.append(stacks.names)
        return real(h, positions, stacks, *args, **kwargs)

    monkeypatch.setattr(learner.forward, "branches", spy)

    def runs(names, **settings):
        ran.clear()
        learner.update(batch, micro_tokens=4096, minibatches=1, **settings)
        return ran.count(tuple(names))

    own = learner.pool.names
    kept = 4 * int(batch.action_BT.sum()) * 64 * 4 / 2**20
    assert runs(["sft"], epochs=3, earlier_mb=1.01 * kept) == 1
    assert runs([*own, "sft"], epochs=3, earlier_mb=1.01 * kept) == 0
    assert runs([*own, "sft"], epochs=3, earlier_mb=0.99 * kept) == 2
    assert runs(own, epochs=3) == 3
