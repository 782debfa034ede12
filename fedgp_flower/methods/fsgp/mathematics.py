"""What sites and server take of the hyperparameters before they have seen a row."""

from __future__ import annotations

import math


def prior(name: str, num_inputs: int) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of a hyperparameter, by its wire name.

    log ℓ ~ N(½ log D + .3, 1), log a ~ N(1, 1.5²), log σ² ~ N(−4, 2²), of a standardised target; others N(0, 1).
    """
    if "lengthscale" in name:
        return 0.5 * math.log(num_inputs) + 0.3, 1.0
    if "noise" in name:
        return -4.0, 2.0
    return (1.0, 1.5) if "outputscale" in name or "variance" in name else (0.0, 1.0)
