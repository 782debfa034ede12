"""Tables for the terminal, and what a finished run prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console, JustifyMethod
from rich.table import Table

from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.summary import headline, sentences, text_rows, title_of


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers: bool = False) -> Table:
    """Rows of text; the first column, which people copy from, is never shortened."""
    shown = Table(title=title or None)
    for position, name in enumerate(titles):
        aligned: JustifyMethod = "right" if numbers and position else "left"
        shown.add_column(name, no_wrap=position == 0, overflow="fold", justify=aligned)
    for row in rows:
        shown.add_row(*row)
    return shown


def figures_table(frame: pd.DataFrame, title: str = "") -> Table:
    """A frame of figures as a table, a row for each of its rows."""
    titles = ["", *(title_of(str(column)) for column in frame.columns)]
    return table(titles, text_rows(frame), title=title, numbers=True)


def show_result(folder: Path) -> None:
    """Print the closing table of a finished run, what it says in words, and where its files are."""
    metrics = read_run(folder).metrics
    counts = f"{metrics.sites} sites, {metrics.rounds} rounds, {len(metrics.failures)} failures"
    console = Console(soft_wrap=True)
    console.print(figures_table(headline(metrics), f"{metrics.method} on {metrics.dataset}: {counts}"))
    for sentence in sentences(metrics):
        console.print(sentence, markup=False)
    console.print(f"run folder  {folder}\nreport      {folder / 'report.html'}", markup=False, highlight=False)
