"""The two comparisons beside every method: what a site can do alone, and what one analyst with all rows could do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.gp.exact import ExactGP
from fedgp_flower.gp.kernels import WiredModel
from fedgp_flower.gp.latent import LatentGP
from fedgp_flower.gp.optimisers import FREE, LOGARITHM, maximise
from fedgp_flower.gp.placement import Placement, to_array
from fedgp_flower.gp.sparse import SparseGP, pooled_bound, pooled_sums
from fedgp_flower.gp.sums import PENALTY, exact_posterior
from fedgp_flower.gp.whitened import WhitenedPosterior
from fedgp_flower.typing import Array

MOST_POINTS = 100
"""Inducing points of a baseline, at most: its fit takes hundreds of evaluations."""
EXACT_ROWS = 400
"""Up to so many rows a site fits an exact GP."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Predictions of held-out rows, standardised, and what they cost."""

    mean: Array  # [n]
    variance: Array  # [n]
    target: Array  # [n]
    evaluations: int
    latent: LatentGP | None = None
    """Where the likelihood is not Gaussian: the model; ``mean`` and ``variance`` are then those of f."""


def log_prior(model: WiredModel) -> Tensor:
    """Log density, up to a constant, of weak priors: lengthscales, amplitude √outputscale and noise sd are LN(0, 1).

    They keep a GP of a dozen rows from explaining them without noise.
    """
    terms = []
    for name, parameter in model.wire_parameters():
        if ".log_" in name:
            is_variance = "outputscale" in name or "variance" in name or "noise" in name
            terms.append((parameter / 2 if is_variance else parameter).square().sum())
    return -0.5 * torch.stack(terms).sum()


def no_prior(model: WiredModel) -> Tensor:
    """0."""
    del model
    return torch.zeros((), dtype=torch.float64)


def penalty(model: WiredModel) -> Tensor:
    """−.05 Σ (log ℓ − 1)², the penalty of :mod:`fedgp_flower.gp.sums`."""
    logs = [value for name, value in model.wire_parameters() if name.endswith("log_lengthscale")]
    return -PENALTY * sum(((value - 1).square().sum() for value in logs), no_prior(model))


PRIORS = {"none": no_prior, "log-normal": log_prior, "lengthscales": penalty}
"""Log densities of hyperparameters, up to a constant, by :attr:`MethodOptions.hyperprior`."""


def fit(model: WiredModel, objective: Callable[[], Tensor], max_evaluations: int, tolerance: float = 1e-7) -> int:
    """Maximise a function of the model's parameters, logarithms within their bounds; returns the evaluations used."""
    named = dict(model.wire_parameters())
    bounds = [LOGARITHM if ".log_" in name else FREE for name in named]
    trace = maximise(
        objective, list(named.values()), max_evaluations=max_evaluations, bounds=bounds, tolerance=tolerance
    )
    return trace.evaluations


def local_only(site_data: tuple[Array, Array, Array, Array], config: RunConfig) -> Baseline:
    """A GP of the site's rows, hyperparameters at their mode: exact up to ``EXACT_ROWS`` rows, else sparse.

    Where all targets are one number, hyperparameters stay as configured: a fit would let noise vanish.
    """
    x, y, x_test, y_test = site_data
    if len(x) > EXACT_ROWS or config.model.likelihood != "gaussian":
        return _sparse(site_data, config, np.random.default_rng([config.seed, *b"local"]), log_prior)
    place = Placement.of(config)
    model = place.module(ExactGP(config.model, torch.from_numpy(x), torch.from_numpy(y)))
    budget = config.baselines.max_evaluations
    used = fit(model, lambda: model.log_evidence() + log_prior(model) / len(y), budget) if np.ptp(y) else 0
    mean, variance = model.predict(place.tensor(x_test))
    return Baseline(to_array(mean), to_array(variance), y_test, used)


def pooled(site: RawSite, preparation: Preparation, config: RunConfig) -> Baseline:
    """A sparse GP of the rows of all simulated sites, inducing points started at a random subset of the rows.

    Hyperparameters have the prior of the method that it is compared with.
    """
    rows = all_rows(config, site.partitions, preparation)
    return _sparse(rows, config, np.random.default_rng([config.seed, *b"pooled"]), PRIORS[config.options.hyperprior])


def all_rows(config: RunConfig, partitions: int, preparation: Preparation) -> tuple[Array, Array, Array, Array]:
    """Encoded inputs and targets of all simulated sites, then those of their held-out rows."""
    encoded = [site.encode(preparation) for site in load_all_sites(config, partitions)]
    parts: Sequence[str] = ("x", "y", "x_test", "y_test")
    x, y, x_test, y_test = (np.concatenate([getattr(data, part) for data in encoded]) for part in parts)
    return x, y, x_test, y_test


def _sparse(
    rows: tuple[Array, Array, Array, Array],
    config: RunConfig,
    rng: np.random.Generator,
    prior: Callable[[WiredModel], Tensor],
) -> Baseline:
    """Hyperparameters and inducing points at the maximum of the collapsed bound plus a log prior."""
    x, y, x_test, y_test = rows
    place = Placement.of(config)
    inputs, targets = place.tensor(x), place.tensor(y)
    chosen = np.sort(rng.permutation(len(x))[: min(config.model.num_inducing, MOST_POINTS)])
    if config.model.likelihood != "gaussian":
        return _variational(rows, config, torch.from_numpy(x[chosen]))
    model = place.module(SparseGP(config.model, torch.from_numpy(x[chosen])))

    def objective() -> Tensor:
        return (pooled_bound(model, inputs, targets) + prior(model)) / len(targets)

    used = fit(model, objective, config.baselines.max_evaluations) if np.ptp(y) else 0
    with torch.no_grad():
        sums = pooled_sums(model, inputs, targets)
        mean, variance = model.predict(place.tensor(x_test), exact_posterior(sums, float(model.noise)))
    return Baseline(to_array(mean), to_array(variance), y_test, used)


def _variational(rows: tuple[Array, Array, Array, Array], config: RunConfig, points: Tensor) -> Baseline:
    """A sparse variational GP of the configured likelihood (Hensman et al. 2015): parameters and q(v) = N(m, R Rᵀ)."""
    x, y, x_test, y_test = rows
    place = Placement.of(config)
    inputs, targets = place.tensor(x), place.tensor(y)
    model, size = place.module(LatentGP(config.model, points)), len(points)
    mean, root = (part.requires_grad_() for part in (place.tensor(np.zeros(size)), place.tensor(np.eye(size))))

    def posterior() -> WhitenedPosterior:
        return WhitenedPosterior(mean, root.tril() @ root.tril().mT)

    def objective() -> Tensor:
        cross, prior = model.whitened_cross(inputs), model.kernel(inputs, diag=True)
        fit = model.observed.expected(targets, *model.moments(cross, prior, posterior())[:2], model.hyper).sum()
        divergence = 0.5 * (root.tril().square().sum() + mean.square().sum() - size) - root.diagonal().abs().log().sum()
        return (fit - divergence + model.log_prior()) / len(targets)

    named = dict(model.wire_parameters())
    bounds = [LOGARITHM if ".log_" in name else FREE for name in named]
    leaves = [*named.values(), mean, root]
    trace = maximise(objective, leaves, max_evaluations=config.baselines.max_evaluations, bounds=[*bounds, FREE, FREE])
    centre, spread = model.latent(place.tensor(x_test), posterior())
    return Baseline(to_array(centre), to_array(spread), y_test, trace.evaluations, model)
