import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy import special, stats
from synthetic_runs import make_run, predict

import fedgp_flower as fg
from fedgp_flower.outcome import COLLAPSE
from fedgp_flower.run import figures, summary, terminal
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.dependence import Effect, relevances
from fedgp_flower.run.figures import relevance
from fedgp_flower.run.report import Panel, write_page
from fedgp_flower.run.summary import baseline_differences
from fedgp_flower.scores import bernoulli_scores
from strategies.server.questions import lengthscale_facts

pytestmark = pytest.mark.drawn

LABELS = ["<script>alert(1)</script>", "cost $a$ & $b", "病院"]
FAILURES = [{"round": 3, "site": "5", "reason": "column <b>age</b> is missing"}]


@pytest.fixture(scope="module")
def line_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("line"), inputs=1, failures=FAILURES, labels=LABELS)


@pytest.fixture(scope="module")
def line_page(line_run):
    extra = [Panel("Own <panel>", "<p>text</p>", "a & b"), Panel("Own figure", Figure(figsize=(1, 1)), "a figure")]
    return write_page(read_run(line_run), predict, extra).read_text()


@pytest.fixture
def undrawn(monkeypatch):
    """Pages have the captions of their panels alone."""
    monkeypatch.setattr(Panel, "render", lambda panel, _: panel.caption)


def plots(run):
    return {path.stem for path in (run / "plots").iterdir()}


def scored(nlls, rows):
    told = enumerate(zip(nlls, rows, strict=True))
    sites = [{"site": str(k), "num_examples": n, "nll": value} for k, (value, n) in told]
    return {"nll": float(np.average(nlls, weights=rows)), "coverage_95": 0.95, "per_site": sites}


def judged(line_run, own, local, rows, coverage=0.95):
    """The metrics of a run whose sites have the given NLL."""
    mine = scored(own, rows)
    test = {"nll": mine["nll"], "coverage_95": coverage}
    beside = None if local is None else scored(local, rows)
    return replace(read_run(line_run).metrics, test=test, per_site=mine["per_site"], local_only=beside, pooled=None)


def test_the_page_stands_alone_and_escapes_what_comes_from_data(line_page):
    assert "://" not in line_page
    assert set(re.findall(r'(?:src|href)="([^",#]+)', line_page)) == {"data:image/svg+xml;base64"}
    assert "<script" not in line_page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in line_page
    assert "column &lt;b&gt;age&lt;/b&gt; is missing" in line_page
    assert "<b>" not in line_page
    assert "病院" in line_page


def test_the_page_shows_the_figures_of_the_run(line_run, line_page):
    run = read_run(line_run)
    for known in summary.arms(run.metrics).values():
        for name in ("rmse", "nll", "crps"):
            assert f"<td>{summary.show(known[name])}</td>" in line_page
    assert "RMSE and CRPS in units of yield" in line_page
    assert "1 failure at 1 site" in line_page
    assert "<td>extra jitter in Kzz</td><td>3</td>" in line_page
    assert "<td>model.kernel</td><td>rbf</td>" in line_page
    rows = run.predictions.sort_values("sd")
    inside = (abs(rows["target"] - rows["mean"]) <= 1.96 * rows["sd"]).to_numpy()
    shares = [summary.percent(float(inside[part].mean())) for part in np.array_split(np.arange(len(rows)), 3)]
    assert f"hold {shares[0]} of the third of rows with the smallest sd, {shares[1]} and {shares[2]}" in line_page


def test_pictures_follow_the_number_of_inputs(tmp_path, line_run, line_page):
    assert {"curve", "calibration", "convergence", "sites", "cost"} <= plots(line_run)
    two = make_run(tmp_path / "2", inputs=2, sites=2, rows=20)
    write_page(read_run(two), predict)
    assert {"map", "parity"} <= plots(two)
    many = make_run(tmp_path / "8", inputs=8, sites=45, rows=12)
    page = write_page(read_run(many)).read_text()
    assert {"parity"} == plots(many) - {"calibration", "convergence", "sites", "cost"}
    assert re.search(r"400 of [45]\d\d rows", page)
    classes = make_run(tmp_path / "classes", inputs=3, sites=3, rows=20, classes=True)
    page = write_page(read_run(classes)).read_text()
    assert {"probabilities", "roc"} <= plots(classes)
    assert "Brier" in page
    assert "RMSE" not in page


def test_only_figures_that_a_run_has_are_explained(tmp_path, undrawn):
    run = read_run(make_run(tmp_path, inputs=3, sites=3, rows=20, classes=True))
    assert "AUC and calibration slope are computed" in write_page(run).read_text()
    several = {name: run.metrics.test[name] for name in ("accuracy", "nll", "brier")}  # of several classes
    page = write_page(replace(run, metrics=replace(run.metrics, test=several))).read_text()
    assert "AUC and calibration slope are computed" not in page


def test_paired_difference_by_hand(line_run):
    metrics = judged(line_run, [1.0, 1.0, 1.0], [1.2, 1.1, 1.0], [20, 10, 10])
    found = summary.paired_difference(metrics, metrics.local_only)
    # w = (½, ¼, ¼), d = (−0.2, −0.1, 0): D = −0.125, se² = 3/2 (¼·0.075² + 1/16·0.025² + 1/16·0.125²), t₂ = 4.30265
    half = 4.302652729911275 * np.sqrt(1.5 * (0.075**2 / 4 + 0.025**2 / 16 + 0.125**2 / 16))
    wanted = [pytest.approx(value) for value in (-0.125, -0.125 - half, -0.125 + half)]
    assert found == summary.Difference(*wanted, 3, 2)


NLL = [1.0, 1.1, 1.2]


@pytest.mark.parametrize(
    ("mine", "local", "words"),
    [
        (NLL, [1.5, 1.61, 1.7], "30 held-out rows of 3 sites, fsgp is better than each site alone. Comparisons are by"),
        (NLL, [1.1, 1.2, 1.9], "fsgp has a lower NLL than each site alone. Comparisons are by NLL and 95 % intervals"),
        ([1.5, 1.61, 1.7], NLL, "fsgp is worse than each site alone."),
        ([1.09, 1.11, 1.1], [1.1] * 3, "fsgp is about as good as each site alone."),
        ([1.0, 1.2, 1.1], [1.1] * 3, "fsgp is not clearly better or worse than each site alone."),
        ([1.1, 1.0, 80.0], [1.1] * 3, "fsgp is not clearly better or worse than each site alone."),
        (NLL[::2], [1.1, 1.4], "each site alone. Comparisons are by NLL without intervals: 2 sites give none."),
        ([1.2], [1.1], "On 10 held-out rows of 1 site, fsgp has a higher NLL than each site alone."),
        ([1.2], None, "fsgp has a held-out NLL of 1.200 nats per row; no baseline was computed."),
    ],
)
def test_the_verdict_follows_the_numbers(line_run, mine, local, words):
    metrics = judged(line_run, mine, local, [10] * len(mine))
    assert words in summary.verdict(metrics)
    assert len(baseline_differences(metrics)[1]) == (local is not None)


def test_the_first_sentence_is_the_error_beside_the_others(line_run):
    run, beside = read_run(line_run), {"rmse": 12345.6, "per_site": []}
    metrics = judged(line_run, NLL, NLL, [10, 20, 62], 0.978)
    alone = replace(metrics, test={**metrics.test, "rmse": 1.8383}, local_only={**metrics.local_only, "rmse": 4.6})
    known = replace(alone, mean=beside, linear=None, pooled=None)
    held = "95 % intervals held 97.8 % of 92 held-out rows."
    said = f"Typical error of yield: 1.84, against 4.6 for each site alone; {held}"
    assert summary.answer(replace(run, metrics=known)) == said
    large = replace(known, linear={"rmse": 4.6}, local_only=beside)
    assert "against 4.6 for linear regression and 12,300 for each site alone" in summary.answer(
        replace(run, metrics=large)
    )
    assert "against 12,300 for their mean" in summary.answer(replace(run, metrics=replace(known, local_only=None)))
    classes = replace(known, test={"accuracy": 0.931}, linear={"accuracy": 0.9}, local_only={"accuracy": 0.876})
    others = "90.0 % for logistic regression and 87.6 % for each site alone"
    said = f"93.1 % of 92 held-out rows in the right class, against {others}."
    assert summary.answer(replace(run, metrics=classes)) == said
    collapsed = replace(run, metrics=replace(known, warnings=["few rows", f"{COLLAPSE}: take another"]))
    assert summary.opening(collapsed)[0] == "The model collapsed: take another."
    assert "The model collapsed: take another." not in summary.notes(collapsed.metrics)
    nothing = replace(run, metrics=replace(known, test={}, per_site=[], calibration={}))
    assert summary.opening(nothing) == ["Nothing was held out, so nothing was scored: all rows were trained on."]


def test_a_target_is_named_also_without_a_posterior(line_run):
    run = read_run(line_run)
    metrics = replace(run.metrics, data={**run.metrics.data, "target": "days"})
    assert summary.target_of(replace(run, saved=None, metrics=metrics, config={})) == "days"


@pytest.mark.parametrize(
    ("converged", "facts", "said"),
    [
        (True, {}, ""),
        (None, {}, ""),
        (False, {"forecast_rise": 3.4, "latest_gain_per_row": 0.001}, ""),  # .0094 nats a row
        (False, {"forecast_rise": 3.4, "latest_gain_per_row": 0.08}, "may gain 0.08 nats a row"),
        (False, {"forecast_rise": 36.6}, "may gain 0.1 nats a row"),
        (False, {"latest_gain_per_row": 0.02}, "may gain 0.02 nats a row"),
        (False, {}, "before it had converged: raise `sgpr.exchanges` or `num-server-rounds`"),
        (False, {"budgets": []}, "before it had converged: raise `num-server-rounds`"),
    ],
)
def test_an_early_end_is_noted_where_more_would_change_predictions(line_run, converged, facts, said):
    known = replace(read_run(line_run).metrics, method="sgpr", data={"rows": 366})
    metrics = replace(known, converged=converged, method_details=facts)
    assert said in summary.convergence_note(metrics) if said else not summary.convergence_note(metrics)


@pytest.mark.parametrize("converged", [True, False, None])
def test_a_run_that_converged_says_so(line_run, converged, monkeypatch, capsys, undrawn):
    run = read_run(line_run)
    run = replace(run, metrics=replace(run.metrics, converged=converged))
    monkeypatch.setattr(terminal, "read_run", lambda folder: run)
    terminal.show_result(line_run)
    words = " ".join(capsys.readouterr().out.split())
    assert ("rounds, converged, 1 failure" in words) == bool(converged)
    assert ("rounds, converged · " in write_page(run).read_text()) == bool(converged)


@pytest.mark.parametrize(
    ("local", "pooled", "boosting", "words"),
    [
        ([1.003, 1.103, 1.203], 1.098, None, "is about as good as each site alone and one model of all rows in one"),
        (
            [1.01, 1.11, 1.211],
            1.05,
            1.2,
            "has a higher NLL than one model of all rows in one place (0.05 nats a row); it",
        ),
        ([1.01, 1.11, 1.211], 1.3, 1.0, "has a higher NLL than gradient boosting of all rows in one place (0.1 nats"),
    ],
)
def test_the_verdict_names_the_better_of_what_sees_all_rows(line_run, local, pooled, boosting, words):
    beside = [{"nll": nll, "per_site": []} for nll in (pooled, boosting) if nll]
    metrics = replace(judged(line_run, NLL, local, [10] * 3), **dict(zip(("pooled", "boosting"), beside, strict=False)))
    assert summary.verdict(metrics).startswith(f"On 30 held-out rows of 3 sites, fsgp {words}")


def test_a_model_of_all_rows_in_one_place_is_no_single_site(tmp_path, undrawn):
    draw, shift = np.random.default_rng(0), np.repeat([0.0, 30.0, -30.0], 25)
    table = pd.DataFrame({"x": draw.uniform(-3, 3, 75), "lab": np.repeat([*"abc"], 25)})
    table["y"] = np.sin(table["x"]) + shift + 0.1 * draw.standard_normal(75)
    own, pooled = (
        fg.run(
            table,
            target="y",
            site="lab",
            method=method,
            num_rounds=1,
            options={"output-dir": str(tmp_path), "name": method, "baselines.max-evaluations": 20},
        )
        for method in ("fgpr", "pooled")
    )
    assert not pooled.metrics.per_site
    assert "much better from their own rows" not in "".join(pooled.metrics.warnings)
    assert summary.verdict(pooled.metrics).startswith("On 15 held-out rows, pooled ")
    assert {row[-1] for run in (own, pooled) for row in summary.headline(run.metrics)[1]} == {"15"}
    assert summary.comparison_warnings([own, pooled]) == []


@pytest.mark.parametrize(
    ("slope", "words"),
    [(0.5, "0.3040 to 0.6960), below 1: its probabilities are too extreme"), (1.1, "; 1 is right"), (1.3, "cautious")],
)
def test_the_verdict_on_probabilities_follows_the_slope(line_run, slope, words):
    test = {"accuracy": 0.9, "nll": 0.3, "calibration_slope": slope, "calibration_slope_se": 0.1}
    metrics = replace(read_run(line_run).metrics, test=test)
    assert words in summary.calibration_verdict(metrics)
    assert summary.calibration_verdict(replace(metrics, test=test | {"calibration_slope": None})) == ""


@pytest.mark.parametrize(("coverage", "words"), [(0.85, "too narrow"), (0.95, "within"), (1.0, "too wide"), (None, "")])
def test_the_verdict_on_intervals_follows_the_coverage(line_run, coverage, words):
    sentence = summary.calibration_verdict(judged(line_run, [1.0], None, [400], coverage))
    assert words in sentence if words else not sentence
    assert "of independent rows" in sentence or coverage is None  # those of a curve are none


def test_arms_scored_on_different_rows_are_flagged(line_run, undrawn):
    run = read_run(line_run)
    run.metrics.local_only["per_site"].pop()
    assert "different numbers of held-out rows" in write_page(run).read_text()


@pytest.mark.parametrize("longest", [30.0, 2e6])
def test_lengthscales_of_any_range_have_ticks_apart(longest):
    table = pd.DataFrame({"value": [1.5, longest], "low": np.nan, "high": np.nan}, index=["x1", "x2"])
    figure = figures.relevance({"rbf": table, "l1": table})
    figure.canvas.draw()
    for ax in figure.axes:
        low, high = ax.get_xlim()
        labels = [own for own in ax.get_xticklabels() if low <= own.get_position()[0] <= high]
        boxes = [own.get_window_extent() for own in labels]
        assert len(boxes) > 2
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_the_curve_draws_mean_and_the_95_percent_band():
    x = np.linspace(-1, 1, 9)
    (ax,) = figures.curve(None, predict, x, ("x", "y")).axes
    mean, sd = predict(x[:, None])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), mean)
    band = ax.collections[0].get_paths()[0].vertices
    half = np.abs(band[:, 1] - np.interp(band[:, 0], x, mean))
    np.testing.assert_allclose(half, stats.norm.ppf(0.975) * np.interp(band[:, 0], x, sd), rtol=1e-9)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "y")


@pytest.mark.parametrize("days", [1, 240, 3000])
def test_dates_of_any_span_have_ticks_without_a_warning(days):
    values, flat = np.linspace(8000.0, 8000.0 + days, 41), np.ones(41)
    effect = Effect("admitted", (), values, flat, flat - 1, flat + 1, dates=True)
    (ax,) = figures.effects([effect], "days").axes
    assert 2 <= len(ax.get_xticks()) <= 6  # a warning would be an error


def observed(figure):
    [line] = [line for line in figure.axes[0].lines if line.get_label() == "observed"]
    return line.get_xdata(), line.get_ydata()


def test_the_calibration_curve_counts_central_bins():
    pit = [10, 0] + [5] * 16 + [0, 10]  # 20 in the tails of 100
    levels, shares = observed(figures.calibration(pit, 0.9))
    found = dict(zip(np.round(levels, 6), shares, strict=True))
    assert [found[level] for level in (50.0, 80.0, 90.0, 95.0)] == pytest.approx([50.0, 80.0, 80.0, 90.0])


def test_the_reliability_of_rare_events_is_drawn_by_groups_of_equal_size():
    """Of 3 % events all probabilities lie in the first of ten bins, which is one point."""
    draw = np.random.default_rng(0)
    p = special.expit(draw.normal(-3.8, 1, 3000))
    arrays = bernoulli_scores(p, draw.random(3000) < p).arrays
    table, ranks = (arrays[f"evaluation.{name}"].tolist() for name in ("reliability", "ranks"))
    ax = figures.reliability(table, ranks).axes[0]
    [predicted, observed] = next(line for line in ax.lines if line.get_label() == "observed").get_data()
    assert len(predicted) >= 5
    assert ax.get_xlim()[1] < 30
    quantiles = np.array_split(np.sort(p), len(predicted))
    assert predicted == pytest.approx([100 * part.mean() for part in quantiles], rel=0.25)
    assert observed == pytest.approx(predicted, abs=3)


def test_the_roc_is_that_of_the_counts():
    """Log odds in four steps; of class 1, three of four rows lie above even odds, of class 0 one of five."""
    ax = figures.roc([[3, 0], [1, 1], [1, 2], [0, 1]], 0.9).axes[0]
    line, dot = ax.lines[1], ax.lines[2]
    np.testing.assert_allclose(line.get_xdata(), [100, 40, 20, 0, 0])
    np.testing.assert_allclose(line.get_ydata(), [100, 100, 75, 25, 0])
    assert (float(dot.get_xdata()[0]), float(dot.get_ydata()[0])) == (20.0, 75.0)


def test_times_of_survival_have_no_exponent():
    table = [[50, 40.0, 41.0], [50, 20.0, 19.0]]
    (ax,) = figures.survival_calibration([table, table], [0.5, 1234.4]).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["after 0.5", "after 1234"]


@pytest.mark.parametrize(("visits", "label"), [([np.nan, np.nan, 1, 2], "round"), ([1, 2, 4, 5], "visits of a site")])
def test_rounds_before_the_first_visit_are_not_drawn_on_one_another(visits, label):
    history = pd.DataFrame({"round": [1, 2, 3, 4], "objective": 0.5, "visits": visits})
    (ax,) = figures.convergence(history, {}, "m").axes
    assert label in ax.get_xlabel()
    assert len(set(ax.lines[0].get_xdata())) == 4


def test_convergence_draws_baselines_and_frames_the_late_rounds():
    history = pd.DataFrame({"round": range(40), "test_nll": [1e6, 1e3, *np.linspace(2, 1, 38)], "seconds": 1.0})
    (ax,) = figures.convergence(history, {"pooled": {"nll": 0.9}}, "m").axes
    assert [line.get_ydata()[0] for line in ax.lines if line.get_label() == "pooled"] == [0.9]
    assert ax.get_ylim()[0] < 0.9 < ax.get_ylim()[1] < 3
    assert "outside the frame" in ax.get_title(loc="right")
    assert figures.convergence(history[:1], {}, "m") is None
    settled = history.assign(test_nll=1.93 + 1e-4 * history["round"])
    low, high = figures.convergence(settled, {}, "m").axes[0].get_ylim()
    assert high - low == pytest.approx(0.05)


LOGS = {"kernel.log_lengthscale": np.log([[4.0, 0.5, 90.0]]), "kernel.log_outputscale": np.array(0.3)}
SPREAD = {"kernel.log_lengthscale": np.array([[0.1, 0.2, 2.0]])}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    own = read_run(make_run(tmp_path_factory.mktemp("run"), inputs=3, sites=2, rows=5))
    return replace(own, saved=replace(own.saved, inputs=("age", "dose", "ward")))


def telling(run, facts):
    return replace(run, metrics=replace(run.metrics, method_details={"relevance": facts}))


def saved_with(run, arrays):
    named = dict.fromkeys(arrays, "")
    return replace(run, saved=replace(run.saved, arrays=arrays, meanings=named, coordinates=named))


def test_the_shortest_comes_first_with_a_log_normal_interval(run):
    [(part, own)] = relevances(telling(run, lengthscale_facts(LOGS, SPREAD, "a test"))).items()
    assert list(own.index) == ["dose", "age", "ward"]
    assert list(own["value"]) == pytest.approx([0.5, 4, 90])
    assert list(own["low"]) == pytest.approx([0.5, 4, 90] / np.exp(1.959964 * np.array([0.2, 0.1, 2.0])), rel=1e-6)
    assert list(own["low"] * own["high"]) == pytest.approx(list(own["value"] ** 2))
    assert (part, own.attrs["how"]) == ("kernel", "a test")


def test_without_intervals_points_are_shown_and_none_is_made_up(run):
    [own] = relevances(telling(run, lengthscale_facts(LOGS, None, "a test"))).values()
    assert own["low"].isna().all()
    same = relevances(saved_with(run, {"kernel.lengthscale": np.exp(LOGS["kernel.log_lengthscale"])}))
    pd.testing.assert_frame_equal(same["kernel"], own)
    assert own.attrs["how"] == same["kernel"].attrs["how"] == ""
    assert relevances(run) == {}


def test_parts_of_a_model_have_panels_of_their_own(run):
    logs = {f"theta.{part}.log_lengthscale": np.zeros((1, 3)) for part in ("trend", "deviation")}
    figure = relevance(relevances(telling(run, lengthscale_facts(logs, None))))
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["trend", "deviation"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["age", "dose", "ward"]
    summed = replace(run, saved=replace(run.saved, model={"kernel": "warp(rbf + l1)"}))
    logs = {f"kernel.kernels.{term}.log_lengthscale": np.zeros((1, 3)) for term in range(2)}
    arrays = {f"kernel.kernels.{term}.lengthscale": np.ones(3) for term in range(2)}
    for known in (telling(summed, lengthscale_facts(logs, None)), saved_with(summed, arrays)):  # without these facts
        assert list(relevances(known)) == ["rbf (term 1)", "l1 (term 2)"]
