"""The command line: what a user sees before and instead of a run."""

import pytest
import torch

from bupo.cli import main, run_negotiation
from bupo.devices import compute_dtype, use_threads


def test_help_explains_every_section(capsys):
    with pytest.raises(SystemExit) as stop:
        run_negotiation(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--base", "--pool.branch_layers", "--coordinator.name", "--ppo.lr", "--evaluation.size", "--resume"):
        assert option in text


def test_print_config_round_trips(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        run_negotiation(["--pool.size", "2", "--print_config"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "size: 2" in text
    (tmp_path / "again.yaml").write_text(text)
    with pytest.raises(SystemExit):
        run_negotiation(["--config", str(tmp_path / "again.yaml"), "--print_config"])
    assert capsys.readouterr().out == text


def test_a_wrong_configuration_exits_with_2_and_lists_all_mistakes(capsys):
    with pytest.raises(SystemExit) as stop:
        run_negotiation(["--pool.size", "0", "--iterationz", "3"])
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert "pool.size" in text and "iterationz" in text and "2 problems" in text


def test_a_used_folder_is_an_error_not_a_traceback(capsys, tmp_path):
    (tmp_path / "something").write_text("x")
    assert run_negotiation(["--base", "nano", "--output_dir", str(tmp_path)]) == 1
    assert "--resume" in capsys.readouterr().err


def test_a_missing_base_is_an_error_that_says_how_to_get_one(capsys, tmp_path):
    assert run_negotiation(["--base", "no/such-model", "--output_dir", str(tmp_path / "run")]) == 1
    text = capsys.readouterr().err
    assert "no/such-model" in text and "local folder" in text


def test_the_command_names_its_commands(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "bupo COMMAND" in capsys.readouterr().out


def test_plots_of_no_run_folder_are_refused(capsys, tmp_path):
    assert main(["plots", str(tmp_path)]) == 1
    assert "metrics.jsonl" in capsys.readouterr().err


def test_compute_types():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert compute_dtype("auto", gpu, small=True) == torch.bfloat16
    assert compute_dtype("auto", cpu, small=True) == torch.float32
    assert compute_dtype("bf16", cpu, small=True) == torch.bfloat16
    assert compute_dtype("fp32", gpu, small=False) == torch.float32


def test_threads_are_set_whatever_the_launcher_left():
    torch.set_num_threads(1)
    assert use_threads(2, 1) == 2 and torch.get_num_threads() == 2
    assert use_threads(0, 10_000) == 1
