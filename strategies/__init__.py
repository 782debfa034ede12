"""The Flower Strategies, each imported when it is first used: ``strategies.SGPR(num_inducing=50)``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.deep_kernel import DeepKernelGP as DeepKernelGP
    from strategies.fedmgp import FedMGP as FedMGP
    from strategies.fedmgp_exact import FedMGPExact as FedMGPExact
    from strategies.fsgp import FGPR as FGPR
    from strategies.fsgp import FSGP as FSGP
    from strategies.hierarchical_gp import HierarchicalGP as HierarchicalGP
    from strategies.private_sgpr import PrivateSGPR as PrivateSGPR
    from strategies.pvi import PVI as PVI
    from strategies.pvi_weights import PVIBNN as PVIBNN
    from strategies.pvi_weights import PVIGLM as PVIGLM
    from strategies.references import LocalOnly as LocalOnly
    from strategies.references import Pooled as Pooled
    from strategies.sfvi import SFVI as SFVI
    from strategies.sfvi_avg import SFVIAvg as SFVIAvg
    from strategies.sgpr import SGPR as SGPR
    from strategies.svgp import SVGP as SVGP

_MODULES = {
    "DeepKernelGP": "deep_kernel",
    "FGPR": "fsgp",
    "FSGP": "fsgp",
    "FedMGP": "fedmgp",
    "FedMGPExact": "fedmgp_exact",
    "HierarchicalGP": "hierarchical_gp",
    "LocalOnly": "references",
    "PVI": "pvi",
    "PVIBNN": "pvi_weights",
    "PVIGLM": "pvi_weights",
    "Pooled": "references",
    "PrivateSGPR": "private_sgpr",
    "SFVI": "sfvi",
    "SFVIAvg": "sfvi_avg",
    "SGPR": "sgpr",
    "SVGP": "svgp",
}
"""Strategy → the module of its algorithm."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("gpytorch")  # whole, before anything inside it: see fedgp_flower/clients/__init__.py
    return getattr(importlib.import_module(f"strategies.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
