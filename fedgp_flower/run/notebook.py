"""Output in a notebook: HTML summaries of a run and a posterior, and figures of pyplot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from markupsafe import Markup
from matplotlib.axes import Axes
from rich.console import Console

from fedgp_flower.errors import RunError
from fedgp_flower.lazy import Lazy
from fedgp_flower.outcome import Progress, round_of, silent
from fedgp_flower.run.summary import answer, baselines, headline, target_of

if TYPE_CHECKING:
    from IPython import display
    from matplotlib import pyplot

    from fedgp_flower.run import dependence, figures, report
    from fedgp_flower.run.artefacts import Run
    from fedgp_flower.run.predict import Predictor
else:  # only needed in notebooks
    display, pyplot = Lazy("IPython.display"), Lazy("matplotlib.pyplot")
    dependence, figures, report = (Lazy(f"fedgp_flower.run.{name}") for name in ("dependence", "figures", "report"))


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar below the cell of a notebook, and nothing elsewhere."""
    if not Console().is_jupyter:
        yield silent
        return
    shown = display.display(display.HTML(""), display_id=True)
    bar = Markup('<progress value="{}" max="{}"></progress> {}')
    try:
        yield lambda row, total: shown.update(display.HTML(bar.format(row["round"], total, round_of(row, total))))
    finally:
        shown.update(display.HTML(""))


def html_of_run(run: Run) -> str:
    """Return the first sentence and the headline table of a run as HTML."""
    return Markup("<p><b>{}</b></p>\n{}\n<p>{}</p>").format(
        answer(run), report.html_table(*headline(run.metrics)), run.path
    )


def html_of_posterior(posterior: Predictor) -> str:
    """Return method, target and columns of a posterior as HTML."""
    agreed = posterior.preparation
    rows = [[column.name, column.kind, ", ".join(column.levels[:8])] for column in agreed.columns]
    title = f"{posterior.saved.method}: {agreed.target.name}, from"
    return Markup("<p><b>{}</b></p>\n{}").format(title, report.html_table(["column", "kind", "levels"], rows))


def plot_run(run: Run) -> Sequence[Axes]:
    """Plot observed against predicted held-out rows and residuals; without kept rows, the convergence."""
    rows, units = run.predictions, target_of(run)
    if rows is not None and {"mean", "sd", "target"} <= set(rows):
        counts = run.config.get("model.likelihood") == "poisson"
        return figures.parity(rows, units, counts, pyplot.figure).axes
    figure = figures.convergence(run.history, baselines(run.metrics), units, pyplot.figure)
    if figure is None:
        raise RunError(f"{run.path} has nothing to plot: no held-out row and fewer than two rounds")
    return figure.axes


def plot_column(posterior: Predictor, column: str) -> Axes:
    """Plot mean and 95 % interval of the outcome along a column, with all others at their mean."""
    effects = {effect.name: effect for effect in dependence.effects(posterior, most=None)}
    if column not in effects:
        possible = (
            ", ".join(effects) or "none, as this is no single Gaussian process of standardised inputs: use `predict`"
        )
        raise RunError(f"the effect of `{column}` cannot be plotted; possible are {possible}")
    return figures.effects([effects[column]], posterior.preparation.target.name, pyplot.figure).axes[0]
