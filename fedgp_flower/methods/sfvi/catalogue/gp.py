"""``gp``: the hierarchical Gaussian process."""

from __future__ import annotations

from typing import Literal

from fedgp_flower.methods.sfvi.rows import ModelRow
from fedgp_flower.options import Count, NonNegative, Positive, Section


class GPKeys(Section):
    """Shared inducing inputs, and how sites deviate."""

    shared_inputs: Literal["copula", "box"] = "copula"
    """``gp``: shared inducing inputs follow the pooled distribution of the inputs, or fill the box they lie in."""
    learn_inputs: bool = False
    """``gp``: whether the shared inducing inputs are part of θ."""
    site_inducing: Count = 20
    """``gp``: inducing inputs of a site's deviation, rows of its own that stay there; 0: sites do not deviate. Exact in
    closed form, where any other number is the same.
    """
    site_noise: NonNegative = 0.5
    """``gp``: prior standard deviation of a site's log noise offset; 0 gives all sites the same noise."""
    site_amplitude: NonNegative = 0.5
    """``closed-form``: prior sd of the log amplitude of a site's deviation, learned from there; 0: all the same, as
    where targets are labels or counts. A site whose target hardly changes widens it for all.
    """
    site_lengthscale: NonNegative = 0.3
    """``closed-form``: the same of the log lengthscale of its deviation."""
    site_slope: Positive = 0.3
    """``gp``: initial standard deviation of a site's intercept and slopes; ``closed-form`` exceeds it with prior
    probability .05."""
    deviation: Positive = 0.3
    """``gp``: initial prior variance of a site's deviation, relative to ``model.outputscale``; likewise."""


ROWS = {
    "gp": ModelRow(
        "fedgp_flower.methods.sfvi.gp:HierarchicalGP",
        "shared trend + site deviation + site noise",
        GPKeys,
        ("gaussian", "bernoulli", "poisson"),
        link="probit",
        known_expectations=True,
        inducing=True,
    )
}
