"""A run from its configuration to its files; the package can be called, as :func:`fedgp_flower.run.api.run`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *data: Any, **choices: Any) -> object:
        return importlib.import_module("fedgp_flower.run.api").run(*data, **choices)


sys.modules[__name__].__class__ = _CallablePackage
