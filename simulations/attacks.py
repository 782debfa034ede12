"""What attacks reach on the nine UCI sets: in the clear, under masks, and with differential privacy.

    python simulations/attacks.py --data-dir DIR [--sets yacht …]

Ten sites of sizes up to 1 : 10 and few rounds: rows are what is looked at, not accuracy. Of a table at most 1 000 rows,
drawn at random, a fifth of them held out: the smallest site has about 15 rows, the case that attacks are best at.
Complete runs are not repeated; the page ``simulations/results/attacks.md`` shows every run that was made.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from attacking import FILE, attack
from sfvi_runs import RESULTS, RUNS, ensure, write_table

NAME, SITES, MOST = "attacks", 10, 1000
SETS = ("yacht", "boston", "energy", "concrete", "wine", "kin8nm", "power", "naval", "protein")
MASKS, SUMS = {"privacy.secure-aggregation": True}, {"model.num-inducing": 20}
EPSILON = {"privacy.epsilon": 1.0, "model.lengthscale": 2.0}
FSGP = {"method": "fsgp", "fsgp.objective": "exact", "num-server-rounds": 5} | SUMS
FEDMGP = {"method": "fedmgp", "num-server-rounds": 1, "model.num-inducing": 40}
POINTS = {"method": "pvi", "pvi.local-update": "adam"} | SUMS
POINTS |= {"pvi.first-steps": 60, "pvi.schedule": "synchronous", "pvi.steps": 20, "num-server-rounds": 2}
ARMS: dict[str, dict[str, Any]] = {
    "fsgp": FSGP,
    "fsgp, masked": FSGP | MASKS,
    "fsgp, ε = 1": FSGP | EPSILON,
    "fsgp, masked, ε = 1": FSGP | MASKS | EPSILON,
    "fedmgp": FEDMGP,
    "fedmgp, masked": FEDMGP | MASKS,
    "pvi by sums": {"method": "pvi", "num-server-rounds": 10, "pvi.exchanges": 5} | SUMS,
    "pvi, 5 rows a point": POINTS,
    "pvi, 1 row a point": POINTS | {"pvi.min-rows-per-pseudo-point": 1},
}
COLUMNS = {
    "membership by loss": "loss",
    "membership by likelihood ratio": "ratio",
    "membership by nearest pseudo-observation": "nearest",
    "x of rows": "x",
    "x and y of rows": "x and y",
    "membership by rows found in sums": "found",
}
LINES = [
    f"`python simulations/attacks.py --data-dir DIR --sets {' '.join(SETS)}`",
    "",
    f"Ten sites of sizes up to 1 : 10, one run each, of at most {MOST:,} rows of a table. *server*: what the server"
    " saw; *reader*: what the posterior says. Membership, AUC, .5 at chance: by *loss*, by likelihood *ratio*, by"
    " *nearest* pseudo-observation; strangers are all held-out rows. *Worst site* is the site that the server tells"
    " best by loss; of ten sites of few rows it is by luck alone well above .5. *x*, *x and y*: median distance from a"
    " row of the smallest site to the nearest one found in the sums, over that of as many held-out rows; *chance* is"
    " the same from the sum of all other sites, which has none of these rows. Under masks the server has the total,"
    " which is what a reader has of `fsgp`; with ε both are drawn anew. Empty: there is nothing to attack. That"
    " chance is one draw of the same search, and single runs lie on either side of it; the AUC of rows found against"
    " strangers, over several splits, stands in [attacks_chance.md](attacks_chance.md).",
]


def sample(data_dir: str, name: str) -> tuple[Path, str]:
    """A table of at most so many rows, and the range of every column, rounded outwards, as if it were public."""
    table = pd.read_csv(f"{data_dir}/uci/{name}.csv.gz")
    path = RUNS / NAME / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.sample(min(MOST, len(table)), random_state=0).to_csv(path, index=False)
    return path, json.dumps({str(n): [math.floor(own.min()), math.ceil(own.max()) + 1] for n, own in table.items()})


def made(name: str, data_dir: str) -> None:
    """Make the runs of a data set and attack them."""
    path, ranges = sample(data_dir, name)
    base = {"dataset": str(path), "partitioner": "sizes"}
    for number, (arm, more) in enumerate(ARMS.items()):
        started = time.process_time()
        private = {"privacy.ranges": ranges} if "privacy.epsilon" in more else {}
        run = ensure(NAME, f"{name}-{number}", SITES, base | more | private)
        if not (run["folder"] / FILE).exists():
            attack(run["folder"])
        print(f"{name}, {arm}: {time.process_time() - started:.0f} s", flush=True)


def found() -> Iterator[dict[str, Any]]:
    """A row of the table for every run that was attacked."""
    for name in SETS:
        for number, arm in enumerate(ARMS):
            path = RUNS / NAME / f"{name}-{number}" / FILE
            if not path.exists():
                continue
            row: dict[str, Any] = {"data": name, "run": arm}
            for own in json.loads(path.read_text())["attacks"]:
                column = COLUMNS[own["name"].partition(" from")[0].partition(",")[0]]
                row |= {f"{column}: server": own["server"], f"{column}: reader": own["reader"]}
                if column.startswith("x"):
                    row[f"{column}: chance"] = own["chance"]
                if column == "loss":
                    row["loss: worst site"] = max(own["per_site"].values(), default=None)
            yield row


def main() -> None:
    """Make the runs, attack them, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    given = parser.parse_args()
    for name in given.sets:
        made(name, given.data_dir)
    table = pd.DataFrame(found()).dropna(axis=1, how="all").astype(object)
    write_table(RESULTS / f"{NAME}.md", "Attacks", LINES, table)


if __name__ == "__main__":
    main()
