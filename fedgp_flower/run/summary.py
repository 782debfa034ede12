"""What the figures of a run say: the headline table, the verdict in words, runs side by side, and figures as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binom

from fedgp_flower.data.tables import SUFFIXES, table_stem, tables_in
from fedgp_flower.privacy.policy import FEW_ROWS
from fedgp_flower.run.artefacts import Run, RunMetrics
from fedgp_flower.run.registry import METHODS
from fedgp_flower.typing import Facts

TIMES = {"concordance": "concordance", "nll": "NLL", "ibs": "Brier (IBS)", "survival_error": "survival error"}
TIMES |= {"events": "seen events", "coverage_95": "95 % coverage"}
REGRESSION = {"rmse": "RMSE", "r2": "R²", "nll": "NLL", "crps": "CRPS", "coverage_95": "95 % coverage"}
CLASSIFICATION = {"accuracy": "accuracy", "auc": "AUC", "nll": "NLL", "brier": "Brier", "brier_skill": "skill"}
CLASSIFICATION["calibration_slope"] = "slope"
"""Figures that are shown, by kind of task, and what they are called in a table."""
TITLES = {**TIMES, **REGRESSION, **CLASSIFICATION, "mae": "MAE", "rows": "held-out rows"}
MATTERS = 0.01
"""Nats a row that more training has to promise to be worth a note."""
PLAINEST = {"mean of the target", "class shares", "Kaplan–Meier curve"}
"""Baselines that look at no input."""
IN_ONE_PLACE = ("pooled", "gradient boosting")
"""Baselines that see all rows."""
HIGHER, LOWER = "with a higher NLL than", "with a lower NLL than"
LEVEL = 0.003
"""Nats per row: a smaller difference makes nothing better or worse."""
FAR = 0.05
"""Nats per row: a larger difference with the same sign at all sites is said, even if they are few."""
SAME = 1e-6
"""Relative difference of two means or standard deviations that is no more than rounding."""
MOST_NAMED = 5
"""Differences that are named."""
PERCENTAGES = ("accuracy", "concordance", "events", "survival_error", "coverage_50", "coverage_90", "coverage_95")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training: this run, or a baseline on the same held-out rows."""

    name: str
    figures: Facts
    rows: int
    """Held-out rows the figures are means over."""


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
    return tuple(CLASSIFICATION if is_classification(metrics) else TIMES if is_time(metrics) else REGRESSION)


def is_time(metrics: RunMetrics) -> bool:
    """Whether the run predicts times to an event."""
    return "concordance" in metrics.test


def rivals(metrics: RunMetrics) -> dict[str, Facts]:
    """The baselines that the run computed, by the name of their arm, the plainest first."""
    if is_classification(metrics):
        plain = "class shares", "logistic regression"
    else:
        plain = (
            ("Kaplan–Meier curve", "AFT regression")
            if is_time(metrics)
            else ("mean of the target", "linear regression")
        )
    named = {
        **dict(zip(plain, (metrics.mean, metrics.linear), strict=True)),
        "local-only": metrics.local_only,
        "pooled": metrics.pooled,
        "gradient boosting": metrics.boosting,
    }
    return {name: figures for name, figures in named.items() if figures is not None and name != metrics.method}


def arms(metrics: RunMetrics) -> list[Arm]:
    """This run first, then the baselines it computed."""
    federated = metrics.method not in METHODS or METHODS[metrics.method].federated  # or not installed here
    name = f"federated ({metrics.method})" if federated else metrics.method
    counts = metrics.calibration.get("pit") or [row[0] for row in metrics.calibration.get("reliability") or ()]
    together = 0 if metrics.per_site else round(sum(counts))  # under masks no site has separate figures
    found = {name: {**metrics.test, "per_site": metrics.per_site}, **rivals(metrics)}
    return [
        Arm(name, figures, sum(int(row["num_examples"]) for row in figures.get("per_site", ())) or together)
        for name, figures in found.items()
    ]


def headline(metrics: RunMetrics) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table: a row per arm; the test figures in original units that some arm has, and rows."""
    every = arms(metrics)
    columns = [name for name in figure_columns(metrics) if any(name in arm.figures for arm in every)]
    rows = [[arm.name, *(cell(c, arm.figures.get(c)) for c in columns), cell("rows", arm.rows)] for arm in every]
    return ["", *map(title_of, (*columns, "rows"))], rows


def expected_coverage(rows: int, level: float) -> tuple[float, float]:
    """Central 95 % range of the share of ``rows`` independent rows inside right intervals: Bin(rows, level) / rows."""
    return float(binom.ppf(0.025, rows, level)) / rows, float(binom.ppf(0.975, rows, level)) / rows


def paired_difference(metrics: RunMetrics, rival: Facts) -> Difference:
    """Federated minus baseline mean of the NLL over the sites both scored, weighted by held-out rows.

    With w_k the share of rows and d_k the difference at site k, D = Σ w_k d_k and, sites taken as independent,
    se² = K/(K−1) Σ w_k² (d_k − D)²; the interval is D ± t_{K−1, 0.975} se.
    """
    other = {(str(row["site"]), row["num_examples"]): number(row.get("nll")) for row in rival.get("per_site", ())}
    pairs = [
        (int(n), number(row.get("nll")) - other.get((str(row["site"]), n), math.nan))
        for row in metrics.per_site
        for n in [row["num_examples"]]  # one site scores `pooled` on the rows of all
    ]
    kept = np.array([(n, d) for n, d in pairs if n > 0 and math.isfinite(d)]).reshape(-1, 2)
    k = len(kept)
    if k == 0:
        return Difference(number(metrics.test.get("nll")) - number(rival.get("nll")), math.nan, math.nan, 0, 0)
    w, d = kept[:, 0] / kept[:, 0].sum(), kept[:, 1]
    mean = float(w @ d)
    lower_at = int(np.sum(d < 0))
    if k < 3:
        return Difference(mean, math.nan, math.nan, k, lower_at)
    half = float(stdtrit(k - 1, 0.975) * math.sqrt(k / (k - 1) * np.sum(w**2 * (d - mean) ** 2)))
    return Difference(mean, mean - half, mean + half, k, lower_at)


def verdict(metrics: RunMetrics) -> str:
    """The second sentence of a report: whether the run is worse or better than the baselines, by NLL."""
    nll = number(metrics.test.get("nll"))
    if not arms(metrics)[0].rows:
        return "No rows were held out, so that predictions are not judged."
    if not math.isfinite(nll):
        return "The negative log predictive density on held-out rows is not finite, so the run cannot be judged."
    differences = {name: paired_difference(metrics, rival) for name, rival in rivals(metrics).items()}
    compared = {name: d for name, d in differences.items() if math.isfinite(d.mean)}
    if not compared:
        return f"{metrics.method} has a held-out NLL of {show(nll)} nats per row; no baseline was computed."
    weaker = sorted((name for name in IN_ONE_PLACE if name in compared), key=lambda name: compared[name].mean)[:-1]
    judged = {  # bad news first
        words: [name for name, d in compared.items() if _judged(d) == words and name not in weaker]
        for words in ("worse than", HIGHER, "better than", "about as good as", LOWER)
    }
    called = {
        words: ", ".join(_called(name, metrics, compared[name].mean) for name in names)
        for words, names in judged.items()
        if names
    }
    said = [re.sub(r", (?=[^,]+$)", " and ", f"{words} {names}") for words, names in called.items()]
    sites = max(difference.sites for difference in differences.values())
    few = ("no interval, as masks hide each site's score", "1 site gives no interval", "2 sites give no interval")
    how = f"; {few[sites]}" if sites < len(few) else " and 95 % intervals over sites"
    rows = arms(metrics)[0].rows
    where = (f" on {rows:,} held-out rows" if rows else "") + (f" of {sites} site{'s' * (sites > 1)}" if sites else "")
    text = f"{'; '.join(said)}: {metrics.method}{where}, by NLL{how}."
    return text[0].upper() + text[1:]


def _judged(found: Difference) -> str:
    """How the run does beside a baseline; without an interval, or a wide one of few sites, its figures are compared."""
    unsure = found.low <= 0 <= found.high
    alike = found.lower_at in {0, found.sites} and abs(found.mean) > FAR
    if abs(found.mean) <= LEVEL or (unsure and not alike):
        return "about as good as"
    if unsure or math.isnan(found.low):
        return HIGHER if found.mean > 0 else LOWER
    return "worse than" if found.mean > 0 else "better than"


def _called(name: str, metrics: RunMetrics, difference: float) -> str:
    """A baseline in a sentence, with what the run gains over the mean, or how far what sees all rows is away."""
    if name in IN_ONE_PLACE:
        model = "one model" if name == "pooled" else name
        away = "" if abs(difference) <= LEVEL else f" ({_short(abs(difference))} nats a row)"
        return f"{model} of all rows in one place{away}"
    if name not in PLAINEST:
        return {"local-only": "each site alone"}.get(name, name)
    known = {"r2": "R²", "brier_skill": "Brier skill", "ibs_skill": "Brier skill"}
    skill, words = next(((name, words) for name, words in known.items() if name in metrics.test), ("r2", "R²"))
    return f"the {name} ({words} {number(metrics.test.get(skill)):z.2f})".replace("-", "−")


def beside(metrics: RunMetrics) -> tuple[list[str], list[list[str]]]:
    """Titles, and a row for every baseline: the difference of the NLL, its interval, and where the run's is lower.

    The interval is left out where no score of a single site is known.
    """
    rows = []
    for name, rival in rivals(metrics).items():
        found = paired_difference(metrics, rival)
        width = found.high - found.low if math.isfinite(found.low) else abs(found.mean)
        digits = min(max(2 - math.floor(math.log10(width)), 0), 4) if width > 0 else 4
        mean, low, high = (
            f"{round(v, digits) + 0.0:+.{digits}f}".replace("-", "−") for v in (found.mean, found.low, found.high)
        )
        sites = f"; lower at {found.lower_at} of {found.sites} sites" if found.sites > 1 else ""
        few = f"– ({found.sites} site{'s' * (found.sites != 1)})" if found.sites else "–"
        rows.append([name, mean, f"{low} to {high}{sites}" if math.isfinite(found.low) else few])
    titles = ["", "NLL, difference", "95 % interval over sites"][: 3 if any(row[2] != "–" for row in rows) else 2]
    return (titles, [row[: len(titles)] for row in rows]) if rows else ([], [])


def calibration_verdict(metrics: RunMetrics) -> str:
    """One sentence on whether the 95 % intervals, or the probabilities of classes, hold what they promise."""
    if is_classification(metrics):
        slope, error = (number(metrics.test.get(f"calibration_slope{part}")) for part in ("", "_se"))
        low, high = slope - 1.96 * error, slope + 1.96 * error
        found = f"The slope of its calibration is {show(slope)} (95 % interval {show(low)} to {show(high)})"
        extreme, cautious = (f"1: its probabilities are too {word}" for word in ("extreme", "cautious"))
        judgement = f", below {extreme}" if high < 1 else f", above {cautious}" if low > 1 else "; 1 is right"
        return f"{found}{judgement}." if math.isfinite(slope + error) else ""
    observed, rows = number(metrics.test.get("coverage_95")), arms(metrics)[0].rows
    if not math.isfinite(observed) or rows == 0:
        return ""
    low, high = expected_coverage(rows, 0.95)
    chance = f"the {percent(low)} to {percent(high)} that chance alone allows"
    narrow, wide = (f"{chance}: the intervals are too {word}" for word in ("narrow", "wide"))
    judgement = f"below {narrow}" if observed < low else f"above {wide}" if observed > high else f"within {chance}"
    return f"Its 95 % intervals hold {percent(observed)} of {rows:,} held-out rows, {judgement}."


def convergence_note(metrics: RunMetrics) -> str:
    """One sentence where more training would change predictions; empty where it would not, or nobody knows."""
    if metrics.converged is not False:
        return ""
    facts, rows = metrics.method_details, metrics.data.get("rows", math.nan)
    forecasts = [number(facts.get(name)) / rows for name in ("forecast_rise", "promised_rise")]
    forecasts += [number(facts.get(name)) for name in ("latest_gain_per_row", "forecast_per_row")]
    known = [rise for rise in forecasts if math.isfinite(rise)]
    unsettled = facts.get("unsettled") or {}
    if known and known[0] < MATTERS and not unsettled:
        return ""
    more = f"; a longer one may gain {_short(known[0])} nats a row" if known and known[0] >= MATTERS else ""
    if unsettled:
        name = max(unsettled, key=lambda name: unsettled[name])
        more += f"; `{name}` may be {_short(unsettled[name])} standard deviations from where it is heading"
    return f"Training ended after {metrics.rounds} rounds, before it had converged{more}: raise what limits it"


def answer(run: Run) -> str:
    """The first sentence: the error in units of the target, or right classes, beside comparisons; and the intervals."""
    mine, *others = arms(run.metrics)
    if not mine.rows:
        return "Nothing was held out, so nothing was scored: all rows were trained on."
    classes = is_classification(run.metrics)
    figure = figure_columns(run.metrics)[0]
    scored = [arm for arm in others if math.isfinite(number(arm.figures.get(figure)))]
    chosen = [arm for arm in scored if arm.name not in PLAINEST] or scored
    called = {"local-only": "each site alone", "pooled": "one model of all rows in one place"}
    called |= {"mean of the target": "their mean"}
    found = [f"{_plain(figure, arm)} for {called.get(arm.name, arm.name)}" for arm in chosen]
    beside = f", against {re.sub(r', (?=[^,]+$)', ' and ', ', '.join(found))}" if found else ""
    rows, covered = f"{mine.rows:,} held-out rows", number(mine.figures.get("coverage_95"))
    if classes:
        return f"{_plain(figure, mine)} of {rows} in the right class{beside}."
    held = f"; 95 % intervals held {percent(covered)} of {rows}" if math.isfinite(covered) else f", on {rows}"
    if is_time(run.metrics):
        return f"{_plain(figure, mine)} of pairs of rows have their events in the predicted order{beside}{held}."
    return f"Typical error of {target_of(run)}: {_plain(figure, mine)}{beside}{held}."


def _plain(figure: str, arm: Arm) -> str:
    """A figure in a sentence: a percentage, or three significant digits."""
    value = number(arm.figures.get(figure))
    return percent(value) if figure in PERCENTAGES else f"{float(f'{value:.3g}'):,.9g}".replace("-", "−")


def opening(run: Run) -> list[str]:
    """What a report begins with: the answer, and whether the comparisons are more than chance."""
    return [answer(run)] + ([verdict(run.metrics)] if arms(run.metrics)[0].rows else [])


def notes(metrics: RunMetrics) -> list[str]:
    """What to know besides, a sentence each."""
    calibrated = calibration_verdict(metrics)
    odd = "too " in calibrated
    others = [warning for warning in metrics.warnings if not warning.startswith(FEW_ROWS)]
    warnings = others if any("docs/privacy.md" in warning for warning in others) else metrics.warnings
    said = (*warnings, calibrated if odd else "", convergence_note(metrics))
    return [f"{words[0].upper()}{words[1:]}{'' if words.endswith('.') else '.'}" for words in said if words]


def unlike(runs: Sequence[Run]) -> list[str]:
    """Why the figures of runs must not be compared: other kinds of task, other targets."""
    kinds = {"classes" if is_classification(run.metrics) else "numbers" for run in runs}
    targets = sorted({target_of(run) for run in runs} - {"the target"})
    said = ["some predict classes and some numbers"] if len(kinds) > 1 else []
    return said + ([f"their targets differ: {', '.join(f'`{t}`' for t in targets)}"] if len(targets) > 1 else [])


def doubtful(runs: Sequence[Run]) -> list[str]:
    """What makes a comparison doubtful: other data, other training rows or units, other held-out rows."""
    said = []
    if len(names := sorted({data_name(run.metrics.dataset) for run in runs})) > 1:
        said.append(f"their data sets differ: {', '.join(names)}")
    trained = [_trained_on(run) for run in runs]
    differ = [
        f"{fact} {', '.join(f'{facts_of_run[fact][0]:.6g}' for facts_of_run in trained)}"
        for fact, (_, unit) in trained[0].items()
        if all(fact in known for known in trained) and np.ptp([known[fact][0] for known in trained]) > SAME * unit
    ]
    if differ:
        more = f" and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
        said.append(f"their training tables differ, by rows or units: {'; '.join(differ[:MOST_NAMED])}{more}")
    if len({_held_out(run) for run in runs}) > 1:
        rows = ", ".join(f"{arms(run.metrics)[0].rows:,}" for run in runs)
        said.append(f"their held-out rows differ ({rows} rows): the same `split`, `seed`, sites and data give the same")
    return said


def _trained_on(run: Run) -> dict[str, tuple[float, float]]:
    """What is known of a run's training rows, and in what unit a difference of it is judged."""
    target, data = run.metrics.training_target, run.metrics.data
    facts = {f"{name} of the target": (value, target.get("sd", 1.0)) for name, value in target.items()}
    rows = {"rows": (data["rows"], 1.0)} if data else {}
    columns = (column for column in data.get("columns", ()) if "mean" in column)
    return {**rows, **facts, **{f"mean of `{column['name']}`": (column["mean"], column["sd"]) for column in columns}}


def _held_out(run: Run) -> tuple[object, ...]:
    """Tells apart runs that were scored on other rows, as far as their folders show it."""
    rows = run.predictions
    if rows is not None and "target" in rows:
        target = np.sort(rows["target"].to_numpy(dtype=float))
        return len(target), round(float(target.sum()), 6), round(float(np.square(target).sum()), 4)
    return (arms(run.metrics)[0].rows,)


def side_by_side(runs: Sequence[Run]) -> list[list[str]]:
    """A row of text for every fact and figure, with a cell for each run."""
    columns: list[Facts] = [
        {
            "method": metrics.method,
            "dataset": data_name(metrics.dataset),
            "sites": metrics.sites,
            "rounds": metrics.rounds,
            "communications": metrics.communications,
            "seconds": number(metrics.seconds.get("total")),
            "MB_up": metrics.bytes.get("up", 0) / 1e6,
            "MB_down": metrics.bytes.get("down", 0) / 1e6,
            **{name: number(metrics.test.get(name)) for name in figure_columns(metrics)},
            "rows": arms(metrics)[0].rows,
            "failures": len(metrics.failures),
            **quoted(metrics),
        }
        for metrics in (run.metrics for run in runs)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[title_of(name), *(cell(name, column.get(name)) for column in columns)] for name in names]


def quoted(metrics: RunMetrics) -> dict[str, str]:
    """Effects and ratios with their 95 % intervals, and how well the model fits, where a method has them."""
    facts, found = metrics.method_details, dict[str, str]()
    for row in (*facts.get("effects", ()), *facts.get("random", ())):
        name = ": ".join(filter(None, (row.get("group"), row["effect"])))
        found[f"{name} ({row['kind']})" if "kind" in row else name] = f"{show(row['estimate'])} ({interval(row)})"
        if "ratio" in row:
            found[f"{name} (ratio)"] = f"{show(row['ratio'])} ({show(row['ratio_low'])} to {show(row['ratio_high'])})"
    titles = {"log_likelihood": "log likelihood", "aic": "AIC", "bic": "BIC"}
    return found | {title: f"{facts[name]:.2f}" for name, title in titles.items() if found and name in facts}


def interval(row: Facts) -> str:
    """The interval of an effect, by the profile of the likelihood where it is known."""
    low, high = (number(row.get(f"profile_{end}", row[end])) for end in ("low", "high"))
    return f"{show(low)} to {show(high)}" if math.isfinite(low) and math.isfinite(high) else "–"


def target_of(run: Run) -> str:
    """Name of a run's target."""
    saved = run.saved.schema["target"]["name"] if run.saved is not None else ""
    return str(saved or run.config.get("target") or "the target")


def data_name(dataset: str) -> str:
    """What a data set is called: of files their names, without folders and endings."""
    if paths := tables_in(dataset):
        return ", ".join(table_stem(path) for path in paths) if len(paths) < 5 else f"{len(paths)} tables"
    return table_stem(Path(dataset)) if Path(dataset).is_absolute() or dataset.endswith(SUFFIXES) else dataset


def title_of(column: str) -> str:
    """What a figure is called in a table."""
    return TITLES.get(column, column.replace("_", " "))


def cell(column: str, value: str | float | None) -> str:
    """A figure as text: percentages for shares, four digits otherwise, a dash for what is not known."""
    if isinstance(value, str):
        return value
    if column in PERCENTAGES:
        return percent(number(value))
    if isinstance(value, int):
        return f"{value:,}"
    return show(number(value))


def number(value: float | None) -> float:
    """A figure from JSON, where null stands for what is not a finite number."""
    return math.nan if value is None else float(value)


def show(value: float) -> str:
    """Four significant digits."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.4g}".removesuffix(".")
    return text.replace("-", "−")


def _short(value: float) -> str:
    """Two significant digits, for a sentence."""
    return np.format_float_positional(float(f"{value:.2g}"), trim="-").replace("-", "−")


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"
