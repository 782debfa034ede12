"""Modules that few messages need, imported on first use.

Flower starts a process for each message of a real site, so every import costs time for every message.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["cluster", "datasets", "lapack", "optimize", "pd", "special"]


class Lazy(ModuleType):
    """A module that is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import pandas as pd
    from scipy import optimize, special
    from scipy.linalg import lapack
    from sklearn import cluster, datasets
else:
    pd = Lazy("pandas")
    lapack = Lazy("scipy.linalg.lapack")
    special = Lazy("scipy.special")
    optimize = Lazy("scipy.optimize")
    cluster, datasets = Lazy("sklearn.cluster"), Lazy("sklearn.datasets")
