"""Report panels of PVI over weights: weights with intervals, and strength of the factors."""

from __future__ import annotations

import numpy as np

from fedgp_flower.methods.pvi.panels import intervals, product_panels
from fedgp_flower.methods.pvi_weights.model import q_of
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import Z95
from fedgp_flower.run.report import Panel, html_table

MOST_WEIGHTS = 30
"""Most weights in the figure."""
PRUNED = 0.1
"""A weight with less KL from its prior, in nats, counts as pruned (Ashman et al. 2022, footnote 14)."""


def panels(run: Run) -> list[Panel]:
    """The weights furthest from zero, factors by site, and the free energy."""
    if run.saved is None:
        return []
    mean, spread = (part.numpy() for part in q_of(run.saved).moments())
    sd = np.sqrt(spread.diagonal() if spread.ndim == 2 else spread)
    names = ["intercept", *run.saved.inputs]
    order = np.argsort(-np.abs(mean / sd), kind="stable")[:MOST_WEIGHTS]
    which = "" if len(order) == len(mean) else f" Shown are the {len(order)} of {len(mean)} furthest from zero."
    caption = f"Mean and 95 % interval under q, for standardised inputs.{which}"
    centre, reach = mean[order], Z95 * sd[order]
    figure = intervals(centre - reach, centre, centre + reach, [names[i] for i in order], "weight")
    figure.axes[0].axvline(0, color="0.6", linewidth=0.8)
    return [Panel("Weights", figure, caption), *product_panels(run)]


def network_panels(run: Run) -> list[Panel]:
    """Pruned weights, factors by site, and the free energy."""
    if run.saved is None:
        return []
    mean, variance = (part.numpy() for part in q_of(run.saved).moments())
    divergence = 0.5 * (variance + mean**2 - 1 - np.log(variance))
    count = int((divergence < PRUNED).sum())
    body = html_table(("weights", "pruned"), [(f"{len(mean):,}", f"{count:,}")])
    caption = f"A weight with KL from its prior below {PRUNED:g} nats is uninformative; many of them mean over-pruning."
    return [Panel("Pruned weights", body, caption), *product_panels(run)]
