"""Where FedMGP starts: pseudo-inputs from federated statistics of the inputs, and first statistics that can be true."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fedgp_flower.config import RunConfig
from fedgp_flower.errors import RunError
from fedgp_flower.latent import Statistics, unpack
from fedgp_flower.shapes import Array
from fedgp_flower.statistics import INPUT_EDGES
from strategies.exact_trust import possible_start
from strategies.fedmgp_options import FedMGPOptions
from strategies.initialisation import initial_inducing_points
from strategies.meeting import Preparation
from strategies.wire import Answer, sums_over

logger = logging.getLogger("fedgp")

LEAST_SIDE = 3
"""Fewest points of a grid along an input."""


def scaled(preparation: Preparation, config: RunConfig, options: FedMGPOptions) -> Preparation:
    """Targets divided by their root mean square, and not centred: units scale g, and would scale a common offset."""
    own = preparation.arrays
    if options.center_target or config.model.likelihood not in ("gaussian", "student-t") or not config.standardise:
        return preparation
    power = math.hypot(float(own["target.mean"]), float(own["target.scale"]))
    return replace(preparation, arrays={**own, "target.mean": np.array(0.0), "target.scale": np.array(power)})


def pseudo_inputs(config: RunConfig, options: FedMGPOptions, answers: Mapping[str, Answer]) -> Array:
    """Pseudo-inputs W [J, D] from the pooled histograms of the standardised inputs; no site sends a row.

    Raises:
        RunError: a grid was asked for and would have fewer than three points along an input.
    """
    histogram, count = sums_over(answers, "input.histogram"), config.model.num_inducing
    if histogram[:, [0, -1]].any():
        logger.warning(
            "some inputs are more than %g standard deviations from their mean; pseudo-inputs end there. Transform them",
            INPUT_EDGES[-1],
        )
    side = grid_side(count, len(histogram))
    if options.pseudo_inputs == "grid":
        require_grid(count, len(histogram), "or set `fedmgp.pseudo-inputs` to 'scattered'")
    if options.pseudo_inputs == "auto" and side < LEAST_SIDE:
        logger.info("%d pseudo-inputs make no grid over %d inputs; they are scattered", count, len(histogram))
    elif options.pseudo_inputs != "scattered":
        axes = [_axis(counts, side, options.margin) for counts in histogram]
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(histogram))
    rows = float(sum(own.num_examples for own in answers.values()))
    rng = np.random.default_rng([config.seed, *b"inducing"])
    products = sums_over(answers, "input.products")
    return initial_inducing_points(config.model.inducing_init, count, histogram, products, rows, rng)


def grid_side(count: int, dims: int) -> int:
    """Most points along each of ``dims`` inputs of a regular grid with ``count`` points or fewer."""
    side = round(count ** (1 / dims))
    return side if side**dims <= count else side - 1


def require_grid(count: int, dims: int, otherwise: str) -> None:
    """A grid needs three points along every input.

    Raises:
        RunError: there are too few; ``otherwise`` says what to do but to raise their number.
    """
    side = grid_side(count, dims)
    if side < LEAST_SIDE:
        raise RunError(
            f"`model.num-inducing` = {count} makes a grid of {side} point(s) along each of {dims} inputs, {LEAST_SIDE} "
            f"are needed; raise it to {LEAST_SIDE**dims}, {otherwise}"
        )


def _axis(counts: Array, side: int, margin: float) -> Array:
    """Evenly spaced points from the first to the last bin that holds a row, and beyond by the margin."""
    filled = np.flatnonzero(counts)
    low, high = INPUT_EDGES[filled[0]], INPUT_EDGES[filled[-1] + 1]
    beyond = margin * (high - low)
    return np.linspace(low - beyond, high + beyond, side)


def start_factor(number: int) -> float:
    """Lengthscales of a start over those of the first one: 1, 2, ½, 4, ¼ and so on."""
    power = (number + 1) // 2
    return 2.0**power if number % 2 else 2.0**-power


def usable_starts(
    answers: Mapping[str, Answer], rows: Mapping[str, int], refuse: Callable[[str, str], None]
) -> dict[str, Statistics]:
    """First statistics by site, without those that no rows can produce."""
    found = {}
    for site, own in answers.items():
        told = unpack(own.arrays)[0]
        if own.num_examples == rows[site] and possible_start(told, rows[site]):
            found[site] = told
        else:
            refuse(site, "first statistics that its rows cannot produce")
    return found
