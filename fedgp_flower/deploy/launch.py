"""A run through Flower's SuperLink from start to end: started or reached, followed, judged, and nothing left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fedgp_flower.data.sites import natural_sites
from fedgp_flower.deploy.processes import Processes, free_ports
from fedgp_flower.deploy.submission import (
    COMPLETED,
    Flower,
    environment,
    flower_home,
    install_profiles,
    program,
    project_folder,
)
from fedgp_flower.errors import RunError
from fedgp_flower.options import FlatConfig
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.terminal import show_result
from fedgp_flower.run.user_config import run_folder

HOST = "127.0.0.1"
SIMULATION = "simulation"


def simulate(config: FlatConfig, sites: int, gpus_per_site: float = 0.0) -> None:
    """Run the app on Ray, under a SuperLink that ends with it; 0 sites takes every natural group."""
    sites = sites or natural_sites(parse_config(config))
    home, (port,) = flower_home(), free_ports(1)
    project = project_folder(home)
    install_profiles(home)
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


def submit_elsewhere(config: FlatConfig, connection: str) -> None:
    """Hand the app to a SuperLink that somebody runs, and wait for the run to end."""
    home = flower_home()
    project = project_folder(home)
    install_profiles(home)
    with Processes(environment(home), home / "logs" / str(config["name"])) as processes:
        flower = Flower(processes, home, connection)
        conclude(flower, flower.submit(project, config), run_folder(config))


def conclude(flower: Flower, run: str, folder: Path) -> None:
    """Follow a submitted run to its end and print how it went.

    A signal that ends this process ends the run too.
    """
    try:
        flower.follow(run)
        status, details = flower.outcome(run)
    except (SystemExit, KeyboardInterrupt):
        flower.stop(run)
        raise
    if status != COMPLETED:
        raise RunError(f"the run ended as {status}: {details or 'see the log above'}")
    show_result(folder)
