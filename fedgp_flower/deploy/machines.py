"""The folders of a coordinator and of a site: everything that a SuperLink or a SuperNode is started with.

``coordinator/`` holds the authority, the server's key, the SuperLink's database and the operator's connection;
``north/`` the node key, the invitation's certificate, the pinned fingerprint of the app and the site's state.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import tomli_w

from fedgp_flower.deploy.credentials import Authority, create_node_key
from fedgp_flower.deploy.processes import Processes, free_ports
from fedgp_flower.deploy.submission import Flower, environment, project_folder
from fedgp_flower.deploy.wrapped import PIN
from fedgp_flower.errors import ConfigError
from fedgp_flower.files import write_bytes
from fedgp_flower.options import Value
from fedgp_flower.privacy.keys import Identity, short_hash

Command: TypeAlias = tuple[list[str], Path, dict[str, str]]
"""Words, the folder to start in, and variables."""
CONNECTION = "deployment"
AUTHORITY_DAYS, SERVER_DAYS = 3650, 397
"""Of the authority, and of a server's certificate; ``fedgp deploy rotate`` makes a new one."""
WRAPPED = (sys.executable, "-m", "fedgp_flower.deploy.wrapped")
BIND = "0.0.0.0"  # noqa: S104 - sites are on other machines


UNIT = """[Unit]
Description=fedgp {name}
After=network-online.target
Wants=network-online.target

[Service]
User={user}
ExecStart={command}
Restart=always
RestartSec=15
NoNewPrivileges=true
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""


@cache
def app_fingerprint() -> str:
    """SHA-256 of the bundle that this installation sends to sites."""
    from flwr.cli.build import build_fab_from_disk  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as scratch:
        return hashlib.sha256(build_fab_from_disk(project_folder(Path(scratch)))).hexdigest()


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The folder of a SuperLink, its host and its port."""

    folder: Path
    host: str
    port: int

    @staticmethod
    def create(folder: Path, host: str, port: int) -> Coordinator:
        """Make the folder, authority, certificate, connection and unit."""
        folder = folder.resolve()
        _new(folder, "server", "flower", "logs", "invitations")
        authority = Authority.new(AUTHORITY_DAYS)
        authority.write(folder)
        authority.certify(folder / "server", host, SERVER_DAYS)
        _write(folder / "coordinator.toml", {"host": host, "port": port})
        profile = {"address": f"{host}:{port}", "root-certificates": str(folder / "ca.crt")}
        _write(folder / "flower" / "config.toml", {"superlink": {"default": CONNECTION, CONNECTION: profile}})
        write_unit(folder, "superlink", "deploy", "serve", "--folder", str(folder))
        return Coordinator(folder, host, port)

    @staticmethod
    def read(folder: Path) -> Coordinator:
        """From a folder that :meth:`create` made."""
        content = _read(folder / "coordinator.toml", "fedgp deploy init")
        return Coordinator(folder.resolve(), str(content["host"]), int(content["port"]))

    def command(self, bind: str = BIND) -> Command:
        """The SuperLink that listens at an address: its words, where it starts, and its environment."""
        server = self.folder / "server"
        words = [*WRAPPED, "superlink", "--host", bind, "--port", str(self.port), "--database", "superlink.db"]
        words += ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        return [*words, "--enable-supernode-auth"], server, environment(self.folder / "flower")

    def invite(self, site: str) -> Path:
        """Write the file that a site joins with. Nothing in it is secret; it must arrive unchanged."""
        path = self.folder / "invitations" / f"{site}.toml"
        certificate = (self.folder / "ca.crt").read_text(encoding="ascii")
        content = {"site": site, "superlink": f"{self.host}:{self.port}", "app": app_fingerprint()}
        _write(path, {**content, "root-certificate": certificate})
        return path

    def rotate(self) -> None:
        """Make a new key and certificate of the SuperLink by the same authority. Sites need not change anything."""
        Authority.read(self.folder).certify(self.folder / "server", self.host, SERVER_DAYS)

    @contextmanager
    def flower(self) -> Iterator[Flower]:
        """Flower's command line, connected to this SuperLink."""
        home = self.folder / "flower"
        with Processes(environment(home), self.folder / "logs") as processes:
            yield Flower(processes, home, CONNECTION)

    @property
    def sites(self) -> dict[str, int]:
        """Registered sites and their node ids."""
        path = self.folder / "sites.toml"
        return {name: int(node) for name, node in _read(path, "fedgp deploy register").items()} if path.exists() else {}

    def keep(self, sites: Mapping[str, int]) -> None:
        """Save the registered sites."""
        _write(self.folder / "sites.toml", dict(sites))


@dataclass(frozen=True, slots=True)
class SiteFolder:
    """The folder of a SuperNode."""

    folder: Path
    facts: Mapping[str, object]
    """``site``, ``superlink``, ``app``, ``data`` and further keys of the node configuration."""

    @staticmethod
    def join(invitation: Path, folder: Path | None, given: Mapping[str, Path]) -> SiteFolder:
        """Make keys and a folder from an invitation and the site's files."""
        content = _read(invitation, "fedgp deploy invite")
        missing = [name for name in ("site", "superlink", "app", "root-certificate") if not content.get(name)]
        if missing:
            raise ConfigError(f"{invitation} is not an invitation: it lacks {', '.join(missing)}")
        site = str(content["site"])
        if Path(site).name != site or site in {".", ".."}:
            raise ConfigError(f"{invitation}: `site` = {site!r} cannot be the name of a folder")
        place = (folder or Path(site)).resolve()
        _new(place, "state", "bin")
        (place / "ca.crt").write_text(str(content.pop("root-certificate")), encoding="ascii")
        create_node_key(place / site)
        Identity.new().write(place / "site-key")
        script = place / "bin" / "flwr-clientapp"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedgp_flower.deploy.wrapped clientapp "$@"\n')
        script.chmod(0o700)
        facts = {**content, **{key: str(path.resolve()) for key, path in given.items()}}
        _write(place / "site.toml", facts)
        write_unit(place, f"site-{site}", "site", "serve", str(place))
        return SiteFolder(place, facts)

    @staticmethod
    def read(folder: Path) -> SiteFolder:
        """From a folder that :meth:`join` made."""
        return SiteFolder(folder.resolve(), _read(folder / "site.toml", "fedgp site join"))

    @property
    def name(self) -> str:
        """The id of the site."""
        return str(self.facts["site"])

    @property
    def public(self) -> Path:
        """The public half of the node key: what the coordinator registers."""
        return self.folder / f"{self.name}.pub"

    @property
    def fingerprint(self) -> str:
        """That key in short."""
        return short_hash(self.public.read_bytes().strip())

    @property
    def node_config(self) -> dict[str, Value]:
        """The node configuration, which only this SuperNode knows."""
        values: dict[str, Value] = {
            "site": self.name,
            "data-path": str(self.facts["data"]),
            "state-dir": str(self.folder / "state"),
        }
        values |= {key: str(self.facts[key]) for key in ("test-path", "policy", "label") if key in self.facts}
        trust = self.folder / "trust.toml"
        return values | ({"site-key": str(self.folder / "site-key"), "trust": str(trust)} if trust.exists() else {})

    def approve(self, fingerprint: str) -> SiteFolder:
        """Pin another app."""
        facts = {**self.facts, "app": fingerprint}
        _write(self.folder / "site.toml", facts)
        return SiteFolder(self.folder, facts)

    def command(self, port: int = 0) -> Command:
        """The SuperNode: its words, where it starts, and its environment; 0 takes a free port for its ClientApps."""
        node_config = " ".join(f'{key}="{value}"' for key, value in self.node_config.items())
        words = [*WRAPPED, "supernode", "--superlink", str(self.facts["superlink"]), "--root-certificates", "ca.crt"]
        words += ["--auth-supernode-private-key", self.name, "--node-config", node_config]
        words += ["--port", str(port or free_ports(1)[0])]
        variables = environment(self.folder / "flower") | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        variables |= {"PATH": f"{self.folder / 'bin'}{os.pathsep}{variables['PATH']}", PIN: str(self.facts["app"])}
        return words, self.folder, variables


def write_unit(folder: Path, name: str, *words: str) -> None:
    """Write a systemd unit that starts ``fedgp`` with these words whenever it ends."""
    command = shlex.join([sys.executable, "-m", "fedgp_flower.cli", *words]).replace("%", "%%")
    (folder / f"fedgp-{name}.service").write_text(UNIT.format(name=name, user=getpass.getuser(), command=command))


def become(command: Command) -> None:
    """Replace this process by a command, so that a service manager watches that command."""
    words, folder, variables = command
    os.chdir(folder)
    os.execve(words[0], words, {**os.environ, **variables})  # noqa: S606 - a fixed command, no shell


def _new(folder: Path, *parts: str) -> None:
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; choose another folder") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None
    for part in parts:
        (folder / part).mkdir()


def _write(path: Path, content: Mapping[str, object]) -> None:
    write_bytes(path, tomli_w.dumps(content).encode())


def _read(path: Path, maker: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); `{maker}` makes it") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
