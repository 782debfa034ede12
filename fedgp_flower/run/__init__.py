"""A run from its configuration to its files; calling the package calls :func:`fedgp_flower.run.api.run`."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


def _function() -> Any:
    return importlib.import_module("fedgp_flower.run.api").run


def _call(_package: ModuleType, *given: Any, **choices: Any) -> object:
    return _function()(*given, **choices)


def _help(_package: ModuleType) -> str:
    return f"fg.run{inspect.signature(_function())}\n\n{inspect.getdoc(_function())}"


# The package has the documentation and signature of the function, which is imported only on access.
sys.modules[__name__].__class__ = type(
    "CallablePackage",
    (ModuleType,),
    {
        "__call__": _call,
        "__doc__": property(_help),
        "__signature__": property(lambda _: inspect.signature(_function())),
    },
)
