"""Handing this project's app to a SuperLink through Flower's own command line, and learning how the run ended.

``flwr run --stream`` ends with status 0 even when the ServerApp raised; what ``flwr ls`` says of the run is the truth.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedgp_flower.deploy.processes import Processes
from fedgp_flower.errors import RunError
from fedgp_flower.options import Value
from fedgp_flower.run.user_config import for_flower

_QUIET = {
    # Clients and server import what this environment holds, instead of an environment resolved anew for every run.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ADDRESS": "local",
}

COMPLETED = "finished:completed"


def environment(home: Path) -> dict[str, str]:
    """Variables for a SuperLink, a SuperNode and the command line; the first two read them only when they start."""
    beside = Path(sys.executable).parent  # Flower starts programs of its own by name
    return _QUIET | {"FLWR_HOME": str(home), "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def program(name: str) -> str:
    """Path of a program installed beside this Python.

    Raises:
        RunError: where it is missing.
    """
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RunError(f"`{name}` is not installed beside {sys.executable}; run `make setup`")
    return str(path)


def project_folder() -> Path:
    """The source tree this module belongs to, which Flower packs and sends.

    Raises:
        RunError: where the package was installed without its source tree.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / "pyproject.flwr.toml").is_file():
        raise RunError(f"{folder} is not the project's source tree; clone the project and install it with `make setup`")
    return folder


def install_profiles(project: Path, home: Path) -> None:
    """Merge the project's Flower Configuration into ``home/config.toml``; connections added there by hand stay."""
    target = home / "config.toml"
    home.mkdir(parents=True, exist_ok=True)
    own = tomllib.loads((project / "pyproject.flwr.toml").read_text(encoding="utf-8"))
    old = tomllib.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    merged = old | own | {"superlink": old.get("superlink", {}) | own["superlink"]}
    if merged != old:
        target.write_text(tomli_w.dumps(merged), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Flower:
    """Flower's command line, talking to one SuperLink.

    ``home`` is a neutral folder to run it in: apps inherit the folder a SuperLink was started in, and from inside a
    source tree the sites would import that tree instead of the app that was sent to them.
    """

    processes: Processes
    home: Path
    connection: str

    def wait_until_ready(self, url: str, seconds: float = 60.0, trust: Path | None = None) -> None:
        """Wait until the SuperLink answers at ``url``.

        Raises:
            RunError: when it ends, or has not answered after ``seconds``.
        """
        context = ssl.create_default_context(cafile=trust) if trust else None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.processes.require_alive()
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2, context=context):  # noqa: S310 - our own address
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RunError(f"the SuperLink did not answer at {url} within {seconds:.0f} s; see {self.processes.logs}")

    def json(self, *arguments: str) -> dict[str, Any]:
        """The answer of ``flwr … --format json``.

        Raises:
            RunError: with Flower's own words, where it reports a failure.
        """
        done = self.processes.call([program("flwr"), *arguments, "--format", "json"], self.home)
        try:
            answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            answer = {}
        if done.returncode or not answer.get("success", bool(answer)):
            words = answer.get("error-message") or "\n".join(filter(None, (done.stdout.strip(), done.stderr.strip())))
            raise RunError(f"`flwr {' '.join(arguments[:2])}` failed: {words}")
        return answer

    def submit(self, project: Path, config: Mapping[str, Value], *options: str) -> str:
        """Hand the app and its run configuration over; returns the id of the run."""
        overrides = self.home / f"run-{self.processes.token}.toml"
        overrides.write_text(tomli_w.dumps(for_flower(config)), encoding="utf-8")
        try:
            answer = self.json("run", str(project), self.connection, "--run-config", str(overrides), *options)
        finally:
            overrides.unlink()
        return str(answer["run-id"])

    def follow(self, run: str) -> None:
        """Pass the log of a run through until the run ends; returns early if the stream breaks."""
        self.processes.call([program("flwr"), "log", run, self.connection, "--stream"], self.home, capture=False)

    def stop(self, run: str) -> None:
        """End a run that goes on elsewhere; where that fails, say how to do it by hand."""
        try:
            self.json("stop", run, self.connection)
        except RunError as error:
            print(f"run {run} goes on: {error}; end it with `flwr stop {run} {self.connection}`", file=sys.stderr)

    def outcome(self, run: str) -> tuple[str, str]:
        """Wait for the end of a run; its final status and what Flower says about it."""
        while True:
            state = self.json("ls", self.connection, "--run-id", run)["runs"][0]
            if state["status"].startswith("finished"):
                return state["status"], state.get("status-details", "")
            self.processes.require_alive()
            time.sleep(1)
