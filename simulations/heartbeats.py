"""How long a SuperNode that was killed within its reply is waited for: Flower's constants, and this project's.

    python simulations/heartbeats.py [flower] [fedgp] [--seconds 1e9] [--ledger LEDGER.jsonl]

A SuperLink and two SuperNodes on this machine, set up by the commands of docs/deploy.md; one SuperNode is killed when
it has said that it has a reply, and before it has sent it, and is started again as its unit would. Twice for each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from ledger import command_line, done
from test_deploy_commands import blocks
from test_real_machines import AGAIN, DYING, SERVE, TINY, awaited, loopback

from fedgp_flower.deploy.patience import HEARTBEAT, UPLOAD

KILLS = 2
OURS, FLOWERS = "from fedgp_flower.deploy.patience import supernode", "from flwr.supernode.cli import flower_supernode"
PLAIN = """
import sys
from pathlib import Path
from fedgp_flower.deploy import machines
words, *rest = machines.Coordinator.read(Path("coordinator")).command()
machines.become(([str(Path(sys.executable).with_name("flower-superlink")), *words[4:]], *rest))
"""
"""The SuperLink of a coordinator without this project's constants."""


def main() -> None:
    """Do what is asked, and write the page."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    chosen = command_line(__doc__, ("flower", "fedgp"), "heartbeats").parse_args()
    found = done(tasks(chosen.parts), chosen.ledger, chosen.seconds)
    chosen.output.write_text("\n".join(page(found)) + "\n", encoding="utf-8")


def tasks(parts: list[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Whose constants, and what measures them."""
    for whose in parts:
        yield whose, lambda own=whose: measured(own)


def measured(whose: str) -> dict[str, Any]:
    """Seconds from each death to its being missed, and from there to the end of the repeated round."""
    with tempfile.TemporaryDirectory(prefix="fedgp-") as scratch:
        root = Path(scratch)
        made = loopback(root)
        federation = next(made)
        try:
            coordinator, _, run = blocks()
            dying = DYING if whose == "fedgp" else DYING.replace(OURS, f"{FLOWERS} as supernode")
            (root / "south" / "dying.py").write_text(dying)
            (root / "south" / "serve.py").write_text(SERVE)
            (root / "coordinator" / "plain.py").write_text(PLAIN)
            serve = {"south": AGAIN.format(f"{sys.executable} serve.py"), "coordinator": coordinator[1]}
            if whose == "flower":
                serve["coordinator"] = f"{sys.executable} plain.py"
            federation.set_up(serve)
            history = root / "coordinator" / "coordinator" / "results" / "rough" / "history.csv"
            log = root / "coordinator" / f"{len(federation.background)}.log"
            keys = [f"num-server-rounds={KILLS + 1}", "fsgp.objective=average", "evaluate-every=0", *TINY, "name=rough"]
            federation.begun("coordinator", " ".join([run[1], *keys, "round.incomplete=repeat", "round-timeout=600"]))
            die, missed, again = root / "south" / "south" / "die", [], []
            for kill in range(KILLS):
                awaited(lambda least=kill + 1: rounds(history) >= least)
                die.touch()
                awaited(lambda: not die.exists())
                died, before = time.monotonic(), rounds(history)
                awaited(lambda least=kill + 1: log.read_text().count("is repeated: south missed it") >= least)
                noticed = time.monotonic()
                awaited(lambda last=before: rounds(history) > last)
                missed.append(noticed - died)
                again.append(time.monotonic() - noticed)
            return {"missed": missed, "again": again}
        finally:
            federation.end()
            next(made, None)


def rounds(history: Path) -> int:
    """Rounds that are complete."""
    return len(history.read_text().splitlines()) - 1 if history.exists() else 0


def page(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What was measured, as a page."""
    rows = {
        "flower": ("Flower's", HEARTBEAT_DEFAULT_INTERVAL, OBJECT_PUSH_SESSION_TTL_SECONDS),
        "fedgp": ("`fedgp deploy serve`, `fedgp site serve`", HEARTBEAT, UPLOAD),
    }
    yield from (
        "# A SuperNode that dies within its reply",
        "",
        "Made by `python simulations/heartbeats.py`: a SuperLink and two SuperNodes on one machine, `round.incomplete ="
        " repeat`; the killed",
        f"SuperNode is started again after two seconds. Wall-clock seconds of {KILLS} kills each.",
        "",
        "| constants | interval of heartbeats, s | wait for the rest of a reply, s | seconds until it is missed | more,"
        " until the repeated round is complete |",
        "|---|---|---|---|---|",
    )
    for whose, (name, beats, upload) in rows.items():
        if whose in found:
            cells = (", ".join(f"{own:.0f}" for own in found[whose][part]) for part in ("missed", "again"))
            yield f"| {name} | {beats} | {upload} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
