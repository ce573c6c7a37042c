"""bupo.policies.packing: rows that share a beginning give what each gives alone, in values and gradients."""

import itertools

import pytest
import tiny
import torch

from bupo.learn.scoring import micro_batches, score, shuffled_families, token_batch, trunk_of
from bupo.policies.lockstep import Lockstep
from bupo.policies.packing import families, pack

WIDE = torch.float64
TEMPERATURE = 0.7


def siblings(prefixes=(9, 14, 6), copies=(3, 2, 1), seed=0):
    """Families of rows with the same first tokens; each row goes on with tokens of its own, half of them own tokens."""
    rows = []
    for family, (length, count) in enumerate(zip(prefixes, copies, strict=True)):
        start = tiny.random_ids(length, 1000 * seed + family)
        for copy in range(count):
            rest = tiny.random_ids(5 + 4 * copy + family, 7000 + 100 * family + copy)
            action = [False] * (length + 1) + [i % 2 == 0 for i in range(len(rest) - 1)]
            rows.append((start + rest, action, [0.0] * (length + len(rest))))
    return token_batch(rows, [(-1.0) ** i * (1 + i / 4) for i in range(len(rows))])


def test_families_share_what_their_members_have_in_common():
    a, b = [1, 2, 3, 4], [7, 7, 7]
    rows = [[*a, 5, 5], [*b, 1], [*a, 6], [*b, 2, 3], [9, 9]]
    family, shared = families(rows, [len(row) - 1 for row in rows])
    assert shared == [4, 3, 4, 3, 1]
    assert family[0] == family[2] != family[1] == family[3]
    assert len(set(family)) == 3


def test_families_split_relatives_where_closer_ones_save_more():
    # All four begin with 1; the first three have eight tokens more in common. 1 four times saves 3, the others 16.
    near = [1, *range(20, 28)]
    rows = [[*near, 2], [*near, 3], [*near, 4], [1, 5, 5, 5]]
    family, shared = families(rows, [len(row) - 1 for row in rows])
    assert shared == [9, 9, 9, 3]
    assert len({*family[:3]}) == 1 and family[3] != family[0]


def test_a_family_shares_no_more_than_each_member_may():
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
    assert families(rows, [4, 2, 3])[1] in ([2, 2, 2], [3, 2, 3])  # both save 4 less what is lost at the second
    assert families(rows, [4, 4, 4]) == ([0, 0, 0], [4, 4, 4])
    assert families([], []) == ([], [])


def test_every_token_is_packed_once_and_shared_ones_once_a_family():
    batch = siblings()
    packing = trunk_of(tiny.lockstep(), batch).packing
    lengths, shared = batch.length_B.tolist(), batch.shared_B.tolist()
    assert shared == [9, 9, 9, 14, 14, 6]
    assert packing.source_N.numel() == 9 + 14 + 6 + sum(a - b for a, b in zip(lengths, shared, strict=True))
    ids = batch.ids_BT.flatten()[packing.source_N]
    for row, length in enumerate(lengths):
        place = packing.place_BT[row, :length]
        assert ids[place].tolist() == batch.ids_BT[row, :length].tolist()
        assert packing.position_1N[0, place].tolist() == list(range(length))


@pytest.mark.parametrize("branch_layers", [1, "all"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_rows_equal_peft_on_each_row_alone(family, branch_layers):
    pool = tiny.pool(family, WIDE, branch_layers=branch_layers)
    twin, forward = tiny.peft_twin(pool, family, WIDE), Lockstep(pool)
    batch = siblings()
    with torch.no_grad():
        ours = score(forward, batch, forward.stacks(), TEMPERATURE)
        for k, name in enumerate(pool.names):
            twin.set_adapter(name)
            for row in range(len(batch)):
                logits = twin(batch.ids_BT[row : row + 1, : batch.length_B[row]]).logits[0]
                columns = batch.action_BT[row].nonzero()[:, 0]
                expected = torch.log_softmax(logits[columns - 1] / TEMPERATURE, -1)
                torch.testing.assert_close(ours.logp_KNV[k, ours.row_N == row], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_through_a_shared_beginning_equal_peft_on_each_row_alone(family):
    pool = tiny.pool(family, WIDE, branch_layers=2)
    twin, forward = tiny.peft_twin(pool, family, WIDE), Lockstep(pool)
    batch = siblings()
    direction = torch.randn(int(batch.action_BT.sum()), len(tiny.tokenizer()), dtype=WIDE)
    scored = score(forward, batch, forward.stacks(grad=True), TEMPERATURE)
    sum((scored.logp_KNV[k] * direction).sum() * (k + 1) for k in range(len(pool.names))).backward()
    for k, name in enumerate(pool.names):
        twin.set_adapter(name)
        twin.zero_grad()
        for row in range(len(batch)):
            logits = twin(batch.ids_BT[row : row + 1, : batch.length_B[row]]).logits[0]
            columns = batch.action_BT[row].nonzero()[:, 0]
            logp = torch.log_softmax(logits[columns - 1] / TEMPERATURE, -1)
            ((logp * direction[scored.row_N == row]).sum() * (k + 1)).backward()
        expected = [p.grad for p in tiny.adapter_parameters(twin, name)]
        for got, want in zip(pool.parameters(name), expected, strict=True):
            torch.testing.assert_close(got.grad, want, atol=1e-8, rtol=1e-8)


def test_a_row_does_not_see_the_rest_of_its_siblings():
    forward, batch = tiny.lockstep(dtype=WIDE), siblings()
    other = siblings()
    other.ids_BT[1, 11:] = 8
    with torch.no_grad():
        before, after = (score(forward, b, forward.stacks(), 1.0) for b in (batch, other))
    for row in range(len(batch)):
        a, b = (s.logp_KNV[:, s.row_N == row] for s in (before, after))
        assert torch.equal(a, b) == (row != 1)


def test_minibatches_hold_whole_families_in_a_new_order_each_time():
    batch = siblings((5,) * 8, (4,) * 8)
    generator = torch.Generator().manual_seed(0)
    orders = [batch.family_B[shuffled_families(batch, generator)].tolist() for _ in range(5)]
    for order in orders:
        assert [key for key, _ in itertools.groupby(order)] == list(dict.fromkeys(order))
        assert sorted(order) == sorted(batch.family_B.tolist())
    assert len({tuple(order) for order in orders}) > 1


def test_rows_of_one_family_come_in_a_new_order_each_time():
    batch = siblings((5,), (8,))
    assert set(batch.family_B.tolist()) == {0}
    generator = torch.Generator().manual_seed(0)
    orders = {tuple(shuffled_families(batch, generator).tolist()) for _ in range(5)}
    assert len(orders) > 1 and all(sorted(order) == list(range(8)) for order in orders)


def test_a_budget_counts_shared_tokens_once_a_piece():
    batch = siblings((9, 14), (3, 3))
    lengths, shared = batch.length_B.tolist(), batch.shared_B.tolist()

    def packed(piece):
        lists = (piece.length_B.tolist(), piece.family_B.tolist(), piece.shared_B.tolist())
        return pack(*lists, piece.ids_BT.shape[1]).source_N.numel()

    whole = 9 + 14 + sum(a - b for a, b in zip(lengths, shared, strict=True))
    for budget in (whole, whole - 1, 40, 1):
        pieces = list(micro_batches(batch, torch.tensor([3, 0, 5, 1, 4, 2]), budget))
        assert sum(map(len, pieces)) == 6
        assert all(packed(piece) <= budget or len(piece) == 1 for piece in pieces)
        assert (len(pieces) == 1) == (budget == whole)
    # Greedy: the next row would not have fitted.
    pieces = list(micro_batches(batch, torch.arange(6), 40))
    for piece, following in itertools.pairwise(pieces):
        extra = int(following.length_B[0] - following.shared_B[0])
        extra += int(following.shared_B[0]) if following.family_B[0] != piece.family_B[-1] else 0
        assert packed(piece) + extra > 40
