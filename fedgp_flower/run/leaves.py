"""Try out what leaves a site, for the owner of a table (``fedgp leaves``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import ArrayRecord

from fedgp_flower import client_app
from fedgp_flower.clients.numpy_client import handlers
from fedgp_flower.data.sites import site_id
from fedgp_flower.errors import FedGPError
from fedgp_flower.messages import table
from fedgp_flower.options import FlatConfig
from fedgp_flower.outcome import Observer
from fedgp_flower.privacy import audit
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.run.in_process import InProcessGrid
from fedgp_flower.run.registry import load, methods, parse_config, strategy_class
from fedgp_flower.typing import Facts, Node

WORDS: Mapping[str, str] = {
    "query.keys": "under masks: the site's key of the run, signed; number of the latest question answered",
    "query.describe": "id and label of the site; names and kinds of columns; **levels of text with their counts**;"
    " rows; of each numeric column the sum, its rounding residual and the sum of squares about the mean; which columns"
    " may hold a code for missing cells, and in how many; how many rows repeat; whether the target is skewed; under"
    " masks only names, kinds and levels of columns and the number of rows",
    "evaluate": "of held-out rows: count, sums of squared and absolute errors, of NLL and of CRPS, counts inside"
    " intervals, a histogram of 20 bins; for classes the correct rows, the Brier score and sums in 10 bins of predicted"
    " probability",
}
"""Answers that are not declared messages."""


def answers(method: str) -> list[tuple[str, Any]]:
    """Return the kinds of a method's answers and their classes; None for an answer that is not a declared message."""
    declared = sorted(handlers(load(methods()[method].client)).items())
    found = [(kind, handler.answer) for kind, handler in declared if kind not in WORDS]
    return [*found, *((kind, None) for kind in WORDS)]


def try_out(flat: FlatConfig, node: Node, rounds: int) -> tuple[list[str], list[Facts]]:
    """Run a few rounds over a site and copies of it. Return a report of the site's messages, and its audit log."""
    Rules("leaves").read(node)  # a policy that is no policy is an error of the command
    planned = parse_config(flat).num_server_rounds
    config = parse_config({**flat, "num-server-rounds": min(rounds, planned), "wait-seconds": 1.0})
    copies = max(config.min_sites, config.sites, config.privacy.min_sites * config.privacy.secure_aggregation) - 1
    with TemporaryDirectory() as folder:
        given = {name: value for name, value in node.items() if name not in {"site-key", "trust"}}
        nodes = [
            {**given, "site": name, "partition-id": place, "state-dir": str(Path(folder) / str(place))}
            for place, name in enumerate([site_id(node), *(f"copy {number + 1}" for number in range(copies))])
        ]
        path = Path(folder) / "audit.jsonl"
        nodes[0]["audit"] = str(path)
        grid, strategy = InProcessGrid(client_app.app, config.flat(), nodes), strategy_class(config)
        try:
            strategy.from_config(config, Observer()).start(grid, ArrayRecord(), config.num_server_rounds)
            ending = "complete"
        except FedGPError as error:
            ending = f"ended: {error}"
        log, _, _ = audit.read(path)
    tried = f"{config.num_server_rounds} of {planned} rounds tried, with {copies} more sites of these rows: {ending}"
    return [*_sent(log, config.method), tried], log


def _sent(log: list[Facts], method: str) -> Iterator[str]:
    """Yield lines on a site's messages by kind."""
    kinds: dict[str, list[Facts]] = {}
    declared = dict(answers(method))
    for line in log:
        kinds.setdefault(line["kind"], []).append(line)
    for kind, lines in kinds.items():
        sent = [line for line in lines if not line["refused"]]
        sizes = sorted({line["bytes"] for line in sent})
        size = "–".join(f"{count:,}" for count in sizes[:1] + sizes[1:][-1:])
        masked = ", masked" if any(line["masked"] for line in sent) else ""
        yield f"{kind}: {len(sent)} × {size} bytes{masked}" if sent else f"{kind}: refused"
        latest = sent[-1] if sent else lines[-1]
        words = table(declared[kind]) if declared[kind] else ()
        for name, array in latest["arrays"].items():
            meaning = (text for field, _, text in words if f"{name}.".startswith(f"{field.removesuffix('.*')}."))
            yield f"    {name} {array['shape']} {next(meaning, '')}".rstrip()
        if latest["numbers"]:
            yield f"    numbers: {', '.join(latest['numbers'])}"
        if latest["texts"]:
            yield f"    texts: {', '.join(f'{name} ({size})' for name, size in latest['texts'].items())}"
        verdicts: dict[str, dict[str, None]] = {}  # rules by verdict, without repetitions
        for rule in (rule for line in lines for rule in line["rules"]):
            found = f" ({rule['found']})" if rule["found"] and rule["verdict"] != "passed" else ""
            verdicts.setdefault(rule["verdict"], {})[f"{rule['rule']}{found}"] = None
        yield from (f"    rules {verdict}: {', '.join(rules)}" for verdict, rules in verdicts.items())
        yield from dict.fromkeys(f"    refused: {line['refused']}" for line in lines if line["refused"])
