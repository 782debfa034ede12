"""Figures of a report. Each function returns a matplotlib Figure (Agg, no global state)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike
from scipy.special import expit
from scipy.stats import binom

from fedgp_flower.count_scores import count_quantiles, log_rate_of
from fedgp_flower.data.standardisation import read_inputs
from fedgp_flower.errors import RunError
from fedgp_flower.follow_up import FollowUp
from fedgp_flower.privacy.disclosure import merged_cells
from fedgp_flower.run.summary import LINEAR, number, short
from fedgp_flower.scores import RANK_REACH
from fedgp_flower.typing import Array, Facts

if TYPE_CHECKING:
    from fedgp_flower.run.artefacts import Run
    from fedgp_flower.run.dependence import Effect
    from fedgp_flower.run.predict import Predictor

FEDERATED, LOCAL, POOLED, BAND, MISS = "#1f5f99", "#c8691c", "#3d3d3d", "#bcd3e8", "#b3261e"
STYLES = {
    "local-only": (LOCAL, "--"),
    "pooled": (POOLED, ":"),
    **dict.fromkeys(LINEAR, ("#6b7a2a", "-.")),
}
"""Colour and dash of the baselines in the figure of convergence."""
COLOURS, MARKS = (FEDERATED, LOCAL, "#6b7a2a", "#8a4f9e", POOLED, "#2a8a86"), ("o-", "s--", "^-.", "D:", "v-", "P--")
"""Colours and markers of several runs."""
Z95 = 1.959963984540054
MAX_POINTS, PANELS_PER_ROW = 400, 3
MAX_INPUTS, MAX_LENGTHSCALE = 15, 300.0
"""Limits of the figure of lengthscales."""
MANY_TICKS = 1000.0
"""Ratio of the ends of a logarithmic axis from which it has only powers of ten."""
MAX_CLASS_LETTERS = 18
SURVIVAL_GROUPS = 8
"""Largest number of groups of rows by predicted survival."""
DPI = 180
Make: TypeAlias = Callable[..., Figure]
"""Constructor of figures: the class Figure, or a function of pyplot in a notebook."""


def convergence(history: pd.DataFrame, others: Mapping[str, Facts], units: str, make: Make = Figure) -> Figure | None:
    """Plot the objective and held-out scores by round, or by visit if they are counted, with baselines as lines."""
    names = {
        "objective": "training objective (nats per row)",
        "test_nll": "held-out NLL (nats per row)",
        "test_rmse": f"held-out RMSE ({units})",
        "test_accuracy": "held-out accuracy",
    }
    shown = [name for name in names if name in history and history[name].notna().any()]
    if not shown or len(history) < 2:
        return None
    by_visits = "visits" in history and history["visits"].notna().all()  # no rounds before the first, or in vain
    unit, label = ("visits", "communications (visits of a site)") if by_visits else ("round", "round")
    abscissa = history[unit]
    figure, axes = axes_of(len(shown), height=2.9, make=make)
    last = max(float(abscissa.max()), 1.0)  # positive even after a single evaluation
    for ax, name in zip(axes, shown, strict=True):
        values = history[name].dropna()
        style = "o-" if len(values) <= 30 else "-"
        ax.plot(abscissa[values.index], values, style, color=FEDERATED, ms=3.5, lw=1.6, label="federated")
        levels = {arm: number(known.get(name.removeprefix("test_"))) for arm, known in others.items() if arm in STYLES}
        for arm, level in levels.items():
            if math.isfinite(level):
                colour, dash = STYLES[arm]
                ax.axhline(level, color=colour, ls=dash, lw=1.5, label=arm)
        _zoom_on_late_rounds(ax, values.to_numpy(dtype=float), list(levels.values()))
        if name in {"objective", "test_nll"}:
            _ensure_height(ax)
        ax.set(xlabel=label, ylabel=names[name], xlim=(-0.03 * last, 1.03 * last))
        ax.ticklabel_format(axis="y", useOffset=False)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    handles, labels = axes[-1].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def curve(rows: pd.DataFrame | None, predictor: Predictor, x: Array, names: Sequence[str]) -> Figure:
    """Plot mean and 95 % band of a noisy observation at values x [n] of one input, with held-out rows."""
    figure, (ax,) = axes_of(1, width=7.6, height=3.6)
    low, high = predictor.quantiles(x[:, None], (0.025, 0.975))
    band(ax, x, low, predictor(x[:, None])[0], high)
    if rows is not None:
        some = subsample(rows)
        ax.plot(some[f"input.{names[0]}"], some["target"], "o", color=POOLED, ms=2.6, alpha=0.75, label="held-out rows")
    ax.set(xlabel=label_text(names[0]), ylabel=label_text(names[1]))
    ax.legend(fontsize=8, frameon=False)
    return figure


def require_one_input(predictors: Mapping[str, Predictor]) -> None:
    """Raise RunError if :func:`draw_curves` cannot draw these predictors."""
    agreed = next(iter(predictors.values())).preparation
    if len(agreed.names) != 1 or agreed.target.levels:
        raise RunError(
            "`--picture` needs one input and a target of numbers: leave it out;"
            f" inputs are {', '.join(agreed.names)}, the target is `{agreed.target.name}`"
        )


def draw_curves(predictors: Mapping[str, Predictor], source: Path, picture: Path) -> None:
    """Save :func:`site_curves` for the rows of a table with one input."""
    agreed = next(iter(predictors.values())).preparation
    save(site_curves(predictors, read_inputs(source, agreed).sort_values(agreed.features[0])), picture)


def save(figure: Figure, picture: Path) -> None:
    """Save a figure. Raise RunError if the file cannot be written or has an unknown ending."""
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise RunError(f"{picture} cannot be written: {error}") from None


def site_curves(predictors: Mapping[str, Predictor], frame: pd.DataFrame) -> Figure:
    """Plot mean, 95 % band, training and held-out rows along the single input, a panel for each site."""
    agreed = next(iter(predictors.values())).preparation
    figure, axes = axes_of(len(predictors), width=1.6 + 2.6 * min(PANELS_PER_ROW, len(predictors)), height=2.5)
    for ax, (site, predictor) in zip(axes, predictors.items(), strict=True):
        table = predictor.predict(frame)
        x = predictor.inputs(frame)[:, 0].numpy() * agreed.input_scale + agreed.input_mean
        band(ax, x, table["q2.5"], table["mean"], table["q97.5"])
        if predictor.site is not None:
            rows = predictor.site.encode(agreed)
            for inputs, y, colour in ((rows.x, rows.y, "#888888"), (rows.x_test, rows.y_test, MISS)):
                original = inputs[:, 0] * agreed.input_scale + agreed.input_mean
                ax.plot(original, predictor.units.values(y), ".", color=colour, ms=2.5)
        ax.set_title(label_text(site), fontsize=8)
    figure.supxlabel(label_text(agreed.names[0]), fontsize=8)
    figure.supylabel(label_text(agreed.target.name), fontsize=8)
    return figure


def parity(rows: pd.DataFrame, target: str, counts: bool = False, make: Make = Figure) -> Figure:
    """Plot observed against predicted values, and residuals, with 95 % intervals."""
    figure, axes = axes_of(2, width=8.6, height=4.0, make=make)
    some = subsample(rows)
    given = {str(name): column.to_numpy() for name, column in some.items()}
    mean, observed = given["mean"], given["target"]
    # The rows have interval ends if mean and sd do not determine them.
    if "low" in given:
        low, high = given["low"], given["high"]
    elif counts:
        low, high = count_quantiles(*log_rate_of(mean, given["sd"]), (0.025, 0.975))
    else:
        low, high = mean - Z95 * given["sd"], mean + Z95 * given["sd"]
    inside = (observed >= low) & (observed <= high)
    for ax, less in zip(axes, (0 * mean, mean), strict=True):
        ax.vlines(mean, low - less, high - less, color=BAND, lw=1.6, zorder=0.5, label="95 % interval")
        for hit, mark, colour, size in ((True, "o", FEDERATED, 3.2), (False, "^", MISS, 4.2)):
            shown = inside == hit
            label = "inside" if hit else "outside"
            ax.plot(mean[shown], (observed - less)[shown], mark, color=colour, ms=size, label=label)
        ax.set_xlabel(f"predicted {label_text(target)}")
    axes[0].legend(fontsize=8, framealpha=0.85, edgecolor="none", loc="upper left")
    axes[0].axline((float(mean.mean()),) * 2, slope=1, color=POOLED, lw=0.9, zorder=1)
    axes[0].set_ylabel(f"observed {label_text(target)}")
    axes[1].axhline(0, color=POOLED, lw=0.9, zorder=1)
    axes[1].set_ylabel("residual: observed − predicted")
    return figure


def surface(rows: pd.DataFrame | None, predictor: Predictor, spans: Array, names: Sequence[str]) -> Figure:
    """Map predictive mean and sd over two inputs in the ranges ``spans`` [2, 2], with held-out rows as dots."""
    figure, axes = axes_of(2, width=8.6, height=3.7)
    sides = [np.linspace(low, high, 90) for low, high in spans.tolist()]
    grid = np.stack([g.ravel() for g in np.meshgrid(*sides)], axis=1)
    for ax, values, colours, what in zip(axes, predictor(grid), ("viridis", "Blues"), ("mean", "sd"), strict=True):
        image = values.reshape(90, 90)
        mesh = ax.pcolormesh(*sides, image, cmap=colours, shading="nearest", rasterized=True)
        figure.colorbar(mesh, ax=ax, label=f"{what} of {label_text(names[2])}")
        ax.set(xlabel=label_text(names[0]), ylabel=label_text(names[1]), xlim=spans[0], ylim=spans[1])
        ax.grid(visible=False)
    if rows is not None:
        some = subsample(rows)
        x, y = some[f"input.{names[0]}"], some[f"input.{names[1]}"]
        low, high = axes[0].collections[0].get_clim()
        axes[0].scatter(x, y, 15, some["target"], cmap="viridis", vmin=low, vmax=high, edgecolors="white", lw=0.6)
        axes[1].plot(x, y, ".", color=POOLED, ms=3)
    return figure


def calibration(pit: Sequence[int], coverage_95: float) -> Figure:
    """Plot coverage of central intervals against nominal coverage, and the PIT histogram, with 95 % chance bands."""
    counts = np.asarray(pit)
    n, half = int(counts.sum()), len(counts) // 2
    figure, (ax, histogram) = axes_of(2, width=8.6, height=3.6)
    nominal = np.linspace(0, 1, 201)
    low, high = (100 * end / n for end in binom.interval(0.95, n, nominal))
    ax.fill_between(100 * nominal, low, high, color="#e3e3e3", lw=0, label="chance, 95 %")
    inside = [counts[half - j : half + j].sum() / n for j in range(half)]
    levels = np.array([*(np.arange(half) / half), 0.95, 1.0])
    _against_diagonal(ax, levels, np.array([*inside, coverage_95, 1.0]))
    ax.set(xlabel="nominal coverage of central interval (%)", ylabel="held-out rows inside (%)")
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    limits = binom.interval(0.95, n, 1 / len(counts))
    histogram.axhspan(*limits, color="#e3e3e3", lw=0)
    for limit in limits:
        histogram.axhline(limit, color="#8a8a8a", lw=0.8, ls="--", zorder=3)
    histogram.axhline(n / len(counts), color=POOLED, lw=0.9)
    _bars(histogram, counts, np.linspace(0, 1, len(counts) + 1))
    histogram.set_xlabel("predictive probability of a smaller value (PIT)")
    return figure


def reliability(table: Sequence[Sequence[float]], ranks: Sequence[Sequence[float]] = ()) -> Figure:
    """Plot observed frequency against predicted probability, with 95 % chance bars, and a histogram of predictions.

    Where one bin has most rows, as of rare events, groups of equal size by log odds (``ranks``) take the place of bins.
    """
    bins = groups = np.asarray(table, dtype=float)
    if crowded := len(ranks) > 0 and bins[:, 0].max() > 0.8 * bins[:, 0].sum():
        rows, ones = np.sum(ranks, axis=1), np.asarray(ranks, dtype=float)[:, 1]
        centres = RANK_REACH * ((2 * np.arange(len(rows)) + 1) / len(rows) - 1)
        found = merged_cells(np.column_stack([rows, rows * expit(centres), ones]), math.ceil(rows.sum() / 6))
        groups = np.asarray(found, dtype=float)
    count, predicted, seen = groups[groups[:, 0] > 0].T
    p = predicted / count
    figure, (ax, histogram) = axes_of(2, width=8.6, height=3.6)
    low, high = (100 * end / count for end in binom.interval(0.95, count, p))
    ax.vlines(100 * p, low, high, color="#d0d0d0", lw=7, label="chance, 95 %")
    _against_diagonal(ax, p, seen / count)
    ax.set(xlabel="predicted probability (%)", ylabel="observed frequency (%)")
    if crowded:
        far = 1.05 * float(max(high.max(), 100 * (seen / count).max()))
        ax.set(xlim=(-0.05 * far, far), ylim=(-0.05 * far, far))
    ax.legend(fontsize=8, framealpha=0.85, edgecolor="none", loc="upper left")
    _bars(histogram, bins[:, 0], np.linspace(0, 100, len(bins) + 1))
    histogram.set_xlabel("predicted probability (%)")
    return figure


def survival(follow_up: FollowUp, curves: Mapping[str, Array], times: Array, target: str) -> Figure:
    """Plot the Kaplan–Meier curve of all training rows and predicted survival ``curves`` [T] at ``times``."""
    figure, (ax,) = axes_of(1, width=6.2, height=3.6)
    shown = follow_up.times <= times[-1]
    x, y = (np.append(first, part[shown]) for first, part in ((0.0, follow_up.times), (1.0, follow_up.survival)))
    ax.step(x, 100 * y, where="post", color="#9a9a9a", lw=2.2, label="all training rows (Kaplan–Meier)")
    for (name, curve), colour, mark in zip(curves.items(), itertools.cycle(COLOURS), itertools.cycle(MARKS)):
        ax.plot(times, 100 * curve, mark[1:], color=colour, lw=1.6, label=label_text(name))
    ax.set(xlabel=label_text(target), ylabel="without an event (%)", ylim=(0, 102), xlim=(0, times[-1]))
    ax.legend(fontsize=8, frameon=False)
    return figure


def survival_calibration(tables: Sequence[Sequence[Sequence[float]]], times: Sequence[float] | None) -> Figure:
    """Plot observed against predicted survival at the quartiles of time, with rows grouped by prediction."""
    figure, (ax,) = axes_of(1, width=5.0, height=4.0)
    ax.plot([0, 100], [0, 100], color=POOLED, lw=0.9)
    for place, (table, colour, mark) in enumerate(zip(tables, COLOURS, MARKS, strict=False)):
        bins = np.asarray(table, dtype=float)
        bins = np.asarray(merged_cells(bins, math.ceil(bins[:, 0].sum() / SURVIVAL_GROUPS)), dtype=float)
        count, predicted, observed = bins[bins[:, 0] > 0].T
        name = f"quartile {place + 1}" if times is None else f"after {short(times[place], 4)}"
        ax.plot(100 * predicted / count, 100 * observed / count, mark, color=colour, ms=4, lw=1.2, label=name)
    ax.set(xlabel="predicted share without an event (%)", ylabel="observed (%)")
    ax.legend(fontsize=8, frameon=False)
    return figure


def _against_diagonal(ax: Axes, predicted: Array, observed: Array) -> None:
    ax.plot([0, 100], [0, 100], color=POOLED, lw=0.9)
    ax.plot(100 * predicted, 100 * observed, "o-", color=FEDERATED, ms=4, lw=1.4, label="observed")
    ax.set_aspect("equal")


def _bars(ax: Axes, counts: Array, edges: Array) -> None:
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=FEDERATED, alpha=0.75, ec="white", lw=0.6)
    ax.set(ylabel="held-out rows", xlim=(edges[0], edges[-1]))


def confusion(counts: Array, levels: Sequence[str]) -> Figure:
    """Plot a confusion matrix [C, C], observed by predicted class, as shares of each observed class."""
    size = len(counts)
    figure = Figure(figsize=(1.9 + 0.4 * size, 1.3 + 0.4 * size), dpi=DPI, layout="constrained")
    ax = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    image = ax.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    for observed, predicted in zip(*np.nonzero(counts), strict=True):
        dark = shares[observed, predicted] > 0.5
        words = f"{counts[observed, predicted]:,.0f}"
        ax.text(predicted, observed, words, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    ax.set(xlabel="likeliest class", ylabel="observed class", xticks=range(size), yticks=range(size))
    if levels:
        names = [label_text(level, MAX_CLASS_LETTERS) for level in levels]
        ax.set_xticklabels(names, rotation=90 if max(map(len, names)) > 2 else 0)
        ax.set_yticklabels(names)
    ax.grid(visible=False)
    figure.colorbar(image, ax=ax, label="share of the row (%)", shrink=0.8)
    return figure


def probabilities(rows: pd.DataFrame, levels: Sequence[str]) -> Figure:
    """Plot histograms of the predicted probability of the second of two classes, by observed class."""
    figure, (ax,) = axes_of(1, width=6.2, height=3.2)
    edges = np.linspace(0, 100, 21)
    for label, colour in ((0, LOCAL), (1, FEDERATED)):
        share = 100 * rows.loc[rows["target"] == label, "probability"].to_numpy(dtype=float)
        name = f"observed {label_text(levels[label])} ({len(share):,} rows)"
        counts = np.histogram(share, edges)[0]
        ax.stairs(counts, edges, fill=True, color=colour, alpha=0.4)
        ax.stairs(counts, edges, color=colour, lw=1.4, label=name)
    ax.set(xlabel=f"predicted probability of {label_text(levels[1])} (%)", ylabel="held-out rows", xlim=(0, 100))
    ax.legend(fontsize=8, frameon=False)
    return figure


def sites(federated: Mapping[str, float], local: Mapping[str, float]) -> Figure | None:
    """Plot federated and local-only NLL by site: a dot plot, or a scatter plot for more than 40 sites."""
    frame = pd.DataFrame({"federated": federated, "local-only": local}, index=list(federated), dtype=float)
    frame = frame.dropna(subset=["federated"])
    both = frame.dropna()
    if len(frame) == 0 or (len(frame) > 40 and len(both) == 0):
        return None
    if len(frame) > 40:
        figure, (ax,) = axes_of(1, width=4.8, height=4.6)
        low, high = float(both.to_numpy().min()), float(both.to_numpy().max())
        limits = (low - 0.05 * (high - low) - 0.01, high + 0.05 * (high - low) + 0.01)
        ax.plot(limits, limits, color=POOLED, lw=0.9)
        ax.plot(both["local-only"], both["federated"], "o", color=FEDERATED, ms=3.4, alpha=0.6)
        ax.set(xlabel="local-only NLL (nats per row)", ylabel="federated NLL (nats per row)", xlim=limits, ylim=limits)
        ax.set_title("one dot per site; federated is better below the line", fontsize=8, color="#666666", loc="left")
        return figure
    figure, (ax,) = axes_of(1, width=6.2, height=1.1 + 0.26 * len(frame))
    y = np.arange(len(frame))
    ax.hlines(y, frame["federated"], frame["local-only"].fillna(frame["federated"]), color="#c9c9c9", lw=1.6, zorder=1)
    ax.plot(frame["federated"], y, "o", color=FEDERATED, ms=6, label="federated")
    if len(both):
        ax.plot(frame["local-only"], y, "o", color=LOCAL, ms=6, mfc="white", mew=1.5, label="local-only", zorder=1.5)
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.set_yticks(y, [label_text(str(site)) for site in frame.index])
    ax.set(xlabel="held-out NLL (nats per row), smaller is better", ylim=(len(frame) - 0.4, -0.6))
    return figure


def effects(found: Sequence[Effect], target: str, make: Make = Figure) -> Figure:
    """Plot the outcome against each column, a panel each on a common scale; levels of text as points with bars."""
    figure, axes = axes_of(len(found), width=8.6 if len(found) > 1 else 5.0, height=2.6, make=make)
    low, high = min(effect.low.min() for effect in found), max(effect.high.max() for effect in found)
    limits = (low - 0.04 * (high - low), high + 0.04 * (high - low))
    for ax, effect in zip(axes, found, strict=True):
        if effect.levels:
            ax.vlines(effect.values, effect.low, effect.high, color=BAND, lw=6)
            ax.plot(effect.values, effect.median, "o", color=FEDERATED, ms=4)
            ax.set_xticks(effect.values, [label_text(level) for level in effect.levels])
            ax.tick_params(axis="x", rotation=60 if len(effect.levels) > 3 else 0)
            ax.set_xlim(-0.6, len(effect.levels) - 0.4)
        else:
            since = (86400 * effect.values).round().astype("timedelta64[s]")
            x = np.datetime64("2000-01-01") + since if effect.dates else effect.values
            band(ax, x, effect.low, effect.median, effect.high)
            if effect.dates:
                ax.xaxis.set_major_locator(AutoDateLocator(minticks=2, maxticks=5))
                ax.xaxis.set_major_formatter(ConciseDateFormatter(ax.xaxis.get_major_locator()))
        ax.set(xlabel=label_text(effect.name), ylim=limits)
    for ax in axes[::PANELS_PER_ROW]:
        ax.set_ylabel(label_text(target))
    return figure


def relevance(found: Mapping[str, pd.DataFrame]) -> Figure:
    """Plot lengthscales of the most relevant inputs, a panel for each part of the model, with known 95 % intervals."""
    rows = min(MAX_INPUTS, max(map(len, found.values())))
    figure, axes = axes_of(len(found), width=8.6 if len(found) > 1 else 6.4, height=0.9 + 0.24 * rows)
    for ax, (part, table) in zip(axes, found.items(), strict=True):
        shown = table.head(rows)
        _intervals(ax, shown, _outer(shown.assign(high=shown["high"].clip(upper=MAX_LENGTHSCALE))))
        ax.set_xlabel("lengthscale (standard deviations of the input)")
        if len(found) > 1:
            ax.set_title(part, fontsize=9, loc="left")
    return figure


def intervals(table: pd.DataFrame, label: str, *, positive: bool = False) -> Figure:
    """Plot ``value`` and interval from ``low`` to ``high`` of each quantity, on a logarithmic scale if ``positive``."""
    figure, (ax,) = axes_of(1, width=6.4, height=0.9 + min(0.24 * len(table), 12.0))
    _intervals(ax, table, _outer(table) if positive else None)
    ax.set_xlabel(label)
    return figure


def _outer(table: pd.DataFrame) -> tuple[float, float]:
    """Return the limits of a logarithmic axis that shows all numbers of a table."""
    return 0.8 * float(np.nanmin(table)), 1.25 * float(np.nanmax(table))


def _intervals(ax: Axes, table: pd.DataFrame, limits: tuple[float, float] | None) -> None:
    y = np.arange(len(table))
    ax.hlines(y, table["low"], table["high"], color=BAND, lw=6)
    ax.plot(table["value"], y, "o", color=FEDERATED, ms=4)
    ax.set_yticks(y, [label_text(str(name)) for name in table.index])
    ax.set_ylim(len(table) - 0.4, -0.6)
    if limits is None:
        ax.axvline(0, color=POOLED, lw=0.7)
        return
    ax.set(xscale="log", xlim=limits)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if limits[1] < MANY_TICKS * limits[0] else (1,)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())


def roc(counts: Sequence[Sequence[float]], auc: float) -> Figure:
    """Plot the ROC curve from rows of each class by predicted log odds; the dot is at probability ½."""
    above = np.vstack([np.cumsum(np.asarray(counts, dtype=float)[::-1], axis=0)[::-1], [[0.0, 0.0]]])
    alarms, hits = 100 * (above / np.maximum(above[0], 1.0)).T
    figure, (ax,) = axes_of(1, width=4.4, height=4.0)
    ax.plot([0, 100], [0, 100], color=POOLED, lw=0.9)
    ax.plot(alarms, hits, color=FEDERATED, lw=1.8, label=f"AUC {auc:.3f}")
    half = len(counts) // 2
    words = f"at probability ½: {hits[half]:.0f} % found,\n{alarms[half]:.0f} % false alarms"
    ax.plot(alarms[half], hits[half], "o", color=FEDERATED, ms=6, label=words)
    ax.set(xlabel="false alarms: 1 − specificity (%)", ylabel="sensitivity (%)", aspect="equal")
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def cost(history: pd.DataFrame) -> Figure | None:
    """Plot cumulative bytes and seconds by round."""
    if len(history) < 2:
        return None
    figure, axes = axes_of(2, width=8.6, height=2.7)
    up, down = history["bytes_up"].cumsum() / 1e6, history["bytes_down"].cumsum() / 1e6
    axes[0].plot(history["round"], up, color=FEDERATED, lw=1.6, label="sites to server")
    axes[0].plot(history["round"], down, color=LOCAL, lw=1.6, ls="--", label="server to sites")
    axes[0].legend(fontsize=8, frameon=False)
    axes[1].plot(history["round"], history["seconds"].cumsum(), color=FEDERATED, lw=1.6)
    for ax, label in zip(axes, ("megabytes so far", "seconds so far"), strict=True):
        ax.set(xlabel="round", ylabel=label)
        ax.set_ylim(bottom=0)
        ax.margins(y=0.08)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def cost_figure(runs: Sequence[Run]) -> Figure:
    """Plot held-out NLL against cumulative exchanges, megabytes and seconds, a line for each run."""
    figure, axes = axes_of(3, width=11.0, height=3.4)
    for run, colour, mark in zip(runs, itertools.cycle(COLOURS), itertools.cycle(MARKS), strict=False):
        history, nll = run.history, run.history.get("test_nll", run.history["round"] * math.nan).copy()
        nll.iloc[-1:] = number(run.metrics.test.get("nll"))
        spent = {
            "exchanges": history.get("exchanges", history["round"]),
            "megabytes sent, both ways": (history["bytes_up"] + history["bytes_down"]).cumsum() / 1e6,
            "seconds": history["seconds"].cumsum(),
        }
        for ax, (label, amount) in zip(axes, spent.items(), strict=True):
            (line,) = ax.plot(amount[nll.notna()], nll.dropna(), mark, color=colour, ms=4, lw=1.6)
            line.set(label=label_text(run.path.name), clip_on=False)
            ax.set_xlabel(label)
    for ax in axes:
        ax.set_xlim(0, 1.04 * max(ax.get_xlim()[1], 1e-9))
        ax.margins(y=0.15)
        _ensure_height(ax)
    axes[0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[0].set_ylabel("held-out NLL (nats per row)")
    axes[0].legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return figure


def subsample(rows: pd.DataFrame) -> pd.DataFrame:
    """Return at most ``MAX_POINTS`` rows, sampled with a fixed seed."""
    return rows if len(rows) <= MAX_POINTS else rows.sample(MAX_POINTS, random_state=0)


def _zoom_on_late_rounds(ax: Axes, values: Array, levels: Sequence[float]) -> None:
    """Crop the first tenth of the rounds if it would flatten the rest."""
    late = values[len(values) // 10 :]
    shown = np.array([*late, *levels])
    shown = shown[np.isfinite(shown)]
    width = float(np.ptp(shown)) if shown.size else 0.0
    if width > 0 and np.ptp(values) > 4 * width:
        ax.set_ylim(shown.min() - 0.05 * width, shown.max() + 0.05 * width)
        ax.set_title("first rounds lie outside the frame", fontsize=8, color="#666666", loc="right")


def _ensure_height(ax: Axes) -> None:
    """Let the vertical axis span at least 0.05 nats per row, so that noise does not fill the figure."""
    low, high = ax.get_ylim()
    margin = max(0.0, (0.05 - (high - low)) / 2)
    ax.set_ylim(low - margin, high + margin)


def label_text(label: str, longest: int = 28) -> str:
    """Return a label from data as one short line without mathematics mode."""
    line = " ".join(label.split())
    return (line if len(line) <= longest else f"{line[: longest - 1]}…").replace("$", r"\$")


def band(ax: Axes, x: ArrayLike, low: ArrayLike, middle: ArrayLike, high: ArrayLike) -> None:
    """Plot a mean as a line in its 95 % band."""
    ax.fill_between(x, low, high, color=BAND, alpha=0.7, lw=0, label="95 % interval")
    ax.plot(x, middle, color=FEDERATED, lw=1.8, label="mean")


def axes_of(count: int, width: float = 8.6, height: float = 3.0, make: Make = Figure) -> tuple[Figure, list[Axes]]:
    """Return a figure and axes in rows of at most three, each of this ``height``, in the style of all figures."""
    rows = math.ceil(count / PANELS_PER_ROW)
    figure = make(figsize=(width, height * rows), dpi=DPI, layout="constrained")
    axes = list(figure.subplots(rows, min(count, PANELS_PER_ROW), squeeze=False).flat)
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#888888")
        ax.grid(color="#e8e8e8", lw=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8, color="#888888")
        ax.xaxis.label.set_size(9)
        ax.yaxis.label.set_size(9)
    return figure, axes[:count]
