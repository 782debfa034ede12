"""Predictions along one input as a picture: a panel per site with mean, 95 % band and the rows of the site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from fedgp_flower.data.standardisation import read_inputs
from fedgp_flower.errors import RunError
from fedgp_flower.run.figures import BAND, DPI, FEDERATED, MISS
from fedgp_flower.run.predict import Predictor

COLUMNS = 3


def draw_curves(predictors: Mapping[str, Predictor], source: Path, picture: Path) -> None:
    """Draw what the predictors say of a table's rows, which have one input; grey are training rows, red held-out ones.

    Raises:
        RunError: inputs or target are something else, or the picture cannot be written.
    """
    agreed = next(iter(predictors.values())).preparation
    if len(agreed.names) != 1 or agreed.target.levels:
        raise RunError(f"a picture needs one input and a target of numbers; inputs are {', '.join(agreed.names)}")
    [x_name], y_name = agreed.names, agreed.target.name
    frame = read_inputs(source, agreed).sort_values(agreed.features[0])
    width, height = min(COLUMNS, len(predictors)), -(-len(predictors) // COLUMNS)
    figure = Figure(figsize=(1.6 + 2.6 * width, 0.5 + 2.3 * height), dpi=DPI, layout="constrained")
    panels = figure.subplots(height, width, squeeze=False)
    for ax, (site, predictor) in zip(panels.ravel(), predictors.items(), strict=False):
        table, at = (
            predictor.predict(frame),
            predictor.inputs(frame)[:, 0].numpy() * agreed.input_scale + agreed.input_mean,
        )
        ax.fill_between(at, table["q2.5"], table["q97.5"], color=BAND, alpha=0.7, lw=0)
        ax.plot(at, table["mean"], color=FEDERATED, lw=1.6)
        if predictor.site is not None:
            rows = predictor.site.encode(agreed)
            for inputs, y, colour in ((rows.x, rows.y, "#888888"), (rows.x_test, rows.y_test, MISS)):
                original = inputs[:, 0] * agreed.input_scale + agreed.input_mean
                ax.plot(original, y * agreed.target_scale + agreed.target_mean, ".", color=colour, ms=2.5)
        ax.set_title(site, fontsize=8)
        ax.tick_params(labelsize=7)
    for ax in panels.ravel()[len(predictors) :]:
        ax.set_visible(False)
    figure.supxlabel(x_name, fontsize=8)
    figure.supylabel(y_name, fontsize=8)
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise RunError(f"{picture} cannot be written: {error}") from None
