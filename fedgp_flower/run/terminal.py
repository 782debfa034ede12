"""Tables for the terminal, and what a finished run prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.summary import beside, data_name, headline, sentences


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers: bool = False) -> Table:
    """Rows of text; the first column, which people copy from, and numbers are never shortened."""
    shown = Table(title=title or None, box=SIMPLE_HEAD if numbers else HEAVY_HEAD)
    for position, name in enumerate(titles):
        aligned: JustifyMethod = "right" if numbers and position else "left"
        widest = max(map(len, [*name.split(), *(row[position] for row in rows)]), default=0) if numbers else None
        shown.add_column(name, no_wrap=position == 0, overflow="fold", justify=aligned, min_width=widest)
    for row in rows:
        shown.add_row(*row)
    return shown


def show_result(folder: Path) -> None:
    """Print the closing table of a finished run, where its files are, and what it says in words, the verdict last."""
    metrics = read_run(folder).metrics
    counts = f"{metrics.sites} sites, {metrics.rounds} rounds, {len(metrics.failures)} failures"
    console = Console(soft_wrap=True)
    title = f"{metrics.method} on {data_name(metrics.dataset)}: {counts}"
    console.print(table(*headline(metrics), title=title, numbers=True))
    if differences := beside(metrics):
        console.print(table(["", "NLL, difference", "95 % interval over sites"], differences, numbers=True))
    verdict, *others = sentences(metrics)
    for sentence in others:
        console.print(sentence, markup=False)
    console.print(f"run folder  {folder}\nreport      {folder / 'report.html'}", markup=False, highlight=False)
    console.print(verdict, markup=False, style="bold")
