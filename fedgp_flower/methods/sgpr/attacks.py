"""What sums of FSGP give to whoever sees them: at the final parameters, which the posterior names."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedgp_flower.data.sites import SiteData
from fedgp_flower.errors import RunError
from fedgp_flower.gp.sparse import SparseGP, pooled_sums
from fedgp_flower.gp.sums import SparseSums, exact_posterior
from fedgp_flower.methods.sgpr.private import EDGE, Budget, cleaned, disturbed
from fedgp_flower.methods.sparse_posterior import SavedSparseGP, saved_model
from fedgp_flower.privacy.attacks import Seen, Sums
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import Array


def seen(run: RunData, config: RunConfig, groups: Mapping[str, Sequence[SiteData]]) -> dict[str, Seen]:
    """Of each group of sites the sum over them, the posterior from it alone, and the range that rows lie in.

    Raises:
        RunError: the likelihood is not Gaussian.
    """
    assert run.posterior is not None
    saved = saved_model(run.posterior, ())
    if type(saved) is not SavedSparseGP:
        raise RunError(f"{run.path}: attacks on sums are known for `model.likelihood` = 'gaussian'")
    return {name: _seen(saved.model, config, sites, name) for name, sites in groups.items()}


@torch.no_grad()
def _seen(model: SparseGP, config: RunConfig, sites: Sequence[SiteData], name: str) -> Seen:
    told = _noisy if config.privacy.epsilon else _exact
    sums = told(model, config, sites, name)

    def features(points: Array) -> Array:
        with torch.no_grad():
            return np.asarray(model.whitened_cross(torch.from_numpy(points)).mT)

    posterior = SavedSparseGP(model, exact_posterior(sums, float(model.noise)))
    return Seen(posterior, Sums(sums.gram.numpy(), sums.projection.numpy(), features))


def _exact(model: SparseGP, config: RunConfig, sites: Sequence[SiteData], name: str) -> SparseSums:
    del config, name
    parts = (pooled_sums(model, torch.from_numpy(own.x), torch.from_numpy(own.y)) for own in sites)
    return functools.reduce(operator.add, parts)


def _noisy(model: SparseGP, config: RunConfig, sites: Sequence[SiteData], name: str) -> SparseSums:
    """As a release of the run, with fresh noise."""
    clipped = [SiteData(own.x, own.y.clip(-EDGE, EDGE), own.x_test, own.y_test, 0) for own in sites]
    exact, rng = _exact(model, config, clipped, name), np.random.default_rng([config.seed, *b"attack", *name.encode()])
    parts = 1 if config.privacy.secure_aggregation else len(sites)
    noise, rows = Budget.of(config).noise * math.sqrt(parts), sum(len(own.x) for own in sites)
    amplitude = float(model.kernel(model.inducing_points[:1], diag=True))
    return cleaned(disturbed(exact, amplitude, noise, rng), rows, amplitude, noise)[0]
