"""Bad units and unstable communication: what every aggregation rule makes of them.

Ten units of 40 rows. Some of them observe another process, a shifted signal or pure noise, or send what they compute
flipped or a hundredfold; the figure is the error over the honest units. Then units that can be reached with
probability 0.3 to 0.7.

    python simulations/fedmgp_anomalies.py [--bad 1 2 3 4] [--seeds 3] [--pseudo-seeds 1] [--only exact pseudo reach]

Runs that are complete are not repeated. Tables go to ``simulations/results/fedmgp_anomalies.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from fedmgp_common import RESULTS, RUNS, SIGNALS, finished, metrics, table
from fedmgp_signals import SPOILT, signals
from flwr.app import Array, ArrayRecord, Error, Message

from fedgp_flower.data.sites import site_id
from fedgp_flower.engine import InProcessGrid

UNITS = 10
LIES: Mapping[str, tuple[float, float]] = {"update flipped": (-1.0, 1.0), "update × 100": (100.0, 100.0)}
"""Factors of a pseudo-gradient or of b, and of everything else in exact statistics."""
ATTACKS = (*SPOILT, *LIES)
EXACT_RULES = ("mean", "agreement")
PSEUDO_RULES = ("mean", "loss-weighted", "norm-clipped", "median", "trimmed-mean", "krum", "multi-krum")
REACH = (0.3, 0.5, 0.7)
TRAIN = ("train", "train.exact")


class SpoiltGrid(InProcessGrid):
    """Some units lie about their updates; every training message reaches its unit with some probability."""

    def __init__(self, *args: Any, bad: int = 0, lie: str = "", reach: float = 1.0, seed: int = 0) -> None:
        super().__init__(*args)
        self.bad, self.lie, self.reach = bad, lie, reach
        self.rng = np.random.default_rng([seed, 77])

    def answer(self, message: Message) -> Message:
        """The reply, spoilt or missing."""
        if message.metadata.message_type not in TRAIN:
            return super().answer(message)
        if self.rng.random() > self.reach:
            return Message(Error(code=4, reason="unreachable"), reply_to=message)
        reply = super().answer(message)
        site = int(site_id(self.contexts[message.metadata.dst_node_id].node_config))
        if self.lie and site < self.bad and "arrays" in reply.content.array_records:
            shift, rest = LIES[self.lie]
            own = {name: array.numpy() for name, array in reply.content.array_records["arrays"].items()}
            new = {
                n: a * (shift if n == "statistics.shift" or n.startswith("update.") else rest) for n, a in own.items()
            }
            reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in new.items()})
        return reply


def configuration(attack: str, bad: int, seed: int, mode: str, rule: str) -> dict[str, Any]:
    """Keys of a run."""
    spoilt = attack if attack in SPOILT else ""
    name = f"ten-{spoilt.replace(' ', '-') or 'honest'}-{bad if spoilt else 0}-{seed}.parquet"
    path = RUNS / "data" / name
    signals(path, units=UNITS, rows=40, seed=seed, widths=(5.0, 20.0), bad=bad, spoilt=spoilt)
    keys = {**SIGNALS, "dataset": str(path), "seed": seed, "fedmgp.aggregation": rule, "max-failures": 1000}
    if mode == "pseudo":
        keys |= {
            "fedmgp.update": "pseudo-gradient",
            "fedmgp.final-rounds": 0,
            "num-server-rounds": 25,
            "optimizer.learning-rate": 0.03,
            "fedmgp.malicious": 3,
            "fedmgp.select": 4,
            "fedmgp.trim": 0.3,
        }
    return keys


def honest_mse(found: dict[str, Any], bad: int) -> float:
    """Mean squared error over the rows of honest units, which all hold out as many."""
    return float(np.mean([row["rmse"] ** 2 for row in found["per_site"] if int(row["site"]) >= bad]))


def one(
    mode: str, rule: str, attack: str, bad: int, seed: int, reach: float = 1.0, leave_out: int | None = None
) -> float:
    """The error over the honest units, or over all but the first ``leave_out``; infinite where the run broke down."""
    from fedgp_flower.errors import FedGPError

    words = [mode, rule, attack or "clean", str(bad), str(seed), *([f"reach-{reach}"] if reach < 1 else [])]
    name = "-".join(words).replace(" ", "-").replace("×", "x")
    keys = configuration(attack, bad, seed, mode, rule)
    if reach < 1:
        keys["num-server-rounds"] = 60 if mode == "exact" else 45
    grid: Callable[..., Any] = partial(
        SpoiltGrid, bad=bad, lie=attack if attack in LIES else "", reach=reach, seed=seed
    )
    try:
        found = metrics(name) or finished(keys, name, grid=grid)
    except FedGPError:
        return float("inf")
    return honest_mse(found, bad if leave_out is None else leave_out)


def section(mode: str, rules: tuple[str, ...], counts: list[int], seeds: int) -> list[str]:
    """A table of the mean over seeds: rules by attacks and numbers of bad units."""
    clean_titles = [f"clean, without {bad}" for bad in counts]
    titles, rows = ["rule", *clean_titles, *(f"{attack}, {bad} bad" for attack in ATTACKS for bad in counts)], []
    for rule in rules:
        clean = [
            float(np.mean([one(mode, rule, "", 0, seed, leave_out=bad) for seed in range(seeds)])) for bad in counts
        ]
        row: list[object] = [rule, *clean]
        for attack in ATTACKS:
            for bad in counts:
                row.append(float(np.mean([one(mode, rule, attack, bad, seed) for seed in range(seeds)])))
                print(mode, rule, attack, bad, f"{row[-1]:.4f}", flush=True)
        rows.append(row)
    return [table(titles, rows), ""]


def reach_section(seeds: int) -> list[str]:
    """Error by the probability that a unit is reached."""
    rows: list[list[object]] = []
    for mode, rule in (("exact", "mean"), ("pseudo", "mean"), ("pseudo", "staleness-weighted")):
        full = float(np.mean([one(mode, "mean", "", 0, seed) for seed in range(seeds)]))
        some = [float(np.mean([one(mode, rule, "", 0, seed, reach) for seed in range(seeds)])) for reach in REACH]
        rows.append([f"{mode}, {rule}", full, *some])
        print(rows[-1], flush=True)
    return [table(["rounds", "all reached", *(f"probability {reach}" for reach in REACH)], rows), ""]


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bad", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pseudo-seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=["exact", "reach", "pseudo"])
    chosen = parser.parse_args()
    lines = [
        "# FedMGP: bad units and unstable communication",
        "",
        "Made by `python simulations/fedmgp_anomalies.py`. Mean squared error over the honest of ten units, 40 rows "
        "each, noise 0.0100; `clean, without n` is a run without attack over the same units. Statistics that no rows "
        "can produce are refused under both rules of exact rounds.",
        "",
    ]
    if "exact" in chosen.only:
        lines += [
            f"## Exact rounds ({chosen.seeds} seeds)",
            "",
            *section("exact", EXACT_RULES, chosen.bad, chosen.seeds),
        ]
    if "reach" in chosen.only:
        lines += ["## Units that can be reached with some probability", "", *reach_section(chosen.pseudo_seeds)]
    if "pseudo" in chosen.only:
        own = section("pseudo", PSEUDO_RULES, [3] if 3 in chosen.bad else chosen.bad, chosen.pseudo_seeds)
        lines += [f"## Pseudo-gradients alone ({chosen.pseudo_seeds} seeds)", "", *own]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fedmgp_anomalies.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
