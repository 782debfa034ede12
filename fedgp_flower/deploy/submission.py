"""A run through Flower's SuperLink. Its status comes from ``flwr ls``; that of ``flwr run`` is unreliable."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.metadata import distribution, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from fedgp_flower.config import nest
from fedgp_flower.data.sites import count_sites
from fedgp_flower.deploy.processes import Processes, free_ports
from fedgp_flower.errors import RunError
from fedgp_flower.options import FlatConfig
from fedgp_flower.run.registry import default_config, parse_config
from fedgp_flower.run.terminal import show_result
from fedgp_flower.run.user_config import for_flower, run_folder

_QUIET = {
    # Clients and server use this environment; Flower would otherwise resolve a new one for every run.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ADDRESS": "local",
}

MISLEADING = (
    *("default simulated SuperNodes", "change federation size", "federation simulation-config"),
    *("Exit Code: 201", "exit-codes/201", "Exit Code: 700", "exit-codes/700", "unhandled exception occurred"),
)
"""Lines of Flower with these words are hidden; the run reports the number of sites, and why it ended."""
REMEDIES = {
    "Connection to the SuperLink is unavailable": "the SuperLink does not answer; when it runs again (fedgp deploy"
    " serve), a run goes on with `resume` = true",
    "Public key already in use": "this key was registered before, under another name or until it was revoked; the site"
    " makes a new one with `fedgp site join` and another `--folder`",
}
COMPLETED = "finished:completed"
HOST = "127.0.0.1"


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a SuperLink, a SuperNode and Flower's command line."""
    beside = Path(sys.executable).parent  # Flower starts its programs by name
    return _QUIET | {"FLWR_HOME": str(home), "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def program(name: str) -> str:
    """Return the path of a program that is installed with this Python."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RunError(f"`{name}` is not installed beside {sys.executable}: install `flwr[simulation]` there")
    return str(path)


PACKAGES = ("fedgp_flower", "strategies")
PROFILES: dict[str, dict[str, object]] = {
    "superlink": {"default": "simulation", "simulation": {"address": ":local-in-memory:"}},
}
"""The Flower Configuration of this project, equal to ``pyproject.flwr.toml``."""


def source_tree() -> Path | None:
    """Return the checkout of this module; None if the package was installed from a wheel."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.flwr.toml").is_file() else None


def project_folder(home: Path) -> Path:
    """Return the folder that Flower bundles: the checkout, else a copy of the installed packages below ``home``."""
    return source_tree() or write_app(home / "app")


def write_app(folder: Path) -> Path:
    """Write the installed packages as a Flower app for `flwr build` and the Hub. Return its folder."""
    if folder.exists() and not (folder / PACKAGES[0] / "server_app.py").is_file():
        raise RunError(f"{folder} exists and is no copy of this app; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(str(files(package)), folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    installed = distribution("fedgp-flower")
    for path in [path for path in installed.files or () if path.name == "LICENSE"][:1]:
        shutil.copy(str(path.locate()), folder / "LICENSE")
    known = installed.metadata.json
    (folder / "README.md").write_text(str(known["description"]), encoding="utf-8")
    app = {
        "publisher": "fedgp",
        "fab-format-version": 1,
        "flwr-version-target": version("flwr"),
        "fab-include": ["fedgp_flower/**/*.py", "fedgp_flower/**/*.json", "strategies/**/*.py", "LICENSE"],
        "components": {"serverapp": "fedgp_flower.server_app:app", "clientapp": "fedgp_flower.client_app:app"},
        "config": nest(default_config()),
    }
    project = {
        "name": known["name"],
        "version": known["version"],
        "description": known["summary"],
        "license": {"file": "LICENSE"},
        "dependencies": [word for word in known["requires_dist"] if "extra ==" not in word],
    }
    written = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    (folder / "pyproject.toml").write_text(written, encoding="utf-8")
    return folder


def installed_home() -> Path:
    """Return ``FLWR_HOME``, else ``.flwr`` in the checkout or here, and add this project's connection to it."""
    home = Path(os.environ.get("FLWR_HOME", (source_tree() or Path.cwd()) / ".flwr")).resolve()
    target = home / "config.toml"
    home.mkdir(parents=True, exist_ok=True)
    old = tomllib.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    merged = old | PROFILES | {"superlink": old.get("superlink", {}) | PROFILES["superlink"]}
    if merged != old:
        target.write_text(tomli_w.dumps(merged), encoding="utf-8")
    return home


@dataclass(frozen=True, slots=True)
class Flower:
    """Flower's command line, started in ``home`` because apps import code from their working directory."""

    processes: Processes
    home: Path
    connection: str

    def wait_until_ready(self, url: str, seconds: float = 60.0, trust: Path | None = None) -> None:
        """Wait until the SuperLink answers at ``url``."""
        context = ssl.create_default_context(cafile=trust) if trust else None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.processes.require_alive()
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2, context=context):  # noqa: S310 - an address of this machine
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RunError(f"the SuperLink did not answer at {url} within {seconds:.0f} s; see {self.processes.logs}")

    def json(self, *arguments: str) -> dict[str, Any]:
        """Return the answer of ``flwr … --format json``. Raise RunError if it reports a failure."""
        done = self.processes.call([program("flwr"), *arguments, "--format", "json"], self.home)
        try:
            answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            answer = {}
        if done.returncode or not answer.get("success", bool(answer)):
            words = answer.get("error-message") or "\n".join(filter(None, (done.stdout.strip(), done.stderr.strip())))
            words = next((remedy for said, remedy in REMEDIES.items() if said in words), words)
            raise RunError(f"`flwr {' '.join(arguments[:2])}` failed: {words}")
        return answer

    def run(self, config: FlatConfig, *options: str) -> None:
        """Submit a run, follow its log and print its result. A signal that interrupts this stops the run."""
        run = self.submit(project_folder(self.home), config, *options)
        try:
            self.processes.follow([program("flwr"), "log", run, self.connection, "--stream"], self.home, MISLEADING)
            status, details = self.outcome(run)
        except (SystemExit, KeyboardInterrupt):
            self.stop(run)
            raise
        if status != COMPLETED:
            raise RunError(f"the run ended as {status}: {details or 'see the log above'}")
        show_result(run_folder(config))

    def submit(self, project: Path, config: FlatConfig, *options: str) -> str:
        """Submit an app and its run configuration. Return the id of the run."""
        overrides = self.home / f"run-{self.processes.token}.toml"
        overrides.write_text(tomli_w.dumps(for_flower(config)), encoding="utf-8")
        try:
            answer = self.json("run", str(project), self.connection, "--run-config", str(overrides), *options)
        finally:
            overrides.unlink()
        return str(answer["run-id"])

    def stop(self, run: str) -> None:
        """Stop a run. If that fails, print how to stop it by hand."""
        try:
            self.json("stop", run, self.connection)
        except RunError as error:
            print(f"run {run} goes on: {error}; stop it with `flwr stop {run} {self.connection}`", file=sys.stderr)

    def outcome(self, run: str) -> tuple[str, str]:
        """Wait for the end of a run. Return its final status and Flower's details."""
        while True:
            state = self.json("ls", self.connection, "--run-id", run)["runs"][0]
            if state["status"].startswith("finished"):
                return state["status"], state.get("status-details", "")
            self.processes.require_alive()
            time.sleep(1)


def simulate(config: FlatConfig, sites: int, gpus_per_site: float = 0.0) -> None:
    """Run the app on Ray, under a SuperLink that stops afterwards; 0 sites means every natural group."""
    sites, (port,) = count_sites(parse_config(config), sites), free_ports(1)
    home, logs = installed_home(), str(config["name"])
    with tempfile.TemporaryDirectory(prefix="fedgp-", ignore_cleanup_errors=True) as scratch:
        # A short path, because names of sockets are limited.
        variables = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port), "RAY_TMPDIR": scratch}
        with Processes(environment(home) | variables, home / "logs" / logs) as processes:
            flower = Flower(processes, home, "simulation")
            options = ["--insecure", "--simulation", "--host", HOST, "--port", str(port)]
            processes.start("superlink", [program("flower-superlink"), *options], home)
            flower.wait_until_ready(f"http://{HOST}:{port}")
            resources = f"num-supernodes={sites} client-resources-num-cpus=1 client-resources-num-gpus={gpus_per_site}"
            flower.run(config, "--federation-config", resources)
