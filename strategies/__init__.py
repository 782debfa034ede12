"""The Flower Strategies, each imported when it is first used: ``strategies.SGPR(num_inducing=50)``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedgp_flower.run.registry import BUILT_IN, load

if TYPE_CHECKING:
    from strategies.deep_kernel import DeepKernelGP as DeepKernelGP
    from strategies.fedmgp import FedMGP as FedMGP
    from strategies.fedmgp_exact import FedMGPExact as FedMGPExact
    from strategies.fsgp import FGPR as FGPR
    from strategies.fsgp import FSGP as FSGP
    from strategies.hierarchical_gp import HierarchicalGP as HierarchicalGP
    from strategies.mixed_model import MixedModel as MixedModel
    from strategies.private_sgpr import PrivateSGPR as PrivateSGPR
    from strategies.pvi import PVI as PVI
    from strategies.pvi_weights import PVIBNN as PVIBNN
    from strategies.pvi_weights import PVIGLM as PVIGLM
    from strategies.references import LocalOnly as LocalOnly
    from strategies.references import Pooled as Pooled
    from strategies.sfvi import SFVI as SFVI
    from strategies.sfvi import SFVIAvg as SFVIAvg
    from strategies.sgpr import SGPR as SGPR
    from strategies.svgp import SVGP as SVGP

_REFERENCES = {row.strategy.partition(":")[2]: row.strategy for row in BUILT_IN.values()}


def __getattr__(name: str) -> Any:
    if name not in _REFERENCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("gpytorch")  # whole, before anything inside it: see fedgp_flower/clients/__init__.py
    return load(_REFERENCES[name])


def __dir__() -> list[str]:
    return sorted(_REFERENCES)
