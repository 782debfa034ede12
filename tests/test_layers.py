"""Who may import whom, read off the syntax trees; and the size of modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("fedgp_flower", "strategies")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FOUNDATION = {"errors", "shapes", "config", "linalg", "gaussian", "barycentre", "statistics", "latent"}
ALLOWED = {
    "errors": set(),
    "shapes": set(),
    "config": {"errors"},
    "linalg": {"errors", "shapes"},
    "gaussian": {"errors", "shapes", "linalg"},
    "barycentre": {"errors", "shapes", "linalg"},
    "statistics": {"errors", "shapes", "linalg"},
    "latent": {"errors", "shapes", "linalg"},
    "metrics": {"errors", "shapes"},
    "models": FOUNDATION | {"models"},
    "data": {"errors", "shapes", "config", "data"},
    "clients": FOUNDATION | {"models", "data", "metrics", "clients"},
}
FLOWER = {"clients", "client_app", "server_app", "engine", "cli", "launch", "submission", "deploy_demo"}
PLOTTING = {"report", "figures", "pvi_figures", "unit_figures", "structured_figures"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(module: str) -> str:
    """The unit of ``fedgp_flower`` that a dotted name or a path belongs to."""
    return module.split(".")[1] if "." in module else ""


def own_part(path: Path) -> str:
    return path.relative_to(ROOT / "fedgp_flower").parts[0].removesuffix(".py")


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_keep_to_the_layers(path):
    if path.is_relative_to(ROOT / "strategies"):
        seen = {part(name) for name in imports(path) if name.startswith("fedgp_flower.")}
        assert seen <= FOUNDATION
        assert not tops(path) & {"torch", "gpytorch", "sklearn", "pandas", "matplotlib", "simulations"}
        return
    unit = own_part(path)
    seen = {part(name) for name in imports(path) if name.startswith("fedgp_flower.")}
    if unit in ALLOWED:
        assert seen <= ALLOWED[unit]
        assert "strategies" not in tops(path)
    assert "simulations" not in tops(path)
    if unit not in FLOWER:
        assert not tops(path) & {"flwr", "ray"}
    if unit not in PLOTTING:
        assert "matplotlib" not in tops(path)
    if unit == "server_app":
        assert not seen & {"models", "clients", "data", "metrics", "statistics"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_have_one_purpose(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
