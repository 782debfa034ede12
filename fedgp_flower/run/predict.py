"""Prediction from the saved posterior of a finished run."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pandas as pd
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.operators import DiagLinearOperator
from pydantic import ValidationError
from torch import Tensor

from fedgp_flower.config import RunConfig
from fedgp_flower.count_scores import count_quantiles, log_rate_of
from fedgp_flower.data.dates import source
from fedgp_flower.data.sites import RawSite, load_site
from fedgp_flower.data.standardisation import (
    Preparation,
    encode_inputs,
    other_columns,
    read_inputs,
    typed_inputs,
    unknown_levels,
)
from fedgp_flower.data.tables import read_table
from fedgp_flower.errors import DamagedError, DataError, RunError, first_of
from fedgp_flower.files import read_arrays, reading
from fedgp_flower.gp.error_law import SCALE, TAILS
from fedgp_flower.gp.to_gpytorch import Exported, Transforms, evenly
from fedgp_flower.options import REAL_VALUED, SECOND_COLUMN, WITH_NOISE, Value
from fedgp_flower.outcome import Posterior
from fedgp_flower.privacy.policy import Rules
from fedgp_flower.run import notebook
from fedgp_flower.run.artefacts import Run, read_run, site_named
from fedgp_flower.run.registry import load, methods, parse_config
from fedgp_flower.scores import TargetUnits
from fedgp_flower.typing import Array, NamedArrays, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedgp_flower.run.to_botorch import FederatedModel

Standardised: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""Mean and sd [N] at standardised inputs [N, D]; for more than two classes those of their indicators [N, C].

It may have further methods, all in standardised units: ``mean(inputs)``, only the means [N]; ``quantiles(inputs,
levels)`` of non-normal observations [levels, N]; ``survival(inputs, times)``, P(T > t) [times, N]; and ``export()``,
equally weighted pairs of a GPyTorch model and likelihood such that ``likelihood(model(x))`` is the prediction.
"""
QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)
MOST_NAMED = 12
"""Most sites that a message names."""
SavedModel: TypeAlias = Callable[[Posterior, tuple[str, ...]], Standardised]
"""Function from a saved posterior and the names of the encoded inputs to its predictor."""
SiteModel: TypeAlias = Callable[[Run, RunConfig, RawSite, NamedArrays], Standardised | None]
"""Function from a site's rows and its saved state to its predictor; None if the state belongs to other rows or runs."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """The posterior of a run; it predicts noisy observations in original units."""

    run: Run
    saved: Posterior
    preparation: Preparation
    standardised: Standardised
    site: RawSite | None = None
    """The site of a prediction at a site."""

    def __repr__(self) -> str:
        where = f" at {self.site.label}" if self.site else ""
        return f"<Predictor of {self.preparation.target.name}{where} from {self._columns()}; {self.run.path}>"

    def _repr_html_(self) -> str:
        return notebook.html_of_posterior(self)

    def plot(self, column: str) -> Axes:
        """Plot mean and 95 % interval of the outcome along a column, with all others at their mean."""
        return notebook.plot_column(self, column)

    def _columns(self) -> str:
        return ", ".join(dict.fromkeys(source(name, ()) for name in self.preparation.features))

    @staticmethod
    def of(run: Run) -> Predictor:
        """Return the posterior of a run. Raise RunError if it has none."""
        reason = run.why_no_posterior
        if run.saved is None or reason:
            raise RunError(f"{run.path} has no posterior to predict from: {reason}. Run a method that saves one")
        with reading(run.path):
            preparation = Preparation.from_wire(run.saved.arrays, json.dumps(run.saved.schema))
        model: SavedModel = load(run.method.posterior)
        try:
            standardised = model(run.saved, preparation.names)
        except ValidationError as error:
            problems = "; ".join(f"{item['input']!r}: {item['msg']}" for item in error.errors())
            raise RunError(f"{run.path} was made with {problems}. Install the package that provides it") from None
        return Predictor(run, run.saved, preparation, standardised)

    @staticmethod
    def at_site(
        run: Path, site: str, *, data: Path | None = None, state_dir: Path | None = None, policy: Path | None = None
    ) -> Predictor:
        """Return the predictor of a participating site, by id or label; nothing is sent.

        A real site also needs its table ``data``, and the ``state-dir`` and the ``policy`` of its node.
        """
        read = read_run(run)
        node = _node(read, site, data) | ({} if policy is None else {"policy": str(policy)})
        state = (state_dir or run / "sites" / str(node.get("partition-id"))) / "site-state.safetensors"
        try:
            arrays = read_arrays(state)
        except RunError:
            arrays = {}  # sites of some methods keep no state
        config = parse_config(read.config)
        rows = Rules("predict").read(node).site(load_site(config, node))
        unusable = f"{state}, the state of site {site!r}, is missing, damaged, or belongs to other rows or another run"
        return _at_node(read, config, rows, arrays, unusable)

    @staticmethod
    def joined(run: Path, name: str, data: Path) -> Predictor:
        """Return the predictor of a new site, which fits its local parameters to all its rows and sends nothing."""
        read = read_run(run)
        if any(name in pair for pair in read.metrics.labels.items()):
            raise RunError(f"a site {name!r} took part in {run}: use `fedgp predict --site`, or rename the table")
        table = read_table(data)
        present = table.columns  # which need not have a column that the run left out
        named = [name.strip() for name in str(read.config.get("features", "")).split(",")]
        features = ",".join(name for name in named if name.removeprefix("-") in present or not name.startswith("-"))
        config = parse_config(read.config | {"split": -1, "test-fraction": 0.0, "features": features})
        site = config.partition.column if config.partitioner == "natural" else ""
        if site in present and (count := table[site].nunique()) > 1:
            raise DataError(f"{data}: the column `{site}` names {count} sites; give the rows of one")
        rows = load_site(config, _node(read, name, data))
        unusable = f"a new site cannot join a run of {read.metrics.method!r} as configured"
        return _at_node(read, config, rows, {}, unusable)

    @staticmethod
    def of_all(run: Path) -> dict[str, Predictor]:
        """Return the posterior of a run; for a personal method, the predictor of every simulated site by label."""
        read = read_run(run)
        simulated = all(site.isdecimal() for site in read.metrics.labels)
        if not read.why_no_posterior or not read.method.at_site or not simulated:
            return {"": Predictor.of(read)}
        return {label: Predictor.at_site(run, label) for label in read.metrics.labels.values()}

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Return mean and sd, both [N], at encoded inputs [N, D] in original units."""
        return self.units.moments(*self.standardised(self._standardise(inputs)))

    def quantiles(self, inputs: Array, levels: Sequence[float]) -> Array:
        """Return quantiles of a noisy observation [levels, N] at encoded inputs [N, D] in original units."""
        encoded = self._standardise(inputs)
        return self._quantiles(encoded, levels, lambda: self.standardised(encoded))

    def _standardise(self, inputs: Array) -> Array:
        return (inputs - self.preparation.input_mean) / self.preparation.input_scale

    @property
    def units(self) -> TargetUnits:
        """Transformation of the standardised target to original units."""
        agreed = self.preparation
        return TargetUnits(agreed.target_mean, agreed.target_scale, agreed.transform)

    def _quantiles(self, encoded: Array, levels: Sequence[float], moments: Callable[[], tuple[Array, Array]]) -> Array:
        if hasattr(self.standardised, "quantiles"):
            return self.units.values(self.standardised.quantiles(encoded, levels))
        mean, sd = moments()
        if self.saved.likelihood == "poisson":
            return count_quantiles(*log_rate_of(*self.units.modelled(mean, sd)), levels)
        return self.units.quantiles(mean, sd, levels, self.saved.arrays.get(TAILS))

    def predict(self, frame: pd.DataFrame, site: str | None = None, *, times: Sequence[float] = ()) -> pd.DataFrame:
        """Return mean, sd and quantiles of a noisy observation for each row of a table.

        Classes have probabilities; grades also a median, and a mean if they are numbers. Times to an event have only
        quantiles (``q50`` is the median), and the survival at each of ``times``. With ``missing`` = drop, rows with a
        missing cell are NaN. ``site`` is the id or label of a simulated site that predicts, see :meth:`at_site`. The
        index is that of the table.
        """
        if site is not None:
            return Predictor.at_site(self.run.path, site).predict(frame, times=times)
        if not all(0 < time < math.inf for time in times):
            raise RunError(f"`times` = {tuple(times)}: expected times above zero")
        encoded, second = self._encoded(frame, whole=False), parse_config(self.run.config).second_target
        if second and second in frame and (what := of_what(self)):
            warnings.warn(f"the column `{second}` is not used{what}", stacklevel=2)
        kept = np.flatnonzero(~np.isnan(encoded).any(axis=1))
        table = self._predicted(encoded[kept], times)
        return table.set_axis(kept).reindex(range(len(frame))).set_axis(frame.index)

    def _predicted(self, encoded: Array, times: Sequence[float]) -> pd.DataFrame:
        """Return the table of :meth:`predict` at standardised inputs without NaN."""
        agreed = self.preparation
        with reading(self.run.path):
            mean, sd = self.standardised(encoded)
        if not (np.isfinite(mean).all() and np.isfinite(sd).all() and (sd >= 0).all()):
            raise DamagedError(f"the posterior of {self.run.path} predicts no finite numbers; it is damaged")
        if agreed.target.levels or mean.ndim == 2:
            classes = mean if mean.ndim == 2 else np.stack([1 - mean, mean], axis=1)
            levels = agreed.target.levels or [str(index) for index in range(classes.shape[1])]
            table = pd.DataFrame(classes, columns=[f"probability of {level}" for level in levels])
            return table if self.saved.likelihood != "ordinal" else table.assign(**graded(classes, levels))
        names = ("mean", "sd", *(f"q{100 * level:g}" for level in QUANTILES))
        values = (*self.units.moments(mean, sd), *self._quantiles(encoded, QUANTILES, lambda: (mean, sd)))
        table = pd.DataFrame(dict(zip(names, values, strict=True)))
        if SECOND_COLUMN.get(self.saved.likelihood) != "event":
            return table
        table = table.drop(columns=["mean", "sd"])
        if not times or not hasattr(self.standardised, "survival"):
            return table
        shares = self.standardised.survival(encoded, times)
        return table.assign(**{f"survival at {t:g}": share for t, share in zip(times, shares, strict=True)})

    def mean(self, frame: pd.DataFrame) -> Array:
        """Return only the means [N]; fast for a sparse Gaussian process with Gaussian noise."""
        if self.preparation.target.levels:
            raise RunError("a class has no mean: use `predict`")
        if not hasattr(self.standardised, "mean") or self.preparation.transform is not None:
            return self.predict(frame)["mean"].to_numpy()
        encoded = self._encoded(frame, whole=False)
        kept, found = ~np.isnan(encoded).any(axis=1), np.full(len(encoded), np.nan)
        found[kept] = self.units.values(self.standardised.mean(encoded[kept]))
        return found

    def outside(self, frame: pd.DataFrame) -> pd.Series:
        """Return for each row the columns outside the binned range, or the levels, of all training rows."""
        rows = typed_inputs(frame, self.preparation, "the table")
        columns, x = self.preparation.columns, encode_inputs(rows, self.preparation)
        starts = np.cumsum([0, *(len(column.names) for column in columns)])
        known = {str(column["name"]): column.get("reach") for column in self.run.metrics.data.get("columns", ())}
        found = pd.Series("", index=range(len(frame)))
        unknown = unknown_levels(rows, self.preparation)
        for column, start in zip(columns, starts, strict=False):
            if column.levels:
                found[unknown[column.name].to_numpy()] += f"{column.name}; "
                continue
            low, high = known.get(column.name) or (None, None)
            below = x[:, start] < (-np.inf if low is None else low)
            found[below | (x[:, start] > (np.inf if high is None else high))] += f"{column.name}; "
        return found.str.removesuffix("; ").set_axis(frame.index)

    def inputs(self, frame: pd.DataFrame) -> Rows:
        """Return encoded, standardised inputs, float64 [N, D], for a model of :meth:`to_gpytorch`."""
        return torch.from_numpy(self._encoded(frame))

    def distribution(self, frame: pd.DataFrame, *, noise: bool = False) -> MultivariateNormal:
        """Return the joint distribution of f at the rows of a table in original units, over all draws of a mixture.

        For classes f is a probit, for counts a log rate. With ``noise``, return the distribution of observations.
        Raise RunError if the target is transformed, or if observations are not normal.
        """
        if self.preparation.transform is not None:
            name = self.preparation.transform.name
            raise RunError(f"with `transform.target` = '{name}' predictions are not normal: use `sample`")
        draws, inputs = self.to_gpytorch_draws(), self.inputs(frame)
        if noise and not isinstance(draws[0].likelihood, GaussianLikelihood):
            kind = self.saved.likelihood
            raise RunError(f"observations with `model.likelihood` = {kind!r} are not normal: use `predict`")
        found = evenly([likelihood(model(inputs)) if noise else model(inputs) for model, likelihood in draws])
        if noise and SCALE in self.saved.arrays:
            scale = DiagLinearOperator(self._scale(inputs))
            found = MultivariateNormal(found.mean, scale @ found.lazy_covariance_matrix @ scale)
        return draws[0].transforms.original(found[0] if self.saved.likelihood in WITH_NOISE else found)

    def sample(self, frame: pd.DataFrame, count: int = 1, *, noise: bool = True, seed: int = 0) -> Array:
        """Return joint draws at the rows of a table in original units, [count, N], over all draws of a mixture.

        With ``noise`` they are observations, classes as 0 and 1; otherwise values of f as in :meth:`distribution`.
        """
        draws, inputs, found = self.to_gpytorch_draws(), self.inputs(frame), []
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(draws), (count,), generator=generator).bincount(minlength=len(draws)).tolist()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)  # GPyTorch's distributions draw from the generator of the process
            for (model, likelihood), share in zip(draws, chosen, strict=True):
                if not share:  # GPyTorch fails on zero draws
                    continue
                latent = model(inputs).rsample(torch.Size([share]))
                of_target = latent[:, 0] if self.saved.likelihood in WITH_NOISE else latent
                found.append(likelihood(latent).sample() if noise else of_target)
        drawn = torch.cat([torch.empty(0, len(inputs)), *found])
        values = drawn[torch.randperm(count, generator=generator)].double().numpy()
        if noise and SCALE in self.saved.arrays:
            mean = self.standardised(inputs.numpy())[0]
            values = mean + (values - mean) * self._scale(inputs).numpy()
        if noise and values.size and (mixture := self.saved.arrays.get(TAILS)) is not None:
            mean = self.standardised(inputs.numpy())[0]
            index = torch.multinomial(torch.from_numpy(mixture[1]), values.size, True, generator=generator)
            values = mean + mixture[0][index.numpy()].reshape(values.shape) * (values - mean)
        gaussian = not noise or self.saved.likelihood in REAL_VALUED
        return self.units.values(values) if gaussian else values

    def _scale(self, inputs: Rows) -> Tensor:
        """Return the ratio of the sd of an observation to that without ``errors.scale`` [N]."""
        model, likelihood = self.to_gpytorch()
        return torch.from_numpy(self.standardised(inputs.numpy())[1]) / likelihood(model(inputs)).stddev

    def to_gpytorch(self) -> Exported:
        """Return ``model, likelihood`` of GPyTorch: ``likelihood(model(x))`` has the mean and sd of the prediction.

        If the saved posterior has an ``errors.scale``, it is left out, and the sd is that of an average scale.
        Both use standardised coordinates: :meth:`inputs` returns x, ``transforms`` convert to original units.
        """
        [first, *others] = self.to_gpytorch_draws()
        if others:
            raise RunError(f"the prediction is a mixture of {1 + len(others)} models: use `to_gpytorch_draws()`")
        return first

    def to_botorch(self) -> FederatedModel:
        """Return a :class:`fedgp_flower.run.to_botorch.FederatedModel` for BoTorch. Needs the extra ``botorch``."""
        try:
            from fedgp_flower.run.to_botorch import FederatedModel  # noqa: PLC0415  optional
        except ModuleNotFoundError as error:
            raise RunError(f"{error}: install `fedgp-flower[botorch]`") from None
        if self.saved.likelihood in {"categorical", *WITH_NOISE}:
            raise RunError(f"a model of BoTorch has one function; with {self.saved.likelihood!r} there are several")
        return FederatedModel(self.to_gpytorch())

    def to_gpytorch_draws(self) -> tuple[Exported, ...]:
        """Return the equally weighted components of the prediction; one if it is no mixture."""
        if not hasattr(self.standardised, "export"):
            raise RunError(
                f"{self.run.path} is a run of {self.saved.method!r}; its predictor is no sparse Gaussian"
                " process that can be exported to GPyTorch. Use `predict`"
            )
        transforms = Transforms.of(self.saved.arrays)
        return tuple(Exported(model, likelihood, transforms) for model, likelihood in self.standardised.export())

    def _encoded(self, frame: pd.DataFrame, *, whole: bool = True) -> Array:
        if not isinstance(frame, pd.DataFrame):
            raise DataError(f"expected a DataFrame with the columns {self._columns()}; got {type(frame).__name__}")
        rows = typed_inputs(frame, self.preparation, "the table")
        unknown = unknown_levels(rows, self.preparation)
        new = {name: rows[name][unknown[name]].unique()[:5] for name in unknown if unknown[name].any()}
        found = "; ".join(f"`{name}`: {', '.join(map(repr, levels))}" for name, levels in new.items())
        if found and "formula" in self.saved.model:
            raise DataError(f"levels that no site had, so that the formula has no effect of them: {found}")
        if found:
            warnings.warn(f"levels that no site had count as missing cells: {found}", stacklevel=3)
        encoded = encode_inputs(rows, self.preparation)
        if whole and np.isnan(encoded).any():
            raise DataError("the table has missing cells, which `missing` = 'drop' does not impute")
        return encoded


def of_what(predictor: Predictor) -> str:
    """Return what is predicted of a target with exposure or trials, as the end of a sentence."""
    what = {"exposure": ": counts for an exposure of 1", "trials": ": probabilities of success in a trial"}
    named = "," in str(predictor.run.config.get("target", ""))
    return what.get(SECOND_COLUMN.get(predictor.saved.likelihood, ""), "") if named else ""


def graded(shares: Array, levels: Sequence[str]) -> dict[str, Array]:
    """Return the median grade of each row, and the mean of numeric grades, from probabilities [N, K]."""
    median = np.array(levels)[(shares.cumsum(axis=1) < 0.5).sum(axis=1).clip(max=len(levels) - 1)]
    try:
        return {"mean": shares @ np.array(levels, dtype=float), "median": median.astype(float)}
    except ValueError:  # grades are words
        return {"median": median}


def times_of(text: str) -> list[float]:
    """Parse comma-separated positive times. Raise RunError if they are not."""
    try:
        times = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        times = [0.0]
    if not all(0 < time < math.inf for time in times):
        raise RunError(f"`--times` = {text}: expected comma-separated times above zero")
    return times


def predict_file(
    predictors: Mapping[str, Predictor], source: Path, output: Path, times: Sequence[float] = ()
) -> tuple[int, int, int]:
    """Predict every row of a table into a CSV. Return the numbers of rows, of cells with a new level and rows outside.

    If any row lies outside the range of the training rows, a column ``outside`` names the inputs.
    """
    first = next(iter(predictors.values()))
    preparation = first.preparation
    frame = read_inputs(source, preparation)
    outside = first.outside(frame)
    extra = {"outside": outside} if outside.any() else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "levels that no site had")  # their number is returned
        tables = {site: predictor.predict(frame, times=times).assign(**extra) for site, predictor in predictors.items()}
    taken = {"site", *next(iter(tables.values()))}
    # Other columns, such as ids, come first and unchanged.
    others = other_columns(source, preparation).rename(columns=lambda name: f"input.{name}" if name in taken else name)
    tables = {site: pd.concat([others, table], axis=1) for site, table in tables.items()}
    combined = pd.concat(tables, names=["site"]).reset_index(level="site")
    if len(tables) == 1:
        del combined["site"]
    try:
        combined.to_csv(output, index=False)
    except OSError as error:
        raise RunError(f"{output} cannot be written: {error.strerror or error}") from None
    unknown = unknown_levels(frame, preparation).to_numpy().sum()
    return len(frame), int(unknown), int((outside != "").sum())


def _at_node(read: Run, config: RunConfig, rows: RawSite, arrays: NamedArrays, unusable: str) -> Predictor:
    """Return the predictor at a site, from its rows and its saved state. Raise RunError ``unusable`` if they differ."""
    reference = read.method.at_site
    if read.saved is None or not reference:
        able = ", ".join(repr(name) for name, method in methods().items() if method.at_site)
        raise RunError(f"{read.path} is a run of {read.metrics.method!r}; only {able} can predict at a site")
    model: SiteModel = load(reference)
    agreed = Preparation.from_wire(read.saved.arrays, json.dumps(read.saved.schema))
    standardised = model(read, config, rows, arrays)
    if standardised is None:
        raise RunError(unusable)
    return Predictor(read, read.saved.at_site(), agreed, standardised, rows)


def _node(run: Run, site: str, data: Path | None) -> dict[str, Value]:
    """Return the configuration of the node of a site."""
    chosen = site_named(run.metrics.labels, site)
    if data is not None:
        return {"data-path": str(data), "site": chosen or site}
    if chosen is None or not chosen.isdecimal():
        named = first_of([*run.metrics.labels.values()], MOST_NAMED)
        what = f"{site!r} is not a simulated site of {run.path}, whose sites are {named}"
        raise RunError(f"{what}: name its table with `--site-data`")
    return {"partition-id": int(chosen), "num-partitions": run.metrics.nodes or run.metrics.sites}
