"""The pooled bound at its best over amplitude and noise, from totals: height, derivatives, curvature."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.gp.linalg import laplace_deviations
from fedgp_flower.gp.profiled import PENALTY, profiled, scaled
from fedgp_flower.gp.selection import explaining, products_of, restricted
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.gp.sums import bound_gradient
from fedgp_flower.methods.fsgp.messages import (
    Adjoints,
    Statistics,
    TrialAdjoints,
    TrialGradients,
    Trials,
    TrialSums,
    apart,
    numbered,
)
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Array, NamedArrays
from strategies.fsgp import LOG_NOISE
from strategies.fsgp_exact import pack, through_inducing_points, unpack
from strategies.server.questions import Asking, Summed, Total

LOCATIONS = "inducing.locations"
CURVATURE = "the curvature of the bound at its end (Laplace's approximation at fixed inducing points)"
STEP = 1e-3
"""Of logarithms, for their curvature."""


def objective(values: Mapping[str, ndarray], totals: Statistics) -> float:
    """J, in nats."""
    logs = [array for name, array in values.items() if name.endswith("log_lengthscale")]
    return profiled(totals.sums()).value - PENALTY * sum(float(np.square(own - 1).sum()) for own in logs)


def adjoints_at(values: Mapping[str, ndarray], totals: Statistics) -> Adjoints:
    """Derivatives of the bound by the totals."""
    found = bound_gradient(totals.sums(), float(values[LOG_NOISE][0]))
    return Adjoints(values, found.gram, found.projection, found.prior_variance)


def folded(values: Mapping[str, ndarray], totals: Statistics, section: ModelSection) -> tuple[NamedArrays, Statistics]:
    """Parameters with the amplitude and noise that their totals are best at, and the totals there."""
    best = profiled(totals.sums())
    names = SparseGP.from_arrays(section, values).amplitude_names
    louder = {name: np.asarray(values[name] + math.log(best.amplitude)) for name in names}
    noise = {LOG_NOISE: np.full_like(values[LOG_NOISE], math.log(best.noise))}
    return {**values, **louder, **noise}, Statistics.of(scaled(totals.sums(), best.amplitude))


@torch.no_grad()
def thinned(
    values: Mapping[str, ndarray], totals: Statistics, count: int, section: ModelSection
) -> tuple[NamedArrays, Statistics]:
    """At those inducing points, at most so many, that explain most of the rows."""
    places = values[LOCATIONS]
    if not 0 < count < len(places):
        return dict(values), totals
    sums, factor = totals.sums(), SparseGP.from_arrays(section, values).factor()
    taken = explaining((factor @ factor.mT).numpy(), products_of(sums, factor).numpy(), count)
    few = {**values, LOCATIONS: places[taken]}
    return few, Statistics.of(restricted(sums, factor, taken, SparseGP.from_arrays(section, few).factor()))


def bends(
    values: Mapping[str, ndarray], logs: Mapping[str, ndarray], sites: tuple[str, ...], section: ModelSection
) -> Asking[Array | None]:
    """−∂²F by some logarithms among the parameters [H, H], in two exchanges; None where sites left in between.

    At fixed inducing points, amplitude and noise at their best everywhere, so that all may make up for each other. The
    slope at the parameters and at a small step along each logarithm give it.
    """
    centre = pack(logs)
    tried = [{**values, **unpack(centre + step, logs)} for step in STEP * np.eye(centre.size + 1, centre.size, -1)]
    sums: Summed[TrialSums] = yield Total(TrialSums, Trials(numbered(tried)), sites)
    if sums.total is None:
        return None
    best = [folded(*own, section) for own in zip(tried, sums.total.each(), strict=True)]
    asked = [adjoints_at(*own) for own in best]
    shares: Summed[TrialGradients] = yield Total(TrialGradients, TrialAdjoints.of(asked), sums.sites)
    if shares.total is None or (shares.sites, shares.silent) != (sums.sites, sums.silent):
        return None
    slopes = []
    for share, own, adjoints in zip(apart(shares.total.values), best, asked, strict=True):
        through = through_inducing_points(*own, adjoints, section)
        slopes.append(pack({name: share[name] + through[name] for name in logs}))
    found = (slopes[0] - np.array(slopes[1:])) / STEP
    return found / 2 + found.T / 2


def known_lengthscales(
    values: Mapping[str, ndarray], sites: tuple[str, ...], section: ModelSection
) -> Asking[NamedArrays | None]:
    """Standard deviations of log ℓ under Laplace's approximation at the maximum of J, in two exchanges.

    The covariance is (−∂²J)⁻¹, see :func:`bends`. Of few inducing points the bound bends more than the evidence. None
    where sites left in between.
    """
    logs = {name: own for name, own in values.items() if name.endswith("log_lengthscale")}
    if not logs:  # a linear kernel
        return None
    found = yield from bends(values, logs, sites, section)
    return None if found is None else unpack(laplace_deviations(found, prior=2 * PENALTY), logs)
