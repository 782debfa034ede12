"""Section 5.1 of Chung and Al Kontar (2024): five units, one with half its curve unobserved, 20 data sets.

For every seed: FedMGP with exact rounds (20), with pseudo-gradients (20 rounds and 5 exact ones; 60 alone), perturbed
pseudo-inputs, independent GPs, FedPoly, ModularGP, and the pooled optimum of the same model by L-BFGS from several
starts, whose bound the exact rounds are compared with. A figure shows the units of the first seed with the truth.

    python simulations/fedmgp_paper.py [--seeds 20] [--first 0] [--skip-pseudo]

Runs that are complete are not repeated. Table and figure go to ``simulations/results/fedmgp_paper.md``.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from fedmgp_common import RESULTS, RUNS, SIGNALS, finished, metrics, mse, spread, table
from matplotlib.figure import Figure

PSEUDO = {
    "fedmgp.update": "pseudo-gradient",
    "num-server-rounds": 25,
    "optimizer.learning-rate": 0.03,
    "optimizer.batch-size": 50,
}
ARMS: dict[str, dict[str, object]] = {
    "FedMGP, exact": {"baselines.local-only": True, "baselines.pooled": True, "baselines.max-evaluations": 300},
    "FedMGP, pseudo-inputs ± 0.05": {"fedmgp.perturbation": 0.05 / 0.58},
    "FedMGP, pseudo-inputs ± 0.1": {"fedmgp.perturbation": 0.1 / 0.58},
    "FedPoly": {"method": "fed-poly"},
    "ModularGP": {"method": "modular-gp", "baselines.max-evaluations": 200},
    "FedMGP, pseudo-gradients, then 5 exact rounds": PSEUDO,
    "FedMGP, pseudo-gradients alone": PSEUDO | {"fedmgp.final-rounds": 0, "num-server-rounds": 60},
}
"""Arm → keys that differ from exact rounds; inputs have a standard deviation of about 0.58."""


def run_name(seed: int, arm: str) -> str:
    """Folder of a run."""
    words = "".join(c if c.isalnum() or c == "." else "-" for c in arm.lower())
    return f"signals-{seed}-{words}"


def pooled_bound(seed: int) -> float:
    """The best bound of L-BFGS on all rows in one place, from three starting lengthscales."""
    path = RUNS / run_name(seed, "FedMGP, exact") / "pooled-bound.json"
    if path.exists():
        return float(json.loads(path.read_text()))
    from fedgp_flower.methods.fedmgp.references import fit_pooled, starting_point

    from fedgp_flower.data.sites import load_all_sites
    from fedgp_flower.data.standardisation import Preparation
    from fedgp_flower.run.artefacts import read_posterior
    from fedgp_flower.run.registry import parse_config

    posterior = read_posterior(path.parent)
    preparation = Preparation.from_wire(posterior.arrays, json.dumps(posterior.schema))
    sites = load_all_sites(parse_config({**SIGNALS, "seed": seed}), 5)
    units = [(part.x, part.y) for part in (site.encode(preparation) for site in sites)]
    W = posterior.arrays["latents.inducing"]
    starts = [starting_point(units, W, multiples=(multiple,)) for multiple in (0.5, 1.0, 2.0)]
    bound = fit_pooled(units, starts, max_evaluations=600).bound
    path.write_text(json.dumps(bound))
    return bound


def truth(seed: int) -> list[np.ndarray]:
    """What the units of a data set would show without noise, on 200 even points of [−1, 1].

    The generator runs as ever, but its noise, the one draw of more than one dimension, is zero.
    """
    from unittest import mock

    from fedgp_flower.data import synthetic

    kept = synthetic.generator

    def silent(*words: object) -> mock.Mock:
        draw = kept(*words)
        own = mock.Mock(wraps=draw)
        own.standard_normal = lambda size: draw.standard_normal(size) if isinstance(size, int) else np.zeros(size)
        return own

    with mock.patch.object(synthetic, "generator", silent):
        frame, _ = synthetic.convolved_signals(seed)
    return [part["y"].to_numpy() for _, part in frame.groupby("unit")]


def draw(seed: int) -> None:
    """Every unit of one data set: rows, federated mean and 95 % band, independent GP, and the truth."""
    found = finished({**SIGNALS, "seed": seed, "keep-predictions": True}, run_name(seed, "figure"))
    units = found["method_details"]["units"]
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes, x = figure.subplots(1, len(units), sharex=True), np.linspace(-1, 1, 200)
    for ax, (label, own), f in zip(axes, sorted(units.items()), truth(seed), strict=True):
        grid, mean, sd = (np.asarray(own[name]) for name in ("grid", "mean", "sd"))
        ax.fill_between(grid, mean - 1.96 * sd, mean + 1.96 * sd, color="#bcd3e8", lw=0, label="95 % of observations")
        ax.plot(own["x"], own["y"], ".", color="#888888", ms=2.5, label="observed")
        ax.plot(grid, own["alone.mean"], "--", color="#c8691c", lw=1, label="independent GP")
        ax.plot(grid, mean, color="#1f5f99", label="FedMGP")
        ax.plot(x, f, ":", color="black", lw=1.2, label="truth")
        ax.set(title=label, xlabel="x", xlim=(-1.1, 1.1))
    axes[0].set(ylabel="y")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=5, loc="outside lower center")
    figure.savefig(RESULTS / "fedmgp_paper.png", dpi=150)


def write(seeds: int) -> None:
    """The table of what is there."""
    done = [seed for seed in range(seeds) if metrics(run_name(seed, "FedMGP, exact"))]
    rows: list[list[object]] = []
    exact = [metrics(run_name(seed, "FedMGP, exact")) or {} for seed in done]
    beside = {"independent GPs": "local_only", "pooled, same model": "pooled"}
    for arm in ARMS:
        found = [own for seed in range(seeds) if (own := metrics(run_name(seed, arm)))]
        if found:
            errors = [mse(own) for own in found]
            cover = float(np.mean([own["test"]["coverage_95"] for own in found]))
            flat = sum(own["method_details"].get("collapsed", False) for own in found)
            seconds = float(np.mean([own["seconds"]["training"] for own in found]))
            rows.append([arm, len(found), spread(errors), float(np.median(errors)), max(errors), cover, flat, seconds])
    for arm, key in beside.items():
        errors = [own[key]["rmse"] ** 2 for own in exact]
        cover = float(np.mean([own[key]["coverage_95"] for own in exact]))
        rows.append([arm, len(errors), spread(errors), float(np.median(errors)), max(errors), cover, "", ""])
    gaps = [pooled_bound(seed) - metrics(run_name(seed, "FedMGP, exact"))["method_details"]["bound"] for seed in done]
    titles = ["method", "seeds", "MSE", "median", "worst", "95 % coverage", "collapsed", "s of training"]
    lines = [
        "# FedMGP, Section 5.1: the unobserved half of unit 1",
        "",
        "Made by `python simulations/fedmgp_paper.py`. Mean squared error against noisy held-out values; the noise "
        "alone is 0.0100, the paper's FedMGP 0.012 ± 0.003.",
        "",
        table(titles, rows),
        "",
        f"Bound of the pooled optimum minus that of 20 exact rounds, in nats, over {len(done)} seeds: "
        f"largest {max(gaps):.3f}, mean {np.mean(gaps):.3f}, smallest {min(gaps):.3f}. L-BFGS takes the best of three "
        "starting lengthscales and stops by its own rule, so that the exact rounds may end above it.",
        "",
        "The units of seed 0; of the first one the right half was never seen:",
        "",
        "![five units](fedmgp_paper.png)",
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fedmgp_paper.md").write_text("\n".join(lines))


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--skip-pseudo", action="store_true", help="leave out the arms with pseudo-gradients")
    chosen = parser.parse_args()
    for seed in range(chosen.first, chosen.seeds):
        for arm, changes in ARMS.items():
            if not (chosen.skip_pseudo and "pseudo-gradients" in arm):
                found = finished({**SIGNALS, **changes, "seed": seed}, run_name(seed, arm))
                print(f"seed {seed:2d}  {arm:32s} MSE {mse(found):.4f}", flush=True)
        pooled_bound(seed)
    write(chosen.seeds)
    if chosen.first == 0:
        draw(0)


if __name__ == "__main__":
    main()
