"""What few messages need: imported when one of its names is first read.

Flower starts a process for each message of a real site, so that what a module imports is paid for every time.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["cluster", "datasets", "pd", "special"]


class Lazy(ModuleType):
    """Stands for a module until it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import pandas as pd
    from scipy import special
    from sklearn import cluster, datasets
else:
    pd = Lazy("pandas")
    special = Lazy("scipy.special")
    cluster, datasets = Lazy("sklearn.cluster"), Lazy("sklearn.datasets")
