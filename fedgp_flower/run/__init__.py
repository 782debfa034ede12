"""A run from its configuration to its files; the package itself is the function that runs a method on a table.

``fedgp_flower.run(data, …)`` is :func:`fedgp_flower.run.api.run`: a package and a function cannot share a name, so the
package can be called.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *data: Any, **choices: Any) -> object:
        return importlib.import_module("fedgp_flower.run.api").run(*data, **choices)


sys.modules[__name__].__class__ = _CallablePackage
