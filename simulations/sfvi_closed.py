"""SFVI in closed form: how many exchanges it takes, and whether a pooled fit of the model finds more.

    python simulations/sfvi_closed.py --data-dir DIR [--folds 0 1 2 3 4] [--seeds 0 1 2 3 4]

Weather by country (34 sites, five folds by country as in ``sfvi_weather.py``) and diabetes (five sites, defaults).
Every run is scored after every third exchange. Then one process with all rows maximises the same bound by L-BFGS from
where the run ended, over θ and the shapes of all sites together, and scores as the sites do. What is there stays, and
rows of ``simulations/results/sfvi_closed.md`` about weather or diabetes stay where a call asks for none of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from fedgp_flower.methods.sfvi.exact_deviation import ExactDeviation
from fedgp_flower.methods.sfvi.shaped import WIDTHS, ShapedGP
from sfvi_runs import RESULTS, ensure, write_table
from sfvi_weather import keys, table_of
from sfvi_weather_model import problem
from strategies.sfvi_closed import SHRINKAGE, prior_of

from fedgp_flower.gp.optimisers import maximise
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.newton import Sums, posterior
from fedgp_flower.methods.sfvi.options import SHARED

NAME = "sfvi_closed"
EVALUATIONS = 15
"""Of the pooled bound, from where a run ended."""
CLOSE = 0.01
"""Nats per row."""
TITLE = "SFVI in closed form beside the same model fitted to all rows in one place"
DEFAULTS: dict[str, Any] = {"method": "sfvi", "evaluate-every": 3}
DIABETES: dict[str, Any] = {"dataset": "diabetes", "baselines.local-only": True, "baselines.pooled": True}


def penalty(name: str, away: torch.Tensor) -> torch.Tensor:
    """−log p of an entry of θ, up to a constant."""
    scale, power = prior_of(name)
    return 0.5 * (away / scale).square().sum() + SHRINKAGE * (power > 0) * (power * away).exp().sum()


def pooled(folder: Path, sites: int) -> dict[str, float]:
    """Rise of the bound, NLL and RMSE (standardised) where L-BFGS takes all rows from where a run ended."""
    limit_threads(1)
    own = problem(folder, sites)
    model = ShapedGP.configured(own.config.options, own.config.model, own.width, torch.tensor(own.arrays[SHARED]))
    start = {name: parameter.detach().clone() for name, parameter in model.theta().items()}
    modes = {n: at + 0.5 * math.log(own.width) * n.endswith("lengthscale") for n, at in start.items()}
    model.load_theta({name: torch.tensor(own.arrays[f"theta.{name}"]) for name in model.theta()})
    theta = {name: parameter for name, parameter in model.theta().items() if name != WIDTHS}
    units = [ExactDeviation(model, torch.from_numpy(data.x), torch.from_numpy(data.y)) for data in own.encoded]
    q_global = GlobalPosterior.of(own.arrays)
    offsets = torch.stack([unit.mode(q_global)[0] for unit in units]).requires_grad_()

    def summed() -> Sums:
        parts = [unit.sums(offset).parts() for unit, offset in zip(units, offsets, strict=True)]
        return Sums(*(torch.stack(part).sum(0) for part in zip(*parts, strict=True)))

    def bound() -> torch.Tensor:
        sums = summed()
        factor = torch.linalg.cholesky(torch.eye(len(sums.shift)).double() + sums.precision)
        fit = torch.linalg.solve_triangular(factor, sums.shift[:, None], upper=False).square().sum()
        prior = [penalty(n, p - modes[n]) for n, p in theta.items()]
        return sums.constant - factor.diagonal().log().sum() + 0.5 * fit - torch.stack(prior).sum()

    before = float(bound().detach())
    end = maximise(bound, [*theta.values(), offsets], max_evaluations=EVALUATIONS, tolerance=1e-10)
    with torch.no_grad():
        sums = summed()
        best, _ = posterior(sums.precision, sums.shift)
    rows = nll = squares = 0.0
    for unit, data in zip(units, own.encoded, strict=True):
        found, target = unit.predict(torch.from_numpy(data.x_test), best), torch.from_numpy(data.y_test)
        error = (target - found.mean).square()
        nll += float((0.5 * (2 * math.pi * found.variance).log() + 0.5 * error / found.variance).sum())
        squares, rows = squares + float(error.sum()), rows + len(target)
    return {"rise": end.value - before, "nll": nll / rows, "rmse": math.sqrt(squares / rows)}


def row(data: str, run: dict[str, Any], sites: int) -> dict[str, Any]:
    """A line of the table; scores are those of the standardised target."""
    history = pd.read_csv(run["folder"] / "history.csv")
    test, shift = run["test_standardised"], run["test"]["nll"] - run["test_standardised"]["nll"]
    path = run["folder"] / "pooled.json"
    reference = json.loads(path.read_text()) if path.exists() else pooled(run["folder"], sites)
    path.write_text(json.dumps(reference))
    scored = history.dropna(subset="test_nll")
    curve, number = scored["test_nll"].to_numpy() - shift, scored["round"].to_numpy(int)
    outside = np.flatnonzero(curve > reference["nll"] + CLOSE)
    others = {
        name: run[key] for name, key in (("each alone", "local_only"), ("pooled sparse GP", "pooled")) if run[key]
    }
    return {
        "data": data,
        "exchanges": str(len(history)),
        "converged": "yes" if run["converged"] else "no",
        "NLL": test["nll"],
        "RMSE": test["rmse"],
        "L-BFGS NLL": reference["nll"],
        "L-BFGS RMSE": reference["rmse"],
        "bound rises by": reference["rise"],
        f"within {CLOSE} from": str(number[outside[-1] + 1] if len(outside) else number[0]),
        "MB up a site": history["bytes_up"].sum() / sites / 1e6,
        **{name: own["nll"] - shift for name, own in others.items()},
        "rows": sum(site["num_examples"] for site in run["per_site"]),
    }


def mean_row(data: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all held-out rows: NLL by its mean, RMSE by the mean of squares."""
    weight, found = np.array([own["rows"] for own in rows], float), {"data": data}
    for name in rows[0]:
        if "NLL" in name or name in ("each alone", "pooled sparse GP"):
            found[name] = float(np.average([own[name] for own in rows], weights=weight))
        elif "RMSE" in name:
            found[name] = math.sqrt(float(np.average([own[name] ** 2 for own in rows], weights=weight)))
    return found


def earlier(name: str) -> list[dict[str, Any]]:
    """Rows of the page about data that a call does not ask for."""
    page = RESULTS / f"{NAME}.md"
    lines = [row for row in page.read_text().splitlines() if row.startswith("| ")] if page.exists() else []
    head, *rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in lines] or [["data"]]
    return [dict(zip(head, row, strict=True)) for row in rows if row[0].startswith(name)]


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--folds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    chosen = parser.parse_args()
    path, stations = table_of(chosen.data_dir)
    diabetes = [
        row(f"diabetes, seed {k}", ensure(NAME, f"diabetes-{k}", 5, DIABETES | DEFAULTS | {"seed": k}), 5)
        for k in chosen.seeds
    ]
    weather = [
        row(f"weather, fold {k}", ensure(NAME, f"weather-{k}", len(stations), keys(path, k) | DEFAULTS), len(stations))
        for k in chosen.folds
    ]
    rows = []
    for name, found in (("weather", weather), ("diabetes", diabetes)):
        rows += [*found, mean_row(f"{name}, all", found)] if found else earlier(name)
    asked = " ".join(["--folds", *map(str, chosen.folds), "--seeds", *map(str, chosen.seeds)])
    lines = (
        f"Made by `python simulations/sfvi_closed.py {asked}`, and with other folds or seeds for other data. Scores of",
        "the standardised target. L-BFGS: one process with all rows goes on from where the run ended; by how many nats",
        f"its bound rises, and from which exchange on the run's NLL was within {CLOSE} of its own, or better, as",
        "far as it was scored: after every third exchange, or each. The two exchanges before training do not count.",
        "[sfvi_shapes.md](sfvi_shapes.md) has weather, [sfvi_weather.md](sfvi_weather.md) SFVI by gradients.",
    )
    write_table(RESULTS / f"{NAME}.md", TITLE, lines, pd.DataFrame(rows).drop(columns="rows").fillna(""))


if __name__ == "__main__":
    main()
