"""Held-out rows that are copies of training rows, and those that are not.

Of some tables many held-out rows have the same inputs as a training row, and often the same target. Boosting and `sgpr`
at its defaults, each fitted as in `accuracy`, are scored on both kinds of held-out rows apart: who sees the rows can
repeat a target, and sums over cells of rows cannot. NLL in nats a row, in units of the target; *copies* is the share of
held-out rows with the inputs of a training row. Every split, and the means over them last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from simulations.common import Row, averaged, fit, remembered, tuned
from simulations.studies.accuracy import SPLITS, TUNED, keys_of, pooled, scored

SITES = 10


def apart(name: str, split: int, folder: Path) -> Row:
    """NLL of both models on copies and on other held-out rows."""
    from fedgp_flower.data.sites import SiteData
    from fedgp_flower.gp.error_law import TAILS
    from fedgp_flower.run.artefacts import read_run
    from fedgp_flower.run.predict import Predictor
    from fedgp_flower.scores import Prediction

    keys = keys_of(name, split)
    rows, units = pooled(keys, SITES)
    seen = {row.tobytes() for row in rows.x.round(9)}
    copies = np.array([row.tobytes() in seen for row in rows.x_test.round(9)])
    trees, sgpr = tuned(rows.x, rows.y, "gaussian", TUNED), Predictor.of(read_run(folder))
    found: Row = {"copies": copies.mean()}
    for kind, of_kind in (("copies", copies), ("others", ~copies)):
        held_out = SiteData(rows.x, rows.y, rows.x_test[of_kind], rows.y_test[of_kind])
        mean, sd = sgpr.standardised(held_out.x_test)
        prediction = Prediction(mean, sd**2, sgpr.saved.arrays.get(TAILS))
        scores = {
            "sgpr": units.gaussian_scores(prediction, held_out.y_test),
            "boosting": trees.scores(held_out, "gaussian", units),
        }
        found |= {f"{method}, {kind}": scored(each, units)["test"]["nll"] for method, each in scores.items()}
    return found


def study(sets: tuple[str, ...] = ("wine", "concrete")) -> Iterator[Row]:
    """A row for each set and split, and the means."""
    found: list[Row] = []
    for name in sets:
        for split in SPLITS[name]:
            run = fit(keys_of(name, split), SITES)
            told = remembered("copies", [name, split], partial(apart, name, split, run["folder"]))
            row = {"set": name, "split": split, **{key: told[key] for key in told if key != "seconds"}}
            found.append(row)
            yield row
    for row in averaged(found, ("set",)):
        yield {"table": "means", **{name: value for name, value in row.items() if name != "split"}}
