"""Several classes at the defaults: iris, wine, digits and MNIST.

Ten sites of rows dealt at random, a fifth of the rows held out in each split, no key but the likelihood: `categorical`,
a softmax of Gaussian processes from sums. Log loss in nats a row and accuracy on the same held-out rows, means over
splits ± standard errors. Beside it, of all training rows in one place: *multinomial regression*, its penalty chosen by
log loss in five folds among 20, and *boosting*, `HistGradientBoostingClassifier` with learning rate, leaves and number
of trees chosen in five folds. Inputs of digits (1797 images) and MNIST (10 000 of the training images) are 20 principal
components of the images that a split does not hold out. *Gain* is how much lower the log loss of the run is. Where
trees give a class that comes no chance at all, the log loss is infinite, and the split does not count for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from simulations import common
from simulations.common import Array, Row, fit, images, kept_table, remembered, spread, tuned

SITES, COMPONENTS, IMAGES = 10, 20, 10_000
BESIDE = ("multinomial regression", "boosting")
GRID = {"rate": (0.03, 0.1, 0.3), "leaves": (4, 16, 31)}


def bundled(name: str) -> Callable[[], tuple[Array, Array]]:
    """Inputs and classes of a set that scikit-learn brings."""
    from sklearn import datasets

    def make() -> tuple[Array, Array]:
        found: tuple[Array, Array] = getattr(datasets, f"load_{name}")(return_X_y=True)
        return found

    return make


def mnist() -> tuple[Array, Array]:
    """Some of the training images."""
    x, digits = images("train")
    chosen = np.random.default_rng(0).permutation(len(x))[:IMAGES]
    return x[chosen], digits[chosen]


SETS = {"iris": bundled("iris"), "wine": bundled("wine"), "digits": bundled("digits"), "mnist": mnist}


def divided(name: str, split: int) -> tuple[pd.DataFrame, Array]:
    """Inputs and classes of a set, and the rows that are held out."""
    from sklearn.decomposition import PCA

    x, classes = SETS[name]()
    held_out = np.sort(np.random.default_rng([split, 7]).permutation(len(x))[: len(x) // 5])
    if x.shape[1] > COMPONENTS:
        x = PCA(COMPONENTS, svd_solver="full").fit(np.delete(x, held_out, axis=0)).transform(x)
    frame = pd.DataFrame(x, columns=[f"x{number}" for number in range(x.shape[1])])
    return frame.assign(kind=[f"class {number}" for number in classes]), held_out


def pooled(name: str, split: int) -> Row:
    """Log loss and accuracy of models of all training rows."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    frame, held_out = divided(name, split)
    _, codes = np.unique(frame.pop("kind"), return_inverse=True)
    train = np.setdiff1d(np.arange(len(frame)), held_out)
    x = StandardScaler().fit(frame.iloc[train]).transform(frame)
    line = LogisticRegressionCV(Cs=20, cv=5, scoring="neg_log_loss", max_iter=2000, use_legacy_attributes=False)
    models = {
        "multinomial regression": make_pipeline(line).fit(x[train], codes[train]),
        "boosting": tuned(x[train], codes[train].astype(float), "categorical", GRID, split).trees,
    }
    found: Row = {}
    for called, model in models.items():
        shares = np.asarray(model.predict_proba(x[held_out]))
        chosen = shares[np.arange(len(held_out)), codes[held_out]]
        found |= {called: -float(np.log(chosen).mean())}
        found |= {f"{called}, accuracy": float((shares.argmax(axis=1) == codes[held_out]).mean())}
    return found


def study(sets: tuple[str, ...] = tuple(SETS), splits: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Iterator[Row]:
    """A row for each set and way."""
    warnings.simplefilter("ignore")
    for name in sets:
        rows = []
        for split in splits:
            frame, held_out = (pd.DataFrame(), np.arange(0)) if common.CHECKING else divided(name, split)
            path = kept_table(f"several-{name}-{split}", lambda f=frame: f, [held_out])
            run = fit({"dataset": path, "target": "kind", "split": 0, "model.likelihood": "categorical"}, SITES)
            beside = remembered("several_classes", [name, split], lambda n=name, s=split: pooled(n, s))
            row = {figure: beside[figure] for called in BESIDE for figure in (called, f"{called}, accuracy")}
            row |= {"run": run["test"]["nll"], "run, accuracy": run["test"]["accuracy"]}
            rows.append({**row, "exchanges": run["exchanges"], "MB": run["bytes"]["up"] / SITES / 1e6})
        found = pd.DataFrame(rows).replace(np.inf, np.nan)
        for called in ("run", *BESIDE):
            finite = found[called].dropna()
            row = {"set": name, "by": called, "splits": len(finite), "log loss": spread(finite)}
            row |= {"accuracy, %": spread(100 * found.loc[finite.index, f"{called}, accuracy"], 1)}
            if called == "run":
                row |= {"by": "svgp, categorical", "exchanges": spread(found["exchanges"], 1), "MB": found["MB"].mean()}
            else:
                row |= {"gain": spread((found[called] - found["run"]).dropna())}
            yield row
