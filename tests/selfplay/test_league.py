"""bupo.selfplay.league: past selves stay what they were, in memory and on disk."""

import pytest
import tiny
import torch

from bupo.learn.scoring import score
from bupo.selfplay.league import League


def same(one, other):
    return one.names == other.names and all(
        torch.equal(one.weights[key][i], other.weights[key][i]) for key in one.weights | other.weights for i in (0, 1)
    )


def train(forward):
    with torch.no_grad():
        for name in forward.pool.names:
            for parameter in forward.pool.parameters(name):
                parameter.add_(0.1)


def test_snapshot_does_not_follow_later_training():
    forward, league, batch = tiny.lockstep(), League(4), tiny.batch()
    with torch.no_grad():
        before = score(forward, batch, forward.stacks(), 1.0).logp_KNV
        league.add(5, forward.stacks())
        train(forward)
        past = score(forward, batch, league.members["past0005"].to(forward.device), 1.0).logp_KNV
        now = score(forward, batch, forward.stacks(), 1.0).logp_KNV
    assert torch.equal(past, before)
    assert (now - before).abs().max() > 0.01


def test_oldest_goes_when_there_is_no_room():
    forward, league = tiny.lockstep(), League(2)
    for iteration in (5, 10, 15):
        league.add(iteration, forward.stacks())
    assert list(league.members) == ["past0010", "past0015"]


def test_league_survives_saving_and_loading(tmp_path):
    forward, league = tiny.lockstep(), League(8)
    for iteration in (5, 10):
        league.add(iteration, forward.stacks())
        train(forward)
    forward.pool.remove("p00")
    league.add(15, forward.stacks())
    league.save(tmp_path)
    other = League(8)
    other.add(99, forward.stacks())
    other.load(tmp_path, forward)
    assert list(other.members) == ["past0005", "past0010", "past0015"]
    assert other.members["past0015"].names == ("p01", "p02")
    assert all(same(other.members[name], stacks) for name, stacks in league.members.items())
    assert not same(other.members["past0005"], other.members["past0010"])


def test_empty_league_survives_saving_and_loading(tmp_path):
    League(3).save(tmp_path)
    league = League(3)
    league.load(tmp_path, tiny.lockstep())
    assert league.members == {}


@pytest.mark.parametrize("branch_layers", [1, "all"])
def test_snapshot_of_another_pool_shape_is_refused(tmp_path, branch_layers):
    league = League(3)
    league.add(5, tiny.lockstep(branch_layers=2).stacks())
    league.save(tmp_path)
    with pytest.raises(ValueError, match="other layers than the pool"):
        League(3).load(tmp_path, tiny.lockstep(branch_layers=branch_layers))
