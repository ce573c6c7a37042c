"""bupo.tracking: strict JSON on disk, resume after a kill, and a console that shows text literally."""

import io
import json
import math
import os

import numpy as np
import pytest
import torch
from rich.console import Console

from bupo import progress
from bupo.tracking import RunFolderError, Tracker, prepare_run_folder


def tracker(path, *, terminal=False, **kwargs):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    return Tracker(path, console=console, **kwargs)


def output(made):
    return made.console.file.getvalue()


def lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def files_under(path):
    return sorted(p.name for p in path.rglob("*") if p.is_file())


def test_log_appends_one_line_an_iteration_and_forwards_finite_numbers(tmp_path):
    forwarded = []
    made = tracker(tmp_path, forward=lambda metrics, step: forwarded.append((step, metrics)))
    made.log(1, {"interact/reward": 0.5, "balance/culled": None, "note": "x", "count": 3})
    made.log(2, {"interact/reward": np.float32(0.25), "loss": torch.tensor(2.0), "kl": math.inf})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "interact/reward": 0.5, "balance/culled": None, "note": "x", "count": 3},
        {"iteration": 2, "interact/reward": 0.25, "loss": 2.0, "kl": None},
    ]
    assert forwarded == [(1, {"interact/reward": 0.5, "count": 3}), (2, {"interact/reward": 0.25, "loss": 2.0})]


def test_non_finite_numbers_become_null_with_one_warning_a_key(tmp_path):
    made = tracker(tmp_path)
    for step in range(3):
        made.log(step, {"ppo/kl": math.nan})
    made.append("balance", {"scores": {"p00": [1.0, np.float64("inf")]}})
    assert lines(tmp_path / "balance.jsonl") == [{"scores": {"p00": [1.0, None]}}]
    assert output(made).count("ppo/kl is not a finite number") == 1
    assert output(made).count("scores.p00 is not a finite number") == 1


def test_iteration_may_not_be_overridden(tmp_path):
    with pytest.raises(ValueError, match="iteration"):
        tracker(tmp_path).log(1, {"iteration": 7})


def test_log_is_on_disk_when_the_call_returns(tmp_path):
    made = tracker(tmp_path)
    made.log(0, {"a": 1})
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_write_json_replaces_atomically(tmp_path, monkeypatch):
    made = tracker(tmp_path)
    made.write_json("summary", {"payoff": 1, "where": tmp_path})
    made.write_json("summary.json", {"payoff": np.arange(2)})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"payoff": [0, 1]}

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        made.write_json("summary", {"payoff": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"payoff": [0, 1]}


def test_unwritable_objects_leave_no_file(tmp_path):
    with pytest.raises(TypeError):
        tracker(tmp_path).write_json("summary", {"x": object()})
    assert files_under(tmp_path) == []


def test_cut_back_drops_later_and_torn_lines_only(tmp_path):
    made = tracker(tmp_path)
    for step in range(5):
        made.log(step, {"x": step})
        made.append("transcripts", {"iteration": step, "text": "line\u2028separator"})
    made.append("notes", {"no": "iteration"})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"iteration": 2, "x": \xc3')
    assert made.cut_back(2) == 2 + 2 + 1
    assert [r["iteration"] for r in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [r["text"] for r in lines(tmp_path / "transcripts.jsonl")] == ["line\u2028separator"] * 3
    assert lines(tmp_path / "notes.jsonl") == [{"no": "iteration"}]
    made.log(3, {"x": 30})
    assert [r["x"] for r in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 30]
    assert files_under(tmp_path) == ["metrics.jsonl", "notes.jsonl", "transcripts.jsonl"]


def test_cut_back_completes_a_whole_line_that_lost_its_newline(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n{"iteration": 1}')
    made = tracker(tmp_path)
    assert made.cut_back(5) == 0
    made.log(2, {})
    assert [r["iteration"] for r in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_other_processes_write_and_print_nothing(tmp_path):
    made = tracker(tmp_path / "run", is_main=False, forward=lambda *_: pytest.fail("forwarded"))
    made.log(0, {"x": math.nan})
    made.append("transcripts", {})
    made.write_json("summary", {})
    made.cut_back(0)
    made.say("x")
    made.warn("x")
    made.table("t", ["a"], [[1]])
    with made.progress("interact", 3, "dialogues") as bar:
        bar.update(note="x")
    assert output(made) == ""
    assert not (tmp_path / "run").exists()


def test_model_text_is_shown_literally(tmp_path):
    made = tracker(tmp_path)
    text = "[bold]I accept[/bold] [/] :smile: [Offer: a=3]"
    made.say(text)
    made.warn(text)
    made.table(text, ["a", text], [[text, 1.0], [None, 2]])
    with made.progress(text, 1) as bar:
        bar.update(note=text + "\n\x1b[2Jgone")
    assert output(made).count(text) >= 5
    assert "\x1b" not in output(made)


def test_warnings_print_once_each(tmp_path):
    made = tracker(tmp_path)
    for text in ("a", "b", "a"):
        made.warn(text)
    assert output(made) == "warning: a\nwarning: b\n"


def test_table_rounds_floats_and_checks_rows(tmp_path):
    made = tracker(tmp_path)
    made.table("Stages", ["stage", "payoff"], [["sft", 0.51249], ["final", None]])
    assert "0.512" in output(made) and "-" in output(made)
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        made.table("Stages", ["stage", "payoff"], [["sft"]])


def test_a_log_file_gets_a_line_every_fifteen_seconds_and_one_at_the_end(tmp_path):
    made = tracker(tmp_path)
    now = [0.0]
    bar = progress._Lines(made.console, "interact", 40, "dialogues", clock=lambda: now[0])
    for _ in range(40):
        now[0] += 2.0
        bar.update(note=f"reward {now[0] / 100:.2f}")
    bar.close()
    printed = output(made).splitlines()
    assert printed[0] == "interact: 8/40 dialogues, 0:16, about 1:04 left  reward 0.16"
    assert printed[-1] == "interact: 40/40 dialogues, 1:20  reward 0.80"
    assert len(printed) == 80 // 16 + 1


def test_a_quick_phase_prints_only_its_last_line_even_when_it_fails(tmp_path):
    made = tracker(tmp_path)
    with pytest.raises(RuntimeError), made.progress("update", None, "batches") as bar:
        bar.update(3)
        raise RuntimeError
    assert output(made) == "update: 3 batches, 0:00\n"


def test_a_terminal_gets_a_bar_and_messages_above_it(tmp_path):
    made = tracker(tmp_path, terminal=True)
    with made.progress("interact", 4, "dialogues") as bar:
        for _ in range(4):
            bar.update(note="[reward] 0.42")
        bar.update(0)
        made.say("above")
    assert "4/4" in output(made) and "dialogues" in output(made) and "[reward] 0.42" in output(made)
    assert "above" in output(made)


def test_new_run_folder_is_created_or_refused(tmp_path):
    assert prepare_run_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / ".keep").touch()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(FileExistsError, match=r"it holds a, metrics.jsonl\).*--resume.*--output_dir"):
        prepare_run_folder(tmp_path)
    with pytest.raises(RunFolderError, match="is a file"):
        prepare_run_folder(tmp_path / "metrics.jsonl")


def test_hidden_files_do_not_make_a_folder_used(tmp_path):
    (tmp_path / ".keep").touch()
    assert prepare_run_folder(tmp_path) == tmp_path


def test_resume_needs_a_checkpoint(tmp_path):
    with pytest.raises(RunFolderError, match=r"empty or missing.*leaving --resume out"):
        prepare_run_folder(tmp_path / "missing", resume=True)
    assert not (tmp_path / "missing").exists()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunFolderError, match=r"it holds checkpoints.*another --output_dir"):
        prepare_run_folder(tmp_path, resume=True)
    (tmp_path / "checkpoints" / "iteration-0003").mkdir()
    assert prepare_run_folder(tmp_path, resume=True) == tmp_path
