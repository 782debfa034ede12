"""How relevant each input is: its lengthscale, with an interval where the method knows one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from fedgp_flower.run.artefacts import RunData
from fedgp_flower.typing import Array


@dataclass(frozen=True, slots=True)
class Relevance:
    """Lengthscales of one part of the model, shortest first, in standard deviations of the inputs."""

    part: str
    names: tuple[str, ...]
    value: Array  # [D]
    low: Array  # [D] of the 95 % interval; NaN where none is known
    high: Array  # [D]
    how: str
    """Where the intervals come from."""


def relevances(run: RunData) -> list[Relevance]:
    """What a method says of lengthscales, else those of a saved kernel; nothing for a single input."""
    if run.posterior is None:
        return []
    names = list(run.posterior.inputs)
    said = run.metrics.method_details.get("relevance") or {
        name.removesuffix(".lengthscale"): {"value": np.ravel(own).tolist()}
        for name, own in run.posterior.arrays.items()
        if name.startswith("kernel.") and name.endswith(".lengthscale")
    }
    found = []
    for part, own in said.items():
        value = np.asarray(own["value"], dtype=float)
        if len(value) != len(names) or len(names) < 2:  # one for all inputs compares nothing
            continue
        spread = np.full(len(value), np.nan) if own.get("log_sd") is None else np.asarray(own["log_sd"], dtype=float)
        low, high = (value * np.exp(ndtri(level) * spread) for level in (0.025, 0.975))
        order = np.argsort(value)
        sorted_names = tuple(names[index] for index in order)
        found.append(Relevance(part, sorted_names, value[order], low[order], high[order], str(own.get("how", ""))))
    return found
