"""Runs side by side: whether their figures can be compared, and how the NLL fell with what was spent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import FEDERATED, LOCAL, POOLED, axes_of, label_text
from fedgp_flower.run.summary import (
    arms,
    cell,
    data_name,
    figure_columns,
    is_classification,
    number,
    target_of,
    title_of,
)
from fedgp_flower.typing import Facts

SAME = 1e-6
"""Relative difference of two means or standard deviations that is no more than rounding."""
MOST = 5
"""Differences that are named."""
COLOURS, MARKS = (FEDERATED, LOCAL, "#6b7a2a", "#8a4f9e", POOLED, "#2a8a86"), ("o-", "s--", "^-.", "D:", "v-", "P--")
"""Of the runs in a figure: told apart without colours, too."""


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
        more = f" and {len(differ) - MOST} more" if len(differ) > MOST else ""
        said.append(f"their training tables differ, by rows or units: {'; '.join(differ[:MOST])}{more}")
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
        }
        for metrics in (run.metrics for run in runs)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[title_of(name), *(cell(name, column.get(name)) for column in columns)] for name in names]


def cost_figure(runs: Sequence[Run]) -> Figure:
    """Held-out NLL against exchanges, megabytes and seconds since the start, a line for each run."""
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
            ax.plot(
                amount[nll.notna()], nll.dropna(), mark, color=colour, ms=4, lw=1.6, label=label_text(run.path.name)
            )
            ax.set_xlabel(label)
    for ax in axes:
        ax.set_xlim(0, 1.04 * max(ax.get_xlim()[1], 1e-9))
        ax.margins(y=0.15)
    axes[0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[0].set_ylabel("held-out NLL (nats per row)")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, 1.02))
    return figure
