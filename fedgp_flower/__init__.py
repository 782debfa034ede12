"""Federated Gaussian-process learning on Flower.

``run`` trains on a table in this process, ``load_run`` reads a finished run, ``strategies`` are the Strategies, and
``make_client_app`` returns the sites' app with a loader for their rows.
"""

from __future__ import annotations

import pkgutil
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import strategies as strategies
    from fedgp_flower.client_app import make_client_app as make_client_app
    from fedgp_flower.estimators import FederatedGPClassifier as FederatedGPClassifier
    from fedgp_flower.estimators import FederatedGPRegressor as FederatedGPRegressor
    from fedgp_flower.run.api import load_run as load_run
    from fedgp_flower.run.api import print_round as print_round
    from fedgp_flower.run.api import run as run
    from fedgp_flower.run.artefacts import Run as Run

# linear_operator warns at every import, and a user cannot change that.
warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)

_EXPORTS = {
    "FederatedGPClassifier": "fedgp_flower.estimators:FederatedGPClassifier",
    "FederatedGPRegressor": "fedgp_flower.estimators:FederatedGPRegressor",
    "Run": "fedgp_flower.run.artefacts:Run",
    "print_round": "fedgp_flower.run.api:print_round",
    "make_client_app": "fedgp_flower.client_app:make_client_app",
    "load_run": "fedgp_flower.run.api:load_run",
    "run": "fedgp_flower.run:",
    "strategies": "strategies:",
}
"""Public name → ``module:`` or ``module:attribute``, imported when it is first used."""

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(_EXPORTS[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
