"""The self-contained page ``report.html``, computed from the files of a run."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from fedgp_flower import agreement
from fedgp_flower.errors import many
from fedgp_flower.files import write_bytes
from fedgp_flower.options import REAL_VALUED, SECOND_COLUMN
from fedgp_flower.run import figures, summary
from fedgp_flower.run.artefacts import Run, RunMetrics, read_run
from fedgp_flower.run.dependence import MOST, effects, relevances, walks
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import load
from fedgp_flower.run.report_template import STYLE, TEMPLATE
from fedgp_flower.run.summary import cell, number, percent, show, title_of
from fedgp_flower.scores import RANK_BINS, RANK_REACH
from fedgp_flower.typing import Array

CURVES = 5
"""Largest number of survival curves."""
_HTML = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
PAGE = _HTML.from_string(TEMPLATE)


@dataclass(frozen=True, slots=True)
class Panel:
    """A section of a report: a figure, or HTML with escaped data."""

    title: str
    body: Figure | str
    caption: str
    name: str = ""
    """Name of the image file; empty: from the title."""

    def render(self, plots: Path) -> Markup:
        """Return the HTML, with a figure as SVG, and save the figure as PNG in ``plots``."""
        if isinstance(self.body, str):
            return Markup(self.body) + Markup('<p class="note">{}</p>').format(_with_code(self.caption))  # noqa: S704
        name = self.name or "-".join(re.findall(r"[a-z0-9]+", self.title.lower())) or "panel"
        bitmap, drawing = io.BytesIO(), io.BytesIO()
        self.body.savefig(bitmap, format="png", metadata={"Software": None})
        write_bytes(plots / f"{name}.png", bitmap.getvalue())
        self.body.set_layout_engine("none")  # the places are known now
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedgp"}):  # text as text, reproducible ids
            self.body.savefig(drawing, format="svg", metadata={"Date": None})
        source = f"data:image/svg+xml;base64,{base64.b64encode(drawing.getvalue()).decode()}"
        width = math.ceil(self.body.get_figwidth() * 100)
        broad = Markup(' class="broad"' * (width > 500))  # noqa: S704
        image = Markup('<img src="{}" width="{}" alt="{}">').format(source, width, self.title)
        caption = Markup("<figcaption>{}</figcaption>").format(_with_code(self.caption))
        return Markup("<figure{}>\n{}\n{}</figure>").format(broad, image, caption)


def html_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Return rows as an HTML table, for instance for the body of a :class:`Panel`."""
    cells = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in titles)
    return Markup(f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>")  # noqa: S704


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` and ``plots/*.png`` of a finished run, with its method's panels. Return the page's path."""
    run = read_run(run_folder)
    special = load(run.method.panels)(run) if run.method.panels else ()
    return write_page(run, run.posterior, [*_dependence(run), *_relevance(run), *special])


def write_page(run: Run, predictor: Predictor | None = None, panels: Sequence[Panel] = ()) -> Path:
    """Write the page and its figures; the predictor gives a curve over one input or a map over two."""
    plots = run.path / "plots"
    plots.mkdir(exist_ok=True)
    metrics, target, units = run.metrics, summary.target_of(run), f"units of {summary.target_of(run)}"
    failing = len({str(row["site"]) for row in metrics.failures})
    nll = [
        {metrics.labels.get(str(row["site"]), str(row["site"])): number(row.get("nll")) for row in rows}
        for rows in (metrics.per_site, (metrics.local_only or {}).get("per_site", ()))
    ]
    with warnings.catch_warnings():
        # Labels from data may use a script that the font lacks; matplotlib draws boxes and warns.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        page = PAGE.render(
            run=run,
            metrics=metrics,
            plots=plots,
            table=html_table,
            agreement=agreement,
            title=f"{summary.data_name(metrics.dataset)}: {target} by {metrics.method}",
            facts=_facts(run),
            opening=[_sentence_html(sentence) for sentence in summary.opening(run)],
            notes=[_sentence_html(sentence) for sentence in summary.notes(metrics)],
            failed=f"{many(len(metrics.failures), 'failure')} at {many(failing, 'site')}; see the list below.",
            headline=summary.headline(metrics),
            note=_headline_note(metrics, units),
            differences=summary.baseline_differences(metrics),
            predictions=list(_predictions(run, predictor, target)),
            calibration=_calibration(run),
            convergence=_picture(
                "convergence",
                figures.convergence(run.history, summary.baselines(metrics), units),
                "Figures after each round."
                + " The objective of a visit is that of the visited site's rows." * ("visits" in run.history),
            ),
            sites=_picture("sites", figures.sites(*nll), "Held-out NLL of each site, in nats per row."),
            site_table=_site_table(metrics),
            cost=_picture("cost", figures.cost(run.history), "Cumulative over rounds, summed over sites."),
            totals=_totals(metrics),
            extra=panels,
            style=Markup(STYLE),  # noqa: S704
        )
    path = run.path / "report.html"
    write_bytes(path, _with_contents(page).encode())
    return path


def _dependence(run: Run) -> list[Panel]:
    """Return the panel of the outcome along the most important columns, if there is a posterior."""
    predictor = run.posterior
    if predictor is None or not (found := effects(predictor)):
        return []
    caption = (
        "Each panel varies one column (numbers over the central 95 % of all rows) and keeps all others at their means."
        f" The {MOST} columns with the largest effect at most, largest first. Median and 95 % interval of the outcome"
        " without noise, from the posterior. These are associations, not causal effects."
    )
    target, levels = summary.target_of(run), predictor.preparation.target.levels
    words = {"exposure": "rate of ", "trials": "probability of ", "event": "characteristic time of "}
    kind = words.get(SECOND_COLUMN.get(predictor.saved.likelihood, ""), "")
    outcome = f"probability of {levels[-1]}" if levels else f"{kind}{target}"
    if predictor.saved.likelihood == "ordinal":
        outcome = f"mean of {target}"
    return [Panel("What predictions depend on", figures.effects(found, outcome), caption)]


def _relevance(run: Run) -> list[Panel]:
    """Return the panel of lengthscales with intervals, if the posterior has several inputs."""
    found = relevances(run)
    if not found:
        return []
    first = next(iter(found.values()))
    hidden, how = len(first) - figures.MAX_INPUTS, first.attrs["how"]
    caption = (
        "Lengthscales in standard deviations of the input: the shorter, the more relevant. Data span about 4, so inputs"
        " with much longer lengthscales hardly matter."
        f"{f' The {hidden} longest are left out.' if hidden > 0 else ''}"
        f" {f'Bars: 95 % intervals, by {how}.' if how else 'This run has no intervals for them.'}"
    )
    if stepped := [f"{name} ({size:.2g})" for name, size in walks(run).head(figures.MAX_INPUTS).items()]:
        caption += (
            " Some inputs also act by steps at common values, whatever their lengthscale. The sd of all steps together,"
            f" for f: {', '.join(stepped)}."
        )
    return [Panel("Relevance of inputs", figures.relevance(found), caption)]


def _with_contents(page: str) -> str:
    """Return the page with links to every chapter inside ``<nav></nav>``."""
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    links = " · ".join(f'<a href="#chapter-{number}">{title}</a>' for number, title in enumerate(titles))
    numbers = itertools.count()
    body = re.sub("<h2>", lambda found: f'<h2 id="chapter-{next(numbers)}">', page)
    return body.replace("<nav></nav>", f"<nav>{links}</nav>")


def _sentence_html(sentence: str) -> Markup:
    """Return a sentence as HTML with its keys as code."""
    text = _with_code(sentence[:1].upper() + sentence[1:])
    return Markup(re.sub(r"(?<=\d) %", "\u00a0%", text))  # noqa: S704


def _with_code(words: str) -> Markup:
    """Return words as HTML with what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))  # noqa: S704


def _facts(run: Run) -> str:
    m = run.metrics
    sent = (m.bytes.get("up", 0) + m.bytes.get("down", 0)) / 1e6
    total = number(m.seconds.get("total"))
    rounds = many(m.rounds, "round") + ", converged" * bool(m.converged)
    counts = f"{many(m.sites, 'site')} · {rounds} · {many(m.communications, 'communication')}"
    trips = f"{many(m.exchanges, 'exchange')} · " if m.exchanges else ""
    return f"{run.path.name} · {counts} · {trips}{show(sent)} MB sent · {show(total)} s"


def _headline_note(metrics: RunMetrics, units: str) -> str:
    """Return the explanation of the headline's figures."""
    n = summary.held_out_rows(metrics)
    if summary.is_time(metrics):
        note = (
            "Concordance: share of pairs of rows of a site with events in the predicted order. NLL in nats per row and"
            " integrated Brier score, weighted for censoring: smaller is better. Survival error: largest difference of"
            " predicted and observed survival at the quartiles of time."
        )
    elif summary.is_classification(metrics):
        ranked = (
            f" AUC and calibration slope are computed from log odds in steps of {2 * RANK_REACH / RANK_BINS:g}, summed"
            " over sites; a slope below 1: too extreme probabilities."
        )
        note = (
            f"NLL in nats per row; NLL and Brier score: smaller is better.{ranked if 'auc' in metrics.test else ''}"
            " Skill: 1 − Brier score / Brier score of the class shares."
        )
    else:
        low, high = map(percent, summary.expected_coverage(n) if n else (0.0, 1.0))
        counts = metrics.data.get("likelihood") in summary.REGRESSIONS
        rates = " for each unit of exposure or trial, if there is such a column" if counts else ""
        note = (
            f"RMSE and CRPS in {units}, NLL in nats per row for a noisy observation; smaller is better."
            f" R² compares with the mean of the training rows{rates}."
            f"{f' With {n:,} independent rows, calibrated 95 % intervals hold {low} to {high}.' if n else ''}"
        )
    if len({known["rows"] for known in summary.arms(metrics).values()}) > 1:
        note += " The rows of this table were scored on different numbers of held-out rows, so compare them with care."
    return note


def _predictions(run: Run, predictor: Predictor | None, target: str) -> Iterator[Panel]:
    """Yield the panels of predictions: a curve, a map, observed against predicted, or class probabilities."""
    rows = run.predictions
    levels = list(map(str, run.saved.schema["target"].get("levels", ()))) if run.saved else []
    if summary.is_classification(run.metrics) or levels:  # levels: also a run without held-out rows
        if rows is not None:
            figure = figures.probabilities(rows, levels or ("class 0", "class 1"))
            yield Panel("Predicted probability by observed class", figure, "All held-out rows.", "probabilities")
        if ranks := run.metrics.calibration.get("ranks"):
            figure = figures.roc(ranks, number(run.metrics.test.get("auc")))
            yield Panel("Sensitivity against false alarms (ROC)", figure, "From counts, summed over sites.", "roc")
        if counts := run.metrics.method_details.get("confusion"):
            caption = "Held-out rows of all sites. Cells too small to leave a site are omitted."
            yield Panel("Confusion of classes", figures.confusion(np.array(counts), levels), caption)
        return
    shown = "" if rows is None or len(rows) <= figures.MAX_POINTS else f" {figures.MAX_POINTS} of {len(rows):,} rows."
    names, spans = _inputs(run)
    if run.saved is not None and SECOND_COLUMN.get(run.saved.likelihood) == "event":
        yield from _survival(run, predictor, target)
        return
    if len(names) == 1 and predictor is not None:
        figure = figures.curve(rows, predictor, np.linspace(spans[0, 0], spans[0, 1], 400), (*names, target))
        yield Panel("Predictive mean and 95 % interval", figure, f"For a noisy observation.{shown}", "curve")
    elif len(names) == 2 and predictor is not None:
        figure = figures.surface(rows, predictor, spans, (*names, target))
        caption = f"For a noisy observation. Dots: held-out rows, on the left coloured by the observed value.{shown}"
        yield Panel("Maps of predictive mean and sd", figure, caption, "map")
    if rows is not None and (len(names) != 1 or predictor is None):
        figure = figures.parity(rows, target, run.config.get("model.likelihood") == "poisson")
        caption = f"Bars: 95 % predictive intervals; dots: observed values.{shown}"
        yield Panel("Observed against predicted, and residuals", figure, caption, "parity")


def _survival(run: Run, predictor: Predictor | None, target: str) -> Iterator[Panel]:
    """Yield survival curves along the most important column, and the calibration of survival."""
    follow_up = None if predictor is None else predictor.preparation.follow_up
    if predictor is not None and follow_up is not None and hasattr(predictor.standardised, "survival"):
        grid, curves, column = np.linspace(0, 1, 101)[1:] * follow_up.grid[-1], {}, ""
        for effect in effects(predictor, 1):
            column, last = effect.name, len(effect.values) - 1
            few = (
                range(last + 1)[:CURVES] if effect.levels else (round(0.1 * last), round(0.5 * last), round(0.9 * last))
            )
            names = [effect.levels[place] if effect.levels else summary.short(effect.values[place], 4) for place in few]
            assert effect.x is not None
            found = predictor.standardised.survival(effect.x[list(few)], grid.tolist())
            curves = {f"{column} {name}": found[:, place] for place, name in enumerate(names)}
        caption = f"Predicted curves: `{column}` as named, all other columns at their means." if curves else ""
        yield Panel("Survival", figures.survival(follow_up, curves, grid, target), caption, "survival")
    if tables := run.metrics.calibration.get("survival"):
        times = None if follow_up is None else follow_up.quartiles.tolist()
        caption = (
            "Survival of held-out rows at the quartiles of the observed event times. On the diagonal, predictions are"
            " calibrated. Inverse probability weights account for censored rows."
        )
        yield Panel("Calibration of survival", figures.survival_calibration(tables, times), caption)


def _inputs(run: Run) -> tuple[list[str], Array]:
    """Return names of up to two encoded inputs and their plotting ranges [D, 2]; empty for more inputs."""
    if run.predictions is not None:
        x = run.predictions.filter(regex=r"^input\.")
        low, high = x.min().to_numpy(dtype=float), x.max().to_numpy(dtype=float)
        margin = np.where(high > low, 0.04 * (high - low), 0.5)
        return [name.removeprefix("input.") for name in x.columns], np.stack([low - margin, high + margin], axis=1)
    features = run.saved.schema["features"] if run.saved is not None else ()
    if run.saved is None or not 1 <= len(features) <= 2 or any(item["kind"] != "numeric" for item in features):
        return [], np.empty((0, 2))
    mean, scale = (run.saved.arrays[f"input.{name}"] for name in ("mean", "scale"))
    return [str(item["name"]) for item in features], np.stack([mean - 2.5 * scale, mean + 2.5 * scale], axis=1)


def _picture(name: str, figure: Figure | None, caption: str, title: str = "") -> Panel | None:
    return None if figure is None else Panel(title or name.capitalize(), figure, caption, name)


def _calibration(run: Run) -> Panel | None:
    metrics = run.metrics
    if table := metrics.calibration.get("reliability"):
        caption = "On the diagonal, observed frequencies equal predicted probabilities."
        ranks = metrics.calibration.get("ranks", ())
        caption += "" if ranks else " The probability is that of the most probable class."
        drawn = figures.reliability(table, ranks)
        return _picture("calibration", drawn, caption, "Reliability of class probabilities")
    pit = metrics.calibration.get("pit") or ()
    caption = (
        "Left: intervals are too narrow below the diagonal and too wide above it. Right: flat if calibrated; a U shape"
        " means too narrow, a hump too wide, a slope biased. Grey: 95 % range of each point for independent rows."
    )
    caption += _by_sd(run)
    figure = figures.calibration(pit, number(metrics.test.get("coverage_95"))) if sum(pit) else None
    return _picture("calibration", figure, caption, "Calibration curve and PIT histogram")


def _by_sd(run: Run) -> str:
    """Return a sentence on coverage by thirds of the predicted sd, for numeric targets with known rows."""
    rows = run.predictions
    if rows is None or run.config.get("model.likelihood", "gaussian") not in REAL_VALUED:
        return ""
    if len(rows) < 30:
        return ""
    rows = rows.sort_values("sd")
    half = 1.96 * rows["sd"]
    inside = rows["target"].between(rows.get("low", rows["mean"] - half), rows.get("high", rows["mean"] + half))
    small, middle, large = (percent(float(third.mean())) for third in np.array_split(inside.to_numpy(float), 3))
    return (
        f" The 95 % intervals hold {small} of the third of rows with the smallest sd, {middle} and {large} of the"
        " others."
    )


def _site_table(metrics: RunMetrics) -> tuple[list[str], list[list[str]]]:
    local = {str(row["site"]): row for row in (metrics.local_only or {}).get("per_site", ())}
    columns = [
        name for name in summary.figure_columns(metrics) if name != "crps" and name in (metrics.per_site or [{}])[0]
    ]
    known = ["training_rows"] if any("training_rows" in row for row in metrics.per_site) else []
    rows = [
        [
            metrics.labels[str(row["site"])],
            *(cell(name, row.get(name)) for name in (*known, "num_examples", *columns)),
            *(cell(name, local.get(str(row["site"]), {}).get(name)) for name in columns if local),
        ]
        for row in metrics.per_site
    ]
    titles = ["site", *map(title_of, known), "held-out rows", *map(title_of, columns)]
    return [*titles, *(f"local-only {title_of(name)}" for name in columns if local)], rows


def _totals(metrics: RunMetrics) -> list[tuple[str, str]]:
    exchanges = max(metrics.rounds, 1) * max(metrics.sites, 1)
    names = {"up": "sent, sites to server", "down": "sent, server to sites"}
    sent = [
        (names.get(way, way), f"{show(count / 1e6)} MB ({show(count / exchanges / 1e3)} kB per site and round)")
        for way, count in metrics.bytes.items()
    ]
    parts = {"total": "time, total", "sites": "computing at the sites, added up"}
    masked = "privacy" in metrics.method_details  # sites do not report their seconds under masks
    known = {name: value for name, value in metrics.seconds.items() if name != "sites" or not masked}
    times = ((parts.get(name, f"time, {name}"), value) for name, value in known.items())
    return [*sent, *((name, f"{show(number(value))} s") for name, value in times)]
