"""Six cities: SFVI and SFVI-Avg against NUTS.

Wheeze of 537 children, a logistic mixed model at two sites of 300 and 237 children (Hassan et al. 2023, S3.1). z:
posterior mean less that of NUTS, in its standard deviations; sd ratio: posterior standard deviation over that of NUTS,
the least and the largest of the five parameters. R: draws of a child's latent, weighted; R = 1 is the paper's bound.
Unless a row says otherwise L_G is full and R is 1. The reference, `six_cities_nuts.json`, comes from `python -m
simulations.run six_cities --reference-only` and numpyro: NUTS in double precision, non-centred, 4 chains of 1000 + 10
000.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from simulations.common import RESULTS, Row, data_dir, fit, kept_table, posterior_arrays

NUTS = RESULTS / "six_cities_nuts.json"
INPUTS = ("smoke", "age", "smoke_age")
KEYS: dict[str, Any] = {
    "features": ",".join(("child", *INPUTS)),
    "target": "resp",
    "standardise": False,
    "test-fraction": 0.0,
    "partitioner": "natural",
    "partition.column": "site",
    "model.likelihood": "bernoulli",
    "sfvi.model": "glmm",
    "sfvi.unit-column": "child",
    "sfvi.structure": "full",
    "sfvi.learning-rate": 0.02,
}
GRADIENT: dict[str, Any] = {"method": "sfvi", "num-server-rounds": 2000, "sfvi.importance-samples": 1}
AVERAGE: dict[str, Any] = {"method": "sfvi-avg", "num-server-rounds": 20, "sfvi.local-steps": 100, "sfvi.samples": 2}
ARMS: dict[str, dict[str, Any]] = {
    "SFVI-Avg, R = 20": {**AVERAGE, "sfvi.importance-samples": 20},
    "SFVI-Avg, R = 1": {**AVERAGE, "sfvi.importance-samples": 1},
    "SFVI": GRADIENT,
    "SFVI, diagonal L_G": {**GRADIENT, "sfvi.structure": "diagonal"},
    "SFVI, R = 50": {**GRADIENT, "num-server-rounds": 4000, "sfvi.importance-samples": 50},
}


def children() -> pd.DataFrame:
    """Rows of the study with the site of each child; children are shuffled."""
    frame = pd.read_csv(data_dir() / "ohio.csv.gz").rename(columns={"id": "child"})
    first = set(np.random.default_rng(0).permutation(frame["child"].unique())[:300])
    frame["smoke_age"] = frame["smoke"] * frame["age"]
    return frame.assign(site=["a" if child in first else "b" for child in frame["child"]])


def reference(frame: pd.DataFrame) -> Row:
    """Posterior of all children by NUTS."""
    import numpyro
    import numpyro.distributions as dist
    from jax import random
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

    numpyro.enable_x64()
    x, y = frame[list(INPUTS)].to_numpy(float), frame["resp"].to_numpy(int)
    _, unit = np.unique(frame["child"], return_inverse=True)

    def model() -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 10).expand([4]))
        omega = numpyro.sample("omega", dist.Normal(0, 10))
        white = numpyro.sample("white", dist.Normal(0, 1).expand([int(unit.max()) + 1]))
        logits = beta[0] + x @ beta[1:] + (white * np.e ** (-omega))[unit]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    sampler = numpyro.infer.NUTS(model, target_accept_prob=0.9)
    chains = numpyro.infer.MCMC(sampler, num_warmup=1000, num_samples=10000, num_chains=4, chain_method="sequential")
    chains.run(random.PRNGKey(0), extra_fields=("diverging",))
    draws = chains.get_samples(group_by_chain=True)
    joined = np.concatenate([np.asarray(draws["beta"]), np.asarray(draws["omega"])[..., None]], axis=2)
    return {
        "command": "python -m simulations.run six_cities --reference-only",
        "source": f"NUTS, numpyro {numpyro.__version__}, non-centred, 4 chains of 1000 + 10000, target 0.9",
        "mean": joined.mean(axis=(0, 1)).tolist(),
        "sd": joined.std(axis=(0, 1)).tolist(),
        "divergences": int(np.sum(np.asarray(chains.get_extra_fields()["diverging"]))),
        "largest split R-hat": float(split_gelman_rubin(joined).max()),
        "least effective sample size": float(effective_sample_size(joined).min()),
    }


def study(arms: tuple[str, ...] = tuple(ARMS), reference_only: bool = False) -> Iterator[Row]:
    """A row for each arm; or the reference, and nothing else."""
    frame = children()
    if reference_only:
        NUTS.write_text(json.dumps(reference(frame), indent=1) + "\n", encoding="utf-8")
        return
    truth, path = json.loads(NUTS.read_text(encoding="utf-8")), kept_table("children", lambda: frame)
    for arm in arms:
        run = fit({**KEYS, "dataset": path, **ARMS[arm]}, 2)
        arrays = posterior_arrays(run)
        factor = np.eye(len(arrays["q.mean"]))
        if "q.lower" in arrays:
            factor[np.tril_indices(len(factor), -1)] = arrays["q.lower"]
        sd = np.exp(arrays["q.log_scale"]) * np.linalg.norm(factor, axis=1)
        z, ratio = (arrays["q.mean"] - truth["mean"]) / np.array(truth["sd"]), sd / truth["sd"]
        row: Row = {"arm": arm, "rounds": run["rounds"]}
        row |= {f"z {name}": float(value) for name, value in zip(("β₀", *INPUTS, "ω"), z, strict=True)}
        yield row | {"sd ratio, least": float(ratio.min()), "largest": float(ratio.max())}
