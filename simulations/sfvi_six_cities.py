"""Six cities: wheeze of 537 children, a logistic mixed model at two sites of 300 and 237 (Hassan et al. 2023, S3.1).

    python simulations/sfvi_six_cities.py --data-dir DIR [--only "SFVI, R = 50" …]
    python simulations/sfvi_six_cities.py --data-dir DIR --reference    # NUTS on all children; needs numpyro

Every variant is compared with NUTS: z = (mean − NUTS mean) / NUTS sd and the ratio of standard deviations, for
(β₀, smoke, age, smoke × age, ω). The table goes to ``simulations/results/``. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sfvi_runs import RESULTS, RUNS, ensure, write_table

NAME = "sfvi_six_cities"
REFERENCE = RESULTS / "six_cities_nuts.json"
INPUTS = ("smoke", "age", "smoke_age")
SIZES = (300, 237)
TITLE = "Six cities: SFVI and SFVI-Avg against NUTS"
LINES = (
    "Made by `python simulations/sfvi_six_cities.py`. z: posterior mean less that of NUTS, in its standard deviations;",
    "sd ratio: posterior standard deviation over that of NUTS, the least and the largest of the five parameters.",
    "R: draws of a child's latent, weighted; R = 1 is the paper's bound. Unless a row says otherwise weights are N_k,",
    "C_k is on, L_G is full, R is 1, and SFVI-Avg scales the whole local term of the bound. The reference,",
    "`six_cities_nuts.json`, is made by `python simulations/sfvi_six_cities.py --reference`. For seconds",
    "see the [benchmark](sfvi_benchmark.md).",
)

GRADIENT: dict[str, Any] = {"method": "sfvi", "num-server-rounds": 2000, "sfvi.importance-samples": 1}
AVERAGE: dict[str, Any] = {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 100, "sfvi.samples": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "SFVI-Avg, R = 20": {**AVERAGE, "sfvi.importance-samples": 20},
    "SFVI-Avg, R = 20, equal weights": {**AVERAGE, "sfvi.importance-samples": 20, "sfvi.weights": "equal"},
    "SFVI-Avg, R = 1": {**AVERAGE, "sfvi.importance-samples": 1},
    "SFVI-Avg, the paper's scaling": {**AVERAGE, "sfvi.importance-samples": 1, "sfvi.scaling": "likelihood"},
    "SFVI": GRADIENT,
    "SFVI, C off": {**GRADIENT, "sfvi.coupling": False},
    "SFVI, diagonal L_G": {**GRADIENT, "sfvi.structure": "diagonal"},
    "SFVI, R = 50": {**GRADIENT, "num-server-rounds": 4000, "sfvi.importance-samples": 50},
}


def children(data_dir: Path) -> pd.DataFrame:
    """Rows of the study with the site of each child; children are shuffled."""
    frame = pd.read_csv(data_dir / "ohio.csv.gz").rename(columns={"id": "child"})
    order = np.random.default_rng(0).permutation(frame["child"].unique())
    first = set(order[: SIZES[0]])
    frame["smoke_age"] = frame["smoke"] * frame["age"]
    frame["site"] = ["a" if child in first else "b" for child in frame["child"]]
    return frame


def keys(path: Path) -> dict[str, Any]:
    """What all variants share."""
    return {
        "dataset": str(path),
        "features": ",".join(("child", *INPUTS)),
        "target": "resp",
        "standardise": False,
        "test-fraction": 0.0,
        "partitioner": "natural",
        "partition.column": "site",
        "model.likelihood": "bernoulli",
        "sfvi.model": "logistic-mixed",
        "sfvi.unit-column": "child",
        "sfvi.structure": "full",
        "sfvi.initial-local-scale": 1.0,
        "sfvi.learning-rate": 0.02,
    }


def posterior(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of (β₀, β, ω)."""
    from fedgp_flower.run.artefacts import read_posterior
    from strategies.sfvi_avg import factor

    arrays = {name: np.asarray(array) for name, array in read_posterior(folder).arrays.items()}
    found = factor(arrays)
    sd = found if found.ndim == 1 else np.sqrt(np.sum(found**2, axis=1))
    return arrays["q.mean"], sd


def nuts(frame: pd.DataFrame) -> dict[str, Any]:
    """Posterior of all children by NUTS in double precision, non-centred: 4 chains of 1000 + 10 000."""
    import numpyro
    import numpyro.distributions as dist
    from jax import random
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    x, y = frame[list(INPUTS)].to_numpy(float), frame["resp"].to_numpy(int)
    _, unit = np.unique(frame["child"], return_inverse=True)

    def model() -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 10).expand([4]))
        omega = numpyro.sample("omega", dist.Normal(0, 10))
        white = numpyro.sample("white", dist.Normal(0, 1).expand([int(unit.max()) + 1]))
        intercept = white * np.e ** (-omega)
        numpyro.sample("y", dist.Bernoulli(logits=beta[0] + x @ beta[1:] + intercept[unit]), obs=y)

    sampler = NUTS(model, target_accept_prob=0.9)
    chains = MCMC(sampler, num_warmup=1000, num_samples=10000, num_chains=4, chain_method="sequential")
    chains.run(random.PRNGKey(0), extra_fields=("diverging",))
    draws = chains.get_samples(group_by_chain=True)
    joined = np.concatenate([np.asarray(draws["beta"]), np.asarray(draws["omega"])[..., None]], axis=2)
    return {
        "command": "python simulations/sfvi_six_cities.py --reference",
        "source": f"NUTS, numpyro {numpyro.__version__}, non-centred, 4 chains of 1000 + 10000, target 0.9",
        "mean": joined.mean(axis=(0, 1)).tolist(),
        "sd": joined.std(axis=(0, 1)).tolist(),
        "divergences": int(np.sum(np.asarray(chains.get_extra_fields()["diverging"]))),
        "largest split R-hat": float(split_gelman_rubin(joined).max()),
        "least effective sample size": float(effective_sample_size(joined).min()),
    }


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """The z of every mean, and the range of the ratios of standard deviations."""
    truth = json.loads(REFERENCE.read_text())
    mean, sd = posterior(run["folder"])
    z, ratio = (mean - truth["mean"]) / np.array(truth["sd"]), sd / truth["sd"]
    found: dict[str, Any] = {f"z {n}": float(v) for n, v in zip(("β₀", *INPUTS, "ω"), z, strict=True)}
    found |= {"sd ratio, least": float(ratio.min()), "largest": float(ratio.max())}
    return {"rounds": run["rounds"], **found}


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("FEDGP_DATA", ".")))
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--reference", action="store_true", help="make the reference and nothing else")
    chosen = parser.parse_args()
    frame = children(chosen.data_dir)
    if chosen.reference:
        REFERENCE.write_text(json.dumps(nuts(frame), indent=1) + "\n")
        return
    path = RUNS / NAME / "data" / "children.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)
    rows = []
    for variant, own in VARIANTS.items():
        name = "".join(c if c.isalnum() else "-" for c in variant)
        if variant in chosen.only or (RUNS / NAME / name / "metrics.json").exists():
            rows.append({"variant": variant, **figures(ensure(NAME, name, 2, keys(path) | own))})
            write_table(RESULTS / f"{NAME}.md", TITLE, LINES, pd.DataFrame(rows))


if __name__ == "__main__":
    main()
