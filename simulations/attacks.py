"""What attacks reach on small UCI sets: in the clear, under masks, and with differential privacy.

    python simulations/attacks.py --data-dir DIR [--sets yacht boston energy concrete]

Ten sites of sizes up to 1 : 10, split 0, few rounds: rows are what is looked at, not accuracy. Complete runs are not
repeated; the page ``simulations/results/attacks.md`` is written anew each time.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import pandas as pd
from sfvi_runs import RESULTS, ensure, write_table

from fedgp_flower.run.attack import FILE, attack

NAME, SITES = "attacks", 10
MASKS = {"privacy.secure-aggregation": True}
FSGP = {"method": "fsgp", "fsgp.objective": "exact", "num-server-rounds": 10, "model.num-inducing": 20}
ARMS: dict[str, dict[str, Any]] = {
    "fsgp": FSGP,
    "fsgp, masked": FSGP | MASKS,
    "fsgp, masked, ε = 1": FSGP | MASKS | {"privacy.epsilon": 1.0},
    "fedmgp": {"method": "fedmgp", "num-server-rounds": 2, "model.num-inducing": 40},
    "fedmgp, masked": {"method": "fedmgp", "num-server-rounds": 2, "model.num-inducing": 40} | MASKS,
    "pvi": {"method": "pvi", "num-server-rounds": 10, "model.num-inducing": 20, "pvi.first-steps": 60, "pvi.steps": 40},
}


def ranges(data_dir: str, name: str) -> str:
    """The range of every column of a table, rounded outwards, as if it were public."""
    table = pd.read_csv(f"{data_dir}/uci/{name}.csv.gz")
    return json.dumps({str(n): [math.floor(own.min()), math.ceil(own.max()) + 1] for n, own in table.items()})


def main() -> None:
    """Make the runs, attack them, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--sets", nargs="+", default=["yacht", "boston", "energy", "concrete"])
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    lines = [
        f"`python simulations/attacks.py --data-dir DIR --sets {' '.join(given.sets)}`",
        "",
        "Ten sites of sizes up to 1 : 10, split 0, one run each. Membership: AUC, .5 at chance, strangers are all"
        " held-out rows; *worst site* is the site that the server tells best, among ten of few rows by luck alone well"
        " above .5. Rows from sums: median distance from a row of the smallest site to the nearest one found, over that"
        " of as many held-out rows, 1 at chance. *server*: what the server saw; *reader*: what the posterior says."
        " Under masks the server has no more than the total. Held-out rows are not the best guess of somebody who knows"
        " nothing, so that figures somewhat below 1 prove nothing. Runs that were not made are not here.",
    ]
    for name in given.sets:
        base = {"dataset": f"uci/{name}", "data-dir": given.data_dir, "split": 0, "partitioner": "sizes"}
        for arm, more in ARMS.items():
            keys = base | more
            if "privacy.epsilon" in more:
                keys |= {"privacy.ranges": ranges(given.data_dir, name), "model.lengthscale": 2.0}
            run = ensure(NAME, f"{name}-{list(ARMS).index(arm)}", SITES, keys)
            if not (run["folder"] / FILE).exists():
                attack(run["folder"])
            for own in json.loads((run["folder"] / FILE).read_text())["attacks"]:
                each = list(own["per_site"].values())
                figures = {"chance": own["chance"], "server": own["server"], "worst site": max(each, default=None)}
                rows.append({"data": name, "run": arm, "attack": own["name"], **figures, "reader": own["reader"]})
            print(name, arm, flush=True)
            write_table(RESULTS / f"{NAME}.md", "Attacks", lines, pd.DataFrame(rows))


if __name__ == "__main__":
    main()
