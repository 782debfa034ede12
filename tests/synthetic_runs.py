"""Finished run folders made from known Gaussians, for tests of what reads them."""

from dataclasses import replace

import numpy as np
from scipy.stats import norm

from fedgp_flower.config import parse
from fedgp_flower.options import MethodOptions
from fedgp_flower.outcome import Posterior
from fedgp_flower.run.artefacts import RunFolder, RunMetrics
from fedgp_flower.scores import bernoulli_scores, gaussian_scores
from fedgp_flower.shared_messages import ScoreSums
from strategies.server.scoring import as_baseline, combine


class Truth:
    """Predicts nearly the truth: mean and sd of a noisy observation, wider away from the origin."""

    def __call__(self, x):
        mean = 40.5 + 10 * np.sin(2 * x).sum(axis=1) / np.sqrt(x.shape[1])
        return mean, 3 + 0.5 * np.abs(x).max(axis=1)

    def quantiles(self, x, levels):
        mean, sd = self(x)
        return mean + sd * norm.ppf(levels)[:, None]


predict = Truth()


def regression_site(rng, rows, inputs, worse=0.0):
    x = rng.uniform(-3, 3, (rows, inputs))
    mean, sd = predict(x)
    y = mean - 0.5 + sd * rng.normal(size=rows)
    shifted = mean + worse * rng.normal(size=rows)
    arrays = {"prediction.mean": mean, "prediction.sd": sd, "prediction.target": y}
    if inputs <= 2:
        arrays["prediction.input"] = x
    return gaussian_scores(mean, sd, y), gaussian_scores(shifted, np.hypot(sd, 0.6 * worse), y), arrays


def classification_site(rng, rows, _inputs, worse=0.0):
    p = rng.beta(0.8, 0.8, rows)
    label = rng.random(rows) < p
    shrunk = p + (0.5 - p) * min(1.0, 0.12 * worse)
    arrays = {"prediction.probability": p, "prediction.target": label.astype(float)}
    return bernoulli_scores(p, label), bernoulli_scores(shrunk, label), arrays


def make_run(
    folder, *, inputs=1, sites=6, rows=40, baselines=True, keep=True, classes=False, failures=(), labels=(), seed=0
):
    rng = np.random.default_rng(seed)
    make = classification_site if classes else regression_site
    made = {str(k): make(rng, int(rows * (0.5 + k / max(sites - 1, 1))), inputs, 1.0 + k % 4) for k in range(sites)}
    own = combine({k: ScoreSums.of(v[0]) for k, v in made.items()}, 1.0 if classes else 10.0)
    local = combine({k: ScoreSums.of(v[1]) for k, v in made.items()}, 1.0)
    names = [f"x{d + 1}" for d in range(inputs)]
    flat = {"output-dir": str(folder), "name": f"run-{inputs}d-{seed}", "dataset": "synthetic", "seed": seed}
    run = RunFolder.open(parse({"method": "fsgp"} | flat, {"fsgp": MethodOptions}))
    headline = "accuracy" if classes else "rmse"
    for number in range(21):
        row = {"round": number, "communications": number + 1, "seconds": 0.4 + 0.02 * number}
        row |= {"bytes_up": 9000 * sites, "bytes_down": 12000 * sites, "objective": -2 - 3 * np.exp(-number / 5)}
        if number % 2 == 0:
            row |= {f"test_{name}": own["test"][name] + (2.5 * np.exp(-number / 3)) for name in ("nll", headline)}
        run.append_history(row)
    levels = {"kind": "categorical", "levels": ["benign", "malignant"]} if classes else {"kind": "numeric"}
    arrays = {"inducing.mean": np.zeros(4), "input.mean": np.zeros(inputs), "input.scale": np.full(inputs, 1.7)}
    words, kinds = dict.fromkeys(arrays, "what it is"), dict.fromkeys(arrays, "standardised")
    schema = {"features": [{"name": n, "kind": "numeric"} for n in names], "target": {"name": "yield", **levels}}
    model, likelihood = {"kernel": "rbf", "jitter": 1e-8}, "bernoulli" if classes else "gaussian"
    saved = Posterior(arrays, words, kinds, "mean(x) = k(x, Z) Kzz⁻¹ m", model)
    run.write_posterior(replace(saved, schema=schema, method="fsgp", likelihood=likelihood))
    if keep:
        run.write_predictions({k: v[2] for k, v in made.items()}, names if inputs <= 2 and not classes else ())
    shown = [{**row, "training_rows": 4 * row["num_examples"]} for row in own["per_site"]]
    for row, label in zip(shown, labels, strict=False):
        row["label"] = label
    run.write_metrics(
        RunMetrics(
            **{"method": "fsgp", "dataset": "synthetic", "sites": sites, "rounds": 20, "communications": 21},
            seconds={"total": 14.2, "setup": 1.1, "training": 12.0, "evaluation": 1.1},
            bytes={"up": 9000 * sites * 21, "down": 12000 * sites * 21},
            **{**own, "per_site": shown},
            local_only=as_baseline(local) if baselines else None,
            pooled=as_baseline(own) if baselines else None,
            failures=failures,
            repairs={"extra jitter in Kzz": 3} if failures else {},
        )
    )
    return run.path
