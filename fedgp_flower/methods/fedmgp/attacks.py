"""What first statistics of FedMGP give to whoever sees them: every unit answers them at parameters that are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from fedgp_flower.data.sites import SiteData
from fedgp_flower.methods.fedmgp.latents import Latents, spacing
from fedgp_flower.methods.fedmgp.messages import PSEUDO_INPUTS
from fedgp_flower.methods.fedmgp.options import FedMGPOptions
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    features,
    squared_gaps,
    starting_parameters,
    statistics,
)
from fedgp_flower.privacy.attacks import READER, Seen, Sums
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import Array


def seen(run: RunData, config: RunConfig, groups: Mapping[str, Sequence[SiteData]]) -> dict[str, Seen]:
    """Of each group of units the sum of first statistics, in units of the root mean square of a single unit's targets.

    A reader of the posterior sees none of them: it is that of the last round, at parameters that stay with the units.
    """
    assert run.posterior is not None
    options, arrays = cast(FedMGPOptions, config.options), run.posterior.arrays
    inducing = arrays["latents.inducing"] if "latents.inducing" in arrays else arrays[PSEUDO_INPUTS]
    scales = np.outer(np.square(options.multiples), spacing(inducing) ** 2)
    latents = Latents(inducing, scales, np.ones(len(scales)), config.model.jitter)
    search = SearchOptions(convolved=options.covariance != "lmc")
    units = {name: [UnitData.build(own.x, own.y, inducing) for own in sites] for name, sites in groups.items()}
    return {name: Seen() if name == READER else _seen(own, latents, search) for name, own in units.items()}


def _seen(units: Sequence[UnitData], latents: Latents, search: SearchOptions) -> Seen:
    starts = [starting_parameters(own, latents, search) for own in units]
    told = [statistics(own, latents, start) for own, start in zip(units, starts, strict=True)]
    smoothing, amplitudes, factors = starts[0].smoothing, starts[0].amplitudes, latents.whitening()

    def rows(points: Array) -> Array:
        found = features(squared_gaps(points, latents.inducing), latents, factors, smoothing)
        return np.hstack([s * k for s, k in zip(amplitudes, found, strict=True)])

    noise = starts[0].noise  # 0.09 yᵀy/N, which the evidence, a function of it and of N, gives away
    gram, projection = sum(own.precision for own in told), sum(own.shift for own in told)
    return Seen(sums=Sums(np.asarray(gram * noise), np.asarray(projection * noise), rows))
