"""Random generators that depend on names, not on the order in which things happen."""

from __future__ import annotations

import hashlib

import numpy as np


def derived_seed(seed: int, *names: str | int) -> int:
    """An integer below 2³² that is a fixed function of the run's seed and of what the numbers are for."""
    digest = hashlib.sha256("/".join(str(part) for part in (seed, *names)).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A separate generator for every purpose, for example ``generator(seed, "held-out", site)``."""
    digest = hashlib.sha256("/".join(str(part) for part in (seed, *names)).encode()).digest()
    return np.random.default_rng(list(digest))
