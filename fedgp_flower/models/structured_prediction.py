"""Prediction by a structured model: at a site that has its own latents, and for a site that nobody has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.config import ModelSection
from fedgp_flower.models.logistic_mixed import LogisticMixed
from fedgp_flower.models.structured import ClosedFormModel, SiteData, StructuredModel, predict_by_draws
from fedgp_flower.models.structured_choice import Structure
from fedgp_flower.models.structured_estimators import unit_noise
from fedgp_flower.models.structured_family import GlobalPosterior, LocalFamily
from fedgp_flower.shapes import Array, NamedArrays, Rows

PREDICTION_SEED = 20
"""Draws of a prediction are always the same: it is a function of the posterior alone."""


def global_posterior(arrays: NamedArrays) -> GlobalPosterior:
    """q(Z_G) of a message or of a saved posterior."""
    lower = arrays.get("q.lower")
    return GlobalPosterior(
        torch.from_numpy(arrays["q.mean"]),
        torch.from_numpy(arrays["q.log_scale"]),
        None if lower is None else torch.from_numpy(lower),
    )


def moments_at(
    model: StructuredModel,
    site: SiteData,
    q_global: GlobalPosterior,
    q_local: LocalFamily | None,
    features: Rows,
    groups: Tensor,
    *,
    draws: int,
    link: bool = False,
) -> tuple[Array, Array]:
    """Mean and variance of an observation [N], or of indicators of the classes [N, C].

    Args:
        model: Holding θ.
        site: The site's training rows and units.
        q_global: q(Z_G).
        q_local: The site's own posterior; None for a site that has none.
        features: Inputs to predict at [N, D].
        groups: Unit of each, int64 [N]; one that the site has no rows of has its latents from the prior.
        draws: For a model whose expectations are not known.
        link: On the scale of the link function, where trend and deviation add up, instead of that of an observation.
    """
    if isinstance(model, ClosedFormModel):
        where = (site.at(features), q_global, None if q_local is None else q_local.unfold())
        if link:
            mean, variance = model.latent(*where)
            return mean.numpy(), variance.numpy()
        found = model.predict(*where)
        return found.mean.numpy(), found.variance.numpy()
    if not isinstance(model, LogisticMixed):
        return _by_draws(model, site.at(features), q_global, q_local, draws, link)
    unit = torch.searchsorted(site.keys, groups).clamp(max=len(site.keys) - 1)
    known = (site.keys[unit] == groups) & (q_local is not None)
    centre, spread = np.empty(len(features)), np.empty(len(features))
    for rows, own in ((known, q_local), (~known, None)):
        if not rows.any():
            continue
        zero = features.new_zeros(int(rows.sum()))
        data = site.at(features[rows], unit[rows]) if own else model.prepare(features[rows], zero, groups[rows])
        centre[rows.numpy()], spread[rows.numpy()] = _by_draws(model, data, q_global, own, draws, link)
    return centre, spread


def _by_draws(
    model: StructuredModel,
    site: SiteData,
    q_global: GlobalPosterior,
    q_local: LocalFamily | None,
    draws: int,
    link: bool,
) -> tuple[Array, Array]:
    rng = np.random.default_rng(PREDICTION_SEED)
    noise = torch.from_numpy(rng.standard_normal((draws, model.global_size)))
    own = unit_noise(PREDICTION_SEED, 0, site.keys, (draws,), model.local_width(site))
    found = predict_by_draws(model, site, q_global, q_local, noise_global=noise, noise_local=own, link=link)
    return found.mean.numpy(), found.variance.numpy()


def structured_predictor(
    arrays: NamedArrays, model: Mapping[str, Any], names: tuple[str, ...], *, link: bool = False
) -> Callable[[Array], tuple[Array, Array]]:
    """Mean and standard deviation at standardised inputs, for a new site; see :func:`moments_at`.

    Args:
        arrays: θ, q(Z_G) and shared inputs of a saved posterior.
        model: Its description: ``model`` and ``structure``.
        names: Names of the encoded inputs.
        link: As there.
    """
    structure, draws = Structure.of(model["structure"]), int(model["structure"]["prediction-draws"])
    aside = [i for i, name in enumerate(names) if name == model["structure"]["unit-column"]]
    width = len(names) - len(aside)
    own = {name: np.array(array) for name, array in arrays.items()}
    built = structure.at(ModelSection.model_validate(dict(model["model"])), width, own)
    q_global = global_posterior(own)
    nobody = torch.zeros(0, dtype=torch.float64)
    one = torch.zeros(1, dtype=torch.int64)
    site = SiteData(nobody.new_zeros(0, width), nobody, one[:0], one, nobody.new_zeros(0, width))

    def predict(inputs: Array) -> tuple[Array, Array]:
        features = torch.from_numpy(np.delete(inputs, aside, axis=1))
        unseen = torch.arange(len(features), dtype=torch.int64)
        mean, variance = moments_at(built, site, q_global, None, features, unseen, draws=draws, link=link)
        return mean, np.sqrt(variance)

    return predict
