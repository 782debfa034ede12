"""Summary of a run's figures: the headline table, sentences for the report, comparisons of runs, figures as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binom

from fedgp_flower.data.tables import SUFFIXES, table_stem, tables_in
from fedgp_flower.errors import many
from fedgp_flower.options import MethodOptions
from fedgp_flower.outcome import COLLAPSE
from fedgp_flower.privacy.policy import FEW_ROWS
from fedgp_flower.run.artefacts import Run, RunMetrics
from fedgp_flower.run.registry import load, methods
from fedgp_flower.typing import Facts

TIMES = {"concordance": "concordance", "nll": "NLL", "ibs": "Brier (IBS)", "survival_error": "survival error"}
TIMES |= {"events": "seen events", "coverage_95": "95 % coverage"}
REGRESSION = {"rmse": "RMSE", "r2": "R²", "nll": "NLL", "crps": "CRPS", "coverage_95": "95 % coverage"}
CLASSIFICATION = {"accuracy": "accuracy", "auc": "AUC", "nll": "NLL", "brier": "Brier", "brier_skill": "skill"}
CLASSIFICATION["calibration_slope"] = "slope"
"""Titles of the figures of each kind of task."""
TITLES = {**TIMES, **REGRESSION, **CLASSIFICATION, "mae": "MAE", "rows": "held-out rows"}
NOTABLE_GAIN = 0.01
"""Expected gain of further training, in nats per row, that gives a note."""
REGRESSIONS = {
    "poisson": "Poisson regression",
    "negative-binomial": "negative binomial regression",
    "binomial": "binomial regression",
}
"""Names of the regression of counts, by likelihood."""
LINEAR = ("linear regression", "logistic regression", "AFT regression", *REGRESSIONS.values())
"""All names of the simplest baseline with inputs."""
WITHOUT_INPUTS = {"mean of the target", "class shares", "Kaplan–Meier curve"}
"""Baselines that use no input."""
CENTRALISED = ("pooled", "gradient boosting")
"""Baselines that see all rows."""
HIGHER, LOWER = "has a higher NLL than", "has a lower NLL than"
UNCLEAR = "is not clearly better or worse than"
"""Comparison whose interval holds zero and large differences."""
NEGLIGIBLE = 0.003
"""Difference of two NLLs, in nats per row, that counts as none."""
LARGE = 0.05
"""Difference, in nats per row, that is reported without a significant interval if its sign is the same at all sites.

An interval that holds zero and larger differences does not say that two models are about as good."""
ROUNDING = 1e-6
"""Relative difference of two means or standard deviations that rounding can cause."""
MAX_DIFFERENCES = 5
PERCENTAGES = ("accuracy", "concordance", "events", "survival_error", "coverage_50", "coverage_90", "coverage_95")


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference per row, 95 % interval (NaN for fewer than three sites), and number of sites."""

    mean: float
    low: float
    high: float
    sites: int
    lower_at: int
    """Number of sites where this run's figure is lower."""


def is_classification(metrics: RunMetrics) -> bool:
    """Return whether the run predicts classes."""
    return "accuracy" in metrics.test


def figure_columns(metrics: RunMetrics) -> tuple[str, ...]:
    """Return the names of the figures for the run's kind of task."""
    return tuple(CLASSIFICATION if is_classification(metrics) else TIMES if is_time(metrics) else REGRESSION)


def is_time(metrics: RunMetrics) -> bool:
    """Return whether the run predicts times to an event."""
    return "concordance" in metrics.test


def baselines(metrics: RunMetrics) -> dict[str, Facts]:
    """Return the figures of the baselines that the run computed, by name, the simplest first."""
    mean = "mean of the target"
    linear = REGRESSIONS.get(str(metrics.data.get("likelihood")), "linear regression")
    if is_classification(metrics):
        mean, linear = "class shares", "logistic regression"
    elif is_time(metrics):
        mean, linear = "Kaplan–Meier curve", "AFT regression"
    named = {
        mean: metrics.mean,
        linear: metrics.linear,
        "local-only": metrics.local_only,
        "pooled": metrics.pooled,
        "gradient boosting": metrics.boosting,
    }
    return {name: figures for name, figures in named.items() if figures is not None and name != metrics.method}


def arms(metrics: RunMetrics) -> dict[str, Facts]:
    """Return figures and held-out ``rows`` of this run, then of its baselines, by name."""
    federated = metrics.method not in methods() or methods()[metrics.method].federated
    name = f"federated ({metrics.method})" if federated else metrics.method
    counts = metrics.calibration.get("pit") or [row[0] for row in metrics.calibration.get("reliability") or ()]
    # single sites have no figures under masks, and none of a model of all rows in one place
    total = sum(int(row["num_examples"]) for row in metrics.per_site) or round(sum(counts))
    found = {name: {**metrics.test, "per_site": metrics.per_site}, **baselines(metrics)}
    return {
        name: {**figures, "rows": sum(int(row["num_examples"]) for row in figures.get("per_site", ())) or total}
        for name, figures in found.items()
    }


def held_out_rows(metrics: RunMetrics) -> int:
    """Return the number of held-out rows of this run."""
    return int(next(iter(arms(metrics).values()))["rows"])


def headline(metrics: RunMetrics) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the headline table: a row per arm, its figures in original units, held-out rows."""
    every = arms(metrics)
    columns = [name for name in (*figure_columns(metrics), "rows") if any(name in known for known in every.values())]
    rows = [[name, *(cell(column, known.get(column)) for column in columns)] for name, known in every.items()]
    return ["", *map(title_of, columns)], rows


def expected_coverage(rows: int) -> tuple[float, float]:
    """Return the central 95 % range of the coverage of calibrated 95 % intervals: Bin(rows, 0.95) / rows."""
    low, high = binom.interval(0.95, rows, 0.95)
    return low / rows, high / rows


def paired_difference(metrics: RunMetrics, baseline: Facts) -> Difference:
    """Return the mean NLL of the run minus that of a baseline, over the sites of both, weighted by held-out rows.

    With w_k the share of rows and d_k the difference at site k, D = Σ w_k d_k. For independent sites
    se² = K/(K−1) Σ w_k² (d_k − D)²; the interval is D ± t_{K−1, 0.975} se.
    """
    other = {(str(row["site"]), row["num_examples"]): number(row.get("nll")) for row in baseline.get("per_site", ())}
    pairs = [
        (int(n), number(row.get("nll")) - other.get((str(row["site"]), n), math.nan))
        for row in metrics.per_site
        for n in [row["num_examples"]]  # a single site scores `pooled` on all held-out rows
    ]
    kept = np.array([(n, d) for n, d in pairs if n > 0 and math.isfinite(d)]).reshape(-1, 2)
    k = len(kept)
    if k == 0:
        return Difference(number(metrics.test.get("nll")) - number(baseline.get("nll")), math.nan, math.nan, 0, 0)
    w, d = kept[:, 0] / kept[:, 0].sum(), kept[:, 1]
    mean = float(w @ d)
    lower_at = int(np.sum(d < 0))
    if k < 3:
        return Difference(mean, math.nan, math.nan, k, lower_at)
    half = float(stdtrit(k - 1, 0.975) * math.sqrt(k / (k - 1) * np.sum(w**2 * (d - mean) ** 2)))
    return Difference(mean, mean - half, mean + half, k, lower_at)


def verdict(metrics: RunMetrics) -> str:
    """Return the second sentence of a report, if rows were held out: the comparison with the baselines by NLL."""
    nll = number(metrics.test.get("nll"))
    if not math.isfinite(nll):
        return "The negative log predictive density on held-out rows is not finite, so the run cannot be judged."
    differences = {name: paired_difference(metrics, found) for name, found in baselines(metrics).items()}
    compared = {name: d for name, d in differences.items() if math.isfinite(d.mean)}
    if not compared:
        return f"{metrics.method} has a held-out NLL of {show(nll)} nats per row; no baseline was computed."
    weaker = sorted((name for name in CENTRALISED if name in compared), key=lambda name: compared[name].mean)[:-1]
    clauses = []
    for comparison in ("is worse than", HIGHER, "is better than", "is about as good as", UNCLEAR, LOWER):
        names = [name for name, d in compared.items() if _comparison(d) == comparison and name not in weaker]
        described = [_describe_baseline(name, metrics, compared[name].mean) for name in names]
        clauses += [f"{comparison} {_listed(described)}"] if names else []
    sites = max(difference.sites for difference in differences.values())
    few = ("no site has a score", "1 site gives none", "2 sites give none")
    how = f" without intervals: {few[sites]}" if sites < len(few) else " and 95 % intervals over sites"
    rows = held_out_rows(metrics)
    held_out = f"{rows:,} held-out rows" if rows else "held-out rows"
    where = f"{held_out} of {many(sites, 'site')}" if sites else held_out
    return f"On {where}, {metrics.method} {'; it '.join(clauses)}. Comparisons are by NLL{how}."


def _comparison(found: Difference) -> str:
    """Return the words of a comparison. Without a significant interval they only say which NLL is lower."""
    uncertain = found.low <= 0 <= found.high
    same_sign = found.lower_at in {0, found.sites} and abs(found.mean) > LARGE
    if uncertain and not same_sign and max(-found.low, found.high) > LARGE:
        return UNCLEAR
    if abs(found.mean) <= NEGLIGIBLE or (uncertain and not same_sign):
        return "is about as good as"
    if uncertain or math.isnan(found.low):
        return HIGHER if found.mean > 0 else LOWER
    return "is worse than" if found.mean > 0 else "is better than"


def _describe_baseline(name: str, metrics: RunMetrics, difference: float) -> str:
    """Return the words for a baseline, with the run's skill over the mean or the difference from a centralised one."""
    if name in CENTRALISED:
        model = "one model" if name == "pooled" else name
        gap = "" if abs(difference) <= NEGLIGIBLE else f" ({short(abs(difference))} nats a row)"
        return f"{model} of all rows in one place{gap}"
    if name not in WITHOUT_INPUTS:
        return {"local-only": "each site alone"}.get(name, name)
    known = {"r2": "R²", "brier_skill": "Brier skill", "ibs_skill": "Brier skill"}
    skill, words = next(((name, words) for name, words in known.items() if name in metrics.test), ("r2", "R²"))
    return f"the {name} ({words} {number(metrics.test.get(skill)):z.2f})".replace("-", "−")


def baseline_differences(metrics: RunMetrics) -> tuple[list[str], list[list[str]]]:
    """Return titles and a row for every baseline: the NLL difference, and its interval if sites have scores."""
    rows = []
    for name, baseline in baselines(metrics).items():
        found = paired_difference(metrics, baseline)
        width = found.high - found.low if math.isfinite(found.low) else abs(found.mean)
        digits = min(max(2 - math.floor(math.log10(width)), 0), 4) if width > 0 else 4
        mean, low, high = (
            f"{round(v, digits) + 0.0:+.{digits}f}".replace("-", "−") for v in (found.mean, found.low, found.high)
        )
        sites = f"; lower at {found.lower_at} of {found.sites} sites" if found.sites > 1 else ""
        few = f"– ({many(found.sites, 'site')})" if found.sites else "–"
        rows.append([name, mean, f"{low} to {high}{sites}" if math.isfinite(found.low) else few])
    titles = ["", "NLL, difference", "95 % interval over sites"][: 3 if any(row[2] != "–" for row in rows) else 2]
    return (titles, [row[: len(titles)] for row in rows]) if rows else ([], [])


def calibration_verdict(metrics: RunMetrics) -> str:
    """Return a sentence on the calibration of the 95 % intervals or of the class probabilities."""
    if is_classification(metrics):
        slope, error = (number(metrics.test.get(f"calibration_slope{part}")) for part in ("", "_se"))
        low, high = slope - 1.96 * error, slope + 1.96 * error
        found = f"The slope of its calibration is {show(slope)} (95 % interval {show(low)} to {show(high)})"
        extreme, cautious = (f"1: its probabilities are too {word}" for word in ("extreme", "cautious"))
        judgement = f", below {extreme}" if high < 1 else f", above {cautious}" if low > 1 else "; 1 is right"
        return f"{found}{judgement}." if math.isfinite(slope + error) else ""
    observed, rows = number(metrics.test.get("coverage_95")), held_out_rows(metrics)
    if not math.isfinite(observed) or rows == 0:
        return ""
    low, high = expected_coverage(rows)
    chance = f"the {percent(low)} to {percent(high)} that chance alone allows of independent rows"
    narrow, wide = (f"{chance}: the intervals are too {word}" for word in ("narrow", "wide"))
    judgement = f"below {narrow}" if observed < low else f"above {wide}" if observed > high else f"within {chance}"
    return f"Its 95 % intervals hold {percent(observed)} of {rows:,} held-out rows, {judgement}."


def convergence_note(metrics: RunMetrics) -> str:
    """Return a sentence if further training is expected to change predictions; otherwise an empty string."""
    if metrics.converged is not False:
        return ""
    facts, rows = metrics.method_details, metrics.data.get("rows", math.nan)
    forecasts = [number(facts.get(name)) / rows for name in ("forecast_rise", "promised_rise")]
    forecasts += [number(facts.get(name)) for name in ("latest_gain_per_row", "forecast_per_row")]
    known = [rise for rise in forecasts if math.isfinite(rise)]
    rise = max(known, default=0.0)  # a forecast from gains of which one was huge is too small
    unsettled = facts.get("unsettled") or {}
    if known and rise < NOTABLE_GAIN and not unsettled:
        return ""
    more = f"; more training may gain {short(rise)} nats a row" if rise >= NOTABLE_GAIN else ""
    if unsettled:
        name = max(unsettled, key=lambda name: unsettled[name])
        more += f"; `{name}` may be {short(unsettled[name])} standard deviations from its limit"
    ended = f"Training ended after {metrics.rounds} rounds, before it had converged{more}"
    return f"{ended}: raise {_limits_of(metrics.method, facts)}"


def _limits_of(method: str, facts: Facts) -> str:
    """Return the keys that limit how long a method trains; a run that reads other budgets has them in its facts."""
    limits = ["num-server-rounds"]
    if method in methods():
        options: type[MethodOptions] = load(methods()[method].options)
        limits = [*(f"{options.table}.{name}" for name in facts.get("budgets", sorted(options.budgets))), *limits]
    return " or ".join(f"`{key}`" for key in limits)


def answer(run: Run) -> str:
    """Return the first sentence of a report: error or accuracy, the same of the baselines, coverage of intervals."""
    mine, others, held_out = run.metrics.test, baselines(run.metrics), held_out_rows(run.metrics)
    if not held_out:
        return "Nothing was held out, so nothing was scored: all rows were trained on."
    figure = figure_columns(run.metrics)[0]
    scored = [name for name, known in others.items() if math.isfinite(number(known.get(figure)))]
    chosen = [name for name in scored if name not in WITHOUT_INPUTS] or scored
    names = {"local-only": "each site alone", "pooled": "one model of all rows in one place"}
    names |= {"mean of the target": "their mean"}
    found = [f"{_in_words(figure, others[name])} for {names.get(name, name)}" for name in chosen]
    compared = f", against {_listed(found)}" if found else ""
    rows, coverage = f"{held_out:,} held-out rows", number(mine.get("coverage_95"))
    if is_classification(run.metrics):
        return f"{_in_words(figure, mine)} of {rows} in the right class{compared}."
    held = f"; 95 % intervals held {percent(coverage)} of {rows}" if math.isfinite(coverage) else f", on {rows}"
    if is_time(run.metrics):
        return f"{_in_words(figure, mine)} of pairs of rows have their events in the predicted order{compared}{held}."
    return f"Typical error of {target_of(run)}: {_in_words(figure, mine)}{compared}{held}."


def _in_words(figure: str, known: Facts) -> str:
    """Return a figure as a percentage or with three significant digits."""
    value = number(known.get(figure))
    return percent(value) if figure in PERCENTAGES else f"{float(f'{value:.3g}'):,.9g}".replace("-", "−")


def opening(run: Run) -> list[str]:
    """Return the first sentences of a report: a collapse, the error, and the comparison with the baselines."""
    collapsed = [_sentence(warning) for warning in run.metrics.warnings if warning.startswith(COLLAPSE)]
    return [*collapsed, answer(run)] + ([verdict(run.metrics)] if held_out_rows(run.metrics) else [])


def notes(metrics: RunMetrics) -> list[str]:
    """Return notes of the method, warnings that do not open the report, miscalibration and missing convergence."""
    calibration = calibration_verdict(metrics)
    others = [warning for warning in metrics.warnings if not warning.startswith(FEW_ROWS)]
    warnings = others if any("docs/privacy.md" in warning for warning in others) else metrics.warnings
    found = (
        *metrics.method_details.get("notes", ()),
        *warnings,
        calibration if "too " in calibration else "",
        convergence_note(metrics),
    )
    return [_sentence(words) for words in found if words and not words.startswith(COLLAPSE)]


def _listed(words: Sequence[str]) -> str:
    """Return words with commas, and `and` before the last."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _sentence(words: str) -> str:
    """Return the words as a sentence."""
    return f"{words[0].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


def incomparable(runs: Sequence[Run]) -> list[str]:
    """Return why the figures of runs must not be compared: different kinds of task or targets."""
    kinds = {"classes" if is_classification(run.metrics) else "numbers" for run in runs}
    targets = sorted({target_of(run) for run in runs} - {"the target"})
    reasons = ["some predict classes and some numbers"] if len(kinds) > 1 else []
    return reasons + ([f"their targets differ: {', '.join(f'`{t}`' for t in targets)}"] if len(targets) > 1 else [])


def comparison_warnings(runs: Sequence[Run]) -> list[str]:
    """Return why a comparison is doubtful: different data sets, training rows, units or held-out rows."""
    warnings = []
    if len(names := sorted({data_name(run.metrics.dataset) for run in runs})) > 1:
        warnings.append(f"their data sets differ: {'; '.join(names)}")
    trained = [_training_summary(run) for run in runs]
    differ = [
        f"{fact} {', '.join(f'{facts_of_run[fact][0]:.6g}' for facts_of_run in trained)}"
        for fact, (_, unit) in trained[0].items()
        if all(fact in known for known in trained) and np.ptp([known[fact][0] for known in trained]) > ROUNDING * unit
    ]
    if differ:
        more = f" and {len(differ) - MAX_DIFFERENCES} more" if len(differ) > MAX_DIFFERENCES else ""
        warnings.append(f"their training tables differ, by rows or units: {'; '.join(differ[:MAX_DIFFERENCES])}{more}")
    counts, targets = {held_out_rows(run.metrics) for run in runs}, {_held_out_targets(run) for run in runs} - {None}
    if len(counts) > 1 or len(targets) > 1:
        rows = ", ".join(f"{held_out_rows(run.metrics):,}" for run in runs)
        warnings.append(f"their held-out rows differ ({rows} rows): use the same `split`, `seed`, sites and data")
    details = [run.metrics.method_details for run in runs]
    if len({frozenset(row["effect"] for row in facts["effects"]) for facts in details if restricted(facts)}) > 1:
        warnings.append("AIC, BIC and log likelihood by REML compare models with the same fixed effects; theirs differ")
    return warnings


def _training_summary(run: Run) -> dict[str, tuple[float, float]]:
    """Return known figures of a run's training rows, each with the unit of its rounding."""
    target, data = run.metrics.training_target, run.metrics.data
    facts = {f"{name} of the target": (value, target.get("sd", 1.0)) for name, value in target.items()}
    fitted = run.metrics.method_details.get("rows", data.get("rows"))
    rows = {"rows": (fitted, 1.0), "lost sites": (data["sites"] - run.metrics.sites, 1.0)} if data else {}
    columns = (column for column in data.get("columns", ()) if "mean" in column)
    means = {f"mean of `{column['name']}`": (column["mean"], column["sd"] or 1.0) for column in columns}
    return {**rows, **facts, **means}


def _held_out_targets(run: Run) -> tuple[float, ...] | None:
    """Return count and moments of a run's held-out targets; None if it kept no predictions."""
    rows = run.predictions
    if rows is None or "target" not in rows:
        return None
    target = np.sort(rows["target"].to_numpy(dtype=float))
    return len(target), round(float(target.sum()), 6), round(float(np.square(target).sum()), 4)


def side_by_side(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for every fact and figure, with a cell for each run."""
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
            "rows": held_out_rows(metrics),
            "failures": len(metrics.failures),
            **quoted(metrics),
        }
        for metrics in (run.metrics for run in runs)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[title_of(name), *(cell(name, column.get(name)) for column in columns)] for name in names]


def quoted(metrics: RunMetrics) -> dict[str, str]:
    """Return effects and ratios with 95 % intervals, and measures of fit, of a method that has them."""
    facts, found = metrics.method_details, dict[str, str]()
    for row in (*facts.get("effects", ()), *facts.get("random", ())):
        name = ": ".join(filter(None, (row.get("group"), row["effect"])))
        found[f"{name} ({row['kind']})" if "kind" in row else name] = f"{show(row['estimate'])} ({interval(row)})"
        if "ratio" in row:
            found[f"{name} (ratio)"] = f"{show(row['ratio'])} ({ends(row['ratio_low'], row['ratio_high'])})"
    titles = {"log_likelihood": "log likelihood", "aic": "AIC", "bic": "BIC"}
    by = restricted(facts)
    return found | {
        f"{title}{by}": f"{facts[name]:.2f}".replace("-", "−")
        for name, title in titles.items()
        if found and name in facts
    }


def restricted(facts: Facts) -> str:
    """Return what follows the title of a measure of fit: `` (REML)`` for a restricted likelihood."""
    return " (REML)" if facts.get("criterion") == "REML" else ""


def interval(row: Facts) -> str:
    """Return the interval of an effect as text, the profile likelihood interval if it is known."""
    low, high = (number(row.get(f"profile_{end}", row[end])) for end in ("low", "high"))
    return ends(low, high)


def ends(low: float | None, high: float | None) -> str:
    """Return an interval as text, with a word for an end that is unknown; a dash if both are."""
    texts = [show(low), show(high)]
    return "–" if texts == ["–", "–"] else " to ".join(text.replace("–", "unknown") for text in texts)


def target_of(run: Run) -> str:
    """Return the name of a run's target."""
    saved = run.saved.schema["target"]["name"] if run.saved is not None else ""
    return str(saved or run.metrics.data.get("target") or run.config.get("target") or "the target")


def data_name(dataset: str) -> str:
    """Return the name of a data set; files are named without folders and endings."""
    if paths := tables_in(dataset):
        return ", ".join(table_stem(path) for path in paths) if len(paths) < 5 else f"{len(paths)} tables"
    return table_stem(Path(dataset)) if Path(dataset).is_absolute() or dataset.endswith(SUFFIXES) else dataset


def title_of(column: str) -> str:
    """Return the title of a figure in a table."""
    return TITLES.get(column, column.replace("_", " "))


def cell(column: str, value: str | float | None) -> str:
    """Format a figure: shares as percentages, others with four digits, a dash if it is unknown."""
    if isinstance(value, str):
        return value
    if column in PERCENTAGES:
        return percent(number(value))
    if isinstance(value, int):
        return f"{value:,}"
    return show(number(value))


def number(value: float | None) -> float:
    """Return a figure from JSON, where null means NaN."""
    return math.nan if value is None else float(value)


def show(value: float | None) -> str:
    """Format a number with four significant digits; a dash if it is unknown or infinite."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.4g}".removesuffix(".")
    return text.replace("-", "−")


def short(value: float, digits: int = 2) -> str:
    """Format a number with so many significant digits, without an exponent."""
    return np.format_float_positional(float(f"{value:.{digits}g}"), trim="-").replace("-", "−")


def percent(share: float) -> str:
    """Format a share as a percentage with one decimal."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"
