"""Do bands beyond a unit's last row cover? Every cell as target in turn, cut at 12, 30, 50 and 70 % of its cycles.

FedMGP with one shared curve and deviations (``fedmgp.covariance = deviations``) on batteries of one family, every fifth
of 250 cycles. The other cells' curves are whole, the target's rows beyond the cut are seen by nobody, but for the one
number that all targets are divided by. The rounds are those of the method, put to the cells in this process, those seen
at the same cycles together; the search for θ of each case starts where that of the case before it ended.

    python simulations/fedmgp_intervals.py [--data-dir DIR] [--targets 24] [--every 5]
    python simulations/fedmgp_intervals.py --family hust --targets 8      (or mit: other batteries, nothing chosen anew)
    python simulations/fedmgp_intervals.py --family hust --targets 8 --joiners      (100 rows only with --every 2, say)

Beside it stands functional PCA of the other cells' curves: their mean and principal components, conditioned on the
rows seen. A joiner is a cell that took no part and has 3, 5, 10 or 100 rows anywhere. ``--seconds`` begins no case
after so long. Cases that are there are not repeated; the page goes to ``simulations/results/fedmgp_intervals.md``,
that of another family or of joiners to a page whose name says so.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fedmgp_battery import CYCLES, FAMILY, NOMINAL, PREFIX
from fedmgp_common import RESULTS, RUNS, table
from scipy.stats import norm
from strategies.fsgp_exact import pack

from fedgp_flower.methods.closed_form import Sums, flattened, jacobian, posterior, rows_of_jacobian
from fedgp_flower.methods.expansions import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.fedmgp.calibration import CUTS as CALIBRATION_CUTS
from fedgp_flower.methods.fedmgp.calibration import EDGES, LEAST_SEEN, calibration, widened
from fedgp_flower.methods.fedmgp.deviating_client import read_values
from fedgp_flower.methods.fedmgp.deviations import DeviatingUnit, Theta, Weighing
from fedgp_flower.methods.fedmgp.messages import Calibration, CalibrationRequest
from strategies.fedmgp_deviations import DeviationState, ended, one_round, start_state
from strategies.server.questions import Roster, drive

NOTES = {
    "tju": "Cell #2 at 70 %: its loss at cycle 175, the last row that the cut leaves, is an outlier, .005 above those "
    "of the cycles beside it; normal noise of one variance takes it for the level. Cell #17 lost more than any other "
    "up to cycle 60 and flattens from cycle 80 on as no other does. With 24 targets a cell is .04 of coverage: at 50 % "
    "none was missed, and the bands are wider there than they need to be.",
    "hust": "These cells differ along two curves that they share: who loses little at first bends little later. PCA "
    "has both as components and reads the bend off the level; here there is one shared curve, and a deviation that is "
    "independent of it, so that predictions of cells like 2-2 and 10-5 bend back towards the others. Where a cell "
    "leaves that pattern, as 1-5 does, PCA is far off.",
}
"""What was seen in the data of targets that were missed, or predicted better by PCA."""
CUTS = (0.12, 0.3, 0.5, 0.7)
JOINED = (3, 5, 10, 100)
"""Rows of a joiner, where a cell has more."""
EXPLAINED = 0.99
"""Share of the variance that principal components explain; the rest is noise."""
MOST_ROUNDS = 60
JITTER = 1e-8
INDUCING = np.linspace(0, 1, 30)[:, None]


@dataclass(frozen=True)
class Family:
    """Cells of one kind, their nominal capacity, and the cycles that are looked at."""

    dataset: str
    prefix: str
    nominal: float
    cycles: int
    most: int = 24
    """Cells: the first so many that have all cycles."""

    def frame(self, source: Path) -> pd.DataFrame:
        """Rows of whole cells, with y, the loss of capacity relative to nominal."""
        frame = pd.read_csv(source)
        frame = frame[(frame["dataset"] == self.dataset) & frame["cell"].str.startswith(self.prefix)]
        frame = frame[frame["cycle"] <= self.cycles]
        sizes = frame.groupby("cell")["cycle"].size()
        kept = sorted(sizes[sizes == self.cycles].index)[: self.most]
        return frame[frame["cell"].isin(kept)].assign(y=1 - frame["capacity"] / self.nominal)


FAMILIES = {
    "tju": Family(FAMILY, PREFIX, NOMINAL, CYCLES),
    "hust": Family("HUST", "", 1.1, 1000),
    "mit": Family("MIT", "2017-05-12", 1.1, 500),
}


@dataclass(frozen=True)
class Cell:
    """A cell: x, the share of the cycles, and y, over the root mean square of all."""

    x: np.ndarray
    y: np.ndarray

    @property
    def unit(self) -> DeviatingUnit:
        """Its rows under the model."""
        return DeviatingUnit(*map(torch.from_numpy, (self.x, self.y, INDUCING[:, 0])), jitter=JITTER)

    def until(self, cut: float) -> Cell:
        """Its first rows."""
        return Cell(self.x[self.x <= cut], self.y[self.x <= cut])


class Alike:
    """Cells seen at the same cycles answer together: the sum of what units answer, each matrix factorised once."""

    def __init__(self, cells: list[Cell]) -> None:
        self.unit, self.y = cells[0].unit, torch.from_numpy(np.stack([cell.y for cell in cells]))  # y [K, N]

    def expansion(self, request: ExpansionRequest) -> ExpansionShare:
        """Sums and their derivatives, as :meth:`DeviatingUnit.derivatives` of each cell."""
        theta, q = read_values(request.values)
        leaves = [theta[name].clone().requires_grad_() for name in sorted(theta)]
        weighings = self._weighings(self.unit, self.y, dict(zip(sorted(theta), leaves, strict=True)))
        evidence = torch.stack([own.evidence(q) for own in weighings])  # [K, H]
        log_r, precision = evidence.log_softmax(1), weighings[0].precision
        shifts, constants = torch.stack([w.shift for w in weighings]), torch.stack([w.constant for w in weighings])
        sums = Sums(
            torch.einsum("kh,hij->ij", log_r.exp(), precision),
            torch.einsum("kh,khj->j", log_r.exp(), shifts),
            (log_r.exp() * (constants - log_r)).sum(),
        )
        slopes = jacobian(sums.flat(), leaves)
        gradient = flattened(torch.autograd.grad(evidence.logsumexp(1).sum(), leaves, create_graph=True))
        curvature = rows_of_jacobian(gradient, leaves)
        parts = [own.detach().numpy() for own in (*sums.parts(), slopes, curvature)]
        return ExpansionShare(*parts, np.array(float(self.y.numel())), np.zeros(0), np.zeros(0))

    @torch.no_grad()
    def calibration(self, request: CalibrationRequest) -> Calibration:
        """How well each is predicted from its first rows and the others, as :func:`calibration` of each cell."""
        theta, q = read_values(request.values)
        precision, shift = (torch.from_numpy(np.array(own)) for own in (request.precision, request.shift))
        own = [weighing.sums(q) for weighing in self._weighings(self.unit, self.y, theta)]
        others = [Sums(precision - one.precision, shift - one.shift, one.constant) for one in own]
        shares, hidden = np.zeros((len(CALIBRATION_CUTS), len(EDGES) + 1)), np.zeros(len(CALIBRATION_CUTS))
        for c, cut in enumerate(CALIBRATION_CUTS):
            seen = self.unit.x <= float(cut)
            if LEAST_SEEN <= int(seen.sum()) < len(seen):
                for z in self._misses(seen, theta, others):
                    shares[c] += np.bincount(np.searchsorted(EDGES, z), minlength=len(EDGES) + 1) / len(z)
                hidden[c] = float((~seen).sum() * len(self.y))
        return Calibration(shares, hidden)

    def _misses(self, seen: torch.Tensor, theta: Theta, others: list[Sums]) -> Iterator[np.ndarray]:
        """|y − mean| / sd of each cell's hidden rows."""
        part = DeviatingUnit(self.unit.x[seen], self.y[0, seen], self.unit.inducing, jitter=JITTER)
        x, factor = self.unit.x[~seen], part._factor(theta)
        across, prior = part._covariances(theta, part.x, x), part._covariances(theta, x, x).diagonal(dim1=1, dim2=2)
        gain = torch.cholesky_solve(across, factor)
        left = part._trend(theta, x) - part._trend(theta, part.x) @ gain
        variance = prior - (across * gain).sum(1) + (2 * theta["noise"]).exp()
        weighings = self._weighings(part, self.y[:, seen], theta)
        for k, (weighing, rest) in enumerate(zip(weighings, others, strict=True)):
            first = weighing.sums(posterior(rest.precision, rest.shift)[0])
            q = posterior(rest.precision + first.precision, rest.shift + first.shift)[0]
            r = weighing.responsibilities(q)
            means = torch.einsum("hnk,n->hk", gain, self.y[k, seen]) + torch.einsum("hjk,j->hk", left, q.mean)
            mean, own = r @ means, variance + (q.factor().mT @ left).square().sum(1)
            sd = (r @ (own + (means - r @ means).square())).sqrt()
            yield ((self.y[k, ~seen] - mean).abs() / sd).numpy()

    @staticmethod
    def _weighings(unit: DeviatingUnit, y: torch.Tensor, theta: Theta) -> list[Weighing]:
        """:meth:`DeviatingUnit.weighing` at y [K, N], from one factorisation."""
        trend, factor = unit._trend(theta, unit.x), unit._factor(theta)
        rows, J = torch.cat([trend, y]), len(trend)
        solved = torch.linalg.solve_triangular(factor, rows.mT.expand(len(factor), -1, -1), upper=False)
        trended, targets = solved[:, :, :J], solved[:, :, J:]
        precision, shift, fit = trended.mT @ trended, trended.mT @ targets, targets.square().sum(1)
        whole = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1) + y.shape[1] * math.log(2 * math.pi)
        prior = theta["roughness"].log_softmax(0)
        return [Weighing(precision, shift[:, :, k], prior - 0.5 * (fit[:, k] + whole)) for k in range(len(y))]


def check(cells: list[Cell]) -> None:
    """What cells answer together is the sum of what units of the method answer.

    Raises:
        AssertionError: it is not.
    """
    state = start_state(INDUCING)
    values, together = state.newton.parameters, Alike(cells)
    found = [cell.unit.derivatives(*read_values(values)) for cell in cells]
    share = together.expansion(ExpansionRequest(values))
    for name in ("precision", "shift", "constant"):
        np.testing.assert_allclose(getattr(share, name), sum(getattr(d.sums, name).numpy() for d in found), rtol=1e-9)
    for name in ("slopes", "curvature"):
        wanted = sum(getattr(d, name).numpy() for d in found)
        np.testing.assert_allclose(getattr(share, name), wanted, rtol=1e-7, atol=1e-7 * np.abs(wanted).max())
    total = Sums(*(torch.from_numpy(2 * own) for own in (share.precision, share.shift)), torch.zeros(()))
    each = [calibration(cell.unit, *read_values(values), total) for cell in cells]
    judged = together.calibration(CalibrationRequest(values, total.precision.numpy(), total.shift.numpy()))
    np.testing.assert_allclose(judged.shares, sum(own.shares for own in each), atol=1e-12)


def trained(cells: dict[str, Alike], state: DeviationState) -> tuple[DeviationState, int]:
    """Rounds until no step promises more; and their number."""
    best = {name: own for name, own in state.newton.parameters.items() if name[:2] == "q."}
    newton = replace(state.newton, value=None, promised=np.inf, trial=pack(state.newton.theta), asked=best)
    state, rows = replace(state, newton=newton), {name: cell.y.numel() for name, cell in cells.items()}
    for number in range(1, MOST_ROUNDS + 1):
        roster = Roster(rows, tuple(rows), (), number)
        state, _ = drive(one_round(state, roster, last=number == MOST_ROUNDS, jitter=JITTER), cells)
        if ended(state.newton, roster):
            break
    return state, number


def scores(target: Cell, cut: float, state: DeviationState, scale: float) -> dict[str, float]:
    """Of the hidden rows: coverage, width and CRPS × 1000, raw and widened, and MSE × 10⁶."""
    seen = target.x <= cut
    unit = target.until(cut).unit
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


def functional_pca(others: list[Cell], target: Cell, seen: np.ndarray, scale: float) -> dict[str, float]:
    """Scores of the hidden rows under principal components of the others' curves, widened as those of units are.

    y ~ N(μ, Σ_j λ_j e_j e_jᵀ + s² I), conditioned on the rows seen; the factor is the 95 % point of |y − mean| over
    1.96 sd of the hidden rows of the others, each left out in turn.
    """
    curves = np.stack([cell.y for cell in others])

    def conditioned(known: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = known.mean(0)
        _, singular, axes = np.linalg.svd(known - mean, full_matrices=False)
        variances = singular**2 / (len(known) - 1)
        count = int(np.searchsorted(np.cumsum(variances) / variances.sum(), EXPLAINED)) + 1
        noise = max(float(variances[count:].sum() / len(mean)), 1e-6)
        whole = (axes[:count].T * variances[:count]) @ axes[:count] + noise * np.eye(len(mean))
        gain = np.linalg.solve(whole[np.ix_(seen, seen)], whole[np.ix_(seen, ~seen)]).T
        left = whole[np.ix_(~seen, ~seen)] - gain @ whole[np.ix_(seen, ~seen)]
        return mean[~seen] + gain @ (y[seen] - mean[seen]), np.sqrt(left.diagonal())

    ratios = []
    for k, curve in enumerate(curves):
        mean, sd = conditioned(np.delete(curves, k, 0), curve)
        ratios.append(np.abs(curve[~seen] - mean) / (norm.ppf(0.975) * sd))
    mean, sd = conditioned(curves, target.y)
    sd = sd * max(float(np.quantile(np.concatenate(ratios), 0.95)), 1.0)
    z = (mean - target.y[~seen]) / sd
    crps = sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    return {
        "coverage, PCA": float(np.mean(np.abs(z) < norm.ppf(0.975))),
        "CRPS, PCA": 1e3 * scale * float(np.mean(crps)),
    }


def joined(target: Cell, state: DeviationState, scale: float, number: int) -> list[dict[str, float]]:
    """Scores of a cell that took no part, from a few rows anywhere."""
    found = []
    view = read_values(state.newton.parameters)
    for rows in (own for own in JOINED if own < len(target.x)):
        seen = np.zeros(len(target.x), dtype=bool)
        seen[np.random.default_rng([number, rows]).permutation(len(target.x))[:rows]] = True
        unit = Cell(target.x[seen], target.y[seen]).unit
        mean, variance = (own.numpy() for own in unit.predict(torch.from_numpy(target.x[~seen]), *view))
        wide = widened(variance, target.x[~seen], float(target.x[seen].max()), state.factors)
        error = mean - target.y[~seen]
        row = {"rows": rows, "MSE": 1e6 * scale**2 * float(np.mean(error**2))}
        for name, sd in (("raw", np.sqrt(variance)), ("widened", np.sqrt(wide))):
            row |= {f"coverage, {name}": float(np.mean(np.abs(error / sd) < norm.ppf(0.975)))}
            row |= {f"width, {name}": 1e3 * scale * float(np.mean(2 * norm.ppf(0.975) * sd))}
        found.append(row)
    return found


def cells_of(source: Path, every: int, family: Family) -> tuple[dict[str, Cell], float]:
    """All whole cells of the family, and the root mean square that y is divided by."""
    frame = family.frame(source)
    frame = frame[frame["cycle"] % every == 0]
    scale = float(np.sqrt(np.mean(frame["y"] ** 2)))
    return {
        str(name): Cell(rows["cycle"].to_numpy() / family.cycles, rows["y"].to_numpy() / scale)
        for name, rows in frame.groupby("cell")
    }, scale


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--family", choices=list(FAMILIES), default="tju")
    parser.add_argument("--targets", type=int, default=24)
    parser.add_argument("--every", type=int, help="keep every n-th cycle; fifty rows if not given")
    parser.add_argument("--joiners", action="store_true", help="cells that took no part, with a few rows")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after so long")
    chosen = parser.parse_args()
    family = FAMILIES[chosen.family]
    every = chosen.every or family.cycles // 50
    cells, scale = cells_of(chosen.data_dir / "battery.csv.gz", every, family)
    kind = "-joiners" if chosen.joiners else ""
    path = RUNS / f"intervals{'' if chosen.family == 'tju' else '-' + chosen.family}{kind}-{every}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = pd.read_csv(path) if path.exists() else pd.DataFrame({"cut": [], "rows": [], "cell": []})
    state, begun = start_state(INDUCING), time.monotonic()
    check(list(cells.values())[:2])
    names = list(cells)[:: max(1, len(cells) // chosen.targets)][: chosen.targets]
    for number, name in enumerate(names):
        whole = [cell for other, cell in cells.items() if other != name]
        for cut in () if chosen.joiners else CUTS:
            if ((done["cell"] == name) & (done["cut"] == cut)).any() or time.monotonic() - begun > chosen.seconds:
                continue
            state, rounds = trained({"others": Alike(whole), "target": Alike([cells[name].until(cut)])}, state)
            beside = functional_pca(whole, cells[name], cells[name].x <= cut, scale)
            row = {"cut": cut, "cell": name, "rounds": rounds, **scores(cells[name], cut, state, scale), **beside}
            done = pd.concat([done, pd.DataFrame([row])], ignore_index=True)
            done.to_csv(path, index=False)
            print({key: round(own, 3) if isinstance(own, float) else own for key, own in row.items()}, flush=True)
        if chosen.joiners and not (done["cell"] == name).any() and time.monotonic() - begun < chosen.seconds:
            state, rounds = trained({"others": Alike(whole)}, state)
            found = [{"cell": name, "rounds": rounds, **row} for row in joined(cells[name], state, scale, number)]
            done = pd.concat([done, pd.DataFrame(found)], ignore_index=True)
            done.to_csv(path, index=False)
            print(found, flush=True)
    words = (
        f"{'' if chosen.family == 'tju' else f'--family {chosen.family} '}--targets {chosen.targets} --every {every}"
    )
    if chosen.joiners:
        write_joiners(done, words + " --joiners", chosen.family, len(cells))
    else:
        write(done, words, chosen.family, len(cells))


def write_joiners(done: pd.DataFrame, words: str, family: str, count: int) -> None:
    """The page of joiners: means over cells."""
    names = ["MSE"] + [f"{name}, {kind}" for kind in ("raw", "widened") for name in ("coverage", "width")]
    rows = [[int(n), len(part), *(float(part[name].mean()) for name in names)] for n, part in done.groupby("rows")]
    lines = [
        f"# FedMGP: cells that join with a few rows, {family.upper()}",
        "",
        f"Made by `python simulations/fedmgp_intervals.py {words}`: {count} cells, the joiners in turn, which took no "
        "part; rows anywhere, predicted at the cell's others; nominal coverage .95.",
        "",
        table(["rows", "joiners", *(f"{name} × 1000" if name[0] == "w" else name for name in names)], rows),
        "",
    ]
    (RESULTS / f"fedmgp_intervals_joiners_{family}.md").write_text("\n".join(lines))


def above(done: pd.DataFrame) -> Iterator[str]:
    """Where CRPS exceeds that of PCA, at how many targets, and how much of it is one of them."""
    for cut, part in done.groupby("cut"):
        gap = 1.0 * (part["CRPS, widened"] - part["CRPS, PCA"])
        if gap.mean() > 0:
            worst = gap.idxmax()
            yield (
                f"At {cut:.0%} the CRPS is above that of PCA by {gap.mean():.2f}, at {int((gap > 0).sum())} of "
                f"{len(part)} targets; without cell {part.loc[worst, 'cell']} the difference is "
                f"{gap.drop(worst).mean():+.2f}.\n"
            )


def write(done: pd.DataFrame, words: str, family: str, count: int) -> None:
    """The page: means over target cells, and the cells that were missed."""
    figures = ["MSE"] + [f"{name}, {kind}" for kind in ("raw", "widened") for name in ("coverage", "width", "CRPS")]
    figures += [name for name in ("coverage, PCA", "CRPS, PCA") if name in done]
    rows: list[list[object]] = []
    for cut, part in done.groupby("cut"):
        missed = int((part["coverage, widened"] < 0.5).sum())
        others = float(part["MSE"].drop(part["MSE"].idxmax()).mean())
        rows.append([f"{cut:.0%}", len(part), others, *(float(part[name].mean()) for name in figures), missed])
    figures_of = [f"{name} × 1000" if name[0] in "wC" else name for name in figures[1:]]
    titles = ["cut", "targets", "MSE × 10⁶ without the worst target", "MSE × 10⁶", *figures_of]
    missed = done[done["coverage, widened"] < 0.8].sort_values(["cut", "cell"])
    names = ["cut", "cell", "MSE", "width, widened", "coverage, widened"]
    lines = [
        f"# FedMGP: do bands beyond a unit's last row cover?{'' if family == 'tju' else f' {family.upper()}'}",
        "",
        f"Made by `python simulations/fedmgp_intervals.py {words}`: {count} cells of one family, the targets in turn; "
        "loss of capacity relative to nominal; nominal coverage .95. The search for θ of each case starts where that "
        "of the case before it ended. PCA: functional PCA of the other cells with a leave-one-unit-out factor.",
        "",
        table([*titles, "targets covered by less than half"], rows),
        "",
        "Targets covered by less than 80 %:",
        "",
        table(["cut", "cell", "MSE × 10⁶", "width × 1000", "coverage"], missed[names].to_numpy().tolist()),
        "",
        "Misses are whole cells: a band that fails a cell fails most of its rows, so that what counts is the number of "
        "cells, and with few of them no factor makes coverage certain.",
        "",
        *above(done),
        NOTES.get(family, ""),
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"fedmgp_intervals{'' if family == 'tju' else f'_{family}'}.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
