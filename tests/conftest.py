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


SLOWEST = ("test_deployment", "test_methods_simulation", "test_simulation", "test_site")
"""Files of few tests that take long: begun first, or one worker would be left alone with them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first."""
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


@pytest.fixture(scope="session", autouse=True)
def _coarse_pictures():
    """Pictures of few pixels: their content is tested, not their resolution."""
    from fedgp_flower.run import figures  # after the hook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 30)
        yield
