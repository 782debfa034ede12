"""Seconds and bytes of a communication of PVI against M_k, M and K, beside the operations that the equations count.

    python simulations/benchmarks/pvi.py

One thread; processor time, the least of several repetitions. Rates of matrix products, triangular solves and Cholesky
factors are those of the same run at the same shapes. Written to ``simulations/results/pvi_benchmark.md``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import least
from fedgp_flower.methods.pvi.factors import PseudoObservations
from fedgp_flower.methods.pvi.hierarchical import Data, Latents, SparseModel, location_scale, sparse_model
from fedgp_flower.methods.pvi.learner import Site, Situation, prior_of, replayed
from fedgp_flower.methods.pvi.pseudo_points import microaggregate
from torch.profiler import ProfilerActivity, profile

from fedgp_flower.gp.gaussian import DiagonalGaussian
from fedgp_flower.gp.optimisers import AdamSettings
from fedgp_flower.gp.placement import limit_threads
from fedgp_flower.methods.pvi.options import PVIOptions
from fedgp_flower.methods.pvi.updates import LocalProblem, adam_update
from fedgp_flower.run.registry import parse_config

RESULT = Path(__file__).parent.parent / "results" / "pvi_benchmark.md"
INPUTS, SAMPLES, STEPS = 8, 4, 4


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of a problem: every site has ``points`` pseudo-observations of a quarter more rows."""

    points: int = 50
    inducing: int = 100
    sites: int = 10

    @property
    def rows(self) -> int:
        """N_k."""
        return round(self.points / 0.8)


CASES = (
    Case(),
    *(Case(points=points) for points in (25, 100, 200)),
    *(Case(inducing=inducing) for inducing in (50, 200)),
    *(Case(sites=sites) for sites in (2, 34)),
)


def problem(case: Case) -> tuple[SparseModel, Data, list[PseudoObservations], Latents]:
    """A site's rows, the factors of the other sites, and q(Z), q(β) in the middle of training."""
    rng = np.random.default_rng(0)
    model = sparse_model(parse_config({"method": "pvi"}).model, INPUTS)
    data = [_rows(rng, case.rows) for _ in range(case.sites)]
    Z = torch.from_numpy(rng.standard_normal(case.inducing * INPUTS))
    hyper = model.initial_hyper() + torch.tensor([1.0] * INPUTS + [0.0, 0.0], dtype=torch.float64)
    narrow = (DiagonalGaussian.from_moments(m, torch.full_like(m, 0.03**2)) for m in (Z, hyper))
    return model, data[0], [microaggregate(own, case.points, 1) for own in data[1:]], Latents(*narrow)


def _rows(rng: np.random.Generator, count: int) -> Data:
    x = rng.standard_normal((count, INPUTS))
    y = np.sin(x[:, 0]) + 0.3 * x[:, 1] + 0.2 * rng.standard_normal(count)
    return Data(torch.from_numpy(x), torch.from_numpy(y))


def settings(**keys: bool | int | float | str) -> PVIOptions:
    """Of a site, as a configuration gives them; pseudo-observations near single rows, as in the paper."""
    flat: dict[str, bool | int | float | str] = {"method": "pvi", "pvi.local-update": "replay"}
    flat["pvi.min-rows-per-pseudo-point"] = 1
    flat |= {f"pvi.{name.replace('_', '-')}": value for name, value in keys.items()}
    options = parse_config(flat).options
    assert isinstance(options, PVIOptions)
    return options


def adam_steps(case: Case) -> Callable[[], object]:
    """A few steps of a local update by Adam."""
    model, data, others, latents = problem(case)
    own, chosen = microaggregate(data, case.points, 1), settings(local_update="adam")
    local = LocalProblem(model, data, others, prior_of(chosen, latents), num_samples=SAMPLES)
    budget = AdamSettings(STEPS, 1e-4, final_fraction=0.0, window=STEPS + 1)
    return lambda: adam_update(local, own, latents, budget, torch.Generator().manual_seed(0))


def replay_visit(case: Case) -> tuple[float, int]:
    """Processor seconds of one visit with the default budgets, and the evaluations it took."""
    model, data, others, latents = problem(case)
    started = time.process_time()
    outcome = replayed(
        Site(model, data, settings(), torch.Generator().manual_seed(0)), Situation(latents, latents, others)
    )
    return time.process_time() - started, outcome.evaluations


def operations(case: Case) -> dict[str, float]:
    """Operations of one value and gradient of the local free energy, by kind of routine, over all samples.

    With J pseudo-observations of the others and P = J + M_k + N_k, the value takes the factors of K_ZZ, the cavity and
    the posterior (M³/3 each), solves with P columns, N_k and M of them (M² each), and C Cᵀ (2M² for J + M_k columns).
    Reverse mode adds to each solve another and a product, to C Cᵀ two products, to a factor two solves and a product.
    """
    M, own, rows = case.inducing, case.points, case.rows
    J = (case.sites - 1) * case.points
    P = J + own + rows
    solves = M**2 * (P + rows + M)
    products = 2 * M**2 * (J + own)
    total = {
        "products": products + 2 * solves + 2 * products + 3 * 2 * M**3,
        "solves": 2 * solves + 3 * 2 * M**3,
        "factors": 3 * M**3 / 3,
    }
    return {kind: SAMPLES * count for kind, count in total.items()}


def routines(case: Case) -> dict[str, tuple[Callable[[], object], float]]:
    """The three routines at the shapes of the case, and their operations."""
    M = case.inducing
    P = case.sites * case.points + case.rows
    A = torch.randn(SAMPLES, M, P, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    B = torch.eye(M, dtype=torch.float64) + A @ A.mT / P
    L = torch.linalg.cholesky(B)
    return {
        "products": (lambda: A @ A.mT, SAMPLES * 2 * M**2 * P),
        "solves": (lambda: torch.linalg.solve_triangular(L, A, upper=False), SAMPLES * M**2 * P),
        "factors": (lambda: torch.linalg.cholesky_ex(B), SAMPLES * M**3 / 3),
    }


def kernel_matrices(case: Case) -> Callable[[], object]:
    """Value and gradient of the kernel matrices of a step: S M P exponentials, which are not among the counted."""
    model, data, others, latents = problem(case)
    inputs = torch.cat([*(own.inputs for own in others), data.inputs, data.inputs[: case.points]]).requires_grad_()
    Z, hyper = (location_scale(latent)[0].repeat(SAMPLES, 1) for latent in (latents.inducing, latents.hyper))
    Z = Z.unflatten(-1, (-1, INPUTS)).requires_grad_()
    hyper = hyper[:, : model.kernel.num_hyper].requires_grad_()

    def action() -> None:
        matrices = [model.kernel.matrix(hyper, Z, inputs), model.kernel.matrix(hyper, Z, Z)]
        torch.autograd.grad(matrices, [Z, hyper, inputs], [torch.ones_like(matrix) for matrix in matrices])

    return action


def traffic(case: Case) -> tuple[float, float]:
    """Bytes up and down of a visit to a site when all sites have factors, as a run counts them."""
    from fedgp_flower.run.in_process import run_in_process

    rng = np.random.default_rng(0)
    data = _rows(rng, case.rows * case.sites)
    frame = pd.DataFrame(data.inputs.numpy(), columns=[f"x{i}" for i in range(INPUTS)]).assign(y=data.targets.numpy())
    with tempfile.TemporaryDirectory() as folder:
        frame.to_csv(Path(folder) / "rows.csv", index=False)
        flat: dict[str, bool | int | float | str] = {
            "method": "pvi",
            "dataset": str(Path(folder) / "rows.csv"),
            "output-dir": folder,
            "name": "run",
            "num-server-rounds": case.sites + 1,
            "test-fraction": 0.0,
            "evaluate-every": 0,
            "keep-predictions": False,
            "model.num-inducing": case.inducing,
            "pvi.local-update": "adam",
            "pvi.first-steps": 1,
            "pvi.steps": 1,
            "pvi.prediction-samples": 2,
            "pvi.min-rows-per-pseudo-point": 1,
        }
        run_in_process(flat | {"baselines.local-only": False, "baselines.pooled": False}, case.sites)
        last = pd.read_csv(Path(folder) / "run" / "history.csv").iloc[-1]
    return float(last["bytes_up"]), float(last["bytes_down"])


def numbers(case: Case) -> tuple[int, int]:
    """Float64 numbers up and down: V, m, w, c of factors, and two natural parameters each for Z and β.

    Up are the site's share of Z and β; down are q and the cavity, the others' factors and the site's own one.
    """
    latents = 2 * (case.inducing * INPUTS + INPUTS + 2)
    factor = case.points * (INPUTS + 2) + 1
    return factor + latents, case.sites * factor + 2 * latents


KINDS = {
    "products": ("aten::bmm", "aten::mm", "aten::addmm", "aten::baddbmm"),
    "solves": ("aten::linalg_solve_triangular", "aten::cholesky_solve", "aten::_cholesky_solve_helper"),
    "factors": ("aten::linalg_cholesky_ex",),
    "copies": ("aten::copy_", "aten::cat", "aten::fill_", "aten::zero_", "aten::tril", "aten::triu", "aten::tril_"),
}


def shares(case: Case) -> list[tuple[str, int, float]]:
    """Self time by kind of operation: calls and milliseconds per evaluation."""
    action = adam_steps(case)
    action()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        action()
    names = {name: kind for kind, members in KINDS.items() for name in members}
    totals: dict[str, list[float]] = {
        kind: [0.0, 0.0] for kind in (*KINDS, "element by element", "Python and autograd")
    }
    for event in found.key_averages():
        kind = names.get(event.key, "element by element" if event.key.startswith("aten::") else "Python and autograd")
        totals[kind][0] += event.count / STEPS
        totals[kind][1] += event.self_cpu_time_total / 1e3 / STEPS
    return [(kind, round(calls), milliseconds) for kind, (calls, milliseconds) in totals.items()]


def row(case: Case) -> str:
    """A line of the table."""
    bare = routines(case)
    actions = {name: action for name, (action, _) in bare.items()}
    best = least({**actions, "step": adam_steps(case), "kernel": kernel_matrices(case)})
    counted, step = operations(case), best["step"] / STEPS
    blas = sum(counted[name] / (count / best[name]) for name, (_, count) in bare.items())
    seconds, evaluations = replay_visit(case)
    bytes_up, bytes_down = traffic(case)
    up, down = numbers(case)
    cells = [
        f"{case.points} | {case.inducing} | {case.sites}",
        f"{sum(counted.values()) / 1e6:.0f} | {1e3 * blas:.1f} | {1e3 * step:.1f} | {step / blas:.1f}",
        f"{1e3 * best['kernel']:.1f} | {150 * step:.1f} | {seconds:.1f} ({evaluations})",
        f"{bytes_up / 1e3:.1f} ({8 * up / 1e3:.1f}) | {bytes_down / 1e3:.1f} ({8 * down / 1e3:.1f})",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = """# PVI: seconds and bytes of a communication

Made by `python simulations/benchmarks/pvi.py`: one thread, processor time, least of repetitions taken in turn; D = 8,
S = 4 draws of (Z, β), tied pseudo-observations, N_k = M_k / 0.8, all sites have factors. `counted`: operations of one
value and gradient of the local free energy, S [M³ + M² (Σ M_m + N_k)] with the constants of value and reverse mode;
`BLAS`: their time at the rates of products, solves and Cholesky factors measured beside, at the same shapes; `step`: a
step of Adam; `kernel`: value and gradient of its kernel matrices alone, which are not among the counted. Adam: 150 such
steps; replay: a visit with the default budgets (evaluations in brackets). kB as a run with Adam counts them, and in
brackets 8 bytes for each number that the method has to send; replay sends no cavity.

"""
COLUMNS = ("M_k", "M", "K", "counted, 10⁶", "BLAS, ms", "step, ms", "step / BLAS", "kernel, ms", "Adam, s", "replay, s")


def main() -> None:
    """Measure and write the tables."""
    limit_threads(1)
    names = (*COLUMNS, "kB up", "kB down")
    lines = [HEAD + "| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for case in CASES:
        lines.append(row(case))
        print(lines[-1], flush=True)
    for case in (CASES[0], CASES[-1]):
        sizes = f"M_k = {case.points}, M = {case.inducing}, K = {case.sites}"
        lines += ["", f"Where a step at {sizes} spends its time, by PyTorch's profiler, which slows it:", ""]
        lines += ["| kind | calls | ms | share |", "| --- | --- | --- | --- |"]
        parts = shares(case)
        total = sum(part[2] for part in parts)
        lines += [f"| {kind} | {calls} | {ms:.1f} | {ms / total:.0%} |" for kind, calls, ms in parts]
    RESULT.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
