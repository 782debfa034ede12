"""What the figures of a run say: the headline table, the verdict in words, runs side by side, and figures as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit
from scipy.stats import binom

from fedgp_flower.run.artefacts import RunMetrics, read_run

REGRESSION_COLUMNS = ("rmse", "nll", "crps", "coverage_95")
CLASSIFICATION_COLUMNS = ("accuracy", "nll", "brier")
BASELINES = ("local-only", "pooled")
PERCENTAGES = ("accuracy", "coverage_50", "coverage_90", "coverage_95")

TITLES = {
    "rmse": "RMSE",
    "mae": "MAE",
    "nll": "NLL",
    "crps": "CRPS",
    "coverage_95": "95 % coverage",
    "accuracy": "accuracy",
    "brier": "Brier",
    "rows": "held-out rows",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training: this run, or a baseline on the same held-out rows."""

    name: str
    figures: Mapping[str, Any]
    per_site: Sequence[Mapping[str, Any]]

    @property
    def rows(self) -> int:
        """Held-out rows the figures are means over."""
        return sum(int(row["num_examples"]) for row in self.per_site)


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference per row, its 95 % interval (NaN for fewer than three sites), and the sites behind it."""

    mean: float
    low: float
    high: float
    sites: int
    lower_at: int
    """Sites where this run's figure is the lower one."""


def is_classification(metrics: RunMetrics) -> bool:
    """Whether the run predicts classes."""
    return "accuracy" in metrics.test


def figure_columns(metrics: RunMetrics) -> tuple[str, ...]:
    """The figures shown for the run's kind of task."""
    return CLASSIFICATION_COLUMNS if is_classification(metrics) else REGRESSION_COLUMNS


def arms(metrics: RunMetrics) -> list[Arm]:
    """This run first, then the baselines it computed."""
    name = metrics.method if metrics.method in BASELINES else f"federated ({metrics.method})"
    beside = zip(BASELINES, (metrics.local_only, metrics.pooled), strict=True)
    computed = [(arm, figures) for arm, figures in beside if figures is not None and arm != metrics.method]
    return [
        Arm(name, metrics.test, metrics.per_site),
        *(Arm(arm, figures, figures.get("per_site", ())) for arm, figures in computed),
    ]


def headline(metrics: RunMetrics) -> pd.DataFrame:
    """A row per arm; columns the test figures in original units and ``rows``."""
    columns = figure_columns(metrics)
    table = {arm.name: [*(number(arm.figures.get(name)) for name in columns), arm.rows] for arm in arms(metrics)}
    return pd.DataFrame.from_dict(table, orient="index", columns=[*columns, "rows"])


def expected_coverage(rows: int, level: float) -> tuple[float, float]:
    """Central 95 % range of the share of ``rows`` independent rows inside right intervals: Bin(rows, level) / rows."""
    return float(binom.ppf(0.025, rows, level)) / rows, float(binom.ppf(0.975, rows, level)) / rows


def paired_difference(metrics: RunMetrics, figure: str) -> Difference | None:
    """Federated minus local-only mean of ``figure`` over the sites both scored, weighted by held-out rows.

    With w_k the share of rows and d_k the difference at site k, D = Σ w_k d_k and, sites taken as independent,
    se² = K/(K−1) Σ w_k² (d_k − D)²; the interval is D ± t_{K−1, 0.975} se.
    """
    if metrics.local_only is None:
        return None
    local = {str(row["site"]): number(row.get(figure)) for row in metrics.local_only.get("per_site", ())}
    pairs = [
        (int(row["num_examples"]), number(row.get(figure)) - local.get(str(row["site"]), math.nan))
        for row in metrics.per_site
    ]
    kept = np.array([(n, d) for n, d in pairs if n > 0 and math.isfinite(d)]).reshape(-1, 2)
    k = len(kept)
    if k == 0:
        return None
    w, d = kept[:, 0] / kept[:, 0].sum(), kept[:, 1]
    mean = float(w @ d)
    lower_at = int(np.sum(d < 0))
    if k < 3:
        return Difference(mean, math.nan, math.nan, k, lower_at)
    half = float(stdtrit(k - 1, 0.975) * math.sqrt(k / (k - 1) * np.sum(w**2 * (d - mean) ** 2)))
    return Difference(mean, mean - half, mean + half, k, lower_at)


def verdict(metrics: RunMetrics) -> str:
    """One sentence that says how the run did against its baselines, by NLL."""
    nll = number(metrics.test.get("nll"))
    if not math.isfinite(nll):
        return "The negative log predictive density on held-out rows is not finite, so the run cannot be judged."
    difference = paired_difference(metrics, "nll")
    pooled = number(metrics.pooled.get("nll")) if metrics.pooled is not None else math.nan
    beside = f"; training on all rows in one place gives {show(pooled)}" if math.isfinite(pooled) else ""
    if difference is None or metrics.local_only is None:
        none = "" if beside else "; no baseline was computed to judge it by"
        what = f"The baseline {metrics.method}" if metrics.method in BASELINES else "Federated training"
        return f"{what} has a held-out NLL of {show(nll)} nats per row{beside}{none}."
    against = f"NLL {show(nll)} against {show(number(metrics.local_only.get('nll')))} nats per row"
    if not math.isfinite(difference.low):
        word = "lower" if difference.mean < 0 else "higher"
        sites = "1 site is" if difference.sites == 1 else f"{difference.sites} sites are"
        claim = f"Federated training has a {word} NLL than sites on their own, though {sites} too few to be sure"
        return f"{claim}: {against}{beside}."
    return f"{_claim(difference)}: {against} ({_in_words(difference)}){beside}."


def calibration_verdict(metrics: RunMetrics) -> str:
    """One sentence on whether the 95 % intervals hold what they promise; empty for classification."""
    observed, rows = number(metrics.test.get("coverage_95")), arms(metrics)[0].rows
    if not math.isfinite(observed) or rows == 0:
        return ""
    low, high = expected_coverage(rows, 0.95)
    share = f"Its 95 % intervals hold {percent(observed)} of {rows:,} held-out rows"
    chance = f"the {percent(low)} to {percent(high)} that chance alone allows"
    if observed < low:
        return f"{share}, below {chance}: the intervals are too narrow."
    if observed > high:
        return f"{share}, above {chance}: the intervals are too wide."
    return f"{share}, within {chance}."


def sentences(metrics: RunMetrics) -> list[str]:
    """What the figures say in words, warnings first."""
    said = (no_better_than_the_mean(metrics), verdict(metrics), calibration_verdict(metrics), convergence(metrics))
    return [*metrics.warnings, *filter(None, said)]


def convergence(metrics: RunMetrics) -> str:
    """One sentence on whether training converged; empty for a method that does not know."""
    details = metrics.method_details
    if "converged" not in details:
        return ""
    if details["converged"]:
        return f"Training converged after {metrics.rounds} rounds."
    rise = number(details.get("promised_rise"))
    more = f"; the next step promised another {show(rise)} nats of the bound" if math.isfinite(rise) else ""
    return f"Training stopped after {metrics.rounds} rounds, before it converged{more}."


def no_better_than_the_mean(metrics: RunMetrics) -> str:
    """One sentence where looking at the inputs gained nothing over the mean, or the class shares, of the training rows.

    The mean's RMSE over n held-out rows is about sd (1 ± 1/√(2n)), sd that of the training targets. With p the share of
    class 1 in training and q among the held-out rows, always predicting p scores q (1 − p)² + (1 − q) p².
    """
    test, rows, of = metrics.test, arms(metrics)[0].rows, metrics.training_target
    rmse = number(test.get("rmse"))
    if rows and "sd" in of and rmse >= of["sd"] * (1 - 1 / math.sqrt(2 * rows)):
        return (
            f"No better than the mean: the RMSE of {show(rmse)} on {rows:,} held-out rows is not clearly below"
            f" {show(of['sd'])}, the standard deviation of the training targets, which is about what predicting their"
            f" mean gives (R² = 1 − RMSE²/sd² = {show(1 - (rmse / of['sd']) ** 2)})."
        )
    counts = np.array(metrics.calibration.get("reliability") or (), dtype=float).reshape(-1, 3).sum(axis=0)
    if "share" not in of or not counts[0]:
        return ""
    p, q = of["share"], counts[2] / counts[0]
    accuracy, common = number(test.get("accuracy")), q if p >= 0.5 else 1 - q
    brier, always = number(test.get("brier")), q * (1 - p) ** 2 + (1 - q) * p**2
    said = []
    if accuracy <= common + 1e-12:
        said.append(
            f"an accuracy of {percent(accuracy)} against {percent(common)} for always naming the commoner class"
        )
    if brier >= always - 1e-12:
        said.append(f"a Brier score of {show(brier)} against {show(always)} for always predicting its training share")
    return f"No better than the share of the classes: {' and '.join(said)}." if said else ""


def comparison_frame(paths: Iterable[Path]) -> pd.DataFrame:
    """Finished runs side by side, a row per run in the order given.

    Raises:
        RunError: when a run cannot be read.
    """
    runs = [read_run(path) for path in paths]
    rows = [_comparison_row(run.metrics) for run in runs]
    return pd.DataFrame(rows, index=pd.Index([run.path.name for run in runs], name="run"))


def text_rows(frame: pd.DataFrame) -> list[list[str]]:
    """A frame of figures as rows of text, the name of each first."""
    columns = [str(column) for column in frame.columns]
    return [[str(name), *map(cell, columns, row)] for name, *row in frame.astype(object).itertuples(name=None)]


def title_of(column: str) -> str:
    """What a figure is called in a table."""
    return TITLES.get(column, column.replace("_", " "))


def cell(column: str, value: Any) -> str:
    """A figure as text: percentages for shares, four digits otherwise, a dash for what is not known."""
    if isinstance(value, str):
        return value
    if column in PERCENTAGES:
        return percent(number(value))
    if isinstance(value, int):
        return f"{value:,}"
    return show(number(value))


def number(value: Any) -> float:
    """A figure from JSON, where null stands for what is not a finite number."""
    return math.nan if value is None else float(value)


def show(value: float) -> str:
    """Four significant digits."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.4g}".removesuffix(".")
    return text.replace("-", "−")


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"


def _claim(difference: Difference) -> str:
    if difference.high < 0:
        return "Federated training predicts held-out rows better than sites on their own"
    if difference.low > 0:
        return "Federated training predicts held-out rows worse than sites on their own"
    return "Federated training and sites on their own do not differ clearly"


def _in_words(difference: Difference) -> str:
    """Difference and interval to three digits of the interval's width, and the count of sites."""
    width = difference.high - difference.low
    digits = min(max(2 - math.floor(math.log10(width)), 0), 6) if width > 0 else 6
    mean, low, high = (
        f"{value:.{digits}f}".replace("-", "−") for value in (difference.mean, difference.low, difference.high)
    )
    interval = f"difference {mean}, 95 % interval {low} to {high}"
    return f"{interval}; lower at {difference.lower_at} of {difference.sites} sites"


def _comparison_row(metrics: RunMetrics) -> dict[str, Any]:
    figures = {name: number(metrics.test.get(name)) for name in figure_columns(metrics)}
    return {
        "method": metrics.method,
        "dataset": metrics.dataset,
        "sites": metrics.sites,
        "rounds": metrics.rounds,
        "communications": metrics.communications,
        "seconds": number(metrics.seconds.get("total")),
        "MB_up": metrics.bytes.get("up", 0) / 1e6,
        "MB_down": metrics.bytes.get("down", 0) / 1e6,
        **figures,
        "rows": arms(metrics)[0].rows,
        "failures": len(metrics.failures),
    }
