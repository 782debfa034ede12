"""Shapes are code: while testing, jaxtyping checks every annotated shape of the mathematics at every call."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

CHECKED = ("fedgp_flower.gp", "fedgp_flower.methods")

settings.register_profile("gate", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("gate")  # the same examples every time; new ones are looked for where somebody looks at them

_hook = install_import_hook(CHECKED, "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def _coarse_pictures():
    """Pictures of few pixels: their content is tested, not their resolution."""
    from fedgp_flower.run import figures  # after the hook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 30)
        yield
