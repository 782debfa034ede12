"""FedMGP with bad units, and with units that cannot always be reached.

Ten units of 40 rows, noise variance .01. Some units observe another process, a shifted signal or pure noise, or send
what they compute flipped or a hundredfold. Mean squared error over the honest units; *over clean* is its ratio to that
of the same rule without bad units, on the same rows of the same units. `natural`: 30 rounds of 20 local steps,
pseudo-gradients in natural parameters; rules are told to withstand three bad units. `heavy tails`: the same with the
Student-t likelihood, whose pseudo-gradients no check bounds. `exact`: 20 exact rounds. With a reach below 1 every
message to a unit is lost with the rest of the probability, and there are 60 rounds.

What a rule can and cannot see. A flipped or hundredfold answer of an exact round contradicts itself and is refused
under every rule. A unit of pure noise says next to nothing about g. `agreement` leaves out units whose rows and those
of most others are likelier apart than together. `mean` follows one long update anywhere; `norm-clipped` bounds how far
one unit moves θ, not in which direction; `median` and `trimmed-mean` bound every coordinate as long as fewer than half,
or than the trimmed share, are bad, at the price of a bias because honest units differ; `krum` averages a few whole
updates, and those left out take their knowledge with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Error, Message
from scipy.ndimage import gaussian_filter1d

from fedgp_flower.run.in_process import InProcessGrid
from simulations.common import Array, Row, averaged, fit, kept_table
from simulations.studies.signals import EXACT, NATURAL, SIGNALS

UNITS, ROWS, HELD_OUT, POINTS, MARGIN = 10, 40, 60, 500, 60
SPOILT: Mapping[str, Callable[[Array, Array, np.random.Generator], Array]] = {
    "another process": lambda f, other, rng: other,
    "shifted": lambda f, other, rng: np.roll(f, len(f) // 4),
    "pure noise": lambda f, other, rng: rng.standard_normal(f.size) * f.std(),
}
"""What a bad unit observes instead of its signal."""
LIES: Mapping[str, tuple[float, float]] = {"update flipped": (-1.0, 1.0), "update × 100": (100.0, 100.0)}
"""Factors of a pseudo-gradient or of b, and of everything else in exact statistics."""
LOCAL_STEPS = NATURAL | {"num-server-rounds": 30, "fedmgp.malicious": 3, "fedmgp.select": UNITS - 3, "fedmgp.trim": 0.3}
RULES = ("mean", "norm-clipped", "median", "trimmed-mean", "krum")
MODES: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "natural": (LOCAL_STEPS, (*RULES, "agreement")),
    "heavy tails": (LOCAL_STEPS | {"model.likelihood": "student-t"}, RULES),
    "exact": (EXACT, ("mean", "agreement")),
}


def units(seed: int, bad: int, spoilt: str) -> pd.DataFrame:
    """Convolved signals ``x, unit, y, split``; what honest units observe does not depend on which are spoilt."""
    rng = np.random.default_rng([seed, UNITS, ROWS])
    grid = -1 + 2 / (POINTS - 1) * np.arange(-MARGIN, POINTS + MARGIN)
    root = np.linalg.cholesky(np.exp(-0.5 * ((grid[:, None] - grid) / 0.1) ** 2) + 1e-8 * np.eye(grid.size))
    g, other = root @ rng.standard_normal(grid.size), root @ rng.standard_normal(grid.size)
    x, frames = np.linspace(-1, 1, POINTS), []
    for m in range(UNITS):
        width, gain = rng.uniform(5.0, 20.0), rng.uniform(0.5, 3)
        f, wrong = (gain * gaussian_filter1d(own, width, truncate=5.0)[MARGIN:-MARGIN] for own in (g, other))
        if m < bad and spoilt:
            f = SPOILT[spoilt](f, wrong, np.random.default_rng([seed, UNITS, ROWS, m]))
        y, chosen = f + 0.1 * rng.standard_normal(POINTS), rng.permutation(POINTS)
        for split, part in (("train", chosen[:ROWS]), ("test", chosen[ROWS : ROWS + HELD_OUT])):
            at = np.sort(part)
            frames.append(pd.DataFrame({"x": x[at], "unit": f"unit-{m:03d}", "y": y[at], "split": split}))
    return pd.concat(frames, ignore_index=True)


class SpoiltGrid(InProcessGrid):
    """Some units lie about what they computed; every training message reaches its unit with some probability."""

    def __init__(self, *args: Any, bad: int, lie: str, reach: float, seed: int) -> None:
        super().__init__(*args)
        self.liars, self.lie, self.reach = sorted(self.contexts)[:bad], lie, reach
        self.rng = np.random.default_rng([seed, 77])

    def answer(self, message: Message) -> Message:
        """The reply, spoilt or missing."""
        if not message.metadata.message_type.startswith("train"):
            return super().answer(message)
        if self.rng.random() > self.reach:
            return Message(Error(code=4, reason="unreachable"), reply_to=message)
        reply = super().answer(message)
        if self.lie and message.metadata.dst_node_id in self.liars and "arrays" in reply.content.array_records:
            self.spoil(reply)
        return reply

    def spoil(self, reply: Message) -> None:
        """Other numbers; flags that come with a pseudo-gradient stay as they are."""
        from fedgp_flower.records import numpy_arrays, packed_record

        shift, rest = LIES[self.lie]
        arrays = numpy_arrays(reply.content.array_records["arrays"])
        if any(name.startswith("parameters.") for name in arrays):
            rest = 1.0
        moved = {name for name in arrays if name.startswith("parameters.") or name.split(".")[-1] == "shift"}
        new = {name: np.asarray(array * (shift if name in moved else rest)) for name, array in arrays.items()}
        reply.content["arrays"] = packed_record(new)


def error(mode: str, rule: str, attack: str, bad: int, seed: int, reach: float = 1.0, without: int = 0) -> float:
    """Mean squared error over all units but the first ``without``; infinite where the run broke down."""
    spoilt, lie = attack if attack in SPOILT else "", attack if attack in LIES else ""
    count = bad if spoilt else 0
    path = kept_table(f"units-{spoilt.replace(' ', '-')}-{count}-{seed}", lambda: units(seed, count, spoilt))
    keys = SIGNALS | MODES[mode][0] | {"dataset": path, "seed": seed, "fedmgp.aggregation": rule, "max-failures": 1000}
    if not lie and reach == 1.0:
        run = fit(keys, 0)
    else:
        keys |= {"name": f"{lie}-{bad}-{reach}".replace(" ", "-").replace("×", "x")}
        keys |= {"num-server-rounds": 60} if reach < 1.0 else {}
        run = fit(keys, 0, partial(SpoiltGrid, bad=bad, lie=lie, reach=reach, seed=seed))
    rows = run.get("per_site", [])
    return float(np.mean([row["rmse"] ** 2 for row in rows if int(row["site"]) >= without])) if rows else np.inf


def study(
    modes: tuple[str, ...] = tuple(MODES),
    rules: tuple[str, ...] = ("",),
    bad: tuple[int, ...] = (3,),
    seeds: tuple[int, ...] = (0, 1, 2),
    reach: tuple[float, ...] = (0.3, 0.5, 0.7),
) -> Iterator[Row]:
    """Tables of attacks, one for each mode, and of units that cannot always be reached."""
    for mode in modes:
        for rule in MODES[mode][1] if rules == ("",) else rules:
            for count in bad:
                clean = float(np.mean([error(mode, rule, "", 0, seed, without=count) for seed in seeds]))
                row: Row = {"table": mode, "rule": rule, "bad": count, "clean": clean}
                for attack in (*SPOILT, *LIES):
                    mean = float(np.mean([error(mode, rule, attack, count, seed, without=count) for seed in seeds]))
                    row |= {attack: mean, f"{attack}, over clean": mean / clean}
                yield row
    rows = [
        {"table": "reach", "mode": mode, "probability": share, "MSE": error(mode, "mean", "", 0, seed, share)}
        for mode in modes
        for share in (1.0, *reach)
        for seed in seeds
    ]
    yield from averaged(rows, ("table", "mode", "probability"))
