"""A SuperNode that dies within its reply.

A SuperLink and two SuperNodes on this machine, set up by the commands of docs/deploy.md, `round.incomplete = repeat`.
One SuperNode is killed when it has said that it has a reply, and before it has sent it, and is started again after two
seconds. Wall-clock seconds until it is missed, and from there until the repeated round is complete, with Flower's
constants and with those of `fedgp deploy serve` and `fedgp site serve`.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fedgp_flower.deploy.processes import free_ports
from simulations.common import ROOT, Row, remembered

FLOWERS_UPLOAD = 180
OURS, FLOWERS = "from fedgp_flower.deploy.wrapped import supernode", "from flwr.supernode.cli import flower_supernode"
SLOW = f"from fedgp_flower.deploy import wrapped; wrapped.UPLOAD = {FLOWERS_UPLOAD}; wrapped.superlink()"
PLAIN = f"""
from pathlib import Path
from fedgp_flower.deploy import machines
words, *rest = machines.Coordinator.read(Path("coordinator")).command()
machines.become(([words[0], "-c", {SLOW!r}, *words[4:]], *rest))
"""
"""The SuperLink of a coordinator with Flower's constant."""


def rounds(history: Path) -> int:
    """Rounds that are complete."""
    return len(history.read_text(encoding="utf-8").splitlines()) - 1 if history.exists() else 0


def measured(whose: str, kills: int) -> Row:
    """Seconds from each death to its being missed, and from there to the end of the repeated round."""
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from test_deploy_commands import blocks
    from test_real_machines import AGAIN, DYING, SERVE, TINY, Federation, awaited

    with tempfile.TemporaryDirectory(prefix="fedgp-") as scratch:
        root = Path(scratch)
        federation = Federation(root, socket.gethostname(), free_ports(1)[0])
        try:
            coordinator, _, run = blocks()
            dying = DYING if whose == "fedgp" else DYING.replace(OURS, f"{FLOWERS} as supernode")
            (root / "south" / "dying.py").write_text(dying)
            (root / "south" / "serve.py").write_text(SERVE)
            (root / "coordinator" / "plain.py").write_text(PLAIN)
            serve = {"south": AGAIN.format(f"{sys.executable} serve.py"), "coordinator": coordinator[1]}
            serve |= {"coordinator": f"{sys.executable} plain.py"} if whose == "flower" else {}
            federation.set_up(serve)
            history = root / "coordinator" / "coordinator" / "results" / "rough" / "history.csv"
            log = root / "coordinator" / f"{len(federation.background)}.log"
            keys = ["method=fsgp", f"num-server-rounds={kills + 1}", "evaluate-every=0", *TINY, "name=rough"]
            federation.begun("coordinator", " ".join([run[1], *keys, "round.incomplete=repeat", "round-timeout=600"]))
            die, missed, again = root / "south" / "south" / "die", [], []
            for kill in range(1, kills + 1):
                awaited(lambda least=kill: rounds(history) >= least)
                die.touch()
                awaited(lambda: not die.exists())
                died, before = time.monotonic(), rounds(history)
                awaited(lambda least=kill: log.read_text().count("is repeated: south missed it") >= least)
                noticed = time.monotonic()
                awaited(lambda last=before: rounds(history) > last)
                missed.append(f"{noticed - died:.0f}")
                again.append(f"{time.monotonic() - noticed:.0f}")
            return {"until it is missed": ", ".join(missed), "more, until the round is complete": ", ".join(again)}
        finally:
            federation.end()


def study(whose: tuple[str, ...] = ("flower", "fedgp"), kills: int = 2) -> Iterator[Row]:
    """A row for each set of constants."""
    for name in whose:
        yield {"constants": name, **remembered("heartbeats", [name, kills], lambda n=name: measured(n, kills))}
