"""Shapes are code: while testing, jaxtyping checks every annotated shape of the mathematics, at every call of its own
tests and in the first run of every Strategy.
"""

import gc
import inspect
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from beartype import beartype
from hypothesis import HealthCheck, settings
from jaxtyping import config as shapes
from jaxtyping import install_import_hook, jaxtyped

CHECKED = ("fedgp_flower.gp", "fedgp_flower.methods")

gc.set_threshold(10_000)  # with the usual 700, searching for cycles of objects took 4 of 85 s in three files

SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
"""A machine that has much else to do is no failure."""
settings.register_profile("here", **SLOW)
settings.register_profile("gate", **SLOW, derandomize=True)
# The same examples every time in the gate; new ones are looked for where somebody looks at them.
settings.load_profile("gate" if os.environ.get("CI") else "here")

_checkers: dict[tuple[str, str, str], Callable[..., Any]] = {}


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Beartype's check of a signature, built once; jaxtyping asks for it whenever a nested function is defined."""
    key = function.__module__, function.__qualname__, str(inspect.signature(function))
    if key not in _checkers:
        _checkers[key] = beartype(function)
    return _checkers[key]


_hook = install_import_hook(CHECKED, "conftest.checker")


SLOWEST = ("test_deployment", "test_simulation", "test_site")
"""Files of few tests that take long: begun first, or one worker would be left alone with them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first."""
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


@pytest.fixture(scope="session", autouse=True)
def _shapes_once() -> Iterator[None]:
    """Later runs of a Strategy call what its first one did; checking them again would take a fifth of all time, and so
    would preparing to check the functions that they define within others.
    """
    from strategies.server.strategy import FederatedStrategy  # after the hook

    start, checked = FederatedStrategy.start, set[type]()

    def decorator(*, typechecker: Any) -> Callable[[Any], Any]:
        """As `jaxtyped`, but for nested functions where nothing is checked."""

        def decorated(value: Any) -> Any:
            nested = "<locals>" in getattr(value, "__qualname__", "")
            return value if nested and shapes.jaxtyping_disable else jaxtyped(value, typechecker=typechecker)

        return decorated

    def unchecked(self: FederatedStrategy[Any], *values: Any, **keywords: Any) -> Any:
        """A run, with shapes checked if it is the first."""
        before = shapes.jaxtyping_disable
        shapes.update("jaxtyping_disable", before or type(self) in checked)
        checked.add(type(self))
        try:
            return start(self, *values, **keywords)
        finally:
            shapes.update("jaxtyping_disable", before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedStrategy, "start", unchecked)
        patch.setattr("jaxtyping.jaxtyped", decorator)
        yield


@pytest.fixture(scope="session", autouse=True)
def _waits_once() -> Iterator[None]:
    """No test cuts the power, so none waits until the disk has what was written. Commands are built once a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="module", autouse=True)
def _pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most of a small run's time goes into the pictures of its report: they are drawn, of few pixels, by the modules
    about them (``drawn``); elsewhere each has no pixel.
    """
    from matplotlib.backend_bases import FigureCanvasBase  # after the hook

    from fedgp_flower.run import figures

    draw = FigureCanvasBase.print_figure

    def print_figure(self: FigureCanvasBase, target: Any, *rest: Any, **keywords: Any) -> None:
        """Files are drawn; what is kept in memory for a page is not."""
        if isinstance(target, io.BytesIO):
            target.write(b"<svg></svg>" if keywords.get("format") == "svg" else b"\x89PNG")
        else:
            draw(self, target, *rest, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 30)
        if not request.node.get_closest_marker("drawn"):
            patch.setattr(FigureCanvasBase, "print_figure", print_figure)
        yield


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def fedgp(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line: words → exit status, and what is printed on both streams."""
    from fedgp_flower.cli import main  # after the hook

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
        return end.value.code or 0, *capsys.readouterr()

    return call
