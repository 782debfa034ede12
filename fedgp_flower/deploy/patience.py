"""A SuperLink and a SuperNode that notice sooner who is gone: Flower 1.41 has these times as constants, not as options.

A SuperNode names the interval of its heartbeats, two of which may be missed; a SuperLink waits so long for the next
piece, of 5 MB at most, of a reply that somebody has begun to send.
"""

from __future__ import annotations

import sys

HEARTBEAT = 10
"""Seconds; Flower's are 30, and 10 the fewest that a SuperLink takes."""
UPLOAD = 30
"""Seconds; Flower's are 180."""


def superlink() -> None:
    """Run Flower's ``flower-superlink``."""
    from flwr.supercore.corestate import sql_corestate  # noqa: PLC0415
    from flwr.superlink.cli import flower_superlink  # noqa: PLC0415

    sql_corestate.OBJECT_PUSH_SESSION_TTL_SECONDS = UPLOAD  # type: ignore[attr-defined]
    flower_superlink()


def supernode() -> None:
    """Run Flower's ``flower-supernode``."""
    from flwr.supercore import heartbeat  # noqa: PLC0415
    from flwr.supernode import fleet_http_connection  # noqa: PLC0415
    from flwr.supernode.cli import flower_supernode  # noqa: PLC0415

    for module in (heartbeat, fleet_http_connection):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT  # type: ignore[attr-defined]
    flower_supernode()


if __name__ == "__main__":
    sys.argv[:2] = [f"flower-{sys.argv[1]}"]
    {"flower-superlink": superlink, "flower-supernode": supernode}[sys.argv[0]]()
