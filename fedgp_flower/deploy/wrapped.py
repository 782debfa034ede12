"""Flower's programs with what a federation on real machines needs and Flower 1.41 has no option for.

``superlink`` and ``supernode`` notice sooner who is gone. A SuperNode names the interval of its heartbeats; two
may be missed. A SuperLink limits how long a site takes for the next piece, of 5 MB at most, of a reply it has begun.

``clientapp`` unpacks and runs one app alone. A SuperNode starts ``flwr-clientapp`` by name; ``fedgp site serve`` puts a
script before it on the PATH that comes here. The fingerprint of the app is the SHA-256 of its bundle.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable

from fedgp_flower.errors import PolicyError

HEARTBEAT = 10
"""Seconds; Flower's are 30, and 10 the fewest that a SuperLink takes."""
UPLOAD = 30
"""Seconds; Flower's are 180."""
PIN = "FEDGP_APP"
"""Variable with the fingerprint, or the word ``any``."""


def superlink() -> None:
    """Run Flower's ``flower-superlink``."""
    from flwr.supercore.corestate import sql_corestate
    from flwr.superlink.cli import flower_superlink

    vars(sql_corestate)["OBJECT_PUSH_SESSION_TTL_SECONDS"] = UPLOAD
    flower_superlink()


def supernode() -> None:
    """Run Flower's ``flower-supernode``."""
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.cli import flower_supernode

    for module in (heartbeat, fleet_http_connection):
        vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT
    flower_supernode()


def guarded(install: Callable[..., object], pin: str) -> Callable[..., object]:
    """Flower's installation of a bundle, for one bundle alone."""

    def pinned(content: bytes, *rest: object, **options: object) -> object:
        found = hashlib.sha256(content).hexdigest()
        if pin not in ("any", found):
            raise PolicyError(
                f"this site runs the app {pin[:16]}… and was sent {found[:16]}…; if its owner approves of the new one:"
                " fedgp site approve"
            )
        return install(content, *rest, **options)

    return pinned


def clientapp() -> None:
    """Run Flower's ``flwr-clientapp`` behind the guard."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as flower

    vars(flower)["install_from_fab"] = guarded(vars(flower)["install_from_fab"], os.environ[PIN])
    flwr_clientapp()


if __name__ == "__main__":
    name = sys.argv[1]
    sys.argv[:2] = [f"{'flwr' if name == 'clientapp' else 'flower'}-{name}"]
    {"superlink": superlink, "supernode": supernode, "clientapp": clientapp}[name]()
