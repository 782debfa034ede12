"""Grades, counts, times to an event, outliers and noise that varies at the defaults.

Ten sites of rows dealt at random, a fifth of the rows held out (wine: its standard splits, a tenth); no key but the
likelihood and the columns that it reads. NLL is in nats a row; every figure is a mean over seeds or splits ± its
standard error. *Truth* is the NLL of the law that drew the rows.

**Grades.** Wine quality, whole numbers from 3 to 8, of which *gaussian, rounded* has the mass between k − ½ and k + ½.
**Counts.** *claims*: negative binomial with dispersion ½ and exposures from .1 to 3; *wheeze*: few attacks of children
in two to six years of a clinic, by age, smoke and city, Poisson; *visits*: the share of visits with wheeze, binomial.
Of discrete intervals the share that they should hold is counted, see `fedgp_flower.scores`. **Times.** *aft*: Weibull
times, a function of four columns, 40 % censored; *gbsg2* and *rossi*: breast cancer and recidivism, as lifelines brings
them. Concordance of all held-out rows, by the median and by a Cox regression of all training rows (lifelines);
*survival error* is the largest difference of the predicted and the observed share without an event at the quartiles of
time, and *together* that of the held-out rows of all seeds. **Outliers.** A function of two columns with noise .1, and
so many training rows moved by Cauchy's law of scale 2; held-out rows are clean. *Clean alone* is a fit of the rows that
were not moved, with the same likelihood or with normal noise. Who says that so large a share of rows lies anywhere, as
it does, gives clean rows a density that is lower by −log(1 − share). **Noise.** One input: a sine whose noise grows
from .1 to 1, and an acceleration like that of Silverman's motorcycles, quiet before the impact. *Left* and *right* are
shares of held-out rows in their 95 % intervals in the two halves; *gaussian* is the default, whose errors have a scale
that varies where left-out rows ask for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import expit, ndtr

from simulations import common
from simulations.common import Keys, Row, fit, kept_table, spread

SITES, ROWS = 10, 2000
PARTS = ("grades", "counts", "times", "outliers", "noise")


def table_of(rows: list[Row], by: str) -> Iterator[Row]:
    """Means ± standard errors of the numbers of rows that agree in ``by`` and ``method``."""
    for names, group in pd.DataFrame(rows).groupby([by, "method"], sort=False):
        numbers = group.drop(columns=[by, "method"]).dropna(axis=1, how="all")
        found = {str(name): spread(column.dropna().astype(float)) for name, column in numbers.items()}
        yield {by: names[0], "method": names[1], "runs": int(numbers.iloc[:, 0].count()), **found}


# ------------------------------------------------------------------------------------------------ grades


def rounded(run: Row) -> float:
    """NLL of the grades of a run of numbers, whose errors are a mixture of normals."""
    if common.CHECKING:
        return 1.0
    from fedgp_flower.gp.error_law import TAILS
    from fedgp_flower.run.artefacts import read_run
    from fedgp_flower.run.predict import Predictor

    rows = pd.read_csv(run["folder"] / "predictions.csv")
    factors, shares = Predictor.of(read_run(run["folder"])).saved.arrays.get(TAILS, np.ones((2, 1)))
    edges = np.array([-np.inf, *np.arange(3.5, 8), np.inf])
    at = (edges - rows["mean"].to_numpy()[:, None]) / rows["sd"].to_numpy()[:, None]
    grade = rows["target"].round().astype(int).to_numpy() - 3
    low, high = (np.take_along_axis(at, grade[:, None] + above, 1) for above in (0, 1))
    mirrored = low + high > 0
    low, high = np.where(mirrored, -high, low), np.where(mirrored, -low, high)
    return -float(np.log((ndtr(high / factors) - ndtr(low / factors)) @ shares).mean())


def grades(seeds: tuple[int, ...]) -> Iterator[Row]:
    """Wine quality."""
    for split in seeds:
        keys: Keys = {"dataset": "uci/wine", "split": split}
        for likelihood in ("ordinal", "categorical"):
            run = fit({**keys, "model.likelihood": likelihood}, SITES)
            test, cost = run["test"], run["exchanges"]
            yield {"method": likelihood, "NLL": test["nll"], "accuracy": test["accuracy"], "exchanges": cost}
        gaussian = fit({**keys, "keep-predictions": True}, SITES)
        yield {"method": "gaussian, rounded", "NLL": rounded(gaussian), "exchanges": gaussian["exchanges"]}


# ------------------------------------------------------------------------------------------------ counts


def claims(seed: int) -> tuple[pd.DataFrame, Callable[[pd.DataFrame], Any]]:
    """Negative binomial counts with exposure."""
    draw = np.random.default_rng([seed, 1])
    frame = pd.DataFrame(draw.uniform(-2, 2, (ROWS, 2)), columns=["x0", "x1"])
    frame["years"] = draw.uniform(0.1, 3, ROWS)

    def law(rows: pd.DataFrame) -> Any:
        mean = rows["years"] * np.exp(0.5 + np.sin(2 * rows["x0"]) + 0.5 * rows["x1"])
        return stats.nbinom(2.0, 2.0 / (2.0 + mean))

    return frame.assign(count=law(frame).rvs(random_state=draw)), law


def children(seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Children of six cities, and what their logarithm of a rate is."""
    draw = np.random.default_rng([seed, 2])
    frame = pd.DataFrame({"age": draw.integers(6, 12, ROWS), "smoke": draw.integers(0, 2, ROWS)})
    frame["city"] = [f"city {k}" for k in draw.integers(0, 6, ROWS)]
    frame["years"] = draw.integers(2, 7, ROWS)
    city = frame["city"].str[-1].astype(int).to_numpy()
    return frame, (-1.2 + 0.46 * frame["smoke"] - 0.22 * (frame["age"] - 9) + 0.3 * np.sin(2 * city)).to_numpy()


def wheeze(seed: int) -> tuple[pd.DataFrame, Callable[[pd.DataFrame], Any]]:
    """Attacks in the years of a child."""
    frame, _ = children(seed)

    def law(rows: pd.DataFrame) -> Any:
        return stats.poisson(rows["years"] * np.exp(children(seed)[1][rows.index]))

    return frame.assign(count=law(frame).rvs(random_state=seed)), law


def visits(seed: int) -> tuple[pd.DataFrame, Callable[[pd.DataFrame], Any]]:
    """Visits with wheeze among those of a child."""
    frame, _ = children(seed)

    def law(rows: pd.DataFrame) -> Any:
        return stats.binom(rows["years"], expit(children(seed)[1][rows.index]))

    return frame.assign(count=law(frame).rvs(random_state=seed)), law


COUNTS = {
    "claims": (claims, ("negative-binomial", "poisson")),
    "wheeze": (wheeze, ("poisson", "negative-binomial")),
    "visits": (visits, ("binomial",)),
}


def halves(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out rows."""
    order = np.random.default_rng([seed, 3]).permutation(ROWS)
    return np.sort(order[ROWS // 5 :]), np.sort(order[: ROWS // 5])


def counts(seeds: tuple[int, ...]) -> Iterator[Row]:
    """Generated counts."""
    for name, (make, likelihoods) in COUNTS.items():
        for seed in seeds:
            frame, law = make(seed)
            test = frame.iloc[halves(seed)[1]]
            path = kept_table(f"outcomes-{name}-{seed}", lambda f=frame: f, [halves(seed)[1]])
            truth = -float(law(test).logpmf(test["count"]).mean())
            for likelihood in likelihoods:
                keys = {"dataset": path, "split": 0, "target": "count,years", "model.likelihood": likelihood}
                found = fit(keys, SITES)["test"]
                row = {"set": name, "method": likelihood, "NLL": found["nll"], "beyond truth": found["nll"] - truth}
                yield row | {"coverage_95": found["coverage_95"], "coverage_50": found["coverage_50"]}


# ------------------------------------------------------------------------------------------------ times


def aft(seed: int) -> pd.DataFrame:
    """Weibull times, of which 40 % are censored."""
    draw = np.random.default_rng([seed, 4])
    x = draw.normal(size=(ROWS, 3))
    group = draw.integers(0, 3, ROWS)
    f = 5 + 0.6 * np.sin(2 * x[:, 0]) + 0.4 * x[:, 1] - 0.3 * x[:, 0] * x[:, 2] - 0.5 * (group == 2)
    time = np.exp(f + 0.6 * np.log(draw.exponential(size=ROWS)))
    ends = np.exp(4.88 + draw.normal(size=ROWS))
    frame = pd.DataFrame(x, columns=["age", "marker", "dose"]).assign(group=[f"arm {g}" for g in group])
    return frame.assign(time=np.minimum(time, ends), event=(time <= ends).astype(int))


def gbsg2() -> pd.DataFrame:
    """686 women with breast cancer."""
    from lifelines.datasets import load_gbsg2

    return load_gbsg2().rename(columns={"cens": "event"})


def rossi() -> pd.DataFrame:
    """432 men after prison."""
    from lifelines.datasets import load_rossi

    return load_rossi().rename(columns={"week": "time", "arrest": "event"})


def cox(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """What a Cox regression of all rows orders held-out rows by: the negative logarithm of their hazard."""
    from lifelines import CoxPHFitter

    both = pd.get_dummies(pd.concat([train, test], keys=("train", "test")), drop_first=True, dtype=float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = CoxPHFitter().fit(both.loc["train"], "time", "event")
    return -np.asarray(model.predict_log_partial_hazard(both.loc["test"]))


def concordance(order: np.ndarray, test: pd.DataFrame) -> float:
    """Harrell's, over all pairs of held-out rows."""
    from lifelines.utils import concordance_index

    return float(concordance_index(test["time"], order, test["event"]))


def times(seeds: tuple[int, ...]) -> Iterator[Row]:
    """Survival."""
    from fedgp_flower.run.artefacts import read_run
    from fedgp_flower.run.predict import Predictor

    for name in ("aft", "gbsg2", "rossi"):
        tables: list[np.ndarray] = []
        for seed in seeds:
            frame = aft(seed) if name == "aft" else {"gbsg2": gbsg2, "rossi": rossi}[name]()
            order = np.random.default_rng([seed, 5]).permutation(len(frame))
            held = np.sort(order[: len(frame) // 5])
            train, test = frame.drop(index=frame.index[held]), frame.iloc[held]
            path = kept_table(f"outcomes-{name}-{seed}", lambda f=frame: f, [held])
            keys = {"dataset": path, "split": 0, "target": "time,event", "model.likelihood": "time-to-event"}
            run = fit({**keys, "baselines.linear": True}, SITES)
            row = {"set": name, "censored": 1 - frame["event"].mean()}
            shown = ("nll", "ibs", "survival_error", "coverage_95")
            for method, figures in {"svgp": run["test"], "AFT regression": run["linear"], "KM": run["mean"]}.items():
                found = row | {"method": method} | {figure: figures[figure] for figure in shown}
                if method == "svgp" and not common.CHECKING:
                    found["concordance"] = concordance(Predictor.of(read_run(run["folder"])).predict(test)["q50"], test)
                    tables.append(np.array(run["calibration"]["survival"]).sum(axis=1))
                yield found
            if not common.CHECKING:
                yield row | {"method": "Cox, pooled", "concordance": concordance(cox(train, test), test)}
        if tables:
            count, predicted, observed = np.sum(tables, axis=0).T
            yield {"set": name, "method": "svgp", "together": float(np.abs(predicted - observed).max() / count[0])}


# ------------------------------------------------------------------------------------------------ outliers


def moved(share: float, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Rows of which a share of the training rows lies anywhere, and which these are."""
    draw = np.random.default_rng([seed, 6])
    x = draw.uniform(-2, 2, (ROWS, 2))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * draw.normal(size=ROWS)
    train = halves(seed)[0]
    chosen = draw.permutation(train)[: round(share * len(train))]
    y[chosen] += 2 * draw.standard_cauchy(len(chosen))
    return pd.DataFrame({"x0": x[:, 0], "x1": x[:, 1], "y": y}), chosen


def outliers(seeds: tuple[int, ...]) -> Iterator[Row]:
    """Student-t noise."""
    for share in (0.05, 0.1, 0.2):
        for seed in seeds:
            frame, chosen = moved(share, seed)
            clean, held = frame.drop(index=chosen), np.zeros(ROWS)
            held[halves(seed)[1]] = 1
            rows, alone = {"clean alone": (clean, np.delete(held, chosen)), "all rows": (frame, held)}, 0.0
            for name, (kept, test) in rows.items():
                path = kept_table(f"outcomes-{share}-{name}-{seed}", lambda f=kept: f, [np.flatnonzero(test)])
                for likelihood in ("student-t", *(("gaussian",) if name == "clean alone" else ())):
                    found = fit({"dataset": path, "split": 0, "model.likelihood": likelihood}, SITES)["test"]
                    alone = found["nll"] if (name, likelihood) == ("clean alone", "student-t") else alone
                    row = {"Cauchy rows": f"{share:.0%}", "method": f"{name}, {likelihood}", "NLL": found["nll"]}
                    more = {"beyond clean": found["nll"] - alone, "−log(1 − share)": -np.log1p(-share)}
                    yield row | {"rmse": found["rmse"]} | (more if name == "all rows" else {})


# ------------------------------------------------------------------------------------------------ noise that varies


def sine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd at x in [0, 1]: a sine whose noise grows from .1 to 1."""
    return np.sin(4 * np.pi * x), 10 ** (x - 1)


def motorcycle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd of an acceleration like that of Silverman (1985), x in [0, 1]: quiet, an impact, a slow return."""
    mean = 45 * np.exp(-(((x - 0.57) / 0.09) ** 2)) - 115 * np.exp(-(((x - 0.37) / 0.1) ** 2))
    return mean, 2 + 24 * expit((x - 0.25) / 0.025) - 14 * expit((x - 0.75) / 0.05)


def coverage(run: Row, test: pd.DataFrame) -> Row:
    """Shares of held-out rows in their 95 % intervals, in the left and the right half."""
    from fedgp_flower.run.artefacts import read_run
    from fedgp_flower.run.predict import Predictor

    if common.CHECKING:
        return {}
    table, y = Predictor.of(read_run(run["folder"])).predict(test), test["y"].to_numpy()
    inside, left = (table["q2.5"] <= y) & (y <= table["q97.5"]), test["x"].to_numpy() < 0.5
    return {"left": inside[left].mean(), "right": inside[~left].mean()}


def noise(seeds: tuple[int, ...]) -> Iterator[Row]:
    """One input, half of whose range is quiet."""
    for name, curve in {"sine": sine, "motorcycle": motorcycle}.items():
        for seed in seeds:
            draw = np.random.default_rng([seed, 7])
            x = draw.uniform(0, 1, ROWS)
            mean, sd = curve(x)
            frame, held = pd.DataFrame({"x": x, "y": mean + sd * draw.normal(size=ROWS)}), halves(seed)[1]
            path = kept_table(f"outcomes-{name}-{seed}", lambda f=frame: f, [held])
            truth = -float(stats.norm.logpdf(frame["y"], mean, sd)[held].mean())
            for likelihood in ("heteroscedastic", "gaussian"):
                run = fit({"dataset": path, "split": 0, "model.likelihood": likelihood}, SITES)
                found = run["test"]
                row = {"set": name, "method": likelihood, "NLL": found["nll"], "beyond truth": found["nll"] - truth}
                yield row | {"rmse": found["rmse"], "exchanges": run["exchanges"]} | coverage(run, frame.iloc[held])


def study(parts: tuple[str, ...] = PARTS, seeds: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Iterator[Row]:
    """A table for each part."""
    made = {"grades": grades, "counts": counts, "times": times, "outliers": outliers, "noise": noise}
    for part in parts:
        rows = [{"set": "wine", **row} if part == "grades" else row for row in made[part](seeds)]
        for row in table_of(rows, "Cauchy rows" if part == "outliers" else "set"):
            yield {"table": part, **row}
