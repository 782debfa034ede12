"""The default of PVI, Z and β from sums and exact factors: NLL against the best pooled fit, and what factors give away.

    python simulations/pvi_sums.py --data-dir DIR [--sets energy yacht] [--splits 0 1 2] [--variants sums capped]

Pooled fits are those of ``fsgp_exchanges.py``. Runs that are complete are not repeated. The page goes to
``simulations/results/``, written anew after every case; its rows of other sets stay.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from fsgp_exchanges import LARGE, SITES, SMALL, agreed, auc, pooled, write_sets
from pvi_runs import ensure
from sfvi_runs import RESULTS

from fedgp_flower.data.sites import load_all_sites
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.gp.sparse import SparseGP
from fedgp_flower.run.artefacts import RunFolder
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import parse_config
from fedgp_flower.typing import Array
from strategies.pvi import state_of

NAME = "pvi_sums"
VARIANTS: dict[str, dict[str, Any]] = {"sums": {}, "capped": {"pvi.small-sites": "cap"}}
LINES = (
    "Standard splits, ten sites of rows dealt at random, `method=pvi`, all else at its default: (Z, β) from sums, 300",
    "inducing points, sequential visits, one for each site. Capped: `pvi.small-sites=cap`. Gaps are NLL of the",
    "held-out rows less that of the best pooled fit with M = 100, nats per row: mean over the splits / worst split.",
    "Communications: of a site, those before training and its visit among them. AUC, mean over the splits: how well an",
    "attack tells training rows from held-out ones (½: not at all). By loss: with what a run publishes, the posterior,",
    "by −log p(y | x). By factor: with what the server alone holds, a site's own factor, by how far w = L⁻¹k(Z, x) is",
    "outside the range of its A. A site with fewer rows than inducing points cannot hide from that one.",
)
EDGE = 1e-6
"""Of the largest eigenvalue of A: directions below it are outside its range."""


def keys_of(data: str, split: int, variant: str, data_dir: Path) -> dict[str, Any]:
    """Keys of one run."""
    return {"method": "pvi", "dataset": f"uci/{data}", "data-dir": str(data_dir), "split": split, **VARIANTS[variant]}


def leaks(folder: Path, keys: dict[str, Any]) -> dict[str, float]:
    """AUC of the attack by loss on the posterior, and of that by range on the sites' factors."""
    config = parse_config(keys)
    raw = load_all_sites(config, SITES)
    preparation = agreed(raw)
    sites = {site.site: site.encode(preparation) for site in raw}
    predict = Predictor.of_run(folder).standardised
    x, y, x_test, y_test = (
        np.concatenate([getattr(s, n) for s in sites.values()]) for n in ("x", "y", "x_test", "y_test")
    )

    def loss(inputs: Array, targets: Array) -> Array:
        mean, sd = predict(inputs)
        return np.asarray(np.log(sd) + 0.5 * ((targets - mean) / sd) ** 2)

    arrays = snapshot_of(folder)
    values = {n.removeprefix("state.values."): a for n, a in arrays.arrays.items() if n.startswith("state.values.")}
    model = SparseGP.from_arrays(config.model, values)
    by_factor = []
    for name, contribution in state_of(arrays).sites.items():
        scale, vectors = np.linalg.eigh(-2 * contribution.factors["whitened"].eta2)
        inside = vectors[:, scale > EDGE * scale[-1]]
        by_factor.append(auc(outside(model, sites[name].x, inside), outside(model, x_test, inside)))
    return {"AUC by loss": auc(loss(x, y), loss(x_test, y_test)), "AUC by factor": float(np.mean(by_factor))}


def outside(model: SparseGP, inputs: Array, inside: Array) -> Array:
    """|w|² beyond a space [M, R], as a share of |w|², for rows [N, D]."""
    with torch.no_grad():
        w = model.whitened_cross(torch.from_numpy(inputs)).numpy()
    within, whole = np.square(inside.T @ w).sum(0), np.square(w).sum(0)
    return np.asarray(1 - np.divide(within, whole, out=np.zeros_like(whole), where=whole > 0))  # far from all of Z


def snapshot_of(folder: Path) -> Any:
    """The last checkpoint of a run."""
    from fedgp_flower.run.artefacts import read_run

    found = RunFolder(folder, parse_config(read_run(folder).config).digest()).restore()
    assert found is not None
    return found


def case(data: str, split: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Figures of one split."""
    row: dict[str, Any] = {"data": data, "split": split}
    for variant in chosen.variants:
        keys = keys_of(data, split, variant, chosen.data_dir)
        metrics = ensure(NAME, f"{data}-{split}-{variant}", SITES, keys)
        details = metrics["method_details"]
        row |= {f"{variant} nll": metrics["test"]["nll"], f"{variant} coverage": metrics["test"]["coverage_95"]}
        row |= {f"{variant} P": details["num_inducing"], f"{variant} MB": metrics["bytes"]["up"] / SITES / 1e6}
        row[f"{variant} exchanges"] = details["exchanges"] + max(details["visits"].values())
        row[f"{variant} s"] = metrics["seconds"]["setup"] + metrics["seconds"]["training"]
        row |= {f"{variant} {name}": found for name, found in leaks(metrics["folder"], keys).items()}
    starts, evaluations = (4, 300) if data in SMALL else (2, 150)
    reference = pooled(data, split, chosen.data_dir, starts, evaluations)
    return row | {"pooled nll": reference["nll"], "pooled auc": reference["auc"]}


def table(frame: pd.DataFrame, variants: list[str]) -> pd.DataFrame:
    """Means over splits by set."""
    rows = []
    for data, own in frame.groupby("data", sort=False):
        row: dict[str, Any] = {"set": data, "splits": ", ".join(map(str, sorted(own["split"])))}
        row["pooled NLL"] = f"{own['pooled nll'].mean():.3f}"
        row["pooled: AUC by loss"] = f"{own['pooled auc'].mean():.2f}"
        for variant in variants:
            gap = own[f"{variant} nll"] - own["pooled nll"]
            row[f"{variant}: gap"] = f"{gap.mean():+.3f} / {gap.max():+.3f}"
            row[f"{variant}: P"] = f"{own[f'{variant} P'].min():.0f}"
            row[f"{variant}: AUC by loss"] = f"{own[f'{variant} AUC by loss'].mean():.2f}"
            row[f"{variant}: by factor"] = f"{own[f'{variant} AUC by factor'].mean():.2f}"
        first = variants[0]
        row["coverage of 95 %"] = f"{own[f'{first} coverage'].mean():.3f}"
        row["communications"] = f"{own[f'{first} exchanges'].max():.0f}"
        row["MB up"] = f"{own[f'{first} MB'].mean():.1f}"
        row["s"] = f"{own[f'{first} s'].mean():.0f}"
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    """Run what is missing, and write the page after every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--sets", nargs="*", choices=(*SMALL, *LARGE), default=list(SMALL))
    parser.add_argument("--splits", type=int, nargs="*", default=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    chosen = parser.parse_args()
    limit_threads(1)
    rows: list[dict[str, Any]] = []
    for split in chosen.splits:
        for data in chosen.sets:
            rows.append(case(data, split, chosen))
            print(json.dumps(rows[-1]), flush=True)
            write(rows, chosen)


def write(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """The page; its rows of sets that are not asked for stay."""
    page, how = RESULTS / f"{NAME}.md", f"--sets {' '.join(chosen.sets)} --splits {' '.join(map(str, chosen.splits))}"
    how += f" --variants {' '.join(chosen.variants)}"
    made = f"Made by `python simulations/pvi_sums.py --data-dir DIR`, some sets at a time, here last `{how}`."
    write_sets(page, "PVI with Z and β from sums", [made, *LINES], table(pd.DataFrame(rows), chosen.variants))


if __name__ == "__main__":
    main()
