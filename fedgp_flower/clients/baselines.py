"""The two comparisons beside every method: what a site can do alone, and what one analyst with all rows could do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.models import ExactGP, LatentGP, SparseGP, WhitenedPosterior, WiredModel
from fedgp_flower.gp.optimisers import FREE, LOGARITHM, maximise
from fedgp_flower.gp.placement import Placement, to_array
from fedgp_flower.gp.sparse import pooled_bound, pooled_sums
from fedgp_flower.gp.sums import PENALTY, exact_posterior
from fedgp_flower.scores import Prediction, Scores, TargetUnits

MOST_POINTS = 100
"""Inducing points of a baseline, at most: its fit takes hundreds of evaluations."""
EXACT_ROWS = 400
"""Up to so many rows a site fits an exact GP."""


def log_prior(model: WiredModel) -> Tensor:
    """Log density, up to a constant, of weak priors: lengthscales, √outputscale and noise sd are LN(0, 1)."""
    variances = ("outputscale", "variance", "noise")
    logs = [(name, value) for name, value in model.wire_parameters().items() if ".log_" in name]
    terms = [(value / 2 if any(part in name for part in variances) else value).square().sum() for name, value in logs]
    return -0.5 * torch.stack(terms).sum()


def penalty(model: WiredModel) -> Tensor:
    """−.05 Σ (log ℓ − 1)², the penalty of :mod:`fedgp_flower.gp.sums`."""
    logs = [value for name, value in model.wire_parameters().items() if name.endswith("log_lengthscale")]
    return -PENALTY * sum(((value - 1).square().sum() for value in logs), torch.zeros(()))


PRIORS: dict[str, Callable[[WiredModel], Tensor]] = {
    "none": lambda model: torch.zeros(()),
    "log-normal": log_prior,
    "lengthscales": penalty,
}
"""Log densities of hyperparameters, up to a constant, by :attr:`MethodOptions.hyperprior`."""


def scores(rows: SiteData, config: RunConfig, units: TargetUnits, pooled: bool) -> Scores:
    """Scores of a GP of these rows at the mode of its hyperparameters: exact for few rows of one site, else sparse.

    Pooled rows have the hyperprior of the method. Where all targets are one number nothing is fitted.
    """
    if not len(rows.y_test):
        return units.gaussian_scores(Prediction(np.empty(0), np.empty(0)), rows.y_test)
    if pooled:
        prior = PRIORS[config.options.hyperprior]
        return _sparse(rows, config, units, np.random.default_rng([config.seed, *b"pooled"]), prior)
    if len(rows.x) > EXACT_ROWS or config.model.likelihood != "gaussian":
        return _sparse(rows, config, units, np.random.default_rng([config.seed, *b"local"]), log_prior)
    place = Placement.of(config)
    model = place.module(ExactGP(config.model, torch.from_numpy(rows.x), torch.from_numpy(rows.y)))
    _maximise(model, lambda: model.log_evidence() + log_prior(model) / len(rows.y), rows, config)
    mean, variance = model.predict(place.tensor(rows.x_test))
    return units.gaussian_scores(Prediction(to_array(mean), to_array(variance)), rows.y_test)


def all_rows(config: RunConfig, partitions: int, preparation: Preparation) -> SiteData:
    """The encoded rows of all simulated sites."""
    encoded = [site.encode(preparation) for site in load_all_sites(config, partitions)]
    parts = zip(*((data.x, data.y, data.x_test, data.y_test) for data in encoded), strict=True)
    x, y, x_test, y_test = map(np.concatenate, parts)
    return SiteData(x, y, x_test, y_test, sum(data.unknown_levels for data in encoded))


def _maximise(
    model: WiredModel, objective: Callable[[], Tensor], rows: SiteData, config: RunConfig, *more: Tensor
) -> None:
    """Maximise a function of the model's parameters and of free ones; logarithms stay within their bounds."""
    named = model.wire_parameters()
    bounds = [LOGARITHM if ".log_" in name else FREE for name in named]
    leaves, budget = [*named.values(), *more], config.baselines.max_evaluations
    if np.ptp(rows.y) or more:
        maximise(objective, leaves, max_evaluations=budget, bounds=[*bounds, *(FREE for _ in more)])


def _sparse(
    rows: SiteData,
    config: RunConfig,
    units: TargetUnits,
    rng: np.random.Generator,
    prior: Callable[[WiredModel], Tensor],
) -> Scores:
    """Hyperparameters and inducing points at the maximum of the collapsed bound plus a log prior."""
    place = Placement.of(config)
    inputs, targets = place.tensor(rows.x), place.tensor(rows.y)
    chosen = np.sort(rng.permutation(len(rows.x))[: min(config.model.num_inducing, MOST_POINTS)])
    points = torch.from_numpy(rows.x[chosen])
    if config.model.likelihood != "gaussian":
        return _variational(rows, config, units, points)
    model = place.module(SparseGP(config.model, points))
    _maximise(model, lambda: (pooled_bound(model, inputs, targets) + prior(model)) / len(targets), rows, config)
    with torch.no_grad():
        sums = pooled_sums(model, inputs, targets)
        mean, variance = model.predict(place.tensor(rows.x_test), exact_posterior(sums, float(model.noise)))
    return units.gaussian_scores(Prediction(to_array(mean), to_array(variance)), rows.y_test)


def _variational(rows: SiteData, config: RunConfig, units: TargetUnits, points: Tensor) -> Scores:
    """A sparse variational GP of the configured likelihood (Hensman et al. 2015): parameters and q(v) = N(m, R Rᵀ)."""
    place = Placement.of(config)
    inputs, targets = place.tensor(rows.x), place.tensor(rows.y)
    model, size = place.module(LatentGP(config.model, points)), len(points)
    mean, root = (part.requires_grad_() for part in (place.tensor(np.zeros(size)), place.tensor(np.eye(size))))

    def posterior() -> WhitenedPosterior:
        return WhitenedPosterior(mean, root.tril() @ root.tril().mT)

    def objective() -> Tensor:
        cross, prior = model.project(inputs), model.kernel(inputs, diag=True)
        fit = model.observed.expected(targets, *model.moments(cross, prior, posterior())[:2], model.hyper).sum()
        divergence = 0.5 * (root.tril().square().sum() + mean.square().sum() - size) - root.diagonal().abs().log().sum()
        return (fit - divergence + model.log_prior()) / len(targets)

    _maximise(model, objective, rows, config, mean, root)
    centre, spread = model.latent(place.tensor(rows.x_test), posterior())
    return model.observed.scores(to_array(centre), to_array(spread), rows.y_test, model.hyper, units.scale)
