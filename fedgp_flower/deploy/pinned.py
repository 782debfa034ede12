"""The SuperNode's ``flwr-clientapp`` of a site that pins the app: it unpacks and runs an app of one fingerprint alone.

A SuperNode starts ``flwr-clientapp`` by name; ``fedgp site serve`` puts a script before it on the PATH that comes here.
The fingerprint is the SHA-256 of the app's bundle, which ``flwr build`` and ``fedgp deploy invite`` give.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

from fedgp_flower.errors import PolicyError

PIN = "FEDGP_APP"
"""Variable with the fingerprint, or the word ``any``."""


def guarded(install: Callable[..., Any], pin: str) -> Callable[..., Any]:
    """Flower's installation of a bundle, for one bundle alone."""

    def pinned(content: bytes, *rest: Any, **options: Any) -> Any:
        found = hashlib.sha256(content).hexdigest()
        if pin not in ("any", found):
            raise PolicyError(
                f"this site runs the app {pin[:16]}… and was sent {found[:16]}…; if its owner approves of the new one:"
                " fedgp site approve"
            )
        return install(content, *rest, **options)

    return pinned


def main() -> None:
    """Run Flower's ``flwr-clientapp`` behind the guard."""
    from flwr.supernode.cli import flwr_clientapp  # noqa: PLC0415
    from flwr.supernode.runtime import run_clientapp as flower  # noqa: PLC0415

    flower.install_from_fab = guarded(flower.install_from_fab, os.environ[PIN])  # type: ignore[attr-defined]
    flwr_clientapp()


if __name__ == "__main__":
    main()
