"""Config trees: precedence, types, help, round trips, and every mistake reported at once."""

from __future__ import annotations

import pickle
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bupo import config as cfg
from bupo.config import ConfigError, dump, load, parse, parse_or_exit, raise_problems, to_dict


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Low-rank adapters.

    Attributes:
        rank: width of the
            low-rank update (about 50% of it is enough).
    """

    rank: int = 8

    def __post_init__(self) -> None:
        raise_problems([cfg.at_least("rank", self.rank, 1)])


@dataclass(frozen=True, kw_only=True)
class PoolSection:
    """The pool of sub-policies.

    Attributes:
        size: number of sub-policies, K.
        branch_layers: layers that carry adapters: "all", a count or a fraction.
        lora: the shape of the adapters.
    """

    size: int = 4
    branch_layers: int | float | str = "all"
    lora: LoraSection = field(default_factory=LoraSection)

    def __post_init__(self) -> None:
        raise_problems([cfg.at_least("size", self.size, 1)])


@dataclass(frozen=True, kw_only=True)
class PpoSection:
    """The update.

    Attributes:
        lr: learning rate.
        clip: clip of the ratio.
        betas: Adam's two decay rates.
        schedule: how the rate falls.
        spread: per-layer scales.
    """

    lr: float = 3e-4
    clip: float = 0.2
    betas: tuple[float, ...] = (0.9, 0.95)
    schedule: Literal["constant", "linear"] = "constant"
    spread: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        raise_problems([cfg.positive("lr", self.lr), cfg.in_range("clip", self.clip, 0, 1)])


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """Train a pool.

    Attributes:
        out: folder of the run.
        seed: seed of everything random.
        resume: continue the run in `out`.
        note: free text.
        weights: reward weights by term.
        table: reward weights by sub-policy and term.
        pool: the sub-policies.
        ppo: the update.
    """

    out: Path = Path("runs/x")
    seed: int = 0
    resume: bool = False
    note: str | None = None
    weights: dict[str, float] = field(default_factory=lambda: {"deal": 1.0})
    table: dict[str, dict[str, float]] = field(default_factory=dict)
    pool: PoolSection = field(default_factory=lambda: PoolSection(size=2))
    ppo: PpoSection = field(default_factory=PpoSection)

    def __post_init__(self) -> None:
        raise_problems([cfg.at_least("seed", self.seed, -1)])
        if self.seed == 13 and self.pool.size == 13:
            raise ConfigError("pool.size and seed must not both be 13")


@dataclass(frozen=True, kw_only=True)
class NeedsName:
    """One required field."""

    name: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """Two fields that are compared with one another."""

    low: float = 1.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if self.high <= self.low:
            raise ConfigError("high must be above low")


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Raises an ordinary ValueError."""

    mode: str = "even"

    def __post_init__(self) -> None:
        if self.mode == "odd":
            raise ValueError("odd modes are not supported")


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Holds a section."""

    inner: Plain = field(default_factory=Plain)


@dataclass(frozen=True, kw_only=True)
class Clashing:
    """A field that takes the parser's own name."""

    config: str = ""


def write(folder: Path, text: str, name: str = "a.yaml") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def problems(*argv: str, cls: type = RootConfig) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(cls, argv)
    return caught.value.problems


# --- what is accepted ---------------------------------------------------------------------------------------------


def test_no_arguments_give_the_defaults_including_those_set_by_the_owner_of_a_section():
    assert parse(RootConfig, []) == RootConfig()
    assert parse(RootConfig, ["--pool.lora.rank", "2"]).pool == PoolSection(size=2, lora=LoraSection(rank=2))


def test_command_line_beats_later_file_beats_earlier_file_beats_default(tmp_path):
    first = write(tmp_path, "seed: 1\nnote: one\npool: {size: 5, lora: {rank: 3}}\n", "1.yaml")
    second = write(tmp_path, "seed: 2\npool:\n  size: 6\n", "2.yaml")
    got = parse(RootConfig, ["--seed=3", "--config", first, f"--config={second}"])
    assert (got.seed, got.note, got.pool.size, got.pool.lora.rank, got.ppo.lr) == (3, "one", 6, 3, 3e-4)


def test_last_of_repeated_options_wins():
    assert parse(RootConfig, ["--seed", "1", "--seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], False),
        (["--resume"], True),
        (["--resume", "--seed", "1"], True),
        (["--resume", "true"], True),
        (["--resume", "false"], False),
        (["--resume=false"], False),
        (["--resume=True"], True),
    ],
)
def test_a_bool_option_alone_means_true(argv, expected):
    assert parse(RootConfig, argv).resume is expected


@pytest.mark.parametrize(("text", "expected"), [("all", "all"), ("10", 10), ("0.5", 0.5)])
def test_a_union_of_numbers_and_text_reads_the_same_from_yaml_and_command_line(tmp_path, text, expected):
    from_file = load(RootConfig, write(tmp_path, f"pool: {{branch_layers: {text}}}"))
    from_argv = parse(RootConfig, ["--pool.branch_layers", text])
    assert from_file == from_argv
    assert from_file.pool.branch_layers == expected
    assert type(from_file.pool.branch_layers) is type(expected)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "0.00001", "'1e-5'"])
def test_yaml_floats_may_be_written_with_an_exponent(tmp_path, text):
    got = load(RootConfig, write(tmp_path, f"ppo:\n  lr: {text}\n  betas: [{text}, 1]\nweights: {{deal: {text}}}\n"))
    assert got.ppo.lr == got.ppo.betas[0] == got.weights["deal"] == 1e-5


def test_an_int_is_taken_for_a_float_and_becomes_one(tmp_path):
    got = load(RootConfig, write(tmp_path, "ppo: {lr: 1}"))
    assert isinstance(got.ppo.lr, float)


def test_sequences_dicts_literals_paths_and_negative_numbers_from_the_command_line():
    argv = ["--ppo.betas", "[0.8, 9e-1]", "--ppo.spread=[1,2]", "--weights", "{deal: 2, walk: -1}"]
    got = parse(RootConfig, [*argv, "--ppo.schedule", "linear", "--out", "runs/y", "--seed", "-1"])
    assert (got.ppo.betas, got.ppo.spread, got.weights) == ((0.8, 0.9), [1.0, 2.0], {"deal": 2.0, "walk": -1.0})
    assert (got.ppo.schedule, got.out, got.seed) == ("linear", Path("runs/y"), -1)


@pytest.mark.parametrize(("text", "expected"), [("null", None), ("10", "10"), ("1e-5", "1e-5"), ("", "")])
def test_optional_text_from_the_command_line(text, expected):
    assert parse(RootConfig, [f"--note={text}"]).note == expected


@pytest.mark.parametrize(("text", "expected"), [("null", None), ("'null'", "null"), ("'10'", "10"), ("a b", "a b")])
def test_optional_text_from_yaml_keeps_what_was_quoted(tmp_path, text, expected):
    assert load(RootConfig, write(tmp_path, f"note: {text}")).note == expected


def test_one_entry_of_a_dict_can_be_set_over_the_default_and_over_a_file(tmp_path):
    assert parse(RootConfig, ["--weights.walk", "0.5"]).weights == {"deal": 1.0, "walk": 0.5}
    file = write(tmp_path, "weights: {a: 1, b: 2}\ntable: {hard: {deal: 1}}\n")
    argv = ["--config", file, "--weights.b=3", "--table.hard.walk", "4", "--table.soft.deal", "5"]
    got = parse(RootConfig, argv)
    assert got.weights == {"a": 1.0, "b": 3.0}
    assert got.table == {"hard": {"deal": 1.0, "walk": 4.0}, "soft": {"deal": 5.0}}
    assert parse(RootConfig, ["--weights", "{c: 1}", "--weights.d", "2"]).weights == {"c": 1.0, "d": 2.0}


def test_empty_files_empty_sections_dotted_keys_and_merge_keys_are_fine(tmp_path):
    assert load(RootConfig, write(tmp_path, "# nothing\n")) == RootConfig()
    assert load(RootConfig, write(tmp_path, "pool:\n  # size: 3\n")) == RootConfig()
    assert load(RootConfig, write(tmp_path, "pool.lora.rank: 3\n")).pool.lora.rank == 3
    merged = load(RootConfig, write(tmp_path, "weights: &w {a: 1}\ntable:\n  p:\n    <<: *w\n    b: 2\n"))
    assert merged.table == {"p": {"a": 1.0, "b": 2.0}}


def test_arguments_default_to_those_of_the_process(monkeypatch):
    monkeypatch.setattr("sys.argv", ["prog", "--seed", "5"])
    assert parse(RootConfig).seed == 5


# --- dump and load ------------------------------------------------------------------------------------------------

_TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
_AWKWARD = st.sampled_from(["1e-5", "null", "true", "10", "0.5", "yes", "~", "", " a ", "2024-01-01", "a: b", "é☃"])
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(
    note=st.none() | _TEXT | _AWKWARD,
    branch_layers=st.integers() | _FLOATS | _AWKWARD,
    lr=st.floats(min_value=1e-300, max_value=1e300),
    betas=st.lists(_FLOATS, max_size=3).map(tuple),
    weights=st.dictionaries(_TEXT | _AWKWARD, _FLOATS, max_size=3),
    resume=st.booleans(),
)
def test_dump_then_load_gives_an_equal_config(tmp_path_factory, note, branch_layers, lr, betas, weights, resume):
    config = RootConfig(
        note=note,
        resume=resume,
        weights=weights,
        pool=PoolSection(branch_layers=branch_layers),
        ppo=PpoSection(lr=lr, betas=betas),
    )
    file = write(tmp_path_factory.mktemp("round"), "")
    Path(file).write_text(dump(config), encoding="utf-8")
    again = load(RootConfig, file)
    assert again == config
    assert type(again.pool.branch_layers) is type(branch_layers)


def test_to_dict_is_plain_data():
    plain = to_dict(RootConfig(ppo=PpoSection(betas=(0.1,))))
    assert plain["out"] == "runs/x"
    assert plain["ppo"]["betas"] == [0.1]
    assert plain["pool"] == {"size": 2, "branch_layers": "all", "lora": {"rank": 8}}


def test_print_config_prints_the_merged_config_and_exits_0(tmp_path, capsys):
    file = write(tmp_path, "pool: {size: 7}")
    with pytest.raises(SystemExit) as caught:
        parse(RootConfig, ["--print_config", "--config", file, "--seed", "4"])
    assert caught.value.code == 0
    printed = write(tmp_path, capsys.readouterr().out, "printed.yaml")
    assert load(RootConfig, printed) == RootConfig(seed=4, pool=PoolSection(size=7))


def test_print_config_of_a_wrong_config_reports_the_problems():
    assert problems("--print_config", "--pool.size", "0")


def test_help_explains_every_option_with_its_default_and_exits_0(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(RootConfig, ["--pool.sise", "4", "--help"], prog="bupo train")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "bupo train" in text
    assert "Train a pool." in text
    assert "The pool of sub-policies." in text
    assert "number of sub-policies, K. (type: int, default: 2)" in text
    assert "low-rank update (about 50% of it is enough). (type: int, default: 8)" in text
    assert "continue the run in `out`." in text
    assert "--ppo.spread+" not in text
    for option in ("config", "print_config", "out", "pool.lora.rank", "ppo.betas", "weights", "ppo.spread"):
        assert f"--{option}" in text


def test_help_marks_required_options(capsys):
    with pytest.raises(SystemExit):
        parse(NeedsName, ["-h"], description="Something else.")
    text = " ".join(capsys.readouterr().out.split())
    assert "(required, type: str)" in text
    assert "Something else." in text


# --- what is refused ----------------------------------------------------------------------------------------------


def test_all_mistakes_of_files_and_command_line_arrive_together(tmp_path):
    file = write(
        tmp_path,
        """\
        sead: 3
        pool:
          sise: 4
          size: 0
          lora:
            rank: many
        ppo:
          lr: -1
          clip: .nan
          schedule: linaer
        """,
    )
    argv = ["--config", file, "--config", "missing.yaml", "--ppo.beta", "1", "leftover", "--resume", "maybe"]
    found = problems(*argv, "--weights.deal", "x", "--out")
    expected = [
        "sead is not an option",
        "pool.sise is not an option",
        "config: cannot read missing.yaml",
        "ppo.beta is not an option",
        "'leftover' belongs to no option",
        "'maybe' belongs to no option",
        "--out needs a value",
        "pool.lora.rank must be int, got 'many'",
        "pool.size must be a finite number of at least 1, got 0",
        "ppo.schedule must be one of 'constant', 'linear', got 'linaer'; did you mean 'linear'?",
        "ppo.lr must be a finite number above 0, got -1.0",
        "ppo.clip must be a finite number in [0, 1], got nan",
        "weights must be dict[str, float]",
    ]
    missing = [start for start in expected if not any(problem.startswith(start) for problem in found)]
    assert not missing
    assert len(found) == len(expected)


def test_problems_name_file_and_line(tmp_path):
    file = write(tmp_path, "seed: 1\npool:\n  sise: 4\n  size: 0\n")
    unknown, value = problems("--config", file)
    assert unknown.startswith(f"pool.sise is not an option ({file}, line 3); did you mean pool.size?")
    assert unknown.endswith("Allowed in pool: lora, size, branch_layers")
    assert value == f"pool.size must be a finite number of at least 1, got 0 ({file}, line 4)"


def test_a_value_that_a_later_source_overrides_is_not_judged(tmp_path):
    file = write(tmp_path, "pool: {size: 0}")
    assert parse(RootConfig, ["--config", file, "--pool.size", "3"]).pool.size == 3


@pytest.mark.parametrize(
    ("option", "nearest"),
    [("--pool.siez", "pool.size"), ("--size", "pool.size"), ("--pool.lr", "ppo.lr"), ("--pol", "pool")],
)
def test_unknown_options_are_answered_with_the_nearest_name(option, nearest):
    (problem,) = problems(option, "4")
    assert f"did you mean {nearest}?" in problem


def test_unknown_option_without_a_near_name_lists_what_is_allowed():
    (problem,) = problems("--zzzzzz")
    assert problem == (
        "zzzzzz is not an option (command line). Allowed at the top level: "
        "pool, ppo, out, seed, resume, note, weights, table"
    )


def test_single_dash_options_are_refused_once_with_their_value():
    (problem,) = problems("-seed", "4")
    assert "options begin with two dashes: --seed" in problem


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (["--seed"], "--seed needs a value"),
        (["--config"], "--config needs a value"),
        (["--seed", "--resume"], "--seed needs a value"),
        (["foo"], "'foo' belongs to no option"),
        (["--"], "'--' belongs to no option"),
        (["--pool", "4"], "pool is a section (command line); set its options: pool.size"),
        (["--pool"], "pool is a section"),
        (["--print_config=1"], "print_config is not an option"),
        (["--seed", "1.5"], "seed must be int, got '1.5'"),
        (["--seed", "null"], "seed must be int, got 'null'"),
        (["--resume=maybe"], "resume must be bool, got 'maybe'; write true or false"),
        (["--ppo.betas", "0.1"], "ppo.betas must be tuple[float, ...], got '0.1'; write a list, such as [a, b]"),
        (["--ppo.betas", "[0.1"], "ppo.betas must be tuple[float, ...]"),
        (["--ppo.lr", "nan"], "ppo.lr must be"),
        (["--ppo.schedule", "x"], "ppo.schedule must be one of 'constant', 'linear', got 'x'"),
        (["--weights", "3"], "weights must be dict[str, float], got '3'; write a mapping, such as {key: value}"),
        (["--weights", "{a", "--weights.b", "1"], "weights must be dict[str, float], got '{a'"),
        (["--weights", "{1: 2}"], "weights must be dict[str, float]"),
    ],
)
def test_command_line_mistakes(argv, start):
    (problem,) = problems(*argv)
    assert problem.startswith(start)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("seed: true", "seed must be int, got True (bool)"),
        ("seed: 1.0", "seed must be int, got 1.0 (float)"),
        ("seed: null", "seed must be int, got nothing (null)"),
        ("resume: 1", "resume must be bool, got 1 (int)"),
        ("note: 10", "note must be str or null, got 10 (int); quote it"),
        ("ppo: {betas: [a]}", "ppo.betas must be tuple[float, ...], got ['a'] (list)"),
        ("pool: {branch_layers: true}", "pool.branch_layers must be int or float or str, got True (bool)"),
        ("pool: 4", "pool is a section and must be a mapping"),
        ("- a", "config: the file must be a mapping with keys from pool, ppo, out"),
        ("weights: {1: 2}", "weights must be dict[str, float], got {1: 2}; quote the keys"),
        ("? [a, b]\n: 1", "['a', 'b'] is not an option"),
    ],
)
def test_yaml_mistakes_say_what_came_and_where(tmp_path, text, start):
    file = write(tmp_path, text)
    (problem,) = problems("--config", file)
    assert problem.startswith(start)
    assert f"{file}, line 1" in problem


@pytest.mark.parametrize(
    ("text", "line"), [("seed: 1\npool: [1, 2\nppo: 3", 3), ("seed: 1\nnote: !!python/name:os.system x", 2)]
)
def test_malformed_yaml_is_reported_with_file_and_line_beside_other_problems(tmp_path, text, line):
    file = write(tmp_path, text)
    found = problems("--config", file, "--sed", "1")
    assert found[0].startswith(f"config: {file}, line {line} is not valid YAML")
    assert found[1].startswith("sed is not an option")


def test_unreadable_files_are_reported(tmp_path):
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    found = problems("--config", str(binary), "--config", str(tmp_path), "--config", str(tmp_path / "no.yaml"))
    assert len(found) == 3
    assert "is not UTF-8" in found[0]
    assert "cannot read" in found[1]
    assert "No such file" in found[2]


def test_impossible_dates_are_a_problem_and_not_a_crash(tmp_path):
    (problem,) = problems("--config", write(tmp_path, "note: 2024-13-45"))
    assert "is not valid YAML" in problem


def test_keys_given_twice_are_a_problem(tmp_path):
    file = write(tmp_path, "pool:\n  size: 1\n  size: 2\n")
    assert problems("--config", file) == (f"pool.size is given twice ({file}, line 3); keep one",)


def test_a_failing_section_hides_no_other_section():
    found = problems("--pool.size", "0", "--ppo.clip", "2")
    assert [problem.split()[0] for problem in found] == ["pool.size", "ppo.clip"]


def test_a_wrong_type_hides_no_impossible_value_of_the_same_section():
    found = problems("--ppo.lr", "fast", "--ppo.clip", "2")
    assert [problem.split()[0] for problem in found] == ["ppo.lr", "ppo.clip"]


def test_a_failing_section_hides_no_impossible_value_of_the_section_around_it():
    found = problems("--pool.lora.rank", "0", "--pool.size", "0", "--seed", "-5")
    assert [problem.split()[0] for problem in found] == ["pool.lora.rank", "pool.size", "seed"]


def test_a_wrong_value_starts_no_false_alarm_about_the_values_compared_with_it():
    # `low` stands at its default 1 while it is wrong, and high = 0.5 must not be held against that default.
    (problem,) = problems("--low", "x", "--high", "0.5", cls=Ordered)
    assert problem.startswith("low must be float")
    assert problems("--low", "3", cls=Ordered) == ("high must be above low",)


def test_a_plain_value_error_of_a_section_is_a_problem_too():
    assert problems("--inner.mode", "odd", cls=Wrapping) == ("inner: odd modes are not supported",)


def test_root_checks_run_when_the_sections_are_fine_and_keep_their_names():
    assert problems("--seed", "13", "--pool.size", "13") == ("pool.size and seed must not both be 13 (command line)",)


def test_root_checks_do_not_run_on_broken_sections():
    assert len(problems("--seed", "13", "--pool.size", "13", "--ppo.clip", "2")) == 1


def test_required_fields_are_reported_when_missing_beside_other_problems():
    found = problems("--count", "x", cls=NeedsName)
    assert found[0] == "name is required: --name VALUE, or a line of a config file"
    assert found[1].startswith("count must be int")
    assert parse(NeedsName, ["--name", "a"]) == NeedsName(name="a")


def test_a_root_field_may_not_take_a_name_of_the_parser():
    with pytest.raises(TypeError, match=r"Clashing\.config"):
        parse(Clashing, [])


def test_parse_or_exit_prints_all_problems_to_stderr_and_exits_2(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(RootConfig, ["--pool.size", "0", "--ppo.clip", "2"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("2 problems in the configuration:\n  - pool.size must be")
    assert "  - ppo.clip must be" in captured.err
    assert parse_or_exit(RootConfig, ["--seed", "1"]).seed == 1


# --- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, "1", None, [1]])
@pytest.mark.parametrize(
    "rule",
    [
        lambda value: cfg.positive("x", value),
        lambda value: cfg.at_least("x", value, 0),
        lambda value: cfg.in_range("x", value, -10, 10),
    ],
)
def test_number_rules_refuse_what_is_no_finite_number(rule: Any, value):
    assert rule(value) is not None


def test_number_rules_at_their_ends():
    assert cfg.positive("x", 1e-9) is None
    assert cfg.positive("x", 0) == "x must be a finite number above 0, got 0"
    assert cfg.at_least("x", 1, 1) is None
    assert cfg.at_least("x", 0, 1) == "x must be a finite number of at least 1, got 0"
    assert cfg.in_range("x", 0, 0, 1) is None
    assert cfg.in_range("x", 1, 0, 1) is None
    assert cfg.in_range("x", 0, 0, 1, include_low=False) == "x must be a finite number in (0, 1], got 0"
    assert cfg.in_range("x", 1, 0, 1, include_high=False) == "x must be a finite number in [0, 1), got 1"


def test_one_of_names_the_allowed_values_and_the_nearest():
    table = {"linear": 1, "log": 2}
    assert cfg.one_of("name", "linear", table) is None
    assert cfg.one_of("name", "liner", table) == (
        "name must be one of 'linear', 'log', got 'liner'; did you mean 'linear'?"
    )
    assert cfg.one_of("name", 7, table) == "name must be one of 'linear', 'log', got 7"
    assert cfg.one_of("name", ["linear"], table) is not None


def test_raise_problems_raises_all_or_nothing():
    raise_problems([None, None])
    with pytest.raises(ConfigError) as caught:
        raise_problems(problem for problem in ["a is bad", None, "b is bad"])
    assert caught.value.problems == ("a is bad", "b is bad")
    assert str(caught.value) == "2 problems in the configuration:\n  - a is bad\n  - b is bad"
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_a_section_built_directly_is_validated_too():
    with pytest.raises(ConfigError, match="size must be"):
        PoolSection(size=0)
