"""What is wrong with a machine of a federation before it takes part, each finding with the next thing to try."""

from __future__ import annotations

import datetime
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cryptography import x509

from fedgp_flower.deploy.machines import Coordinator, SiteFolder, app_fingerprint
from fedgp_flower.errors import FedGPError, RunError

LEAST_SPACE = 1 << 30
"""Bytes."""
SOON = datetime.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    said: str
    good: bool


def of_site(own: SiteFolder) -> list[Finding]:
    """Look at a site: its table, keys, disk, the way to the SuperLink, and the app it runs."""
    return [
        Finding("versions", versions(), True),
        _look("table", lambda: _table(own)),
        _look("keys", lambda: _secret([own.folder / own.name, own.folder / "site-key"])),
        _look("disk", lambda: _space(own.folder)),
        _look("SuperLink", lambda: _reachable(str(own.facts["superlink"]), own.folder / "ca.crt")),
        _look("app", lambda: _app(str(own.facts["app"]))),
    ]


def of_coordinator(own: Coordinator) -> list[Finding]:
    """Look at a coordinator: certificate, keys, disk, and whether its SuperLink answers."""
    return [
        Finding("versions", versions(), True),
        _look("certificate", lambda: _valid(own.folder / "server" / "server.pem")),
        _look("keys", lambda: _secret([own.folder / "ca.key", own.folder / "server" / "server.key"])),
        _look("disk", lambda: _space(own.folder)),
        _look("SuperLink", lambda: _reachable(f"{own.host}:{own.port}", own.folder / "ca.crt")),
    ]


def versions() -> str:
    """Of what must be the same at all machines."""
    return ", ".join(f"{name} {version(name)}" for name in ("fedgp-flower", "flwr", "torch"))


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line each."""
    for own in findings:
        yield f"{'ok      ' if own.good else 'PROBLEM '}{own.what}: {own.said}"


def _look(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, look(), True)
    except (FedGPError, OSError) as error:
        return Finding(what, str(error), False)


def _table(own: SiteFolder) -> str:
    from fedgp_flower.run.check import check  # noqa: PLC0415
    from fedgp_flower.run.registry import parse_config  # noqa: PLC0415

    path = Path(str(own.facts["data"]))
    found = check([path], parse_config({"test-fraction": 0.0}))
    if found.problems:
        raise RunError("; ".join(found.problems))
    return f"{path}: {found.data['rows']} rows, {found.data['inputs']} inputs" if found.data else str(path)


def _secret(files: Sequence[Path]) -> str:
    for path in files:
        if path.stat().st_mode & 0o077:
            raise RunError(f"{path} can be read by others: chmod 600 {path}")
    return "their owner alone can read them"


def _space(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < LEAST_SPACE:
        raise RunError(f"{free >> 20} MiB are free at {folder}; a run needs {LEAST_SPACE >> 20}")
    return f"{free >> 30} GiB free"


def _reachable(address: str, authority: Path) -> str:
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            ssl.create_default_context(cafile=authority).wrap_socket(plain, server_hostname=host) as secure,
        ):
            return f"{address} answers with {secure.version()}, and its certificate is the authority's"
    except ssl.SSLCertVerificationError as error:
        raise RunError(f"{address}: {error.verify_message}; ask the coordinator for a new invitation") from None
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{address} cannot be reached ({reason}): is it started, its port open, its name known?"
        ) from None


def _valid(path: Path) -> str:
    end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    if end - datetime.datetime.now(datetime.UTC) < SOON:
        raise RunError(f"{path} ends on {end:%Y-%m-%d}: fedgp deploy rotate, then start the SuperLink again")
    return f"good until {end:%Y-%m-%d}"


def _app(pinned: str) -> str:
    here = app_fingerprint()
    if here != pinned:
        raise RunError(
            f"runs {pinned[:16]}… alone, and the project installed here, which its owner may have read, is"
            f" {here[:16]}…: install the coordinator's version, or approve of what is here: fedgp site approve"
        )
    return f"runs {pinned[:16]}… alone, which is the project installed here"
