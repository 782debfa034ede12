"""Do bands beyond a unit's last row cover? Every cell as target in turn, cut at 12, 30, 50 and 70 % of its cycles.

FedMGP with one shared curve and deviations (``fedmgp.covariance = deviations``) on batteries of one family, every fifth
of 250 cycles. The other cells' curves are whole, the target's rows beyond the cut are seen by nobody, but for the one
number that all targets are divided by. The rounds are those of the method, put to the cells in this process; the search
for θ of each case starts where that of the case before it ended.

    python simulations/fedmgp_intervals.py [--data-dir DIR] [--targets 24] [--every 5]

Cases that are there are not repeated; the page goes to ``simulations/results/fedmgp_intervals.md``.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fedmgp_battery import CYCLES, whole_cells
from fedmgp_common import RESULTS, RUNS, table
from scipy.stats import norm

from fedgp_flower.methods.closed_form import Sums
from fedgp_flower.methods.expansions import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.fedmgp.calibration import calibration, widened
from fedgp_flower.methods.fedmgp.deviating_client import read_values
from fedgp_flower.methods.fedmgp.deviations import DeviatingUnit
from fedgp_flower.methods.fedmgp.messages import Calibration, CalibrationRequest
from strategies.fedmgp_deviations import DeviationState, ended, one_round, start_state
from strategies.fsgp_exact import pack
from strategies.server.questions import Roster, drive

CUTS = (0.12, 0.3, 0.5, 0.7)
MOST_ROUNDS = 60
JITTER = 1e-8
INDUCING = np.linspace(0, 1, 30)[:, None]


@dataclass(frozen=True)
class Cell:
    """A cell that answers as a unit does: x, the share of the cycles, and y, over the root mean square of all."""

    x: np.ndarray
    y: np.ndarray

    @property
    def unit(self) -> DeviatingUnit:
        """Its rows under the model."""
        return DeviatingUnit(*map(torch.from_numpy, (self.x, self.y, INDUCING[:, 0])), jitter=JITTER)

    def expansion(self, request: ExpansionRequest) -> ExpansionShare:
        """Sums and their derivatives."""
        found = self.unit.derivatives(*read_values(request.values))
        parts = [own.numpy() for own in (*found.sums.parts(), found.slopes, found.curvature)]
        return ExpansionShare(*parts, np.array(float(len(self.y))))

    def calibration(self, request: CalibrationRequest) -> Calibration:
        """How well it is predicted from its first rows and the others."""
        total = Sums(*(torch.from_numpy(np.array(own)) for own in (request.precision, request.shift)), torch.zeros(()))
        return calibration(self.unit, *read_values(request.values), total)


def trained(cells: dict[str, Cell], state: DeviationState) -> tuple[DeviationState, int]:
    """Rounds until no step promises more; and their number."""
    best = {name: own for name, own in state.newton.parameters.items() if name[:2] == "q."}
    newton = replace(state.newton, value=None, promised=np.inf, trial=pack(state.newton.theta), asked=best)
    state, rows = replace(state, newton=newton), {name: len(cell.y) for name, cell in cells.items()}
    for number in range(1, MOST_ROUNDS + 1):
        roster = Roster(rows, tuple(rows), (), number)
        state, _ = drive(one_round(state, roster, last=number == MOST_ROUNDS, jitter=JITTER), cells)
        if ended(state.newton, roster):
            break
    return state, number


def scores(target: Cell, cut: float, state: DeviationState, scale: float) -> dict[str, float]:
    """Of the hidden rows: coverage, width and CRPS × 1000, raw and widened, and MSE × 10⁶."""
    seen = target.x <= cut
    unit = Cell(target.x[seen], target.y[seen]).unit
    view = read_values(state.newton.parameters)
    mean, variance = (own.numpy() for own in unit.predict(torch.from_numpy(target.x[~seen]), *view))
    error = mean - target.y[~seen]
    found = {"MSE": 1e6 * scale**2 * float(np.mean(error**2))}
    wide = widened(variance, target.x[~seen], float(target.x[seen].max()), state.factors)
    for name, sd in (("raw", np.sqrt(variance)), ("widened", np.sqrt(wide))):
        z = error / sd
        crps = sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
        found |= {
            f"coverage, {name}": float(np.mean(np.abs(z) < norm.ppf(0.975))),
            f"width, {name}": 1e3 * scale * float(np.mean(2 * norm.ppf(0.975) * sd)),
            f"CRPS, {name}": 1e3 * scale * float(np.mean(crps)),
        }
    return found


def cells_of(source: Path, every: int) -> tuple[dict[str, Cell], float]:
    """All whole cells of the family, and the root mean square that y is divided by."""
    frame = whole_cells(source)
    frame = frame[frame["cycle"] % every == 0]
    scale = float(np.sqrt(np.mean(frame["y"] ** 2)))
    return {
        str(name): Cell(rows["cycle"].to_numpy() / CYCLES, rows["y"].to_numpy() / scale)
        for name, rows in frame.groupby("cell")
    }, scale


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--targets", type=int, default=24)
    parser.add_argument("--every", type=int, default=5, help="keep every n-th cycle")
    chosen = parser.parse_args()
    cells, scale = cells_of(chosen.data_dir / "battery.csv.gz", chosen.every)
    path = RUNS / f"intervals-{chosen.every}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = pd.read_csv(path) if path.exists() else pd.DataFrame({"cut": [], "cell": []})
    state = start_state(INDUCING)
    for name in list(cells)[:: max(1, len(cells) // chosen.targets)][: chosen.targets]:
        for cut in CUTS:
            if ((done["cell"] == name) & (done["cut"] == cut)).any():
                continue
            seen = cells[name].x <= cut
            masked = {**cells, name: Cell(cells[name].x[seen], cells[name].y[seen])}
            state, rounds = trained(masked, state)
            row = {"cut": cut, "cell": name, "rounds": rounds, **scores(cells[name], cut, state, scale)}
            done = pd.concat([done, pd.DataFrame([row])], ignore_index=True)
            done.to_csv(path, index=False)
            print({key: round(own, 3) if isinstance(own, float) else own for key, own in row.items()}, flush=True)
    write(done, chosen.targets, chosen.every)


def write(done: pd.DataFrame, targets: int, every: int) -> None:
    """The page: means over target cells."""
    figures = ["MSE"] + [f"{name}, {kind}" for kind in ("raw", "widened") for name in ("coverage", "width", "CRPS")]
    rows: list[list[object]] = []
    for cut, part in done.groupby("cut"):
        missed = int((part["coverage, widened"] < 0.5).sum())
        rows.append([f"{cut:.0%}", len(part), *(float(part[name].mean()) for name in figures), missed])
    titles = ["cut", "targets", "MSE × 10⁶", *(f"{name} × 1000" if name[0] in "wC" else name for name in figures[1:])]
    lines = [
        "# FedMGP: do bands beyond a unit's last row cover?",
        "",
        f"Made by `python simulations/fedmgp_intervals.py --targets {targets} --every {every}`: 24 cells of one "
        "family, the targets in turn; loss of capacity relative to nominal; nominal coverage .95. The search for θ of "
        "each case starts where that of the case before it ended.",
        "",
        table([*titles, "targets covered by less than half"], rows),
        "",
        "Misses are whole cells: a band that fails a cell fails most of its rows, so that what counts is the number of "
        "cells, and with few of them no factor makes coverage certain.",
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fedmgp_intervals.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
