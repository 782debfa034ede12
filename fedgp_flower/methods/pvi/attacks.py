"""What PVI gives: sums; or pseudo-observations, each site's to the server, those of all in the posterior."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from fedgp_flower.data.sites import SiteData
from fedgp_flower.messages import decode
from fedgp_flower.methods.pvi.factors import Factor, PseudoObservations
from fedgp_flower.methods.pvi.messages import PseudoPoints
from fedgp_flower.methods.pvi.posterior import SavedFactors, saved_model
from fedgp_flower.privacy.attacks import Seen
from fedgp_flower.run.artefacts import RunData, read_checkpoint
from fedgp_flower.run.config import RunConfig
from fedgp_flower.run.registry import load

SITES = "state.sites"
"""Name of the sites' factors in a checkpoint."""


def seen(run: RunData, config: RunConfig, groups: Mapping[str, Sequence[SiteData]]) -> dict[str, Seen]:
    """Of a single site its factor, alone with the prior; of all, the posterior."""
    assert run.posterior is not None
    saved = saved_model(run.posterior, ())
    if not isinstance(saved, SavedFactors):  # factors by sums are those of the method that asks for sums alone
        return dict(load("fedgp_flower.methods.sgpr.attacks:seen")(run, config, groups))
    arrays = read_checkpoint(run.path).arrays
    names = json.loads(np.asarray(arrays[SITES], dtype=np.uint8).tobytes())
    tied = bool(run.posterior.arrays.get("factor.points-0.tied", True))
    found = {}
    for name, sites in groups.items():
        if len(sites) > 1 or name not in names:
            found[name] = Seen(saved, points=_points(saved.factors))
            continue
        prefix = f"{SITES}.{names.index(name)}.points."
        own = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        factors: list[Factor] = [decode(PseudoPoints, own).factor(tied=tied)] if own else []
        alone = SavedFactors(saved.model, saved.draws, factors) if factors else None
        found[name] = Seen(alone, points=_points(factors))
    return found


def _points(factors: Sequence[Factor]) -> np.ndarray | None:
    """Pseudo-inputs and targets [V, D + 1]."""
    parts = [
        np.column_stack([own.inputs.numpy(), own.targets.numpy()])
        for own in factors
        if isinstance(own, PseudoObservations)
    ]
    return np.concatenate(parts) if parts else None
