"""Which power of a transformation of the target is best, and its mean and spread, from sums over sites.

See :mod:`fedgp_flower.transforms`: the power maximises −½ N log σ²(λ) + Σ log g'(y; λ) over a grid, at which the choice
does not move with rounding.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from fedgp_flower.errors import DataError
from fedgp_flower.shared_messages import TargetMoments, TargetPowers
from fedgp_flower.transforms import Transform
from fedgp_flower.typing import Array
from strategies.server.enrolment import Preparation
from strategies.server.questions import Asking, Summed, Total


def transformed(preparation: Preparation, family: type[Transform], sites: tuple[str, ...]) -> Asking[Preparation]:
    """What the sites agreed on, with a transformed target.

    Raises:
        DataError: nobody answers, or the transformed target is the same number everywhere.
    """
    powers = np.array(family.powers)
    middle = np.array(preparation.training_target["mean"])
    centres = np.array([float(family(power).forward(middle)) for power in powers])
    summed: Summed[TargetMoments] = yield Total(TargetMoments, TargetPowers(powers, centres), sites)
    if summed.total is None:
        raise DataError(f"no site answered how its target is spread under `transform.target` = '{family.name}'")
    best, mean, scale = chosen(summed.total, centres)
    if not scale > 0:
        raise DataError(f"the target is one number everywhere under `transform.target` = '{family.name}'")
    schema = json.loads(preparation.schema)
    schema["target"]["transform"] = family(float(powers[best])).as_json()
    own = {"target.mean": np.array(mean), "target.scale": np.array(scale)}
    sums = {site: with_last_unknown(known) for site, known in preparation.sums.items()}
    return replace(preparation, schema=json.dumps(schema), arrays={**preparation.arrays, **own}, sums=sums)


def with_last_unknown(sums: Array) -> Array:
    """What a site said of its columns, [D + 1, 3], but of the target: that was before the transformation."""
    return np.vstack([sums[:-1], np.full((1, sums.shape[1]), np.nan)])


def chosen(sums: TargetMoments, centres: np.ndarray) -> tuple[int, float, float]:
    """Position of the best power, and mean and standard deviation of t there."""
    rows = float(sums.count)
    offset = sums.first / rows
    variance = sums.second / rows - offset**2
    with np.errstate(divide="ignore", invalid="ignore"):
        likelihood = np.where(variance > 0, -rows / 2 * np.log(variance) + sums.slopes, -np.inf)
    best = int(np.argmax(likelihood))
    return best, float(centres[best] + offset[best]), float(np.sqrt(max(variance[best], 0.0)))
