"""Do bands cover on signals that are what the model says? Section 5.1 of the paper at defaults, and units that join.

Five units, the first with half of its curve hidden, which is what is predicted; seeds from 100 on. Then ten units of 40
rows, and five that took no part and have 3, 5, 10 or 100 rows anywhere, predicted at 60 others by `fedgp join`'s code;
beside it the same with φ of the new unit taken as a point. Priors of φ were chosen on seeds 0 and 1 (``--first 0``).

    python simulations/fedmgp_coverage.py [--seeds 5] [--joined-seeds 5] [--first 100]

Runs that are complete are not repeated; the page goes to ``simulations/results/fedmgp_coverage.md``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
from fedmgp_common import RESULTS, RUNS, SIGNALS, finished, mse, table
from fedmgp_natural import FIRST
from fedmgp_signals import signals
from scipy.special import ndtri

from fedgp_flower.methods.fedmgp import client
from fedgp_flower.run.predict import Predictor

DEFAULTS = {name: own for name, own in SIGNALS.items() if not name.startswith(("fedmgp.", "model.", "num-server"))}
ARMS: dict[str, dict[str, Any]] = {
    "defaults": DEFAULTS,
    "convolved": {**DEFAULTS, "fedmgp.covariance": "convolved"},
}
UNITS, JOINERS, HELD_OUT = 10, 5, 60
ROWS = (3, 5, 10, 100)
INTEGRATED, POINT = "", ", φ a point"


def covered(frame: pd.DataFrame, y: pd.Series) -> float:
    """Share of rows in the 95 % band."""
    return float((np.abs(frame["mean"].to_numpy() - y.to_numpy()) < ndtri(0.975) * frame["sd"].to_numpy()).mean())


def tables(seed: int) -> tuple[Path, dict[str, pd.DataFrame]]:
    """A table of the units that take part, with 40 rows each, and those of the others."""
    whole = RUNS / "data" / f"coverage-all-{seed}.parquet"
    wide = signals(whole, units=UNITS + JOINERS, rows=max(ROWS), seed=seed, widths=(5.0, 20.0), held_out=HELD_OUT)
    by_unit = {str(name): rows for name, rows in pd.read_parquet(wide).groupby("unit")}
    names, draw = sorted(by_unit), np.random.default_rng(seed)
    kept = []
    for name in names[:UNITS]:
        train = by_unit[name].query("split == 'train'")
        kept += [train.iloc[np.sort(draw.permutation(len(train))[:40])], by_unit[name].query("split == 'test'")]
    path = whole.with_name(f"coverage-{seed}.parquet")
    if not path.exists():
        pd.concat(kept, ignore_index=True).to_parquet(path)
    return path, {name: by_unit[name] for name in names[UNITS:]}


def joined(seed: int) -> list[dict[str, float]]:
    """Coverage and squared errors of joiners, one row for each and number of rows."""
    path, others = tables(seed)
    name = f"coverage-ten-{seed}"
    finished({**DEFAULTS, "dataset": str(path), "seed": seed}, name)
    found = []
    for number, (unit, frame) in enumerate(others.items()):
        train, test = (frame[frame["split"] == split].drop(columns="split") for split in ("train", "test"))
        order = np.random.default_rng([seed, number]).permutation(len(train))
        for rows in ROWS:
            source = RUNS / "data" / f"joins-{seed}-{number}-{rows}.csv"
            train.iloc[np.sort(order[:rows])].to_csv(source, index=False)
            predictor = Predictor.joined(RUNS / name, f"new-{number}", source)
            row: dict[str, Any] = {"unit": unit, "rows": rows}
            for how, most in ((INTEGRATED, client.MOST_ROWS), (POINT, 0)):
                with mock.patch.object(client, "MOST_ROWS", most):
                    predicted = predictor.predict(test[["x"]])
                error = np.square(predicted["mean"].to_numpy() - test["y"].to_numpy()).mean()
                row |= {f"coverage{how}": covered(predicted, test["y"]), f"MSE{how}": float(error)}
            found.append(row)
    return found


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--joined-seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=FIRST)
    chosen = parser.parse_args()
    rows: list[list[object]] = []
    errors: dict[str, list[float]] = {}
    for arm, keys in ARMS.items():
        coverages, chose = [], []
        for seed in range(chosen.first, chosen.first + chosen.seeds):
            found = finished({**keys, "seed": seed}, f"coverage-{arm}-{seed}")
            errors.setdefault(arm, []).append(mse(found))
            coverages.append(found["test"]["coverage_95"])
            chose.append(found["method_details"].get("covariance", arm))
            print(arm, seed, errors[arm][-1], coverages[-1], chose[-1], flush=True)
        said = ", ".join(f"{name} {chose.count(name)}" for name in dict.fromkeys(chose))
        means = float(np.mean(errors[arm])), float(max(errors[arm]))
        rows.append([arm, *means, float(np.mean(coverages)), float(min(coverages)), said])
    for row in rows:
        row.insert(2, float(np.mean(errors[str(row[0])]) / np.mean(errors["convolved"])))
    joins = pd.DataFrame(
        [own for seed in range(chosen.first, chosen.first + chosen.joined_seeds) for own in joined(seed)]
    )
    figures = [f"{name}{how}" for how in (INTEGRATED, POINT) for name in ("MSE", "coverage")]
    by_rows = [
        [int(str(n)), len(part), *(float(part[name].mean()) for name in figures), float(part["coverage"].min())]
        for n, part in joins.groupby("rows")
    ]
    print(by_rows, flush=True)
    lines = [
        "# FedMGP: do bands cover on signals that are what the model says?",
        "",
        f"Made by `python simulations/fedmgp_coverage.py --seeds {chosen.seeds} --joined-seeds {chosen.joined_seeds} "
        f"--first {chosen.first}`: `convolved-signals`, seeds from {chosen.first} on (the prior of φ was chosen on "
        "seeds 0 and 1), no key but method, data and partition; the hidden half of the first of five units, noise "
        "variance .01; nominal coverage .95. Convolved: the same with that covariance given, between which and "
        "`deviations` the defaults choose by the evidence.",
        "",
        table(
            ["run", "MSE", "over convolved", "MSE, worst", "coverage", "coverage, least", "chosen by the evidence"],
            rows,
        ),
        "",
        f"Units that join: {JOINERS} for each of {chosen.joined_seeds} seeds, beside {UNITS} units of 40 rows; "
        f"{HELD_OUT} other rows of each are predicted.",
        "",
        table(["rows", "joiners", *figures, "coverage, least"], by_rows),
        "",
    ]
    (RESULTS / "fedmgp_coverage.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
