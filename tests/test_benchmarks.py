"""experiments/benchmarks: what is timed side by side does the same work, and the last line printed is JSON."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "experiments" / "benchmarks"
SIZES = {"base": "random:64x3", "policies": 3, "batch": 4, "branch_layers": "2", "context": 40, "rank": 4}
HOW = {"targets": "all-linear", "dtype": "float32", "device": "cpu", "repeats": 1, "threads": 1}
UPDATE = {"action_fraction": 0.33, "epochs": 2, "micro_rows": 2, "logit_tokens": 16, "alone": None}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("common", "lockstep", "scaling", "update"):
        sys.modules.pop(name, None)


def arguments(**changed):
    return [
        text for key, value in (SIZES | HOW | changed).items() for text in (f"--{key.replace('_', '-')}", str(value))
    ]


def test_all_updates_that_are_timed_move_the_adapters_alike(benchmark, monkeypatch):
    common, update = benchmark("common"), benchmark("update")
    monkeypatch.setattr(update, "LR", 1e-2)
    options = argparse.Namespace(**SIZES, **HOW, **UPDATE)
    moved = {}
    for name in update.VARIANTS:
        torch.manual_seed(0)
        pool = common.pool_of(options, options.policies)
        before = {p: [weight.detach().clone() for weight in pool.parameters(p)] for p in pool.names}
        if name == "lockstep":
            update.ours(pool, options)()
        else:
            update.Theirs(pool, options, mixed=name == "peft_mixed").run()
        moved[name] = torch.cat(
            [(b - a).flatten() for p in pool.names for a, b in zip(before[p], pool.parameters(p), strict=True)]
        ).detach()
    size = moved["lockstep"].norm()
    assert size > 0.5
    for name in ("sequential", "peft_mixed"):
        assert (moved[name] - moved["lockstep"]).norm() < 0.02 * size


def test_the_decode_benchmark_prints_its_measures_as_json(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lockstep.py", *arguments(batch=2, context=12)])
    module = benchmark("lockstep")
    monkeypatch.setattr(module, "NEW_TOKENS", 4)
    module.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    steps = ("base", "single", "sequential", "peft_mixed", "lockstep", "lockstep_k1")
    assert all(told[f"{name}_ms"] > 0 for name in steps)
    assert told["generate_tps"] > 0 and told["rollout_tps"] > 0
    assert (told["policies"], told["batch"], told["base"]) == (3, 2, "random:64x3")


def test_the_scaling_benchmark_times_every_size_and_draws(benchmark, monkeypatch, capsys, tmp_path):
    picture = tmp_path / "scaling.png"
    sizes = arguments(batch=2, context=12, policies=4)
    monkeypatch.setattr(sys, "argv", ["scaling.py", *sizes, "--plot", str(picture)])
    benchmark("scaling").main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    for size in (1, 2, 4):
        assert told[f"k{size}_ms"] > 0 and told[f"k{size}_shortcut_ms"] > 0
    assert told["branch_at_4_ms"] == pytest.approx((told["k4_ms"] - told["k2_ms"]) / 2)
    assert picture.read_bytes().startswith(b"\x89PNG")
