"""Whether rows found in a total under masks are rows that were trained on: MUSIC against strangers, several splits.

    python simulations/attacks_chance.py --data-dir DIR [--sets yacht …] [--seeds 0 1 2]

The runs of ``attacks.py``, with seeds that hold out and deal other rows. The search of ``attacks.py`` is made in the
sums of the smallest site, which the server sees in the clear, in the total, which it sees under masks, and in the sum
of all other sites. Complete runs are not repeated; the page is ``simulations/results/attacks_chance.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import numpy as np
import pandas as pd
from attacking import SEEN, reconstruction, rows_of, spread, together
from attacks import FEDMGP, FSGP, NAME, SETS, SITES, sample
from sfvi_runs import RESULTS, RUNS, ensure, write_table

from fedgp_flower.run.artefacts import read_run
from fedgp_flower.run.registry import parse_config

METHODS = {"fsgp": FSGP, "fedmgp": FEDMGP}
KEPT = RUNS / NAME / "chance.jsonl"
LINES = [
    "`python simulations/attacks_chance.py --data-dir DIR --sets {} --seeds {}`",
    "",
    "Rows of the smallest of ten sites, looked for in sums as `attacks.py` does, with seeds that hold out and deal"
    " other rows. AUC: how much nearer to a row found the rows of the site are than rows that were held out of the run;"
    " at chance .5, with the standard deviation of ranks that are drawn. *In the clear*: from the sums of the site."
    " *Under masks*: from the total of all sites. ± is 1.96 standard deviations of the mean at chance. *Nearer than"
    " without*: of the median distances, how often the total that holds the rows led nearer to them than the sum"
    " of the other sites, which does not. Below .5 the rows of the site happen to lie further out than strangers; both"
    " methods have the same.",
]


def measured(name: str, method: str, seed: int, data_dir: str) -> dict[str, Any]:
    """What the search reaches in one run."""
    path, _ = sample(data_dir, name)
    keys = {"dataset": str(path), "partitioner": "sizes", "seed": seed, **METHODS[method]}
    run = read_run(ensure(NAME, f"chance-{name}-{method}-{seed}", SITES, keys)["folder"])
    config, sites = parse_config(run.config), rows_of(run)
    smallest = min(sites, key=lambda site: len(sites[site].x))
    groups = {
        "clear": [sites[smallest]],
        "masked": list(sites.values()),
        "others": [own for site, own in sites.items() if site != smallest],
    }
    strangers = together(list(sites.values()))
    found: dict[str, Any] = {"data": name, "method": method, "seed": seed}
    for group, seen in SEEN[method](run, config, groups).items():
        rng = np.random.default_rng([seed, *b"attack"])
        distance, _, recognised = reconstruction(seen.sums, sites[smallest], strangers, rng)
        found |= {group: recognised, f"{group}, distance": distance}
    return found | {"spread": spread(len(sites[smallest].x), len(strangers.x))}


def summary(method: str, name: str, rows: pd.DataFrame) -> dict[str, Any]:
    """A line of the table."""
    half = 1.96 * math.sqrt(float((rows["spread"] ** 2).sum())) / len(rows)
    nearer = int((rows["masked, distance"] < rows["others, distance"]).sum())
    return {
        "method": method,
        "data": name,
        "runs": len(rows),
        "in the clear": f"{rows['clear'].mean():.3f}",
        "under masks": f"{rows['masked'].mean():.3f}",
        "chance": f"0.5 ± {half:.3f}",
        "masked, better than chance": "yes" if rows["masked"].mean() > 0.5 + half else "no",
        "nearer than without": f"{nearer} of {len(rows)}",
    }


def main() -> None:
    """Make the runs, look for rows, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    done = {(own["data"], own["method"], own["seed"]) for own in kept}
    for seed in given.seeds:
        for name in given.sets:
            for method in METHODS:
                if (name, method, seed) in done:
                    continue
                started = time.process_time()
                kept.append(measured(name, method, seed, given.data_dir))
                with KEPT.open("a") as file:
                    file.write(json.dumps(kept[-1]) + "\n")
                print(f"{name}, {method}, {seed}: {time.process_time() - started:.0f} s", flush=True)
    write(pd.DataFrame(kept))


def write(table: pd.DataFrame) -> None:
    """The page: a line for every set, and one for all."""
    seeds = " ".join(map(str, sorted(table["seed"].unique())))
    sets = [name for name in SETS if name in set(table["data"])]
    lines = [LINES[0].format(" ".join(sets), seeds), *LINES[1:]]
    rows = []
    for method in METHODS:
        own = table[table["method"] == method]
        rows += [summary(method, name, own[own["data"] == name]) for name in sets if name in set(own["data"])]
        rows += [summary(method, "all", own)] if len(own) else []
    write_table(RESULTS / "attacks_chance.md", "Rows found in sums, against strangers", lines, pd.DataFrame(rows))


if __name__ == "__main__":
    main()
