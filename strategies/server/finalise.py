"""What a method's ``predictive`` returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedgp_flower.outcome import Posterior

__all__ = ["Posterior", "Predicted", "lengthscale_facts"]

PART = re.compile(r"theta\.|kernels\.|\.log_lengthscale$")
"""What of a parameter's name does not say which part of the model it belongs to."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a state predicts with: the value that ``predictive`` returns."""

    request: Any
    """The message with which every site predicts; ``{site: message}`` where each has a different one."""
    posterior: Posterior | None = None
    """What is saved to predict without any site; None for a personal method."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts for ``metrics.json``."""

    def at(self, site: str) -> Any:
        """The message with which this site predicts."""
        return self.request[site] if isinstance(self.request, Mapping) else self.request


def lengthscale_facts(logs: Mapping[str, Any], spread: Mapping[str, Any] | None, how: str = "") -> dict[str, Any]:
    """By part of the model, lengthscales and the standard deviations of their logarithms: the report's relevance.

    Args:
        logs: Parameters by name; those that end in ``lengthscale`` are logarithms.
        spread: Standard deviations under the same names; None where the method knows none.
        how: Where they come from, as the end of a sentence.
    """
    return {
        PART.sub("", name): {
            "value": np.exp(log).ravel().tolist(),
            "log_sd": None if spread is None else np.ravel(spread[name]).tolist(),
            "how": "" if spread is None else how,
        }
        for name, log in logs.items()
        if name.endswith("lengthscale")
    }
