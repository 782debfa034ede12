"""What each method reaches, costs and gives away at its defaults, on six sets: which method to take.

    python simulations/method_study.py --data-dir DIR [--sets yacht …] [--methods fsgp …] [--rows 400]

Ten sites; of a table so many rows, drawn at random, a fifth of them held out: about 32 rows a site, which is the case
that attacks are best at. Complete runs are not repeated, and the page ``simulations/results/method_study.md``, written
anew after every run, keeps the rows that a call does not ask for.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from attacking import SEEN, TOTAL, Seen, loss, membership, together
from fsgp_exchanges import agreed
from pvi_runs import ensure
from sfvi_runs import RESULTS, RUNS, write_table

from fedgp_flower.data.sites import SiteData, load_all_sites
from fedgp_flower.errors import ConfigError, RunError
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.run.artefacts import RunData, read_run
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config
from fedgp_flower.typing import Array

NAME, SITES = "method_study", 10
BLOCKS = {"partitioner": "blocks"}
SETS: dict[str, dict[str, Any]] = {
    "yacht": {},
    "boston": {},
    "energy": {},
    "concrete": {},
    "concrete, by blocks": BLOCKS,
    "wine": {},
}
METHODS: dict[str, dict[str, Any]] = {
    "fsgp": {},
    "fsgp, 100 points": {"method": "fsgp", "model.num-inducing": 100},
    "pvi": {},
    "sfvi": {},
    "sfvi-avg": {},
    "fedmgp": {},
    "fgpr": {},
}
"""Keys beside the method, which is the name where there are none."""
EDGE = 1e-6
"""Of the largest eigenvalue of a sum: directions below it are outside its range."""
LINES = (
    "Ten sites, one run each, no key but `method`, `dataset`, how rows lie (dealt at random, or by blocks), and where",
    "it says so the number of inducing points (`model.num-inducing`, 300 of `fsgp` and `pvi`, 50 of the rest). NLL in",
    "nats per held-out row in units of the target; alone: every site by itself; pooled: a GP of all rows with as many",
    "inducing points as `fsgp`. Exchanges with every site, and MB that a site sends in the clear; under masks twice",
    "that (`masks.md`). Membership of a training row: AUC, .5 at chance, whose standard deviation is .036",
    "for 320 rows and 80 strangers. *Predictions*: by log p(y | x) of the posterior that a run publishes; of `fedmgp`",
    "by what each site answers for its own rows. *Site's sums*: what the server holds of each site in the clear, by",
    "how far the features of a row lie outside the range of that sum; *total*: the same of the sum over sites, all",
    "that it sees under masks, which `pvi` refuses. A sum of no more rows than inducing points has these in its range",
    "and little else: here that is every site's, and with 300 points nearly the total of 320 rows. Masks hide which",
    "site a row is of, and the row itself the better, the more rows there are for a point. Empty: nothing is",
    "published, or no attack is known here, which is not to say that it is safe.",
    "",
    "Means over the sets:",
    "",
)


def table_of(name: str, data_dir: Path, rows: int) -> Path:
    """So many rows of a table."""
    base = name.partition(",")[0]
    path = RUNS / NAME / "data" / f"{base}-{rows}.csv"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pd.read_csv(data_dir / "uci" / f"{base}.csv.gz")
        table.sample(min(rows, len(table)), random_state=0).to_csv(path, index=False)
    return path


def by_predictions(run: RunData, sites: Mapping[str, SiteData]) -> float | None:
    """AUC of log p(y | x) by the posterior of a run, else by each site's own predictor; None where there is neither."""
    try:
        predictors = Predictor.of_all(run.path)
    except RunError:
        return None
    labels = run.metrics.labels
    seen = {site: Seen(predictors.get(labels[site], predictors.get("")).standardised) for site in sites}
    return membership(loss, seen, sites, together(list(sites.values())))[0]


def inside(seen: Seen, x: Array, y: Array) -> Array:
    """The share of a row's features that lies in the range of a sum."""
    del y
    assert seen.sums is not None
    spectrum, vectors = np.linalg.eigh(seen.sums.gram)
    features = seen.sums.features(x)
    share = np.square(features @ vectors[:, spectrum > EDGE * spectrum[-1]]).sum(1)
    return np.asarray(share / np.square(features).sum(1))


def by_sums(run: RunData, sites: Mapping[str, SiteData]) -> dict[str, float]:
    """AUC of the attack by range on the sums of each site, and on the total if masks can leave that alone."""
    if run.metrics.method not in SEEN or run.posterior is None:
        return {}
    seen, config = SEEN[run.metrics.method], parse_config(run.config)
    everyone = list(sites.values())
    each = seen(run, config, {site: [own] for site, own in sites.items()})
    total = seen(run, config, {TOTAL: everyone})[TOTAL]
    if total.sums is None:
        return {}
    strangers = together(everyone)
    found = {"site's sums": membership(inside, each, sites, strangers)[0]}
    try:
        parse_config({**run.config, "privacy.secure-aggregation": True})
    except ConfigError:
        return found
    return found | {"total": membership(inside, dict.fromkeys(sites, total), sites, strangers)[0]}


def reference(name: str, method: str, data_dir: Path, rows: int) -> float:
    """NLL of a baseline."""
    keys = {"method": method, "dataset": str(table_of(name, data_dir, rows)), **SETS[name]}
    if method == "pooled":
        keys["model.num-inducing"] = parse_config({"method": "fsgp"}).model.num_inducing
    return float(ensure(NAME, f"{method}-{slug(name)}-{rows}", SITES, keys)["test"]["nll"])


def slug(name: str) -> str:
    """A name in that of a folder."""
    return name.replace(", ", "-").replace(" ", "-")


def case(name: str, method: str, data_dir: Path, rows: int) -> dict[str, Any]:
    """A row of the table."""
    keys = {"method": method, "dataset": str(table_of(name, data_dir, rows)), **SETS[name], **METHODS[method]}
    metrics = ensure(NAME, f"{slug(method)}-{slug(name)}-{rows}", SITES, keys)
    run = read_run(metrics["folder"])
    raw = load_all_sites(parse_config(keys), SITES)
    preparation = agreed(raw)
    sites = {str(own.site): own.encode(preparation) for own in raw}
    sums = by_sums(run, sites)
    return {
        "set": name,
        "method": method,
        "rows": str(rows),
        "NLL": metrics["test"]["nll"],
        "alone": reference(name, "local-only", data_dir, rows),
        "pooled": reference(name, "pooled", data_dir, rows),
        "exchanges": str(metrics["exchanges"] or 0),
        "MB up a site": metrics["bytes"]["up"] / SITES / 1e6,
        "predictions": by_predictions(run, sites),
        "site's sums": sums.get("site's sums"),
        "total": sums.get("total"),
    }


def merged(lines: list[dict[str, Any]], page: Path) -> pd.DataFrame:
    """The rows found, and those that the page has of other sets and methods."""
    found = pd.DataFrame(lines).astype(object)
    cells = [row for row in page.read_text().splitlines() if row.startswith("| ")] if page.exists() else []
    again = {(line["set"], line["method"]) for line in lines}
    start = next((place for place, row in enumerate(cells) if row.startswith("| set ")), len(cells))
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in cells[start + 2 :]]
    earlier = pd.DataFrame([row for row in rows if (row[0], row[1]) not in again], columns=found.columns)
    both = pd.concat([found, earlier], ignore_index=True)
    place = both["set"].map(list(SETS).index) * len(METHODS) + both["method"].map(list(METHODS).index)
    return both.iloc[place.argsort(kind="stable")]


def summary(frame: pd.DataFrame) -> list[str]:
    """Means over sets, as lines of a table, and what announces the next one."""
    numbers = frame.drop(columns=["set", "rows"]).set_index("method").apply(pd.to_numeric).astype(float)
    numbers.insert(0, "NLL above pooled", numbers["NLL"] - numbers["pooled"])
    found = numbers.drop(columns=["NLL", "alone", "pooled"]).groupby(level=0, sort=False).mean()
    found = found.loc[[method for method in METHODS if method in found.index]].reset_index()
    rows = [["" if pd.isna(v) else v if isinstance(v, str) else f"{v:.3f}" for v in row] for row in found.to_numpy()]
    return ["| " + " | ".join(row) + " |" for row in [list(found), ["---"] * len(found.columns), *rows]] + [
        "",
        "Each set:",
    ]


def main() -> None:
    """Make the runs that are missing, attack them, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rows", type=int, default=400)
    chosen = parser.parse_args()
    limit_threads(1)
    page, lines = RESULTS / f"{NAME}.md", []
    made = "Made by `python simulations/method_study.py --data-dir DIR`, some sets and methods at a time."
    for method in chosen.methods:
        for name in chosen.sets:
            lines.append(case(name, method, chosen.data_dir, chosen.rows))
            print(lines[-1], flush=True)
            every = merged(lines, page)
            write_table(page, "What methods reach, cost and give away", [made, *LINES, *summary(every)], every)


if __name__ == "__main__":
    main()
