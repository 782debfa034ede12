"""Commands ``fedgp deploy …`` of a coordinator and ``fedgp site …`` of a site; see ``docs/deploy.md``."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.lazy import Lazy

if TYPE_CHECKING:
    from fedgp_flower.data import tables
    from fedgp_flower.deploy import doctor as checks
    from fedgp_flower.deploy import machines, processes
    from fedgp_flower.options import Value
    from fedgp_flower.run import user_config
else:  # not imported by `fedgp --help`
    checks, machines = Lazy("fedgp_flower.deploy.doctor"), Lazy("fedgp_flower.deploy.machines")
    tables = Lazy("fedgp_flower.data.tables")
    processes, user_config = Lazy("fedgp_flower.deploy.processes"), Lazy("fedgp_flower.run.user_config")

deploy = typer.Typer(no_args_is_help=True, help="A federation on real machines: the coordinator's commands.")
site = typer.Typer(no_args_is_help=True, help="A site: joining a federation, and keys for totals under masks.")

Folder = Annotated[Path, typer.Option("--folder", help="folder of the coordinator")]
SitePath = Annotated[Path, typer.Argument(help="folder of the site")]
HERE = Path("coordinator")


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(help="folder to make")] = HERE,
    host: Annotated[str, typer.Option(help="name by which sites reach this machine")] = ...,  # type: ignore[assignment]
    port: Annotated[int, typer.Option(min=1, max=65535, help="port for the sites")] = 8000,
    control: Annotated[int, typer.Option(min=1, max=65535, help="port for operators on this machine")] = 8001,
    invite: Annotated[list[str] | None, typer.Option(help="site to invite at once; may be given again")] = None,
) -> None:
    """Create the certificate authority, certificate, service units and invitations of a coordinator."""
    coordinator = machines.Coordinator.create(folder, host, port, control, invite or [])
    for name in invite or []:
        print(f"invitation of {name}: {coordinator.invite(name)}")
    print(f"open port {port} for the sites; operators use port {control}, only on this machine")
    print(f"{coordinator.folder}-authority holds the secret of this federation: keep it offline until `rotate`")
    print(f"start the SuperLink:  fedgp deploy serve --folder {quote(str(folder))}")
    unit = quote(f"{coordinator.folder}/fedgp-superlink.service")
    print(f"or as a service:      sudo systemctl enable --now {unit}")


@deploy.command()
def serve(folder: Folder = HERE) -> None:
    """Run the SuperLink in the foreground until a signal."""
    coordinator = machines.Coordinator.read(folder)
    for host, port in ((machines.BIND, coordinator.port), ("127.0.0.1", coordinator.control)):
        processes.require_free(host, port)
    machines.become(coordinator.command())


@deploy.command(name="invite")
def invite_sites(names: Annotated[list[str], typer.Argument(help="ids of sites")], folder: Folder = HERE) -> None:
    """Write the invitation of a site."""
    for name in names:
        print(machines.Coordinator.read(folder).invite(name))


@deploy.command()
def register(
    keys: Annotated[list[Path], typer.Argument(help="public keys that sites sent, NAME.pub")], folder: Folder = HERE
) -> None:
    """Admit sites by their public keys. Compare each fingerprint with the site's, for instance by telephone."""
    coordinator = machines.Coordinator.read(folder)
    with coordinator.flower() as flower:
        for path in keys:
            key, name = str(path.resolve()), path.stem
            if name in coordinator.sites:
                raise ConfigError(f"{name} is registered already; first: fedgp deploy revoke {name}")
            answer = flower.json("supernode", "register", key, flower.connection, "--name", name)
            coordinator.save_sites({**coordinator.sites, name: int(answer["node-id"])})
            fingerprint = machines.fingerprint_of(path)
            print(f"{name} is registered as node {answer['node-id']}; fingerprint of its key: {fingerprint}")


@deploy.command()
def revoke(name: Annotated[str, typer.Argument(help="id of the site")], folder: Folder = HERE) -> None:
    """Stop admitting a site."""
    coordinator = machines.Coordinator.read(folder)
    sites = coordinator.sites
    if name not in sites:
        raise ConfigError(f"{name!r} is not registered; registered are {', '.join(sites) or 'none'}")
    node = str(sites.pop(name))
    with coordinator.flower() as flower:
        nodes = flower.json("supernode", "ls", flower.connection)["nodes"]
        if node in {str(known["node-id"]) for known in nodes}:  # a SuperLink with a new database knows none
            flower.json("supernode", "unregister", node, flower.connection)
    coordinator.save_sites(sites)
    print(f"{name} is no longer admitted")


@deploy.command()
def rotate(folder: Folder = HERE) -> None:
    """Create a new key and certificate of the SuperLink; sites need no change."""
    machines.Coordinator.read(folder).rotate()
    print("start the SuperLink again to use the new certificate")


@deploy.command(name="run")
def run_method(
    assignments: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="run configuration")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with keys of the run configuration")] = None,
    folder: Folder = HERE,
) -> None:
    """Run a method on the registered sites; the exit status is the result of the run."""
    given = (user_config.read_config(config) if config else {}) | user_config.parse_assignments(assignments or [])
    coordinator = machines.Coordinator.read(folder)
    if not coordinator.sites:
        raise RunError("no site is registered; a site sends NAME.pub, then: fedgp deploy register NAME.pub")
    usual: dict[str, Value] = {
        "sites": len(coordinator.sites),
        "output-dir": str(coordinator.folder / "results"),
        "baselines.pooled": False,
    }
    completed = user_config.complete_config(usual | given, "sites")
    with processes.interruptible(), coordinator.flower() as flower:
        flower.run(completed)


@deploy.command()
def status(
    folder: Folder = HERE,
    watch: Annotated[float, typer.Option(min=0.0, help="seconds between looks; 0 looks once")] = 0.0,
) -> None:
    """Show sites with their last connection, and the latest run with its round and failures."""
    coordinator = machines.Coordinator.read(folder)
    with coordinator.flower() as flower:
        while True:
            nodes = {int(node["node-id"]): node for node in flower.json("supernode", "ls", flower.connection)["nodes"]}
            for name, node in coordinator.sites.items():
                found = nodes.get(node, {"status": "not registered any more"})
                seen = found.get("online-at" if found["status"] == "online" else "offline-at") or "never"
                print(f"{name:20} {found['status']:12} since {seen}")
            for run in flower.json("ls", flower.connection)["runs"][:1]:
                print(f"run {run['run-id']}: {run['status']}")
            histories = (coordinator.folder / "results").glob("*/history.csv")
            for history in sorted(histories, key=lambda path: path.stat().st_mtime)[-1:]:
                for row in list(csv.DictReader(history.read_text(encoding="utf-8").splitlines()))[-1:]:
                    print(f"{history.parent.name}: round {row['round']}, {row['failures']} failures")
            if not watch:
                return
            time.sleep(watch)


@deploy.command(name="doctor")
def examine(folder: Folder = HERE) -> None:
    """Check the coordinator; exit status 2 if something is wrong."""
    if not checks.of_coordinator(machines.Coordinator.read(folder)):
        raise typer.Exit(2)


@site.command()
def join(
    invitation: Annotated[Path, typer.Argument(help="file that the coordinator sent")],
    data: Annotated[Path, typer.Option(help="the site's table")],
    test: Annotated[Path | None, typer.Option(help="rows to hold out; otherwise a share of the table")] = None,
    policy: Annotated[Path | None, typer.Option(help="what the site refuses; otherwise the default")] = None,
    folder: Annotated[Path | None, typer.Option(help="folder to make; otherwise the id of the site")] = None,
    audit_copy: Annotated[str, typer.Option(help="second place of the audit log: `syslog`, or a file")] = "",
) -> None:
    """Create the keys, folder and service unit of this site, and check them."""
    given = {"data": data, "test-path": test or tables.held_out_file(data), "policy": policy}
    files = {name: path for name, path in given.items() if path is not None}
    if missing := [str(path) for path in files.values() if not path.is_file()]:
        raise ConfigError(f"no such file: {', '.join(missing)}")
    made = machines.SiteFolder.join(invitation, folder, files, audit_copy)
    authority = machines.fingerprint_of(made.folder / "ca.crt")
    print(f"this site trusts the SuperLink {made.facts['superlink']} with a certificate of the authority {authority},")
    print(
        f"and runs only the app {made.facts['app']}: compare both with the coordinator's, "
        "which `fedgp deploy doctor` prints there"
    )
    good = checks.of_site(made)
    print(f"send {made.public} to the coordinator; its fingerprint, to compare: {machines.fingerprint_of(made.public)}")
    print(f"then start the SuperNode:  fedgp site serve {quote(str(made.folder))}")
    unit = quote(f"{made.folder}/fedgp-site-{made.name}.service")
    print(f"or as a service:           sudo systemctl enable --now {unit}")
    if not good:
        raise typer.Exit(1)


@site.command(name="serve")
def serve_site(folder: SitePath) -> None:
    """Run the SuperNode in the foreground until a signal."""
    served = machines.SiteFolder.read(folder)
    print(f"this site runs only the app {served.facts['app']}", flush=True)
    machines.become(served.command())


@site.command()
def approve(
    folder: SitePath,
    app: Annotated[str, typer.Option(help="fingerprint; otherwise that of the project installed here")] = "",
) -> None:
    """Allow another version of the app to run here. Read that version first."""
    approved = machines.SiteFolder.read(folder).approve(app or machines.app_fingerprint())
    print(f"{approved.name} now runs only the app {approved.facts['app']}; start its SuperNode again")


def doctor(folder: SitePath) -> None:
    """Check a site, or the coordinator's folder; exit status 2 if something is wrong."""
    if (folder / "coordinator.toml").exists():
        examine(folder)
    elif (folder / "site.toml").exists():
        if not checks.of_site(machines.SiteFolder.read(folder)):
            raise typer.Exit(2)
    else:
        raise RunError(f"{folder} is not the folder of a site or of a coordinator")
