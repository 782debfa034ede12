"""Folders of a coordinator and of a site, with all files that a SuperLink or a SuperNode needs.

An invitation is untrusted: its values must match known patterns, and none becomes part of a command.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import tomli_w

from fedgp_flower.deploy.credentials import certify, create_authority, create_node_key
from fedgp_flower.deploy.processes import Processes, free_ports
from fedgp_flower.deploy.submission import Flower, environment, project_folder
from fedgp_flower.deploy.wrapped import CONTROL, PIN
from fedgp_flower.errors import ConfigError
from fedgp_flower.files import read_toml, write_bytes
from fedgp_flower.options import Value
from fedgp_flower.privacy.keys import Identity, Trust, short_hash
from fedgp_flower.typing import Json

Command: TypeAlias = tuple[list[str], Path, dict[str, str]]
"""Words, working directory and environment variables of a command."""
CONNECTION = "deployment"
AUTHORITY_DAYS, SERVER_DAYS = 3650, 397
"""Validity of the authority and of the server's certificate, which ``fedgp deploy rotate`` renews."""
WRAPPED = (sys.executable, "-m", "fedgp_flower.deploy.wrapped")
BIND = "0.0.0.0"  # noqa: S104 - sites are on other machines
SHAPES = {
    "site": r"[A-Za-z0-9._-]{1,64}",
    "superlink": r"[A-Za-z0-9.-]{1,253}:[0-9]{1,5}|\[[0-9A-Fa-f:.]{2,45}\]:[0-9]{1,5}",
    "app": r"[0-9a-f]{64}",
    "root-certificate": r"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]{1,8192}\n-----END CERTIFICATE-----\n?",
}
"""Keys of an invitation, with the pattern of each value."""
CONNECTED = ("site", "superlink", "app", "data")
SITE_KEYS: Mapping[str, type] = {
    **dict.fromkeys((*CONNECTED, "test-path", "policy", "label", "audit", "audit-copy"), str),
    **dict.fromkeys(("min-sites", "max-roster-changes"), int),
}
"""Keys of ``site.toml``; all but the last three of ``CONNECTED`` are also keys of the node configuration."""

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
CapabilityBoundingSet=
PrivateTmp=true
PrivateDevices=true
ProtectSystem=strict
ProtectHome=tmpfs
ProtectKernelTunables=true
ProtectControlGroups=true
ProtectKernelModules=true
ProtectKernelLogs=true
ProtectClock=true
ProtectHostname=true
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=true
RestrictSUIDSGID=true
RestrictRealtime=true
LockPersonality=true
SystemCallArchitectures=native
UMask=0077
BindPaths={writable}
BindReadOnlyPaths={readable}

[Install]
WantedBy=multi-user.target
"""
"""Below /home, a service sees only its folder and, read-only, this installation and the files of the site."""

DOCKERFILE = """FROM python:3.11-slim
COPY . /fedgp
RUN pip install --no-cache-dir --constraint /fedgp/constraints.txt --editable /fedgp
ENTRYPOINT ["fedgp"]
"""


def fingerprint_of(file: Path) -> str:
    """Return the short fingerprint of a key or certificate, for comparison by telephone."""
    return short_hash(file.read_bytes().strip())


@cache
def app_fingerprint() -> str:
    """Return the SHA-256 of the app bundle of this installation."""
    from flwr.cli.build import build_fab_from_disk  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as scratch:
        return hashlib.sha256(build_fab_from_disk(project_folder(Path(scratch)))).hexdigest()


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The folder of a SuperLink, its host and port for sites, and its local port for operators."""

    folder: Path
    host: str
    port: int
    control: int

    @staticmethod
    def create(folder: Path, host: str, port: int, control: int, invited: Sequence[str] = ()) -> Coordinator:
        """Create the folder, authority, certificate, connection and service unit, if all sites can be invited."""
        for name, value in (("superlink", f"{host}:{port}"), *(("site", site) for site in invited)):
            _require_shape(name, value, "fedgp deploy init")
        if port == control:
            raise ConfigError(f"`--port` and `--control` are both {port}; sites and operators need a port each")
        folder = folder.resolve()
        _new(folder, "server", "flower", "logs", "invitations")
        _new(_authority(folder))
        create_authority(_authority(folder), AUTHORITY_DAYS)
        shutil.copy(_authority(folder) / "ca.crt", folder)
        certify(_authority(folder), folder / "server", host, SERVER_DAYS)
        _write(folder / "coordinator.toml", {"host": host, "port": port, "control": control})
        profile = {"address": f"127.0.0.1:{control}", "root-certificates": str(folder / "ca.crt")}
        _write(folder / "flower" / "config.toml", {"superlink": {"default": CONNECTION, CONNECTION: profile}})
        write_units(folder, "superlink", ["deploy", "serve", "--folder", str(folder)])
        return Coordinator(folder, host, port, control)

    @staticmethod
    def read(folder: Path) -> Coordinator:
        """Read a folder that :meth:`create` wrote."""
        content = _read(folder / "coordinator.toml", "fedgp deploy init")
        return Coordinator(folder.resolve(), str(content["host"]), int(content["port"]), int(content["control"]))

    def command(self, bind: str = BIND) -> Command:
        """Return the command of the SuperLink, which sites reach at the address ``bind``."""
        server = self.folder / "server"
        words = [*WRAPPED, "superlink", "--host", bind, "--port", str(self.port), "--database", "superlink.db"]
        words += ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        variables = environment(self.folder / "flower") | {CONTROL: str(self.control)}
        return [*words, "--enable-supernode-auth"], server, variables

    def invite(self, site: str) -> Path:
        """Write the invitation of a site. It is not secret, but must arrive unchanged."""
        path = self.folder / "invitations" / f"{site}.toml"
        certificate = (self.folder / "ca.crt").read_text(encoding="ascii")
        content = {"site": site, "superlink": f"{self.host}:{self.port}", "app": app_fingerprint()}
        _write(path, _checked_invitation({**content, "root-certificate": certificate}, "the invitation"))
        return path

    def rotate(self) -> None:
        """Create a new key and certificate of the SuperLink with the same authority. Sites need no change."""
        certify(_authority(self.folder), self.folder / "server", self.host, SERVER_DAYS)

    @contextmanager
    def flower(self) -> Iterator[Flower]:
        """Open Flower's command line with a connection to this SuperLink."""
        home = self.folder / "flower"
        with Processes(environment(home), self.folder / "logs") as processes:
            yield Flower(processes, home, CONNECTION)

    @property
    def sites(self) -> dict[str, int]:
        """Registered sites and their node ids."""
        path = self.folder / "sites.toml"
        return {name: int(node) for name, node in _read(path, "fedgp deploy register").items()} if path.exists() else {}

    def save_sites(self, sites: Mapping[str, int]) -> None:
        """Save the registered sites."""
        _write(self.folder / "sites.toml", dict(sites))


@dataclass(frozen=True, slots=True)
class SiteFolder:
    """The folder of a SuperNode."""

    folder: Path
    facts: Mapping[str, Value]
    """The content of ``site.toml``, see ``SITE_KEYS``."""

    @staticmethod
    def join(invitation: Path, folder: Path | None, given: Mapping[str, Path], audit_copy: str = "") -> SiteFolder:
        """Create keys and a folder from an invitation, the site's files and a second place of its log."""
        content = _checked_invitation(_read(invitation, "fedgp deploy invite"), str(invitation))
        site = content["site"]
        place = (folder or Path(site)).resolve()
        files = {key: path.resolve() for key, path in given.items()}
        copies = [] if audit_copy in ("", "syslog") else [Path(audit_copy).resolve()]
        for path in (place, *files.values(), *copies):
            if re.search(r"[\"'\\\n\r]", str(path)):
                raise ConfigError(f"{path}: a SuperNode needs paths without quotation marks and backslashes; rename it")
        for path in copies:
            try:
                path.touch(0o600)  # a service sees only files that are there
            except OSError as error:
                raise ConfigError(f"`--audit-copy`: {path} cannot be written ({error.strerror})") from None
        _new(place, "state")
        (place / "ca.crt").write_text(content.pop("root-certificate"), encoding="ascii")
        create_node_key(place / "node-key").rename(place / f"{site}.pub")
        Identity.new().write(place / "site-key")
        Trust({}).write(place / "trust.toml")  # a running SuperNode sees the sites that its owner adds
        further = {"audit-copy": str(copies[0]) if copies else audit_copy} if audit_copy else {}
        facts = {**content, **{key: str(path) for key, path in files.items()}, **further}
        _write(place / "site.toml", facts)
        write_units(place, f"site-{site}", ["site", "serve", str(place)], list(files.values()), copies)
        return SiteFolder(place, facts)

    @staticmethod
    def read(folder: Path) -> SiteFolder:
        """Read a folder that :meth:`join` wrote."""
        content = _read(folder / "site.toml", "fedgp site join")
        keys = {**dict.fromkeys(CONNECTED), **content}
        if wrong := [key for key in keys if type(content.get(key)) is not SITE_KEYS.get(key)]:
            known = ", ".join(key if kind is str else f"{key} (whole number)" for key, kind in SITE_KEYS.items())
            raise ConfigError(f"{folder}/site.toml: missing, unknown or wrong: {', '.join(wrong)}; allowed: {known}")
        return SiteFolder(folder.resolve(), content)

    @property
    def name(self) -> str:
        """The id of the site."""
        return str(self.facts["site"])

    @property
    def public(self) -> Path:
        """Path of the public node key, which the coordinator registers."""
        return self.folder / f"{self.name}.pub"

    @property
    def secret(self) -> Path:
        """Path of the private node key, which folders of earlier versions name as the site."""
        path = self.folder / "node-key"
        return path if path.exists() else self.folder / self.name

    @property
    def node_config(self) -> dict[str, Value]:
        """The node configuration, which stays at this SuperNode."""
        values = {key: value for key, value in self.facts.items() if key not in CONNECTED[1:]}
        values |= {"data-path": self.facts["data"], "state-dir": str(self.folder / "state")}
        trust = self.folder / "trust.toml"
        return values | ({"site-key": str(self.folder / "site-key"), "trust": str(trust)} if trust.exists() else {})

    def approve(self, fingerprint: str) -> SiteFolder:
        """Approve another app by its fingerprint, or ``any`` app."""
        if fingerprint != "any" and not re.fullmatch(SHAPES["app"], fingerprint):
            raise ConfigError(f"{fingerprint!r} is no fingerprint of an app: 64 digits of 0-9a-f, or `any`")
        facts = {**self.facts, "app": fingerprint}
        _write(self.folder / "site.toml", facts)
        return SiteFolder(self.folder, facts)

    def command(self, port: int = 0) -> Command:
        """Return the command of the SuperNode; port 0 is any free port for its ClientApps."""
        node_config = " ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in self.node_config.items())
        words = [*WRAPPED, "supernode", "--superlink", str(self.facts["superlink"]), "--root-certificates", "ca.crt"]
        words += ["--auth-supernode-private-key", self.secret.name, "--node-config", node_config]
        words += ["--port", str(port or free_ports(1)[0])]
        variables = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", PIN: str(self.facts["app"])}
        return words, self.folder, environment(self.folder / "flower") | variables


def write_units(
    folder: Path, name: str, words: Sequence[str], files: Sequence[Path] = (), written: Sequence[Path] = ()
) -> None:
    """Write a systemd unit with its user, a compose file and a Dockerfile that run ``fedgp`` with access to files."""
    project = Path(__file__).resolve().parents[2]
    command = shlex.join([sys.executable, "-m", "fedgp_flower.cli", *words]).replace("%", "%%")
    readable = " ".join(_unit_path(path) for path in (project, Path(sys.prefix).resolve(), *files))
    writable = " ".join(_unit_path(path) for path in (folder, *written))
    user = "fedgp-" + re.sub("[^a-z0-9-]", "-", name.lower())[:25]  # at most 31 characters
    unit = UNIT.format(name=name, user=user, command=command, writable=writable, readable=readable)
    (folder / f"fedgp-{name}.service").write_text(unit)
    (folder / f"fedgp-{name}.conf").write_text(f'u {user} - "fedgp {name}"\n')
    volumes = [*(f"{path}:{path}" for path in (folder, *written)), *(f"{path}:{path}:ro" for path in files)]
    image = {"context": str(project), "dockerfile": str(folder / "Dockerfile")}
    service = {"build": image, "command": list(words), "restart": "always", "network_mode": "host"}
    (folder / "compose.yaml").write_text(json.dumps({"services": {name: {**service, "volumes": volumes}}}, indent=2))
    (folder / "Dockerfile").write_text(DOCKERFILE)


def become(command: Command) -> None:
    """Replace this process by a command, which a service manager then watches."""
    words, folder, variables = command
    os.chdir(folder)
    os.execve(words[0], words, {**os.environ, **variables})  # noqa: S606 - a fixed command, no shell


def _unit_path(path: Path) -> str:
    """Escape a path for a list in a systemd unit."""
    return re.sub(r"([\s:\\\"'])", lambda found: f"\\x{ord(found[0]):02x}", str(path)).replace("%", "%%")


def _authority(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-authority")


def _checked_invitation(content: Mapping[str, object], where: str) -> dict[str, str]:
    if content.keys() != SHAPES.keys():
        odd = ", ".join(sorted(content.keys() ^ SHAPES.keys()))
        raise ConfigError(f"{where}: it must hold exactly {', '.join(SHAPES)}; missing or unknown: {odd}")
    for name, value in content.items():
        _require_shape(name, value, where)
    return {name: str(content[name]) for name in SHAPES}


def _require_shape(name: str, value: object, where: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(SHAPES[name], value) or value in {".", ".."}:
        raise ConfigError(f"{where}: `{name}` = {str(value)[:80]!r} does not look like {SHAPES[name]}")


def _new(folder: Path, *parts: str) -> None:
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; choose another folder") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}") from None
    for part in parts:
        (folder / part).mkdir()


def _write(path: Path, content: Mapping[str, object]) -> None:
    write_bytes(path, tomli_w.dumps(content).encode())


def _read(path: Path, maker: str) -> Json:
    return read_toml(path, f"; `{maker}` creates it")
