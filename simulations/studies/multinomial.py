"""MNIST: multinomial regression at small sites.

Hassan et al. (2023), S3.2, Table S1: multinomial regression with learned prior scales, 5000 images at 25 sites of 200
rows or 200 sites of 25. Accuracy on 10 000 test images, which are dealt to the sites for scoring alone. Independent:
every site fits the same model to its own rows. MB: of all messages, those of evaluations included. The paper's column
is for 25 sites; its rounds differ: 1 × 50 000 steps, 50 × 1000 steps, 50 000 rounds of SFVI. Rates and initial scales
are those that were best on other training images (`--choose`: 2000 images that are at no site, 25 sites).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import Row, fit, images, train_and_test

ROWS, HELD_OUT = 5000, 2000
KEYS: dict[str, Any] = {
    "target": "digit",
    "split": 0,
    "standardise": False,
    "evaluate-every": 20,
    "sfvi.model": "multinomial",
    "sfvi.samples": 1,
}
AVERAGE: dict[str, Any] = {"method": "sfvi-avg", "sfvi.learning-rate": 0.01, "sfvi.initial-scale": 0.03}
GRADIENTS: dict[str, Any] = {"method": "sfvi", "sfvi.learning-rate": 0.03, "sfvi.initial-scale": 0.03}
ONE = {"num-server-rounds": 1, "sfvi.local-steps": 400, "baselines.local-only": True}
ARMS: dict[str, dict[str, Any]] = {
    "SFVI-Avg, 1 round × 400": AVERAGE | ONE,
    "SFVI-Avg, 20 rounds × 10": {**AVERAGE, "num-server-rounds": 20, "sfvi.local-steps": 10},
    "5 rounds of SFVI-Avg, then SFVI": {
        **GRADIENTS,
        "num-server-rounds": 105,
        "sfvi.warm-start-rounds": 5,
        "sfvi.local-steps": 10,
    },
    "SFVI, 105 rounds": {**GRADIENTS, "num-server-rounds": 105},
    "SFVI": {**GRADIENTS, "num-server-rounds": 200},
}
COMPARED = ("SFVI-Avg, 20 rounds × 10", "SFVI, 105 rounds")
INDEPENDENT = "independent, 400 steps"
PAPER = {INDEPENDENT: 51.5, "SFVI-Avg, 1 round × 400": 63.9, "SFVI-Avg, 20 rounds × 10": 69.3, "SFVI": 84.0}
"""Test accuracy in per cent, Table S1, J = 25 and N_j = 200."""


def table(*, choosing: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """5000 training images, and 10 000 test images or 2000 other training images."""
    x, y = images("train")
    order = np.random.default_rng(0).permutation(len(x))
    other = order[ROWS : ROWS + HELD_OUT]
    parts = [(x[order[:ROWS]], y[order[:ROWS]]), (x[other], y[other]) if choosing else images("t10k")]
    frames = [pd.DataFrame(a, columns=[f"p{i}" for i in range(784)]).assign(digit=b.astype(float)) for a, b in parts]
    return frames[0], frames[1]


def study(
    sites: tuple[int, ...] = (25, 200), arms: tuple[str, ...] = tuple(ARMS), choose: bool = False
) -> Iterator[Row]:
    """A row for each number of sites and arm, or for each rate and scale."""
    path = train_and_test(f"multinomial-{choose}", lambda: table(choosing=choose))
    if choose:
        for arm in COMPARED:
            for rate in (0.003, 0.01, 0.03):
                for scale in (0.03, 0.1):
                    keys = {**KEYS, **ARMS[arm], "sfvi.learning-rate": rate, "sfvi.initial-scale": scale}
                    test = fit({**keys, "dataset": path, "evaluate-every": 0}, 25)["test"]
                    yield {
                        "arm": arm,
                        "rate": rate,
                        "scale": scale,
                        "accuracy, %": 100 * test["accuracy"],
                        "NLL": test["nll"],
                    }
        return
    for count in sites:
        for arm in arms:
            run = fit({**KEYS, **ARMS[arm], "dataset": path}, count)
            found = {arm: run["test"]} | ({INDEPENDENT: run["local_only"]} if run["local_only"] else {})
            for name, test in found.items():
                row: Row = {"sites": count, "arm": name, "accuracy, %": 100 * test["accuracy"]}
                row["paper, %"] = PAPER.get(name) if count == 25 else None
                cost = {f"MB {way}": run["bytes"][way] / 1e6 for way in ("up", "down")} | {"rounds": run["rounds"]}
                yield row | (cost if name == arm else {})
