"""Missing cells: what their mean given the rest of the row brings.

A fifth of the cells of each table is gone, whichever they are, in training and held-out rows. `sgpr` at its defaults,
ten sites, at most 1500 rows. *Whole*: no cell is gone. *Column means*: each gap holds the mean of the training cells of
its column, and an input says where it was. `impute` and `indicator` are keys of a run: its mean given the other cells
of the row, and with `indicator` such an input, too. NLL in nats per held-out row, and the share of held-out rows in 95
% intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd

from simulations.common import Row, averaged, data_dir, fit, kept_table

ROWS, GONE = 1500, 0.2


def make(name: str, split: int, gaps: str) -> pd.DataFrame:
    """The table, with rows that split 0 holds out."""
    table = pd.read_csv(data_dir() / "uci" / f"{name}.csv.gz")
    table = table.loc[:, table.nunique() > 1].sample(min(ROWS, len(table)), random_state=split, ignore_index=True)
    draw, inputs = np.random.default_rng(split), table.iloc[:, :-1].astype(float)
    test = draw.random(len(table)) < 0.2
    gone = draw.random(inputs.shape) < GONE * (gaps != "whole")
    inputs = inputs.mask(gone)
    if gaps == "column means":
        said = pd.DataFrame(gone.astype(float), columns=[f"{column} gone" for column in inputs])
        inputs = inputs.fillna(inputs[~test].mean()).join(said)
    return inputs.assign(target=table.iloc[:, -1], split=np.where(test, "test", "train"))


def study(
    sets: tuple[str, ...] = ("boston", "concrete", "energy", "power", "wine", "yacht"), splits: tuple[int, ...] = (0, 1)
) -> Iterator[Row]:
    """Means over sets, then a row for each set."""
    rows: list[Row] = []
    for name in sets:
        for split in splits:
            for what in ("whole", "column means", "impute", "indicator"):
                gaps = what if what in {"whole", "column means"} else "gaps"
                table = kept_table(f"gaps-{name}-{split}-{gaps}", partial(make, name, split, gaps))
                keys = {"dataset": table, "target": "target", "split": 0} | (
                    {"missing": what} if gaps == "gaps" else {}
                )
                test = fit(keys)["test"]
                rows.append({"set": name, "gaps": what, "NLL": test["nll"], "coverage": test["coverage_95"]})
    for row in averaged(rows, ("gaps",)):
        yield {"table": "Means over sets", **row}
    for row in averaged(rows, ("set", "gaps")):
        yield {"table": "Each set", **row}
