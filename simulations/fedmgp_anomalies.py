"""Bad units and unstable communication: what every aggregation rule makes of them.

Ten units of 40 rows. Some of them observe another process, a shifted signal or pure noise, or send what they compute
flipped or a hundredfold; the figure is the error over the honest units. Then units that can be reached with
probability 0.3 to 0.7.

    python simulations/fedmgp_anomalies.py [--bad 1 2 3 4] [--seeds 5] [--pseudo-seeds 3]
    python simulations/fedmgp_anomalies.py --only exact --rules agreement --seeds 2     (some of the runs, no page)

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
ENDED_RULES = ("mean", "median")
REACH = (0.3, 0.5, 0.7)
TRAIN = ("train", "train.exact")
NOTES = (
    "- Exact rounds: a unit of pure noise fits an amplitude near zero and says next to nothing about g, under either "
    "rule. A flipped or hundredfold answer contradicts itself (a unit that took its M-step has E‖y − f‖²/σ² = N) and "
    "is refused under either rule. What is left is a unit that is honest about another g: `agreement` leaves it out "
    "because its rows and those of most others are likelier apart than together. It fails when bad units are the "
    "majority, when most pairs of units see no common range of inputs, or when units share nothing.",
    "- `mean`: one update a hundred times too long moves θ anywhere; units of another process pull by their share.",
    "- `loss-weighted`: meant for bad rows, whose fit is poor. A unit that lies about its update has a good fit, so it "
    "keeps its full weight, or more.",
    "- `norm-clipped`: bounds how far one unit moves θ, not in which direction: a flipped update is as long as an "
    "honest one and is not shortened.",
    "- `median`, `trimmed-mean`: bound every coordinate, whatever its sign or length, as long as fewer than half, or "
    "the trimmed share, are bad. The price is bias, since honest units differ: what only one unit has seen is cut too.",
    "- `krum`, `multi-krum`: one or a few whole updates are taken over. A hundredfold update is never chosen; but "
    "honest updates differ by where their rows lie, so those left out take their knowledge with them.",
    "- Pseudo-gradients that end with exact rounds, which is the default for Gaussian noise, end as good as exact "
    "rounds: with a rule other than `mean` the exact rounds use `agreement`.",
)


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
    if mode in ("pseudo", "ended"):
        keys |= {
            "fedmgp.update": "pseudo-gradient",
            "fedmgp.final-rounds": 5 if mode == "ended" else 0,
            "num-server-rounds": 30 if mode == "ended" else 25,
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
    """A table of the mean over seeds, and its ratio to the same rule's without attack: rules by attacks, bad units."""
    clean_titles = [f"clean, without {bad}" for bad in counts]
    titles, rows = ["rule", *clean_titles, *(f"{attack}, {bad} bad" for attack in ATTACKS for bad in counts)], []
    for rule in rules:
        clean = [
            float(np.mean([one(mode, rule, "", 0, seed, leave_out=bad) for seed in range(seeds)])) for bad in counts
        ]
        row: list[object] = [rule, *clean]
        for attack in ATTACKS:
            for bad in counts:
                error = float(np.mean([one(mode, rule, attack, bad, seed) for seed in range(seeds)]))
                row.append(f"{error:.4f} ({error / clean[counts.index(bad)]:.2f})" if error < 100 else "broke down")
                print(mode, rule, attack, bad, row[-1], flush=True)
        rows.append(row)
    return [table(titles, rows), ""]


def reach_section(seeds: int) -> list[str]:
    """Error by the probability that a unit is reached."""
    rows: list[list[object]] = []
    for mode, rule in (("exact", "mean"), ("pseudo", "mean"), ("pseudo", "staleness-weighted")):
        full = float(np.mean([one(mode, "mean", "", 0, seed) for seed in range(seeds)]))
        some = [float(np.mean([one(mode, rule, "", 0, seed, reach) for seed in range(seeds)])) for reach in REACH]
        rows.append([f"{mode}, {rule}", full, *(f"{error:.4f} ({error / full:.2f})" for error in some)])
        print(rows[-1], flush=True)
    return [table(["rounds", "all reached", *(f"probability {reach}" for reach in REACH)], rows), ""]


def page(bad: list[int], seeds: int, pseudo_seeds: int) -> str:
    """All tables, with what is missing run first."""
    return "\n".join(
        [
            "# FedMGP: bad units and unstable communication",
            "",
            "Made by `python simulations/fedmgp_anomalies.py`. Mean squared error over the honest of ten units, 40 "
            "rows each, noise 0.0100; in brackets over that of the same rule without attack, on the same rows of the "
            "same units (`clean, without n` leaves the first n units out of the error, not out of the training).",
            "",
            f"## Exact rounds ({seeds} seeds)",
            "",
            *section("exact", EXACT_RULES, bad, seeds),
            f"## Pseudo-gradients alone ({pseudo_seeds} seeds, 3 bad units)",
            "",
            *section("pseudo", PSEUDO_RULES, [3], pseudo_seeds),
            f"## Pseudo-gradients that end with 5 exact rounds ({pseudo_seeds} seeds, 3 bad units)",
            "",
            *section("ended", ENDED_RULES, [3], pseudo_seeds),
            f"## Units that can be reached with some probability ({pseudo_seeds} seeds)",
            "",
            "Exact rounds: 60 instead of 20; pseudo-gradients: 45 instead of 25. In brackets over all units reached.",
            "",
            *reach_section(pseudo_seeds),
            "## When a rule fails, and why",
            "",
            *NOTES,
            "",
        ]
    )


def main() -> None:
    """Run what is missing, then write the tables; with ``--only`` or ``--rules`` only run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bad", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pseudo-seeds", type=int, default=3)
    parser.add_argument("--only", choices=["exact", "pseudo", "ended", "reach"])
    parser.add_argument("--rules", nargs="*")
    chosen = parser.parse_args()
    if chosen.only == "reach":
        reach_section(chosen.pseudo_seeds)
    elif chosen.only == "exact":
        section("exact", tuple(chosen.rules or EXACT_RULES), chosen.bad, chosen.seeds)
    elif chosen.only == "pseudo":
        section("pseudo", tuple(chosen.rules or PSEUDO_RULES), [3], chosen.pseudo_seeds)
    elif chosen.only == "ended":
        section("ended", tuple(chosen.rules or ENDED_RULES), [3], chosen.pseudo_seeds)
    else:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "fedmgp_anomalies.md").write_text(page(chosen.bad, chosen.seeds, chosen.pseudo_seeds))


if __name__ == "__main__":
    main()
