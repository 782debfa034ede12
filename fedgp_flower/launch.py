"""A simulated federation from start to end: SuperLink, run, closing table, and nothing left behind.

``python -m fedgp_flower.launch --sites 5 method=fsgp dataset=diabetes``; the exit status is the result of the run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from fedgp_flower.artefacts import read_run
from fedgp_flower.config import FlatConfig, Value, flatten
from fedgp_flower.data.sites import natural_sites
from fedgp_flower.errors import ConfigError, FedGPError, RunError
from fedgp_flower.processes import Processes, free_ports, interruptible
from fedgp_flower.registry import default_config, parse_config
from fedgp_flower.submission import COMPLETED, Flower, environment, install_profiles, program, project_folder
from fedgp_flower.summary import calibration_verdict, headline, rich_table, verdict

HOST = "127.0.0.1"
SIMULATION = "simulation"


def read_config(path: Path) -> dict[str, Value]:
    """The flat keys of a TOML file, whose tables may be nested.

    Raises:
        ConfigError: when there is no such file, or it is not TOML.
    """
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def parse_assignments(words: Sequence[str]) -> dict[str, Value]:
    """``KEY=VALUE`` words with the types their keys have: the text itself for a string, else a TOML scalar.

    Raises:
        ConfigError: for a word without ``=``.
    """
    known, out = default_config(), dict[str, Value]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"`{word}` is not of the form KEY=VALUE")
        out[key] = text if isinstance(known.get(key), str) else _scalar(text)
    return out


def _scalar(text: str) -> Value:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def complete_config(given: FlatConfig, folder: Path) -> dict[str, Value]:
    """Validate keys and fill in what only the caller's shell knows: absolute paths, and a name for the run's folder.

    The ServerApp and the sites run elsewhere than ``folder``, so a relative path would mean another place to them.

    Raises:
        ConfigError: naming every wrong key, before anything is started.
    """
    config = parse_config(given)
    out = dict(given) | {"output-dir": str(folder / config.output_dir)}
    if data := config.data_dir or os.environ.get("FEDGP_DATA", ""):
        out["data-dir"] = str((folder / data).resolve())
    table = folder / config.dataset
    if table.is_file():
        out["dataset"] = str(table.resolve())
    if config.resume and not config.name:
        raise ConfigError("`resume` needs `name`, the name of the run to go on with")
    if not config.name:
        label = table.name.partition(".")[0] if table.is_file() else config.dataset
        words = (config.method, re.sub(r"[^\w.]+", "-", label), time.strftime("%Y%m%d-%H%M%S"))
        out["name"] = "-".join(words)
    return out


def run_folder(config: FlatConfig) -> Path:
    """Where a run with this completed configuration writes its files."""
    return Path(str(config["output-dir"])) / str(config["name"])


def conclude(flower: Flower, run: str, folder: Path) -> None:
    """Follow a submitted run to its end and print how it went.

    Raises:
        RunError: when Flower says that the run did not complete.
    """
    flower.follow(run)
    status, details = flower.outcome(run)
    if status != COMPLETED:
        raise RunError(f"the run ended as {status}: {details or 'see the log above'}")
    show_result(folder)


def show_result(folder: Path) -> None:
    """Print the closing table of a finished run, what it says in words, and where its files are."""
    metrics = read_run(folder).metrics
    counts = f"{metrics.sites} sites, {metrics.rounds} rounds, {len(metrics.failures)} failures"
    console = Console(soft_wrap=True)
    console.print(rich_table(headline(metrics), f"{metrics.method} on {metrics.dataset}: {counts}"))
    for sentence in filter(None, (verdict(metrics), calibration_verdict(metrics))):
        console.print(sentence)
    console.print(f"run folder  {folder}\nreport      {folder / 'report.html'}", markup=False, highlight=False)


def simulate(project: Path, config: FlatConfig, sites: int, gpus_per_site: float) -> None:
    """Run the app on Ray, under a SuperLink of its own that ends with it."""
    home, (port,) = project / ".flwr", free_ports(1)
    install_profiles(project, home)
    with tempfile.TemporaryDirectory(prefix="fedgp-", ignore_cleanup_errors=True) as scratch:
        variables = environment(home) | {
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
            "RAY_TMPDIR": scratch,  # short, as the names of sockets must be, and of this run alone
        }
        with Processes(variables, home / "logs" / str(config["name"])) as processes:
            flower = Flower(processes, home, SIMULATION)
            options = ["--insecure", "--simulation", "--host", HOST, "--port", str(port)]
            processes.start("superlink", [program("flower-superlink"), *options], home)
            flower.wait_until_ready(f"http://{HOST}:{port}")
            resources = f"num-supernodes={sites} client-resources-num-cpus=1 client-resources-num-gpus={gpus_per_site}"
            run = flower.submit(project, config, "--federation-config", resources)
            conclude(flower, run, run_folder(config))


def submit_elsewhere(project: Path, config: FlatConfig, connection: str) -> None:
    """Hand the app to a SuperLink that somebody runs, and wait for the run to end."""
    home = Path(os.environ.get("FLWR_HOME", project / ".flwr"))
    install_profiles(project, home)
    with Processes(environment(home), home / "logs" / str(config["name"])) as processes:
        flower = Flower(processes, home, connection)
        conclude(flower, flower.submit(project, config), run_folder(config))


def guarded(action: Callable[[], None]) -> int:
    """Do something interruptible; its exit status, with expected errors told in a line instead of a traceback."""
    try:
        with interruptible():
            action()
    except FedGPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fedgp_flower.launch", description=__doc__)
    parser.add_argument("--sites", type=int, default=5, help="simulated sites; 0 takes every natural group (default 5)")
    parser.add_argument("--connection", default=SIMULATION, help="connection of .flwr/config.toml (default simulation)")
    parser.add_argument("--gpus-per-site", type=float, default=0.0, help="share of a GPU each simulated site may use")
    parser.add_argument("--config", type=Path, help="TOML file with keys of the run configuration")
    parser.add_argument("assignments", nargs="*", metavar="KEY=VALUE", help="keys of the run configuration")
    return parser.parse_args(words)


def _run(chosen: argparse.Namespace) -> None:
    project = project_folder()
    written = read_config(chosen.config) if chosen.config else {}
    config = complete_config(written | parse_assignments(chosen.assignments), Path.cwd())
    if chosen.connection == SIMULATION:
        simulate(project, config, chosen.sites or natural_sites(parse_config(config)), chosen.gpus_per_site)
    else:
        submit_elsewhere(project, config, chosen.connection)


def main(words: Sequence[str] | None = None) -> int:
    """Run once; returns the exit status."""
    chosen = _arguments(words)
    return guarded(lambda: _run(chosen))


if __name__ == "__main__":
    sys.exit(main())
