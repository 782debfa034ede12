"""A federation on this machine: a SuperLink with TLS, and authenticated SuperNodes with one CSV file each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedgp_flower.data.sites import write_partition
from fedgp_flower.data.tables import held_out_file, table_stem
from fedgp_flower.deploy.machines import CONNECTION, Coordinator, SiteFolder
from fedgp_flower.deploy.processes import free_ports
from fedgp_flower.deploy.submission import HOST, Flower
from fedgp_flower.errors import DataError, RunError
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.privacy.keys import Identity, Trust
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.user_config import complete_config

ONLINE_SECONDS = 90.0

DEFAULTS: dict[str, Value] = {
    "num-server-rounds": 5,
    "model.num-inducing": 20,
    "evaluate-every": 0,
    "baselines.pooled": False,
}
"""Defaults with few rounds, because an exchange with real SuperNodes takes seconds."""


def join_sites(coordinator: Coordinator, folder: Path, files: Sequence[Path]) -> list[SiteFolder]:
    """Create a site per CSV file, named after it, or ``site1``, ``site2``, … if two files have the same name."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise DataError(f"no such file: {', '.join(missing)}")
    names = [table_stem(file) for file in files]
    if len(set(names)) < len(names):
        names = [f"site{i}" for i in range(1, len(files) + 1)]
    sites = []
    for name, file in zip(names, files, strict=True):
        test = held_out_file(file)
        given = {"data": file, **({"test-path": test} if test else {})}
        sites.append(SiteFolder.join(coordinator.invite(name), folder / name, given))
    return sites


@contextmanager
def federation(folder: Path, files: Sequence[Path], *, app: str = "", masked: bool = False) -> Iterator[Flower]:
    """Start a SuperLink and a SuperNode per file. ``app`` is a fingerprint or ``any``; ``masked`` adds trust files."""
    superlink, control, *ports = free_ports(2 + len(files))
    coordinator = Coordinator.create(folder / "coordinator", HOST, superlink, control)
    sites = [site.approve(app) if app else site for site in join_sites(coordinator, folder, files)]
    if masked:  # in practice the owners of the sites exchange their keys
        keys = {site.name: Identity.read(site.folder / "site-key").public for site in sites}
        for site in sites:
            Trust(keys).write(site.folder / "trust.toml")
    with coordinator.flower() as flower:
        say(f"SuperLink on {HOST}:{superlink}, TLS, node authentication")
        flower.processes.start("superlink", *coordinator.command(bind=HOST))
        flower.wait_until_ready(f"https://{HOST}:{superlink}", trust=coordinator.folder / "ca.crt")
        for site, port in zip(sites, ports, strict=True):
            say(f"SuperNode {site.name}: registered key, {site.facts['data']}")
            flower.json("supernode", "register", str(site.public), CONNECTION, "--name", site.name)
            flower.processes.start(site.name, *site.command(port))
        wait_online(flower, len(sites))
        yield flower
        say("ending the SuperLink and the SuperNodes")


def wait_online(flower: Flower, count: int) -> None:
    """Wait until ``count`` SuperNodes are online."""
    deadline, online = time.monotonic() + ONLINE_SECONDS, 0
    while time.monotonic() < deadline:
        flower.processes.require_alive()
        nodes = flower.json("supernode", "ls", CONNECTION)["nodes"]
        online = sum(node["status"] == "online" for node in nodes)
        if online == count:
            return
        time.sleep(1)
    raise RunError(f"{online} of {count} SuperNodes online after {ONLINE_SECONDS:.0f} s; see {flower.processes.logs}")


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"[deploy] {line}", flush=True)


def run_demo(keys: FlatConfig, files: Sequence[Path], count: int, parent: Path) -> None:
    """Run the demonstration in a new folder below ``parent``, with a CSV file per site or ``count`` simulated files."""
    folder, count = parent / time.strftime("%Y%m%d-%H%M%S"), len(files) or count
    config = complete_config(DEFAULTS | {"min-sites": count} | dict(keys), "sites" if files else "")
    folder.mkdir(parents=True, mode=0o700)
    files = files or write_partition(parse_config(config), count, folder / "data")
    with federation(folder, files, masked=parse_config(config).privacy.secure_aggregation) as flower:
        say(f"{len(files)} SuperNodes online; sending the app (each exchange with real nodes takes seconds)")
        flower.run(config)
