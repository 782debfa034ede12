"""Check a machine before it joins a federation. Every problem comes with a remedy."""

from __future__ import annotations

import datetime
import shutil
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from cryptography import x509

from fedgp_flower.data.tables import read_table
from fedgp_flower.deploy.machines import Coordinator, SiteFolder, app_fingerprint, fingerprint_of
from fedgp_flower.deploy.wrapped import reason_of
from fedgp_flower.errors import FedGPError, RunError
from fedgp_flower.options import Value
from fedgp_flower.privacy import audit
from fedgp_flower.privacy.keys import Identity, Trust
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.privacy.questions import LEAST_SITES

PACKAGES = ("fedgp-flower", "flwr", "torch")
LEAST_SPACE = 1 << 30
SOON, LATELY = datetime.timedelta(days=30), datetime.timedelta(days=7)
Checks: TypeAlias = Mapping[str, Callable[[], str]]
"""Functions that return a good result in words, or raise an error with a remedy."""


def of_site(site: SiteFolder) -> bool:
    """Check a site: table, keys, disk, connection to the SuperLink, app, policy, masks and log; are all good?"""
    secrets = [site.secret, site.folder / "site-key"]
    return _examine(
        {
            "table": lambda: _table(Path(str(site.facts["data"]))),
            **_machine(site.folder, str(site.facts["superlink"]), secrets),
            "app": lambda: _app(str(site.facts["app"])),
            "policy": lambda: _policy(Rules("").read(site.node_config), Path(str(site.facts["data"]))),
            "masks": lambda: _masks(site.node_config),
            "log": lambda: _log(audit.log_of(site.node_config)),
        }
    )


def of_coordinator(coordinator: Coordinator) -> bool:
    """Check a coordinator: its certificate, keys, disk and SuperLink. Return whether all are good."""
    folder, server = coordinator.folder, coordinator.folder / "server"
    machine = _machine(folder, f"{coordinator.host}:{coordinator.port}", [server / "server.key"])
    trusted = f"sites trust the authority {fingerprint_of(folder / 'ca.crt')} and run the app {app_fingerprint()}"
    return _examine({"certificate": lambda: _valid(server / "server.pem"), **machine, "invitations": lambda: trusted})


def _machine(folder: Path, superlink: str, secrets: Sequence[Path]) -> Checks:
    return {
        "versions": lambda: ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "keys": lambda: _secret(secrets),
        "disk": lambda: _space(folder),
        "SuperLink": lambda: _reachable(superlink, folder / "ca.crt"),
    }


def _examine(checks: Checks) -> bool:
    """Print the result of every check. Return whether all are good."""
    good = True
    for what, checked in checks.items():
        try:
            print(f"ok      {what}: {checked()}")
        except (FedGPError, OSError) as error:
            print(f"PROBLEM {what}: {error}")
            good = False
    return good


def _table(path: Path) -> str:
    """Read the table. Only the keys of a run, which a site does not have, determine how it reads dates and text."""
    rows, columns = read_table(path).shape
    return f"{path}: {rows} rows, {columns} columns; `fedgp check {path.name}` with the keys of a run tells more"


def _policy(rules: Rules, table: Path) -> str:
    """Check that the table has the columns that the policy hides; one that is misspelt would not be hidden."""
    if absent := sorted({*rules.policy.hidden_columns} - {*read_table(table).columns}):
        raise RunError(
            f"`hidden-columns` in {rules.file} names {', '.join(absent)}, and {table.name} has no such column"
        )
    return f"{rules.file} can be read"


def _masks(node: Mapping[str, Value]) -> str:
    """Check that the trust file names this site with its own key, and enough sites for a total."""
    trusted = Trust.of(node).keys
    if not trusted:
        return "no trusted site: answers leave in the clear"
    site, own, file = str(node["site"]), Identity.read(Path(str(node["site-key"]))).public, Path(str(node["trust"]))
    if trusted.get(site) != own:
        remedy = f"remove its line, if there is one, then: fedgp site trust {file} {site} {own}"
        raise RunError(f"{file} does not hold the key of this site; {remedy}")
    if len(trusted) < LEAST_SITES:
        missing = LEAST_SITES - len(trusted)
        raise RunError(
            f"{file} names {len(trusted)} sites, and a total needs {LEAST_SITES}, so this site answers nothing; add at"
            f" least {missing} more: fedgp site trust {file} SITE KEY"
        )
    others = ", ".join(sorted(trusted.keys() - {site})) or "no other site"
    return f"answers leave only under masks, with {others}"


def _secret(files: Sequence[Path]) -> str:
    for path in files:
        if path.stat().st_mode & 0o077:
            raise RunError(f"other users can read {path}: chmod 600 {path}")
    return "only their owner can read them"


def _space(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < LEAST_SPACE:
        raise RunError(f"{free >> 20} MiB are free at {folder}; a run needs {LEAST_SPACE >> 20}")
    return f"{free >> 30} GiB free"


def _reachable(address: str, authority: Path) -> str:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    try:
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            ssl.create_default_context(cafile=authority).wrap_socket(plain, server_hostname=host) as secure,
        ):
            return f"{address} answers with {secure.version()} and a certificate of the authority"
    except ssl.SSLCertVerificationError as error:
        raise RunError(f"{address}: {reason_of(str(error))}") from None
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{address} cannot be reached ({reason}): is the SuperLink running, its port open, its name known?"
        ) from None


def _valid(path: Path) -> str:
    end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    if end - datetime.datetime.now(datetime.UTC) < SOON:
        raise RunError(f"{path} ends on {end:%Y-%m-%d}: fedgp deploy rotate, then start the SuperLink again")
    return f"good until {end:%Y-%m-%d}"


def _log(path: Path | None) -> str:
    """Check that the log is unchanged and that no recent message was refused."""
    if path is None or not path.exists():
        return "nothing has left this site yet"
    lines, problems, _ = audit.read(path)
    if problems:
        raise RunError(f"{path}: {problems[0]}")
    since = (datetime.datetime.now(datetime.UTC) - LATELY).isoformat()
    refused = [line for line in lines if line["refused"] and line["time"] > since]
    if refused:
        raise RunError(
            f"{len(refused)} messages of the last {LATELY.days} days were refused, the latest because"
            f" {refused[-1]['refused']}; all of them: fedgp audit {path}"
        )
    return f"{len(lines)} answers have left this site; none was refused in the last {LATELY.days} days"


def _app(pinned: str) -> str:
    here = app_fingerprint()
    if here != pinned:
        raise RunError(
            f"this site runs only {pinned[:16]}…, and the project installed here is {here[:16]}…: install the"
            " coordinator's version, or approve the one installed here: fedgp site approve"
        )
    return f"this site runs only {pinned[:16]}…, the project installed here"
