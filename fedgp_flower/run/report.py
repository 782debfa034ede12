"""The page people look at: ``report.html``, self-contained, every number computed from the files of the run."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from fedgp_flower.agreement import OVERVIEW_TITLES, overview_lines, overview_rows
from fedgp_flower.files import write_bytes
from fedgp_flower.run import figures
from fedgp_flower.run.artefacts import RunData, RunMetrics, read_run
from fedgp_flower.run.dependence import MOST, effects, relevances
from fedgp_flower.run.figures import Predictor
from fedgp_flower.run.predict import Predictor as SavedPredictor
from fedgp_flower.run.predict import row_of, why_no_posterior
from fedgp_flower.run.registry import load
from fedgp_flower.run.report_template import STYLE, TEMPLATE
from fedgp_flower.run.summary import (
    against,
    arms,
    cell,
    data_name,
    expected_coverage,
    figure_columns,
    headline,
    is_classification,
    number,
    percent,
    rivals,
    sentences,
    show,
    text_rows,
    title_of,
)
from fedgp_flower.scores import RANK_BINS, RANK_REACH
from fedgp_flower.typing import Array

FAILURE_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Panel:
    """A section a method adds: a figure, or HTML in which the method has escaped whatever comes from data."""

    title: str
    body: Figure | str
    caption: str


@dataclass(frozen=True, slots=True)
class _Drawn:
    title: str
    caption: str
    source: str = ""
    """The picture as a ``data:`` address."""
    width: int = 0
    html: str = ""


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` and ``plots/*.png`` of a finished run with all its method adds; returns the page's path.

    Raises:
        RunError: when a file of the run is missing or unreadable.
    """
    run = read_run(run_folder)
    predictor = None if why_no_posterior(run) else SavedPredictor.of(run)
    panels = row_of(run).panels
    special = load(panels)(run) if panels else ()
    general = [*_dependence(run, predictor), *_relevance(run)]
    return write_page(run, predictor, [*general, *special])


def _dependence(run: RunData, predictor: SavedPredictor | None) -> list[Panel]:
    """Along the columns that matter most, where the posterior tells."""
    found = [] if predictor is None else effects(predictor)
    caption = (
        "One column is moved (numbers between values that about 95 % of all rows lie between), all others stay at their"
        " means; those that move the outcome most come first, at most"
        f" {MOST}. From the posterior alone: median and 95 % interval of the outcome without noise. It is what the"
        " model has learned, not what causes what."
    )
    if not found or predictor is None:
        return []
    levels, kind = predictor.preparation.target.levels, predictor.saved.likelihood
    outcome = f"probability of {levels[-1]}" if levels else f"rate of {_target(run)}" if kind == "poisson" else ""
    return [Panel("What predictions depend on", figures.effects(found, outcome or _target(run)), caption)]


def _relevance(run: RunData) -> list[Panel]:
    """Lengthscales with intervals, where a posterior has several inputs."""
    found = relevances(run)
    if not found:
        return []
    hidden = max(len(part.names) for part in found) - figures.MOST_INPUTS
    how = found[0].how
    caption = (
        "How far one has to go along an input, in its standard deviations, before the outcome may be quite another one:"
        " the shorter, the more relevant. Data span about 4, so that inputs with far longer ones hardly matter."
        f"{f' {hidden} more, the longest, are left out.' if hidden > 0 else ''}"
        f" {f'Bars: 95 % intervals, by {how}.' if how else 'Without intervals: as it ran, the method knows none.'}"
    )
    return [Panel("Relevance of inputs", figures.relevance(found), caption)]


def write_page(run: RunData, predictor: Predictor | None = None, panels: Sequence[Panel] = ()) -> Path:
    """Write the page and its pictures.

    Args:
        run: What was read of the run's folder, which the page goes into.
        predictor: encoded inputs [n, D] → mean [n] and sd [n] of a noisy observation, all in original units; draws the
            curve (D = 1) or map (D = 2). Without it the held-out rows alone are shown.
        panels: sections of the method.
    """
    (run.path / "plots").mkdir(exist_ok=True)
    with warnings.catch_warnings():
        # Labels come from data; a script without a glyph in the font shows as a box and must not end the run.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        content = _content(run, predictor, panels)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(TEMPLATE).render(style=Markup(STYLE), failure_limit=FAILURE_LIMIT, **content)  # noqa: S704
    path = run.path / "report.html"
    write_bytes(path, _with_contents(page).encode())
    return path


def _with_contents(page: str) -> str:
    """The page with a link to every chapter in the place of ``<nav></nav>``."""
    before, *chapters = page.split("<h2>")
    titles = [chapter.partition("</h2>")[0] for chapter in chapters]
    links = " · ".join(f'<a href="#chapter-{number}">{title}</a>' for number, title in enumerate(titles))
    body = "".join(f'<h2 id="chapter-{number}">{chapter}' for number, chapter in enumerate(chapters))
    return before.replace("<nav></nav>", f"<nav>{links}</nav>") + body


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as an HTML table, for the body of a :class:`Panel`."""
    cells = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"


def _content(run: RunData, predictor: Predictor | None, extra: Iterable[Panel]) -> dict[str, Any]:
    metrics, plots = run.metrics, run.path / "plots"
    units = f"units of {_target(run)}"
    baselines = [arm for arm in arms(metrics)[1:] if arm.name in figures.STYLES]
    local = metrics.local_only.get("per_site", ()) if metrics.local_only else ()
    sites = [{**row, "site": row.get("label") or row["site"]} for row in metrics.per_site]
    beside = [{**row, "site": metrics.labels.get(str(row["site"]), row["site"])} for row in local]
    return {
        "metrics": metrics,
        "title": f"{data_name(metrics.dataset)}: {_target(run)} by {metrics.method}",
        "facts": _facts(run),
        "verdicts": [_said(sentence) for sentence in sentences(metrics)],
        "failed": _failed(metrics),
        "headline": _headline(metrics, units),
        "predictions": [_draw(plots, *drawing) for drawing in _predictions(run, predictor)],
        "calibration": _calibration(metrics, plots),
        "convergence": _optional(
            plots, "convergence", figures.convergence(run.history, baselines, units), "Figures after each round."
        ),
        "sites": _optional(plots, "sites", figures.sites(sites, beside), "Held-out NLL of each site, in nats per row."),
        "site_table": _site_table(metrics),
        "data": {
            "lines": overview_lines(metrics.data),
            "titles": OVERVIEW_TITLES,
            "rows": overview_rows(metrics.data),
        }
        if metrics.data
        else None,
        "cost": _optional(plots, "cost", figures.cost(run.history), "Added up over rounds and all sites."),
        "totals": _totals(metrics),
        "extra": [_extra(plots, panel) for panel in extra],
        "repairs": sorted(metrics.repairs.items()),
        "posterior": run.posterior,
        "config": run.config,
    }


def _said(sentence: str) -> Markup:
    """A sentence with its keys in the letters of code."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(sentence[:1].upper() + sentence[1:])))
    return Markup(re.sub(r"(?<=\d) %", "\u00a0%", text))  # noqa: S704


def _target(run: RunData) -> str:
    if run.posterior is not None:
        return str(run.posterior.schema["target"]["name"])
    return str(run.config.get("target") or "the target")


def _facts(run: RunData) -> str:
    m = run.metrics
    sent = (m.bytes.get("up", 0) + m.bytes.get("down", 0)) / 1e6
    total = number(m.seconds.get("total"))
    counts = f"{_many(m.sites, 'site')} · {_many(m.rounds, 'round')} · {_many(m.communications, 'communication')}"
    trips = f"{_many(m.exchanges, 'exchange')} · " if m.exchanges else ""
    return f"{run.path.name} · {counts} · {trips}{show(sent)} MB sent · {show(total)} s"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _failed(metrics: RunMetrics) -> str:
    sites = {str(row["site"]) for row in metrics.failures}
    return f"{_many(len(metrics.failures), 'failure')} at {_many(len(sites), 'site')}; see the list below."


def _headline(metrics: RunMetrics, units: str) -> dict[str, Any]:
    frame = headline(metrics)
    n = arms(metrics)[0].rows
    if is_classification(metrics):
        note = "NLL in nats per row; NLL and Brier score: smaller is better. AUC and the slope of the calibration are"
        note += (
            f" those of log odds in steps of {2 * RANK_REACH / RANK_BINS:g}, summed over sites; a slope below 1: too"
        )
        note += " extreme. Skill: share of the Brier score of the class shares that is gone."
    else:
        note = f"RMSE and CRPS in {units}, NLL in nats per row for a noisy observation; smaller is better. "
        note += "R²: share of the squared error of the training mean that is gone. "
        if n:
            low, high = expected_coverage(n, 0.95)
            note += f"With {n:,} independent rows, calibrated 95 % intervals hold {percent(low)} to {percent(high)}."
    if len({arm.rows for arm in arms(metrics)}) > 1:
        note += " The arms were scored on different numbers of rows, so compare them with care."
    beside = [[name, *more] for name, more in zip(rivals(metrics), against(metrics), strict=True)]
    titles = [title_of(str(name)) for name in frame.columns]
    return {"titles": titles, "rows": text_rows(frame), "note": note, "beside": beside}


def _predictions(run: RunData, predictor: Predictor | None) -> list[tuple[str, str, Figure, str]]:
    """Name, title, figure and caption of what fits the run: a curve, a map, or observed against predicted."""
    if is_classification(run.metrics):
        return _class_predictions(run)
    rows, target = run.predictions, _target(run)
    shown = "" if rows is None or len(rows) <= figures.MAX_POINTS else f" {figures.MAX_POINTS} of {len(rows):,} rows."
    names, spans = _inputs(run)
    counts = run.config.get("model.likelihood") == "poisson"
    drawn: list[tuple[str, str, Figure, str]] = []
    if len(names) == 1 and predictor is not None:
        figure = figures.curve(rows, predictor, (float(spans[0, 0]), float(spans[0, 1])), (names[0], target), counts)
        drawn.append(("curve", "Predictive mean and 95 % interval", figure, f"For a noisy observation.{shown}"))
    elif len(names) == 2 and predictor is not None:
        figure = figures.surface(rows, predictor, spans, (*names, target))
        caption = f"For a noisy observation. Dots: held-out rows; on the left their colour is what was observed.{shown}"
        drawn.append(("map", "Maps of predictive mean and sd", figure, caption))
    if rows is not None and (len(names) != 1 or predictor is None):
        caption = f"Bars: 95 % intervals around the prediction; dots: what was observed.{shown}"
        drawn.append(
            ("parity", "Observed against predicted, and residuals", figures.parity(rows, target, counts), caption)
        )
    return drawn


def _class_predictions(run: RunData) -> list[tuple[str, str, Figure, str]]:
    drawn: list[tuple[str, str, Figure, str]] = []
    if run.predictions is not None:
        target = {} if run.posterior is None else run.posterior.schema["target"]
        levels = [str(level) for level in target.get("levels", ("class 0", "class 1"))]
        figure = figures.probabilities(run.predictions, levels)
        drawn.append(("probabilities", "Predicted probability by observed class", figure, "All held-out rows."))
    if ranks := run.metrics.calibration.get("ranks"):
        figure = figures.roc(ranks, number(run.metrics.test.get("auc")))
        drawn.append(("roc", "Sensitivity against false alarms (ROC)", figure, "From counts, summed over sites."))
    return drawn


def _inputs(run: RunData) -> tuple[list[str], Array]:
    """Names of up to two encoded inputs and the range to draw [D, 2]; empty for more inputs.

    The range is that of the held-out rows, else mean ± 2.5 sd of the training inputs.
    """
    if run.predictions is not None:
        columns = [str(column) for column in run.predictions.columns if str(column).startswith("input.")]
        x = run.predictions[columns].to_numpy(dtype=float)
        low, high = (x.min(axis=0), x.max(axis=0)) if columns else (np.empty(0), np.empty(0))
        margin = np.where(high > low, 0.04 * (high - low), 0.5)
        return [column.removeprefix("input.") for column in columns], np.stack([low - margin, high + margin], axis=1)
    features = run.posterior.schema["features"] if run.posterior is not None else ()
    if run.posterior is None or not 1 <= len(features) <= 2 or any(item["kind"] != "numeric" for item in features):
        return [], np.empty((0, 2))
    mean, scale = (np.asarray(run.posterior.arrays[f"input.{name}"], dtype=float) for name in ("mean", "scale"))
    return [str(item["name"]) for item in features], np.stack([mean - 2.5 * scale, mean + 2.5 * scale], axis=1)


def _calibration(metrics: RunMetrics, plots: Path) -> _Drawn | None:
    if table := metrics.calibration.get("reliability"):
        caption = "On the diagonal, predicted probabilities come true as often as they say."
        caption += "" if metrics.calibration.get("ranks") else " Shown is that of the likeliest class."
        return _draw(plots, "calibration", "Reliability of class probabilities", figures.reliability(table), caption)
    pit = metrics.calibration.get("pit") or ()
    if not sum(pit):
        return None
    caption = (
        "Left: below the diagonal, intervals are too narrow; above it, too wide. Right: flat when calibrated; a valley "
        "means too narrow, a hill too wide, a slope biased. Grey: 95 % range of each point for independent rows."
    )
    figure = figures.calibration(pit, number(metrics.test.get("coverage_95")))
    return _draw(plots, "calibration", "Calibration curve and PIT histogram", figure, caption)


def _site_table(metrics: RunMetrics) -> dict[str, Any]:
    columns = [name for name in figure_columns(metrics) if name != "crps" and name in (metrics.per_site or [{}])[0]]
    local = {str(row["site"]): row for row in (metrics.local_only or {}).get("per_site", ())}
    known = [name for name in ("training_rows",) if any(name in row for row in metrics.per_site)]
    titles = ["site", *(name.replace("_", " ") for name in known), "held-out rows", *(title_of(c) for c in columns)]
    rows = []
    for row in metrics.per_site:
        counts = [*(cell(name, row.get(name)) for name in known), f"{row['num_examples']:,}"]
        alone = local.get(str(row["site"]), {})
        beside = [cell(name, alone.get(name)) for name in columns] if local else []
        rows.append([str(row.get("label") or row["site"]), *counts, *(cell(c, row.get(c)) for c in columns), *beside])
    return {"titles": [*titles, *(f"local-only {title_of(c)}" for c in columns if local)], "rows": rows}


def _totals(metrics: RunMetrics) -> list[tuple[str, str]]:
    exchanges = max(metrics.rounds, 1) * max(metrics.sites, 1)
    names = {"up": "sent, sites to server", "down": "sent, server to sites"}
    sent = [
        (names.get(way, way), f"{show(count / 1e6)} MB ({show(count / exchanges / 1e3)} kB per site and round)")
        for way, count in metrics.bytes.items()
    ]
    parts = {"total": "time, total", "sites": "computing at the sites, added up"}
    times = ((parts.get(name, f"time, {name}"), value) for name, value in metrics.seconds.items())
    return [*sent, *((name, f"{show(number(value))} s") for name, value in times)]


def _optional(plots: Path, name: str, figure: Figure | None, caption: str) -> _Drawn | None:
    return None if figure is None else _draw(plots, name, name.capitalize(), figure, caption)


def _extra(plots: Path, panel: Panel) -> _Drawn:
    if isinstance(panel.body, str):
        return _Drawn(panel.title, panel.caption, html=Markup(panel.body))  # noqa: S704
    name = "-".join(re.findall(r"[a-z0-9]+", panel.title.lower())) or "panel"
    return _draw(plots, name, panel.title, panel.body, panel.caption)


def _draw(plots: Path, name: str, title: str, figure: Figure, caption: str) -> _Drawn:
    """Write a figure as PNG beside the page; the page itself holds it as SVG."""
    image, drawing = io.BytesIO(), io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    write_bytes(plots / f"{name}.png", image.getvalue())
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedgp"}):  # letters stay letters, ids the same
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    address = f"data:image/svg+xml;base64,{base64.b64encode(drawing.getvalue()).decode()}"
    return _Drawn(title, caption, address, math.ceil(figure.get_figwidth() * 100))
