"""What is published: a wheel that works outside the checkout, a source archive with documents, an app for the Hub."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

from fedgp_flower.run.registry import default_config
from fedgp_flower.run.user_config import read_config

ROOT = Path(__file__).resolve().parent.parent
FEW = ["num-server-rounds=2", "model.num-inducing=8", "evaluate-every=0", "baselines.pooled=false"]


def python(folder: Path, *words: object, home: Path | None = None) -> str:
    """The output of this Python in a folder, with packages from ``home`` before all others."""
    variables = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "FLWR_HOME"}}
    variables |= {} if home is None else {"PYTHONPATH": str(home)}
    command = [sys.executable, "-P", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and source archive, made from what git knows."""
    folder = tmp_path_factory.mktemp("built")
    words = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    if names.returncode:
        pytest.skip("needs a checkout")
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    code = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    python(folder / "source", "-c", code)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder that holds the wheel's packages and nothing else."""
    home = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    python(built, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", home, wheel)
    return home


def test_wheel_and_source_archive_are_complete(built):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    tops = (ROOT / "fedgp_flower", ROOT / "strategies")
    modules = {path.relative_to(ROOT).as_posix() for top in tops for path in top.rglob("*.py")}
    assert modules | {"fedgp_flower/py.typed", "strategies/py.typed"} <= packed
    assert {name.split("/")[0] for name in packed if ".dist-info" not in name} == {"fedgp_flower", "strategies"}
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    wanted = {"docs/configuration.md", "CITATION.cff", "CHANGELOG.md", "LICENSE", "tests/conftest.py", "Makefile"}
    assert wanted <= names
    (described,) = (name for name in packed if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(described).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Classifier: Typing :: Typed" in text
    assert python(built, "-m", "twine", "check", "--strict", wheel, archive).count("PASSED") == 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_the_app_meets_the_conventions_of_the_hub(installed, tmp_path):
    python(tmp_path, "-m", "fedgp_flower.cli", "deploy", "app", tmp_path / "app", home=installed)
    written = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert "fab_format_version=1" in str(normalize_and_validate_fab_format(written))
    config = read_config(tmp_path / "app" / "pyproject.toml")
    keys = {key.removeprefix("tool.flwr.app.config."): value for key, value in config.items() if ".app.config." in key}
    assert keys == default_config()
    _validate_files(_collect_file_paths(tmp_path / "app"))
    python(tmp_path, "-m", "flwr.cli.app", "build", "--app", tmp_path / "app")
    assert list(tmp_path.glob("*.fab"))


@pytest.mark.long
def test_runs_in_one_process_on_ray_and_on_supernodes_work_from_the_wheel(installed, tmp_path):
    run = ["-m", "fedgp_flower.cli", "run", "--sites", 3, "dataset=diabetes", "name=first", *FEW]
    assert "354 training rows at 3 sites" in python(tmp_path, *run, "--dry-run", home=installed)
    assert not (tmp_path / "results").exists()
    python(tmp_path, *run, home=installed)
    assert (tmp_path / "results" / "first" / "report.html").is_file()
    for name, command in {"s": ["simulate", "--sites", 2], "d": ["deploy", "demo", "--num-sites", 2]}.items():
        python(tmp_path, "-m", "fedgp_flower.cli", *command, "dataset=diabetes", f"name={name}", *FEW, home=installed)
        assert (tmp_path / "results" / name / "metrics.json").is_file()
