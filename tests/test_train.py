"""The whole job on a small nano base: phases, run folder, resume, refusal, and that PEFT reads what was saved."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from bupo.balancer import BalancerConfig
from bupo.config import ConfigError, load, parse
from bupo.learn.warmstart import WarmstartConfig, prepare_nano
from bupo.policies.bases import Base, load_pretrained
from bupo.policies.chat import ChatFormat
from bupo.policies.lockstep import Lockstep, freeze
from bupo.policies.nano import NanoConfig
from bupo.policies.pool import PolicyPool
from bupo.run import Config
from bupo.selfplay.matchmaking import InteractConfig
from bupo.tracking import RunFolderError, Tracker
from bupo.train import train

NANO = NanoConfig(hidden=64, layers=2, ffn=128, vocab=768)
SFT = WarmstartConfig(dialogues=150, batch=4)
INTERACT = InteractConfig(dialogues=8, group_size=2, self_play=0.5, past=0.25, league_every=1, max_message_tokens=40)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One cached nano base for the whole session, trained once."""
    folder = tmp_path_factory.mktemp("cache")
    old = os.environ.get("BUPO_CACHE_DIR")
    os.environ["BUPO_CACHE_DIR"] = str(folder)
    yield folder
    if old is None:
        os.environ.pop("BUPO_CACHE_DIR")
    else:
        os.environ["BUPO_CACHE_DIR"] = old


@pytest.fixture(scope="session")
def config(cache):
    """A small run: seconds on one core."""
    small = Config(base="nano", iterations=4, nano=NANO, sft=SFT, interact=INTERACT, threads=1)
    evaluation = replace(small.evaluation, size="quick", scenarios=2, batch=512)
    return replace(small, evaluation=evaluation)


@pytest.fixture(scope="session")
def whole(config, tmp_path_factory):
    """An uninterrupted run."""
    return train(replace(config, output_dir=str(tmp_path_factory.mktemp("runs") / "whole")))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_second_run_takes_the_base_from_the_cache(config, whole, tmp_path):
    folder = prepare_nano(config.sft, config.nano, config.scenarios, Tracker(tmp_path))
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_nano(config.sft, config.nano, config.scenarios, Tracker(tmp_path)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_another_base_setting_is_another_cache_entry(config, whole, cache):
    from bupo.learn.warmstart import _key

    assert _key(config.sft) != _key(replace(config.sft, lr=1e-3))


def test_the_run_folder_is_complete(whole):
    for name in ("config.yaml", "metrics.jsonl", "transcripts.jsonl", "summary.json", "deals.json"):
        assert (whole / name).is_file(), name
    assert len(lines(whole / "metrics.jsonl")) == 4
    assert sorted(p.name for p in (whole / "policies").iterdir() if p.is_dir()) == ["p00", "p01", "p02", "p03"]
    assert load(Config, whole / "config.yaml").iterations == 4


def test_the_summary_has_every_promised_key(whole):
    summary = json.loads((whole / "summary.json").read_text())
    keys = {
        "payoff",
        "payoff_agreed_only",
        "opponent_payoff",
        "surplus_share",
        "agreement_rate",
        "rounds",
        "valid_message_rate",
        "irrational_deals",
        "nash_ratio",
        "pareto_distance",
    }
    for stage in ("sft", "initial", "final"):
        entry = summary["stages"][stage]
        assert keys <= set(entry)
        assert all(set(entry[key]) == {"mean", "ci95"} for key in keys)
        assert set(entry["per_opponent"]) == {"boulware", "linear", "conceder", "tit_for_tat"}
        assert keys <= set(summary["self_play"][stage])
    assert set(summary["paired_difference"]) == {"payoff", "agreement_rate", "rounds", "irrational_deals"}
    for key in ("ceiling", "scripted_linear", "seconds", "effective_policies", "mean_pairwise_kl", "tokens_trained"):
        assert key in summary
    difference = summary["stages"]["final"]["payoff"]["mean"] - summary["stages"]["sft"]["payoff"]["mean"]
    assert summary["paired_difference"]["payoff"]["mean"] == pytest.approx(difference, abs=1e-9)


def test_the_documented_metrics_are_those_that_are_written(whole):
    document = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    for key in lines(whole / "metrics.jsonl")[-1]:
        name = key.split("/")[-1] if not key.split("/")[-1].startswith("p0") else key.split("/")[0]
        assert name in document, key


def test_saved_policies_load_with_peft_and_equal_the_lockstep_rows(config, whole):
    path = prepare_nano(config.sft, config.nano, config.scenarios, Tracker(whole))
    model, tokenizer = load_pretrained(str(path), torch.float32)
    freeze(model)
    pool = PolicyPool(Base(name="nano", model=model, tokenizer=tokenizer, chat=ChatFormat(tokenizer)), config.pool)
    pool.load(whole / "policies")
    lockstep = Lockstep(pool)
    ids = torch.randint(5, 700, (3, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(3, -1)
    with torch.no_grad():
        hidden = lockstep.branches(lockstep.trunk(ids, positions), positions, lockstep.stacks())
        ours = lockstep.logits(hidden)
    for row, name in enumerate(pool.names):
        base, _ = load_pretrained(str(path), torch.float32)
        alone = PeftModel.from_pretrained(base, str(whole / "policies" / name)).eval()
        with torch.no_grad():
            theirs = alone(ids).logits
        assert (ours[row] - theirs).abs().max() < 1e-4


def test_resume_equals_an_uninterrupted_run(config, whole, tmp_path):
    folder = tmp_path / "halves"
    half = replace(config, output_dir=str(folder))

    class Stop(Exception):
        pass

    import bupo.train as loop

    real = loop.learn

    def learn(run, batch, bar):
        if run.iteration == 2:
            raise Stop  # in the middle of the third iteration: its dialogues are played, nothing is learnt
        return real(run, batch, bar)

    loop.learn = learn
    try:
        with pytest.raises(Stop):
            train(half)
    finally:
        loop.learn = real
    train(replace(half, resume=True))
    once, twice = lines(whole / "metrics.jsonl"), lines(folder / "metrics.jsonl")
    assert [line["iteration"] for line in twice] == [1, 2, 3, 4]
    for a, b in zip(once, twice, strict=True):
        same = {key for key in a if not key.startswith("seconds/")}
        assert {key: a[key] for key in same} == {key: b[key] for key in same}
    for name in ("p00", "p01", "p02", "p03"):
        left = load_file(whole / "policies" / name / "adapter_model.safetensors")
        right = load_file(folder / "policies" / name / "adapter_model.safetensors")
        assert all(torch.equal(left[key], right[key]) for key in left)
    keep = ("stages", "self_play", "paired_difference", "tokens_trained", "effective_policies")
    first, second = (json.loads((path / "summary.json").read_text()) for path in (whole, folder))
    assert {key: first[key] for key in keep} == {key: second[key] for key in keep}


def test_a_used_folder_is_refused_without_resume(config, whole):
    before = (whole / "summary.json").read_bytes()
    with pytest.raises(RunFolderError, match="--resume"):
        train(replace(config, output_dir=str(whole)))
    assert (whole / "summary.json").read_bytes() == before


def test_ctrl_c_leaves_a_usable_folder(config, whole, cache, tmp_path):
    folder = tmp_path / "stopped"
    arguments = ["--base", "nano", "--iterations", "500", "--output_dir", str(folder), "--threads", "1"]
    arguments += ["--nano.hidden", "64", "--nano.layers", "2", "--nano.ffn", "128", "--nano.vocab", "768"]
    arguments += ["--sft.dialogues", "150", "--interact.dialogues", "8", "--interact.group_size", "2"]
    arguments += ["--interact.max_message_tokens", "40", "--evaluation.scenarios", "2"]
    recipe = Path(__file__).parents[1] / "recipes" / "negotiation.py"
    process = subprocess.Popen(
        [sys.executable, str(recipe), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where the tests run in the background SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    metrics = folder / "metrics.jsonl"
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "--resume" in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"] is False and set(summary["stages"]) == {"sft", "initial"}
    assert (folder / "plots" / "learning_curve.png").stat().st_size > 0
    assert (folder / "policies" / "p00" / "adapter_model.safetensors").is_file()


def test_the_balancer_can_replace_a_policy_in_the_loop(config, tmp_path):
    eager = BalancerConfig(patience=1, min_age=0, margin=0.0, homogenised=1e9)
    folder = train(replace(config, output_dir=str(tmp_path / "balanced"), iterations=2, balancer=eager))
    changes = lines(folder / "balance.jsonl")
    assert changes and changes[0]["cull"] != changes[0]["parent"]
    names = json.loads((folder / "policies" / "manifest.json").read_text())["names"]
    assert len(names) == 4 and changes[-1]["injected"] in names and changes[0]["cull"] not in names


def test_all_mistakes_of_a_configuration_come_together():
    arguments = ["--pool.size", "0", "--pool.sise", "3", "--coordinator.name", "liner", "--ppo.lr=-1"]
    with pytest.raises(ConfigError) as error:
        parse(Config, [*arguments, "--iterations", "many"])
    text = str(error.value)
    for piece in ("pool.size", "pool.sise", "did you mean", "linear", "ppo.lr", "iterations"):
        assert piece in text
    with pytest.raises(ConfigError, match=r"pool\.branch_layers"):
        parse(Config, ["--base", "nano", "--pool.branch_layers", "9"])


def test_a_public_base_gets_an_sft_adapter_that_becomes_the_reference(config, cache, tmp_path):
    """A local folder takes the path of any hub id: LoRA SFT, reference row, perturbed copies, one iteration."""
    nano = prepare_nano(config.sft, config.nano, config.scenarios, Tracker(tmp_path))
    sft = replace(config.sft, public_dialogues=6)
    evaluation = replace(config.evaluation, scenarios=1)
    folder = train(
        replace(
            config, base=str(nano), iterations=1, sft=sft, evaluation=evaluation, output_dir=str(tmp_path / "public")
        )
    )
    (adapter,) = cache.glob("sft-*")
    reference = load_file(adapter / "adapter_model.safetensors")
    assert any(tensor.any() for key, tensor in reference.items() if "lora_B" in key)
    trained = load_file(folder / "policies" / "p00" / "adapter_model.safetensors")
    assert reference.keys() == trained.keys()
    model, _ = load_pretrained(str(nano), torch.float32)
    assert PeftModel.from_pretrained(model, str(adapter)).peft_config["default"].r == config.pool.rank
    assert json.loads((folder / "summary.json").read_text())["complete"] is True
    again = train(
        replace(
            config, base=str(nano), iterations=0, sft=sft, evaluation=evaluation, output_dir=str(tmp_path / "again")
        )
    )
    assert len(list(cache.glob("sft-*"))) == 1 and (again / "summary.json").is_file()
