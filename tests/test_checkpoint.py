"""bupo.checkpoint: a resumed learner goes on exactly as the uninterrupted one."""

import json

import numpy as np
import pytest
import tiny
import torch

from bupo.checkpoint import KEPT, checkpoints, load_checkpoint, save_checkpoint
from bupo.coordinators import CoordinatorConfig, build_coordinator
from bupo.learn.critic import TurnCritic
from bupo.learn.optimizer import PolicyOptimizer
from bupo.learn.ppo import PPOConfig, update
from bupo.policies.lockstep import Lockstep
from bupo.selfplay.league import League

PPO = PPOConfig(minibatches=2)


class Run:
    """What a checkpoint holds, in small."""

    def __init__(self, seed=0):
        self.pool = tiny.pool()
        self.lockstep = Lockstep(self.pool)
        self.optimizer = PolicyOptimizer(self.pool, PPO.max_grad_norm)
        self.critic = TurnCritic(design=lambda x: x, situation=lambda x: np.zeros(len(x), dtype=int), window=3)
        self.league = League(4)
        self.rng = np.random.default_rng(seed)
        self.generators = {"shuffle": torch.Generator().manual_seed(seed), "noise": torch.Generator().manual_seed(9)}
        self.iteration = 0
        self.mixer = build_coordinator(CoordinatorConfig(), 3)

    def learn(self, iterations):
        for _ in range(iterations):
            batch = tiny.batch(seed=int(self.rng.integers(1000)))
            update(
                self.lockstep, self.mixer, self.optimizer, batch, PPO,
                learning_rate=1e-2, generator=self.generators["shuffle"],
            )  # fmt: skip
            self.iteration += 1
            states = [self.rng.normal(size=(2, 3)) for _ in range(4)]
            self.critic.judge(self.rng.normal(size=4), np.zeros(4), states, [state + 1 for state in states])
            self.league.add(self.iteration, self.lockstep.stacks())
        return self

    def replace_one(self):
        self.pool.add_perturbed("p00", generator=self.generators["noise"], iteration=2)
        self.pool.remove(self.pool.names[1])
        self.optimizer.sync()
        return self

    def save(self, folder, iteration=2, state=None):
        return save_checkpoint(
            folder, iteration, pool=self.pool, optimizer=self.optimizer, critic=self.critic, league=self.league,
            state=state or {}, rng=self.rng, generators=self.generators,
        )  # fmt: skip

    def load(self, folder):
        self.iteration, state = load_checkpoint(
            folder, pool=self.pool, optimizer=self.optimizer, critic=self.critic, league=self.league,
            lockstep=self.lockstep, rng=self.rng, generators=self.generators,
        )  # fmt: skip
        return self.iteration, state

    def everything(self):
        found = {(name, i): p for name in self.pool.names for i, p in enumerate(self.pool.parameters(name))}
        found |= {(k, e): v for k, d in self.optimizer.state_dict().items() for e, v in d.items()}
        found |= {
            (member, key, i): stacks.weights[key][i]
            for member, stacks in self.league.members.items()
            for key in stacks.weights
            for i in (0, 1)
        }
        found |= {("critic", key): torch.from_numpy(array) for key, array in self.critic.state().items()}
        found |= {name: generator.get_state() for name, generator in self.generators.items()}
        return {key: value.detach().clone() for key, value in found.items()}


def assert_same(one, other):
    first, second = one.everything(), other.everything()
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different
    assert one.rng.bit_generator.state == other.rng.bit_generator.state
    assert (one.pool.names, one.pool.born, one.pool.parents) == (other.pool.names, other.pool.born, other.pool.parents)
    assert list(one.league.members) == list(other.league.members)


@pytest.mark.parametrize("replaced", [False, True], ids=["same names", "after a replacement"])
def test_everything_comes_back_bit_by_bit_and_training_goes_on_as_if_never_interrupted(tmp_path, replaced):
    whole = Run().learn(2)
    if replaced:
        whole.replace_one()
    folder = whole.save(tmp_path, whole.iteration, state={"baselines": {"buyer": 0.25}})
    resumed = Run(seed=77)
    iteration, state = resumed.load(folder)
    assert (iteration, state) == (2, {"baselines": {"buyer": 0.25}})
    assert_same(whole, resumed)
    before = resumed.everything()
    whole.learn(2)
    resumed.learn(2)
    assert_same(whole, resumed)
    assert any(not torch.equal(value, resumed.everything()[key]) for key, value in before.items() if key[0] == "p00")
    assert_same(whole.replace_one(), resumed.replace_one())


def test_adam_state_comes_back_with_its_step(tmp_path):
    run = Run().learn(3)
    resumed = Run()
    resumed.load(run.save(tmp_path))
    state = resumed.optimizer.state_dict()
    assert len(state) == 3 * len(run.pool.parameters("p00"))
    assert all(float(entry["step"]) == 3 * PPO.minibatches for entry in state.values())
    assert all(entry["exp_avg"].any() for entry in state.values())


def test_only_the_newest_checkpoints_are_kept_and_no_scratch_is_left(tmp_path):
    run = Run()
    for iteration in (1, 2, 10):
        run.save(tmp_path, iteration)
    names = [folder.name for folder in checkpoints(tmp_path)]
    assert names == ["iteration00002", "iteration00010"]
    assert len(names) == KEPT
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == names


def test_scratch_of_a_killed_run_is_no_checkpoint_and_does_not_stop_the_next_one(tmp_path):
    scratch = tmp_path / "checkpoints" / ".iteration00003"
    scratch.mkdir(parents=True)
    (scratch / "half").write_text("killed here")
    assert checkpoints(tmp_path) == []
    folder = Run().save(tmp_path, 3)
    assert checkpoints(tmp_path) == [folder]
    assert not (folder / "half").exists()


def test_checkpoint_is_safetensors_and_json_only(tmp_path):
    folder = Run().learn(1).save(tmp_path)
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".md"}
    assert json.loads((folder / "state.json").read_text())["iteration"] == 2
    largest = max(path.stat().st_size for path in folder.rglob("*"))
    base = sum(p.numel() * 4 for p in tiny.model().parameters())
    assert largest < base, "the frozen base does not belong into a checkpoint"
