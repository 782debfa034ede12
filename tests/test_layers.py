"""What each layer may import, as closures: import it in a fresh interpreter and read ``sys.modules``.

The arrows point from what is used to what uses it:
gp ← methods/*/{options, messages, mathematics} ← strategies; gp, data ← methods/*/{learner, client, posterior, panels};
run and the apps know methods through the registry alone.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from conftest import checker
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from fedgp_flower.run.registry import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "flwr", "pandas", "matplotlib", "gpytorch", "sklearn", "scipy", "ray", "jinja2", "pyarrow")


def modules_of(*folders: str) -> list[str]:
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)


HELP = "sys.argv = ['fedgp', '--help']\nfrom fedgp_flower.cli import main\ntry: main()\nexcept SystemExit: pass"
PARSED = "from fedgp_flower.run.registry import parse_config, strategy_class; parse_config({'sgpr.exchanges': 9})"
FSGP = "strategy_class(parse_config({'method': 'fsgp', 'dataset': 'diabetes'}))"
OPTIONS = sorted({method.options.partition(":")[0] for method in BUILT_IN.values()})
SERVER = ("flwr.simulation", "ray", "matplotlib", "pandas", "jinja2")
SITE = ("matplotlib", "jinja2", "pandas", "pyarrow", "scipy", "sklearn", "strategies")
UNUSED = ("run.report", "clients.baselines", "gp.optimisers", "data.partitioning")
STEPS = {
    "a server": [
        (HELP, (*HEAVY, "numpy", "pydantic")),
        (PARSED, (*HEAVY, "numpy", *(name for name in OPTIONS if ".methods." in name and ".sgpr." not in name))),
        (f"import {', '.join(OPTIONS)}", (*HEAVY, "numpy")),
        ("import fedgp_flower.server_app", (*SERVER, "gpytorch", "sklearn", "scipy.stats")),
        (f"{FSGP}; import {', '.join(modules_of('strategies'))}", SERVER),
    ],
    "a site": [("import fedgp_flower.client_app", (*SITE, *(f"fedgp_flower.{name}" for name in UNUSED)))],
    "a ClientApp of one's own": [("from fedgp_flower import make_client_app", ())],
    "a ServerApp of one's own": [("import strategies; strategies.SGPR", ())],
}
"""What is run, one after the other in a fresh interpreter, and what is not loaded after it."""
WATCH = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe() if name == 'gpytorch' else None
        while frame:
            importing = frame.f_locals.get('name', '') if frame.f_code.co_name == '_find_and_load' else ''
            assert not importing.startswith('gpytorch.'), importing
            frame = frame.f_back
sys.meta_path.insert(0, Watch())
"""
"""Fails where GPyTorch is first imported by way of a module inside it, whose lock is then held already: Flower's
simulation loads both apps in threads of one process, and a thread then meets the other one's half-made modules.
"""


@pytest.mark.parametrize("who", [*(w if "own" not in w else pytest.param(w, marks=pytest.mark.long) for w in STEPS)])
def test_each_loads_none_of_what_it_does_without(who):
    ends = "\n".join(f"{code}\nprint('MODULES', *sys.modules)" for code, _ in STEPS[who])
    done = subprocess.run([sys.executable, "-c", WATCH + ends], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines() if line.startswith("MODULES")]
    for found, (code, without) in zip(told, STEPS[who], strict=True):
        assert sorted({*found} & {*without}) == [], code
    assert "gpytorch" in told[-1]


def test_the_mathematics_needs_no_flower():
    waiting, seen, others = modules_of("fedgp_flower/gp"), set[str](), set[str]()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += graph()[module]
            others |= {name.partition(".")[0] for name in imports_of(file_of(module))}
    assert sorted(others & {"flwr", "pandas", "matplotlib", "strategies"}) == []


def imports_of(path: Path) -> Iterator[str]:
    """Modules that a file imports when it is imported: not inside functions, not for the type checker alone."""
    waiting: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            waiting += node.body
        elif isinstance(node, ast.If):
            waiting += node.orelse if "TYPE_CHECKING" in ast.dump(node.test) else [*node.body, *node.orelse]


def file_of(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def graph() -> dict[str, set[str]]:
    """Module → the project's modules it imports."""
    modules = modules_of("fedgp_flower", "strategies")
    known = set(modules)
    return {module: {name for name in imports_of(file_of(module)) if name in known} - {module} for module in modules}


def test_no_module_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' → '.join(error.args[1])}")


def test_no_two_folders_import_each_other():
    """Modules at the top of the package belong to no folder: every folder may use them."""

    def folder(module: str) -> str:
        parts = module.split(".")
        nested = len(parts) > 2 or file_of(module).name == "__init__.py"
        return "/".join(parts[:2]) if nested else parts[0]

    pairs = {(folder(module), folder(name)) for module, names in graph().items() for name in names}
    mutual = {frozenset(pair) for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs}
    assert [sorted(pair) for pair in mutual if "fedgp_flower" not in pair] == []


def layer_of(module: str) -> str:
    """The layer of a module: its folder, and for methods which half of one."""
    parts = module.split(".")
    if parts[0] == "strategies":
        return "strategies"
    if parts[1:2] == ["methods"] and len(parts) > 3:
        return "site half" if parts[-1] in SITE_HALF else "method"
    return parts[1] if len(parts) > 2 else "top"


SITE_HALF = {"client", "learner", "memory", "posterior", "panels"}
"""Modules of a method that only a site, or a reader of finished runs, imports."""
FORBIDDEN = {
    "gp": {"strategies", "site half", "method", "clients", "data", "deploy"},
    "data": {"strategies", "site half", "method", "clients", "privacy", "deploy"},
    "method": {"strategies", "site half", "deploy"},
    "site half": {"strategies", "deploy"},
    "strategies": {"site half", "clients", "data", "deploy"},
    "clients": {"strategies", "site half", "method", "methods", "deploy"},
    "privacy": {"strategies", "site half", "method", "methods", "clients", "deploy"},
    "run": {"site half", "method", "deploy"},
}
"""Layer → layers that none of its modules may import."""


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_point_downwards(layer):
    edges = [(module, name) for module, names in graph().items() if layer_of(module) == layer for name in names]
    assert edges
    assert {module: name for module, name in edges if layer_of(name) in FORBIDDEN[layer]} == {}


BUILT_ON = {("pvi", "sgpr"), ("pvi_weights", "pvi"), ("hierarchical_gp", "sfvi"), ("hierarchical_gp", "sgpr")}
"""A method that is built on another one, and that other one."""


def test_no_method_reaches_into_another():
    def method(module: str) -> str:
        parts = module.split(".")
        return parts[2] if len(parts) > 3 and parts[1] == "methods" else ""

    pairs = {(method(module), method(name)) for module, names in graph().items() for name in names}
    assert {pair for pair in pairs if all(pair) and pair[0] != pair[1]} <= BUILT_ON


EVERYWHERE = ["fedgp_flower/run", "fedgp_flower/clients", "fedgp_flower/data", "fedgp_flower/gp"]
MAY_NAME = {
    "fedgp_flower/run/registry.py",  # the table of methods
    "fedgp_flower/gp/optimisers.py",  # an error whose remedy is one method's key
}


def test_only_the_registry_names_a_method():
    """The names of baselines are those of arms in every report, too."""
    names = "|".join(sorted(map(re.escape, BUILT_IN.keys() - {"local-only", "pooled"}), key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])(?:{names})(?![\w-])")
    modules = [file_of(module) for module in modules_of(*EVERYWHERE)]
    lines = {
        f"{path}:{number}": line.strip()
        for path in {*modules, ROOT / "fedgp_flower/cli.py"} - {ROOT / name for name in MAY_NAME}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    }
    assert lines == {}


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_nested_function_is_checked_however_often_it_is_defined(time):
    """Of one that was defined before, the check of the signature is the same; shapes are those of the call."""

    @jaxtyped(typechecker=checker)
    def doubled(x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return torch.cat([x, x])

    @jaxtyped(typechecker=checker)
    def same(x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return x

    with pytest.raises(TypeCheckError, match="return value"):
        doubled(torch.ones(2))
    with pytest.raises(TypeCheckError, match="parameters"):
        same(torch.ones(2, 1))
    assert len(same(torch.ones(3))) == 3
