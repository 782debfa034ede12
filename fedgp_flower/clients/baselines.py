"""The two comparisons beside every method: what a site can do alone, and what one analyst with all rows could do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.config import RunConfig
from fedgp_flower.data.sites import RawSite, load_all_sites
from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.models.fitting import maximise
from fedgp_flower.models.placement import Placement, to_array
from fedgp_flower.models.sparse import SparseGP, pooled_bound, pooled_sums
from fedgp_flower.shapes import Array, Rows, Targets
from fedgp_flower.statistics import SparseSums, exact_posterior

EXACT_ROWS = 400
"""Up to so many rows a site fits an exact GP: inducing points at all its rows, where the bound is the evidence."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Predictions of held-out rows, standardised, and what they cost."""

    mean: Array  # [n]
    variance: Array  # [n]
    target: Array  # [n]
    evaluations: int


def log_prior(model: SparseGP) -> Tensor:
    """Log density, up to a constant, of weak priors: lengthscales, amplitude √outputscale and noise sd are LN(0, 1).

    They keep a GP of a dozen rows from explaining them without noise.
    """
    terms = []
    for name, parameter in model.wire_parameters():
        if ".log_" in name:
            is_variance = "outputscale" in name or "variance" in name or "noise" in name
            terms.append((parameter / 2 if is_variance else parameter).square().sum())
    return -0.5 * torch.stack(terms).sum()


def fit(
    model: SparseGP,
    inputs: Rows,
    targets: Targets,
    *,
    max_evaluations: int,
    move_inducing: bool,
    prior: bool,
    tolerance: float = 1e-7,
) -> int:
    """Maximise the collapsed bound, plus the log prior if asked; returns the evaluations it took."""
    named = [(n, p) for n, p in model.wire_parameters() if move_inducing or n != "inducing.locations"]
    model.inducing_points.requires_grad_(move_inducing)

    def objective() -> Tensor:
        bound = pooled_bound(model, inputs, targets)
        return (bound + log_prior(model) if prior else bound) / len(targets)

    _, evaluations = maximise(
        objective,
        [parameter for _, parameter in named],
        max_evaluations=max_evaluations,
        bounded=[".log_" in name for name, _ in named],
        tolerance=tolerance,
    )
    return evaluations


def local_only(site_data: tuple[Array, Array, Array, Array], config: RunConfig) -> Baseline:
    """A GP of the site's own rows, hyperparameters at their mode: exact up to ``EXACT_ROWS`` rows, else sparse."""
    x, y, x_test, y_test = site_data
    place = Placement.of(config)
    inputs, targets = place.tensor(x), place.tensor(y)
    exact = len(x) <= EXACT_ROWS
    rng = np.random.default_rng([config.seed, *b"local"])
    centres = x if exact else _subset(x, config.model.num_inducing, rng)
    model = place.module(SparseGP(config.model, torch.from_numpy(centres)))
    used = fit(
        model,
        inputs,
        targets,
        max_evaluations=config.baselines.max_evaluations,
        move_inducing=not exact,
        prior=True,
    )
    return _predict(model, inputs, targets, x_test, y_test, used)


def pooled(site: RawSite, preparation: Preparation, config: RunConfig) -> Baseline:
    """A sparse GP of the rows of all simulated sites, inducing points started at a random subset of the rows."""
    x, y, x_test, y_test = _all_rows(config, site.partitions, preparation)
    place = Placement.of(config)
    inputs, targets = place.tensor(x), place.tensor(y)
    rng = np.random.default_rng([config.seed, *b"pooled"])
    model = place.module(SparseGP(config.model, torch.from_numpy(_subset(x, config.model.num_inducing, rng))))
    used = fit(
        model, inputs, targets, max_evaluations=config.baselines.max_evaluations, move_inducing=True, prior=False
    )
    return _predict(model, inputs, targets, x_test, y_test, used)


def _all_rows(config: RunConfig, partitions: int, preparation: Preparation) -> tuple[Array, Array, Array, Array]:
    encoded = [site.encode(preparation) for site in load_all_sites(config, partitions)]
    parts: Sequence[str] = ("x", "y", "x_test", "y_test")
    x, y, x_test, y_test = (np.concatenate([getattr(data, part) for data in encoded]) for part in parts)
    return x, y, x_test, y_test


def _subset(x: Array, count: int, rng: np.random.Generator) -> Array:
    return x[np.sort(rng.permutation(len(x))[:count])]


def _predict(model: SparseGP, inputs: Rows, targets: Targets, x_test: Array, y_test: Array, used: int) -> Baseline:
    with torch.no_grad():
        sums = SparseSums.from_arrays(pooled_sums(model, inputs, targets).to_arrays())
        mean, variance = model.predict(torch.from_numpy(x_test).to(inputs), exact_posterior(sums, float(model.noise)))
    return Baseline(to_array(mean), to_array(variance), y_test, used)
