"""Output on the terminal: text, tables, a progress bar, and the figures of a finished run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.logging import RichHandler
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from fedgp_flower.errors import many
from fedgp_flower.files import read_json
from fedgp_flower.outcome import Progress, figures_of, time_left
from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.summary import (
    baseline_differences,
    data_name,
    headline,
    held_out_rows,
    notes,
    opening,
    quoted,
)
from fedgp_flower.typing import Facts

WIDEST = 10_000
"""Width, in letters, that no table has."""


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers: bool = False) -> Table:
    """Return a table of text; the first column and numbers are never wrapped."""
    shown = Table(title=title or None, box=SIMPLE_HEAD if numbers else HEAVY_HEAD)
    for position, name in enumerate(titles):
        aligned: JustifyMethod = "right" if numbers and position else "left"
        widest = max(map(len, [*name.split(), *(row[position] for row in rows)]), default=0) if numbers else None
        shown.add_column(name, no_wrap=position == 0, overflow="fold", justify=aligned, min_width=widest)
    for row in rows:
        shown.add_row(*row)
    return shown


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar over rounds, with warnings above it."""
    terminal, logger = Console(stderr=True), logging.getLogger("fedgp")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    handler = RichHandler(logging.INFO, terminal, show_time=False, show_path=False, show_level=False)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == "fedgp.data")
    handler.addFilter(lambda record: record.exc_info is None)  # tracebacks belong in log.txt
    logger.addHandler(handler)
    try:
        with Bar(*columns, console=terminal, transient=True) as bar:
            task = bar.add_task("", total=None)

            def show(row: Facts, total: int) -> None:
                bar.update(
                    task, completed=row["round"], total=total, description=f"{time_left(row)}  {figures_of(row)}"
                )

            yield show
    finally:
        logger.removeHandler(handler)


@contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """After Ctrl-C, print what was saved and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"stopped before the first round was complete; the name {folder.name} is free again"
        if (folder / "checkpoint" / "checkpoint.json").exists():
            rounds = int(read_json(folder / "checkpoint" / "checkpoint.json")["state"]["round"])
            complete = many(rounds, "complete round")
            kept = (
                f"stopped; {complete} kept in {folder}. Go on: the same command with `name={folder.name} resume=true`"
            )
        print(kept, file=sys.stderr)
        raise SystemExit(130) from None


def show(what: str | Table) -> None:
    """Print text without wrapping, or a table; a table whose folded titles do not fit is wider than the terminal."""
    console = Console(markup=False, emoji=False)
    if isinstance(what, str):
        return console.print(what, soft_wrap=True)
    found = Measurement.get(console, console.options.update(max_width=WIDEST), what)
    if found.minimum + len(what.columns) > console.width:  # Rich folds no column to its least width
        console.width = max(console.width, found.maximum)
    return console.print(what)


def show_result(folder: Path) -> None:
    """Print the result of a finished run: sentences, tables, notes and the paths of its files."""
    run = read_run(folder)
    metrics = run.metrics
    rounds = many(metrics.rounds, "round") + ", converged" * bool(metrics.converged)
    counts = f"{many(metrics.sites, 'site')}, {rounds}, {many(len(metrics.failures), 'failure')}"
    console = Console(soft_wrap=True, markup=False, emoji=False)  # names of effects may be a[b] and a:b:c
    first, *others = opening(run)
    console.print(first, highlight=False, style="bold")
    for sentence in others:
        console.print(sentence, highlight=False)
    title = f"{metrics.method} on {data_name(metrics.dataset)}: {counts}"
    if held_out_rows(metrics):
        show(table(*headline(metrics), title=title, numbers=True))
    titles, differences = baseline_differences(metrics)
    if differences:
        show(table(titles, differences, numbers=True))
    if effects := quoted(metrics):
        show(table(["", "estimate (95 % interval)"], [[*row] for row in effects.items()], numbers=True))
    for note in notes(metrics):
        console.print(f"Note: {note}", highlight=False)
    console.print(f"run folder  {folder}\nreport      {folder / 'report.html'}", highlight=False)
