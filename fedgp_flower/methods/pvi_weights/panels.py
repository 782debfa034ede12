"""Report panels of PVI over weights: weights with intervals, and strength of the factors."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedgp_flower.methods.pvi.panels import product_panels
from fedgp_flower.methods.pvi_weights.model import q_of
from fedgp_flower.run.artefacts import Run
from fedgp_flower.run.figures import Z95, intervals
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
    table = pd.DataFrame({"low": mean - Z95 * sd, "value": mean, "high": mean + Z95 * sd}, index=names)
    return [Panel("Weights", intervals(table.iloc[order], "weight"), caption), *product_panels(run)]


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
