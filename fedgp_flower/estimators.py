"""Estimators of scikit-learn: a federated Gaussian process, fitted in this process to rows with groups."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedgp_flower.clients.app import SiteApp
from fedgp_flower.data.sites import site_of
from fedgp_flower.errors import FedGPError, RunError
from fedgp_flower.options import FlatConfig, Value
from fedgp_flower.outcome import Observer
from fedgp_flower.run.artefacts import Run, RunMetrics, saved_posterior
from fedgp_flower.run.in_process import InProcessGrid
from fedgp_flower.run.predict import Predictor
from fedgp_flower.run.registry import client_class, methods, parse_config, strategy_class
from fedgp_flower.typing import Array

TARGET = "y"
NUMBERS = ("gaussian", "student-t", "heteroscedastic", "poisson", "negative-binomial")
"""Likelihoods of numbers whose predictions have a mean and an sd; the first is the default."""


def fit_in_memory(flat: FlatConfig, tables: Mapping[str, pd.DataFrame], target: str) -> Predictor:
    """Train on a table per site, without held-out rows, baselines or files. Return the predictor."""
    quiet: dict[str, Value] = {"keep-predictions": False, "test-fraction": 0.0, "min-sites": 1, "evaluate-every": 0}
    quiet |= {f"baselines.{name}": False for name in ("linear", "local-only", "pooled")}
    flat = {**quiet, **flat, "sites": len(tables)}
    config = parse_config(flat)
    for note in config.ignored:
        warnings.warn(note, stacklevel=4)  # where `fit` was called
    if not methods()[config.method].posterior:
        raise RunError(f"method {config.method!r} saves no posterior for new rows; take one that does")
    raw = {
        site: replace(site_of(config, {"site": site}, (table, target)), partitions=len(tables), shared_table=True)
        for site, table in tables.items()
    }

    sites = SiteApp(parse_config, client_class, lambda _, context: raw[str(context.node_config["site"])])
    grid = InProcessGrid(sites, flat, [{"site": site} for site in tables])
    strategy = strategy_class(config).from_config(config, Observer())
    strategy.start(grid, ArrayRecord(), num_rounds=config.num_server_rounds, timeout=config.round_timeout)
    posterior = saved_posterior(config, strategy.outcome)
    metrics = RunMetrics(**strategy.outcome.metrics)
    return Predictor.of(Run(Path("(fitted in memory)"), dict(config.flat()), pd.DataFrame(), metrics, posterior, None))


def _renamed(predictor: Predictor, names: Mapping[str, str], classes: Sequence[str]) -> Predictor:
    """Return the predictor with new names of its columns, and of its classes if it has any."""
    schema = dict(predictor.saved.schema)
    for column in (*schema["features"], *predictor.run.metrics.data["columns"]):
        column["name"] = names[column["name"]]
    if classes:
        schema["target"] = {**schema["target"], "levels": [*classes]}
    return Predictor.of(replace(predictor.run, saved=replace(predictor.saved, schema=schema)))


def _plain_names(count: int) -> list[str]:
    return [f"x{column}" for column in range(count)]


class _FederatedGP(BaseEstimator):
    """Base of regressor and classifier.

    ``method`` must save a posterior, see ``fedgp methods``. ``sites`` is used if ``fit`` has no ``groups``. None for
    ``num_rounds`` is the default of the key. ``options`` are further keys of the run, ``random_state`` is its seed, or
    draws it.
    """

    def __init__(
        self,
        method: str = "auto",
        *,
        sites: int = 5,
        num_rounds: int | None = None,
        options: Mapping[str, Value] | None = None,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.method = method
        self.sites = sites
        self.num_rounds = num_rounds
        self.options = options
        self.random_state = random_state

    def _fit(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        groups: ArrayLike | None,
        likelihoods: Sequence[str],
        classes: Sequence[str] = (),
    ) -> None:
        """Fit with the first of the likelihoods, or the one of them that ``options`` name."""
        if (likelihood := (self.options or {}).get("model.likelihood", likelihoods[0])) not in likelihoods:
            can = ", ".join(likelihoods)
            raise ValueError(f"`model.likelihood` = {likelihood!r}: this estimator has {can} here; `fg.run` has all")
        given = self.random_state
        seed = int(given if isinstance(given, Integral) else check_random_state(given).randint(2**31 - 1))
        flat: dict[str, Value] = {"method": self.method, "seed": seed, "model.likelihood": likelihood}
        flat |= {} if self.num_rounds is None else {"num-server-rounds": self.num_rounds}
        plain = _plain_names(x.shape[1])  # a run reads names such as `split`
        table = pd.DataFrame(x, columns=plain).assign(**{TARGET: y})
        if groups is None:
            if not isinstance(self.sites, Integral) or self.sites < 1:
                raise ValueError(f"`sites` = {self.sites!r}: expected a whole number, at least 1")
            order = np.random.default_rng(seed).permutation(len(table))
            parts = np.array_split(order, max(1, min(self.sites, len(table) // 2)))  # two rows or more each
            tables = {str(number): table.iloc[np.sort(part)] for number, part in enumerate(parts)}
        else:
            site_of_row = pd.Series(column_or_1d(groups))
            check_consistent_length(x, site_of_row)
            if site_of_row.isna().any():
                raise ValueError(f"`groups` names no site for row {site_of_row.isna().argmax() + 1}")
            tables = {str(site): part for site, part in table.groupby(site_of_row.astype(str).to_numpy())}
        try:
            fitted = fit_in_memory({**flat, **(self.options or {})}, tables, TARGET)
        except FedGPError as error:
            raise ValueError(f"{error} ({len(x)} samples, {x.shape[1]} features)") from error
        self.posterior_ = _renamed(fitted, dict(zip(plain, self._names(plain), strict=True)), classes)

    def _names(self, plain: list[str]) -> list[str]:
        plainly = "formula" in (self.options or {})  # a formula names the columns `x0`, …
        return [*self.feature_names_in_] if hasattr(self, "feature_names_in_") and not plainly else plain

    def _predicted(self, x: ArrayLike) -> pd.DataFrame:
        check_is_fitted(self)
        inputs = validate_data(self, x, reset=False, dtype=np.float64)
        return self.posterior_.predict(pd.DataFrame(inputs, columns=self._names(_plain_names(inputs.shape[1]))))


class FederatedGPRegressor(RegressorMixin, _FederatedGP):
    """Federated Gaussian-process regression.

    Example::

        model = FederatedGPRegressor(method="sgpr").fit(X, y, groups=hospital)
        mean, sd = model.predict(X_new, return_std=True)
    """

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Train on inputs [N, D] and targets [N]; ``groups`` [N] are the sites of the rows."""
        x, targets = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit(x, targets, groups, NUMBERS)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Return the mean [N] and, with ``return_std``, the sd [N] of a noisy observation."""
        found = self._predicted(X)
        mean, sd = (found[name].to_numpy() for name in ("mean", "sd"))
        return (mean, sd) if return_std else mean


class FederatedGPClassifier(ClassifierMixin, _FederatedGP):
    """Federated Gaussian-process classification: probit for two classes, softmax for up to 20."""

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Train on inputs [N, D] and classes [N]; ``groups`` [N] are the sites of the rows."""
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        likelihoods = ["bernoulli"] * (len(self.classes_) == 2) + ["categorical"]
        plain = np.array([str(number) for number in range(len(self.classes_))])
        self._fit(x, plain[codes], groups, likelihoods, [str(label) for label in self.classes_])
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probability of each class [N, C]."""
        return self._predicted(X).to_numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable class [N]."""
        likely = self.predict_proba(X).argmax(axis=1)
        return self.classes_[likely]
