"""bupo.report: figures hold the numbers they were given, and sparse or damaged files never stop them."""

import json
import warnings

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bupo.report import axes as draw
from bupo.report.plots import read_records, write_plots


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def ax():
    return Figure().subplots()


def metrics(iterations):
    for i in range(1, iterations + 1):
        alive = ["p00", "p01"] if i < 4 else ["p00", "p05"]
        yield {
            "iteration": i,
            "interact/reward": 0.1 * i,
            "interact/payoff": 0.3 + 0.01 * i,
            "interact/agreement_rate": 0.8,
            "interact/self_play_agreement": 0.7 if i % 2 else None,
            "interact/rounds": 7.5,
            "reward/economic": 0.4,
            "ppo/clip_fraction": 0.1,
            "ppo/kl_reference": 0.01 * i,
            "evaluator/mean_pairwise_kl": 0.2,
            "evaluator/mean_pairwise_kl_null": 0.05,
            "evaluator/jsd": 0.1,
            "evaluator/effective_policies": 1.2,
            "entropy/mixture": 1.5,
            "seconds/interact": 3.0,
            "balance/culled": "p01" if i == 3 else None,
            "balance/injected": ["p05"] if i == 3 else None,
            **{f"responsibility/{p}": 0.5 for p in alive},
            **{f"weight/{p}": 0.5 for p in alive},
            **{f"entropy/{p}": 1.1 for p in alive},
            **{f"relative_advantage/{p}": 0.02 * i for p in alive},
            **{f"relative_advantage_low/{p}": -0.1 for p in alive},
            **{f"relative_advantage_high/{p}": 0.1 for p in alive},
        }


def estimate(mean, half=0.03):
    return {"mean": mean, "ci95": [mean - half, mean + half]}


SUMMARY = {
    "stages": {
        "final": {"payoff": estimate(0.6), "per_opponent": {"boulware": {"payoff": estimate(0.5)}}},
        "sft": {
            "payoff": estimate(0.4),
            "per_opponent": {"boulware": {"payoff": estimate(0.3)}, "tit_for_tat": {"payoff": {"mean": 0.45}}},
        },
    },
    "scripted_linear": {"payoff": {"mean": 0.55}},
    "ceiling": {"mean": 0.7, "per_opponent": {"boulware": {"mean": 0.65}}},
}
DEALS = {"stages": {"sft": [[0.2, 0.6], [-0.1, 0.4]], "final": [[0.5, 0.5]]}, "frontier": [[1, 0], [0, 1], [0.6, 0.7]]}


def write_run(folder, records, summary=None, deals=None):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name, content in (("summary", summary), ("deals", deals)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))


def names(paths):
    return {p.stem for p in paths}


def curve(ax, label):
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return line.get_xdata().tolist(), line.get_ydata().tolist()


@pytest.mark.parametrize("iterations", [1, 6, 100])
def test_every_figure_of_a_full_run_is_written(tmp_path, iterations):
    write_run(tmp_path, metrics(iterations), SUMMARY, DEALS)
    written = write_plots(tmp_path)
    assert names(written) == {"learning_curve", "diversity", "responsibilities", "updates", "deals"}
    for path in written:
        assert path.parent == tmp_path / "plots"
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_only_figures_with_data_are_written(tmp_path):
    assert write_plots(tmp_path) == []
    assert not (tmp_path / "plots").exists()
    write_run(tmp_path, [{"iteration": 1, "interact/reward": 0.5}, {"iteration": 2}, {"iteration": 3, "other": "x"}])
    assert names(write_plots(tmp_path)) == {"learning_curve"}


def test_stages_alone_make_a_learning_figure(tmp_path):
    write_run(tmp_path, [], SUMMARY)
    assert names(write_plots(tmp_path)) == {"learning_curve"}


@pytest.mark.parametrize(
    ("summary", "deals"),
    [
        ({}, {}),
        ({"stages": {}}, {"stages": {}}),
        ({"stages": {"sft": {}}}, {"stages": {"sft": []}}),
        (
            {"stages": {"sft": {"payoff": {"mean": None, "ci95": [None, None]}}}},
            {"stages": {"sft": [], "new": [[0, 0]]}},
        ),
        ({"stages": {"new": {"payoff": {"mean": 0.4, "ci95": [None, None]}}}, "ceiling": None}, {"frontier": []}),
    ],
)
def test_empty_and_unknown_parts_are_skipped(tmp_path, summary, deals):
    write_run(tmp_path, [{"iteration": 1, "interact/reward": None}], summary, deals)
    for path in write_plots(tmp_path):
        assert path.stat().st_size > 1000


def test_torn_and_foreign_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "a": 2}\n[1]\n{"no": "iteration"}\n\n{"iteration": 2, "a": \xc3')
    assert read_records(path) == [{"iteration": 1, "a": 2}]
    assert read_records(tmp_path / "missing.jsonl") == []


def test_a_curve_holds_the_known_numbers_of_its_metric(ax):
    records = [
        {"iteration": 1, "interact/reward": 0.5},
        {"iteration": 2, "interact/reward": None},
        {"iteration": 3, "interact/reward": "nan"},
        {"iteration": 7, "interact/reward": 2},
    ]
    draw.plot_series(
        ax, records, {"interact/reward": draw.Curve("reward", draw.BLUE), "x": draw.Curve("x", draw.INK)}, "utility"
    )
    assert curve(ax, "reward") == ([1.0, 7.0], [0.5, 2.0])
    assert len(ax.lines) == 1
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("iteration", "utility")


def test_a_policy_is_drawn_while_it_lives_and_keeps_its_look(ax):
    records = list(metrics(6))
    draw.plot_policies(ax, records, "relative_advantage", "advantage", band=True)
    assert draw.policies(records, "relative_advantage") == ["p00", "p01", "p05"]
    assert curve(ax, "p00") == ([1, 2, 3, 4, 5, 6], pytest.approx([0.02 * i for i in range(1, 7)]))
    assert curve(ax, "p01")[0] == [1, 2, 3]
    assert curve(ax, "p05")[0] == [4, 5, 6]
    band = ax.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (-0.1, 0.1)
    other = Figure().subplots()
    draw.plot_policies(other, records[3:], "weight", "weight")
    looks = [{line.get_label(): line.get_color() for line in a.lines} for a in (ax, other)]
    assert looks[0]["p05"] == looks[1]["p05"]


def test_a_policy_line_breaks_only_where_others_were_measured(ax):
    records = [{"iteration": i, "weight/p00": 0.5, "weight/p01": 0.5 if i != 10 else None} for i in (5, 10, 15)]
    draw.plot_policies(ax, records, "weight", "weight")
    np.testing.assert_array_equal(curve(ax, "p00"), [[5, 10, 15], [0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(curve(ax, "p01"), [[5, 10, 15], [0.5, np.nan, 0.5]])


def test_balance_decisions_are_vertical_lines_with_names(ax):
    draw.plot_balance(ax, [*metrics(6), {"iteration": 9, "balance/culled": "p02,p03"}], label=True)
    assert [line.get_xdata()[0] for line in ax.lines] == [3, 3, 9]
    assert [text.get_text() for text in ax.texts] == ["culled p01\ninjected p05", "culled p02 p03"]


def test_stage_bars_have_the_payoffs_and_intervals(ax):
    draw.plot_stage_payoffs(ax, SUMMARY)
    bars = {
        c.get_label(): [bar.get_height() for bar in c]
        for c in ax.containers
        if c.get_label() in ("SFT policy", "final pool")
    }
    assert bars == {"SFT policy": [0.4, 0.3, 0.45], "final pool": [0.6, 0.5]}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["all", "boulware", "tit for tat"]
    segments = [s for c in ax.collections for s in c.get_segments()]
    spans = {(round(s[0][1], 3), round(s[1][1], 3)) for s in segments}
    assert {(0.37, 0.43), (0.27, 0.33), (0.57, 0.63), (0.47, 0.53), (0.45, 0.45)} <= spans
    levels = {
        c.get_label(): [s[0][1] for s in c.get_segments()]
        for c in ax.collections
        if c.get_label() in ("ceiling", "scripted Linear")
    }
    assert levels == {"scripted Linear": [0.55], "ceiling": [0.7, 0.65]}


def test_deals_are_points_below_a_sorted_frontier(ax):
    draw.plot_deals(ax, DEALS)
    points, mean = ax.collections[0].get_offsets(), ax.collections[1].get_offsets()
    np.testing.assert_allclose(points, DEALS["stages"]["sft"])
    np.testing.assert_allclose(mean, [[0.05, 0.5]])
    assert curve(ax, "mean Pareto frontier") == ([0, 0.6, 1], [1, 0.7, 0])
    assert ax.get_xlim()[0] < -0.1 and ax.get_xlim()[1] > 1


def test_sub_policy_looks_are_distinct_for_a_large_pool(ax):
    records = [{"iteration": 1, **{f"weight/p{k:02d}": 0.1 for k in range(24)}}]
    draw.plot_policies(ax, records, "weight", "weight")
    assert len({(to_hex(line.get_color()), line.get_marker()) for line in ax.lines}) == 24
