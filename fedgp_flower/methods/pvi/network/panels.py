"""Sections that PVI over a network adds to a report: weights that say nothing, and what each factor says."""

from __future__ import annotations

import numpy as np

from fedgp_flower.methods.pvi.weights.panels import factors, free_energy, prior_precision
from fedgp_flower.methods.pvi.weights.posterior import q_of
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.report import Panel, html_table

PRUNED = 0.1
"""Nats of KL from the prior below which a weight counts as pruned (Ashman et al. 2022, footnote 14)."""


def panels(run: RunData) -> list[Panel]:
    """Pruned weights, factors by site, and the free energy."""
    if run.posterior is None:
        return []
    mean, variance = (part.numpy() for part in q_of(run.posterior).moments())
    precision = prior_precision(run)
    divergence = 0.5 * (precision * (variance + mean**2) - 1 - np.log(precision * variance))
    count = int((divergence < PRUNED).sum())
    body = html_table(("weights", "pruned"), [(f"{len(mean):,}", f"{count:,}")])
    caption = f"A weight whose KL from its prior is below {PRUNED:g} nats says nothing; many of them mean over-pruning."
    return [Panel("Pruned weights", body, caption), factors(run), *free_energy(run)]
