"""A whole deployment on this machine: a SuperLink with TLS, SuperNodes that authenticate, each with its own CSV file.

It makes an authority, certificates and keys under ``.deploy/``, starts everything,
runs the app, prints the result and ends exactly what it started. ``--keep`` leaves it up until Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedgp_flower.data.sites import write_partition
from fedgp_flower.deploy.credentials import ServerCredentials, create_node_key, create_server_credentials
from fedgp_flower.deploy.launch import HOST, conclude
from fedgp_flower.deploy.processes import Processes, free_ports
from fedgp_flower.deploy.submission import Flower, environment, program, project_folder
from fedgp_flower.errors import ConfigError, DataError, RunError
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.privacy.keys import Identity, Trust
from fedgp_flower.run.registry import parse_config
from fedgp_flower.run.user_config import complete_config, run_folder

CONNECTION = "deployment"
ONLINE_SECONDS = 90.0

# An exchange with real SuperNodes takes seconds, however little it carries: few rounds, each with many local steps.
DEFAULTS: dict[str, Value] = {
    "method": "fsgp",
    "fsgp.objective": "average",
    "fsgp.server-optimizer": "fedavg",
    "num-server-rounds": 3,
    "model.num-inducing": 20,
    "evaluate-every": 0,
    "baselines.pooled": False,
}
LOCAL_STEPS: dict[str, Value] = {"optimizer.steps": 25}
"""For methods that take the optimiser's local steps; the others have another key for them and refuse this one."""


def demo_config(chosen: Mapping[str, Value], count: int) -> dict[str, Value]:
    """The demonstration's configuration: its defaults, and over them what was chosen."""
    given = DEFAULTS | {"min-sites": count} | dict(chosen)
    try:
        return complete_config(LOCAL_STEPS | given, Path.cwd())
    except ConfigError:
        return complete_config(given, Path.cwd())


@dataclass(frozen=True, slots=True)
class Site:
    """One SuperNode: its name, its CSV file, and the folder that stands for its machine."""

    name: str
    data: Path
    folder: Path

    @property
    def key(self) -> Path:
        """Private key that the node authenticates with."""
        return self.folder / "node-key"

    @property
    def secret(self) -> Path:
        """Key that the site signs with when its summands travel under masks."""
        return self.folder / "site-key"

    @property
    def trust(self) -> Path:
        """Public keys of the sites that it adds its summands to."""
        return self.folder / "trust.toml"

    @property
    def node_config(self) -> str:
        """What the SuperNode alone is told: where the site's rows lie, held-out rows in a file beside them or not."""
        test = self.data.with_suffix(".test.csv")
        told = {"site": self.name, "data-path": self.data, "state-dir": self.folder / "state"}
        told |= {"test-path": test} if test.is_file() else {}
        told |= {"site-key": self.secret, "trust": self.trust} if self.trust.is_file() else {}
        return " ".join(f'{key}="{value}"' for key, value in told.items())


def create_sites(folder: Path, files: Sequence[Path]) -> list[Site]:
    """A site per CSV file, named after it, or ``site1``, ``site2``, … where two files have one name.

    Raises:
        DataError: for a file that does not exist.
    """
    if missing := [str(file) for file in files if not file.is_file()]:
        raise DataError(f"no such file: {', '.join(missing)}")
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = [f"site{i}" for i in range(1, len(files) + 1)]
    return [Site(name, file.resolve(), folder / name) for name, file in zip(names, files, strict=True)]


def introduce(sites: Sequence[Site]) -> None:
    """Give every site a key and the public keys of all, as their owners would do outside the server."""
    trust = Trust({})
    for site in sites:
        identity = Identity.new()
        identity.write(site.secret)
        trust = trust.with_site(site.name, identity.public)
    for site in sites:
        trust.write(site.trust)


def start_superlink(processes: Processes, folder: Path, port: int) -> ServerCredentials:
    """Start a SuperLink that speaks TLS only and takes registered SuperNodes only."""
    files = create_server_credentials(folder / "server", HOST)
    tls = ["--ssl-ca-certfile", files.authority, "--ssl-certfile", files.certificate, "--ssl-keyfile", files.key]
    command = [program("flower-superlink"), "--host", HOST, "--port", port, *tls, "--enable-supernode-auth"]
    processes.start("superlink", [*map(str, command), "--database", "superlink.db"], folder / "server")
    return files


def start_supernode(processes: Processes, site: Site, superlink: int, port: int, authority: Path) -> None:
    """Start the SuperNode of a site; only this process is told where the site's data lie."""
    options = {
        "--superlink": f"{HOST}:{superlink}",
        "--root-certificates": authority,
        "--auth-supernode-private-key": site.key,
        "--node-config": site.node_config,
        "--port": port,
    }
    words = [str(word) for pair in options.items() for word in pair]
    variables = {"FLWR_HOME": str(site.folder / "flower"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    processes.start(site.name, [program("flower-supernode"), *words], site.folder, variables)


def connect(processes: Processes, folder: Path, port: int, authority: Path) -> Flower:
    """The operator's command line, with a connection to the SuperLink."""
    home = folder / "operator"
    home.mkdir()
    profile = {"address": f"{HOST}:{port}", "root-certificates": str(authority)}
    document = {"superlink": {"default": CONNECTION, CONNECTION: profile}}
    (home / "config.toml").write_text(tomli_w.dumps(document), encoding="utf-8")
    return Flower(processes, home, CONNECTION)


def wait_online(flower: Flower, count: int) -> None:
    """Wait until ``count`` SuperNodes are online.

    Raises:
        RunError: when they are not after ``ONLINE_SECONDS``, or one has ended.
    """
    deadline, online = time.monotonic() + ONLINE_SECONDS, 0
    while time.monotonic() < deadline:
        flower.processes.require_alive()
        nodes = flower.json("supernode", "ls", CONNECTION)["nodes"]
        online = sum(node["status"] == "online" for node in nodes)
        if online == count:
            return
        time.sleep(1)
    raise RunError(f"{online} of {count} SuperNodes online after {ONLINE_SECONDS:.0f} s; see {flower.processes.logs}")


def deploy(project: Path, folder: Path, sites: Sequence[Site], config: FlatConfig, keep: bool) -> None:
    """Start, register, run, report and, unless ``keep``, end at once."""
    superlink, *ports = free_ports(1 + len(sites))
    for site in sites:
        (site.folder / "state").mkdir(parents=True)
    if parse_config(config).privacy.secure_aggregation:  # a site with a trust file answers under masks alone
        introduce(sites)
    (folder / "server").mkdir()
    with Processes(environment(folder / "operator"), folder / "logs") as processes:
        say(f"SuperLink on {HOST}:{superlink}, TLS, node authentication")
        files = start_superlink(processes, folder, superlink)
        flower = connect(processes, folder, superlink, files.authority)
        flower.wait_until_ready(f"https://{HOST}:{superlink}", trust=files.authority)
        for site, port in zip(sites, ports, strict=True):
            say(f"SuperNode {site.name}: registered key, {site.data}")
            flower.json("supernode", "register", str(create_node_key(site.key)), CONNECTION, "--name", site.name)
            start_supernode(processes, site, superlink, port, files.authority)
        wait_online(flower, len(sites))
        say(f"{len(sites)} SuperNodes online; sending the app (each exchange with real nodes takes seconds)")
        conclude(flower, flower.submit(project, config), run_folder(config))
        if keep:
            hold(flower)
        say("ending the SuperLink and the SuperNodes")


def hold(flower: Flower) -> None:
    """Leave the federation up until a signal comes."""
    say("the federation stays up until Ctrl-C; from another shell:")
    again = f"-m fedgp_flower.cli deploy run --connection {flower.connection} num-server-rounds=5"
    print(f"  FLWR_HOME={flower.home} {sys.executable} {again}", flush=True)
    signal.pause()


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(f"[deploy] {line}", flush=True)


def run_demo(keys: FlatConfig, files: Sequence[Path], count: int, parent: Path, *, keep: bool) -> None:
    """Run the demonstration in a new folder below ``parent``: a CSV file per site, or ``count`` sites of a data set.

    Raises:
        RunError: when the run did not complete.
    """
    folder, count = parent / time.strftime("%Y%m%d-%H%M%S"), len(files) or count
    config = demo_config(keys, count)
    folder.mkdir(parents=True, mode=0o700)
    sites = create_sites(folder, files or write_partition(parse_config(config), count, folder / "data"))
    deploy(project_folder(folder), folder, sites, config, keep)
