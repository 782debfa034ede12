"""The end of a run: what is saved, and the comparison with local-only and pooled training."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgp_flower.errors import RunError
from fedgp_flower.methods.messages import HISTOGRAM_SHAPES
from fedgp_flower.run.metrics import CLASSIFICATION_SUMS, REGRESSION_SUMS
from fedgp_flower.typing import NamedArrays
from strategies.server.evaluation import as_baseline, combine_histograms, with_skill
from strategies.server.network import Network
from strategies.server.wire import Answer, ArraySpec

if TYPE_CHECKING:
    from strategies.server.base import BaseStrategy

logger = logging.getLogger("fedgp")

CLASS_ARRAYS = {name: ArraySpec((None,)) for name in ("prediction.probability", "prediction.target")}
PREDICTION_ARRAYS = {name: ArraySpec((None,)) for name in ("prediction.mean", "prediction.sd", "prediction.target")}


@dataclass(frozen=True, slots=True)
class Posterior:
    """What predicts without any site: arrays, what each is, and the equation that uses them."""

    arrays: NamedArrays
    meanings: Mapping[str, str]
    coordinates: Mapping[str, str]
    equation: str
    model: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a finished run and what goes into its folder beside them."""

    metrics: dict[str, Any]
    posterior: Posterior | None
    predictions: Mapping[str, NamedArrays]
    schema: str
    preparation: NamedArrays
    input_names: tuple[str, ...]


def _names_of(own: Answer) -> tuple[str, ...]:
    return CLASSIFICATION_SUMS if "brier" in own.metrics else REGRESSION_SUMS


def sums_of(own: Answer) -> dict[str, float]:
    """The sums of scores in an evaluation reply."""
    return {name: own.number(name) for name in _names_of(own)}


def usable_scores(network: Network, answers: Mapping[str, Answer]) -> dict[str, Answer]:
    """Answers with scores of at least one row; one that cannot be scores is its site's failure."""
    kinds = Counter(_names_of(own) for own in answers.values())
    found: dict[str, Answer] = {}
    for site, own in answers.items():
        reason = scores_refusal(own, kinds.most_common(1)[0][0])
        if reason:
            network.fail(site, reason)
        elif own.number("count") > 0:
            found[site] = own
    return found


def scores_refusal(own: Answer, names: Iterable[str]) -> str | None:
    """Why numbers cannot be the sums ``names`` of scores of some rows, or None."""
    missing = [name for name in names if not isinstance(own.metrics.get(name), float)]
    if missing:
        return f"scores missing: {', '.join(missing)}"
    bounded = [name for name in names if name.startswith("inside-") or name == "correct"]
    if any(own.number(name) < 0 for name in names if name != "nll"):
        return "a score that cannot be negative is"
    if any(own.number(name) > own.number("count") for name in bounded):
        return "scores count more rows than there are"
    for name, shape in HISTOGRAM_SHAPES.items():
        size = math.prod(shape)
        values = own.metrics.get(name, [0.0] * size)
        if not isinstance(values, list) or len(values) != size:
            return f"`{name}`: expected {size} numbers"
    return None


def close(strategy: BaseStrategy) -> Summary:
    """Ask for the comparisons and rows the configuration wants, and put the figures of the run together."""
    network, config, preparation = strategy.network, strategy.config, strategy.preparation
    shows_rows = preparation.simulated and not config.privacy.secure_aggregation
    keeps_rows = strategy.predicts and shows_rows and config.keep_predictions
    predictions = _predictions(strategy) if keeps_rows else {}
    local_only = _baseline(strategy, "query.local_only", network.sites()) if config.baselines.local_only else None
    wants_pooled = config.baselines.pooled and preparation.simulated
    pooled = _baseline(strategy, "query.pooled", network.healthy()[:1]) if wants_pooled else None
    mean, line = _simple(strategy) if config.baselines.linear else (None, None)
    posterior = strategy.posterior()
    strategy.clock.switch("evaluation")
    evaluation = strategy.evaluation
    if strategy.evaluated_sites == 0:
        raise RunError("no site could score its held-out rows, so the run has no result; see the failures above")
    seconds = strategy.clock.seconds
    test = with_skill(evaluation["test"], mean or {}) if evaluation else {}
    metrics = {
        "method": config.method,
        "dataset": config.dataset,
        "sites": len(network.sites()),
        "rounds": strategy.round,
        "communications": network.traffic.communications,
        "seconds": {"total": sum(seconds.values()), **seconds, "sites": network.site_seconds},
        "bytes": {"up": network.traffic.bytes_up, "down": network.traffic.bytes_down},
        "test": test,
        "test_standardised": evaluation["test_standardised"] if evaluation else {},
        "per_site": _labelled(strategy, evaluation["per_site"]) if evaluation else [],
        **{
            name: None if own is None else with_skill(own, mean or {})
            for name, own in {"mean": mean, "linear": line, "local_only": local_only, "pooled": pooled}.items()
        },
        "converged": strategy.converged_now(),
        "training_target": preparation.training_target,
        "data": preparation.data,
        "warnings": strategy.warnings(),
        "calibration": combine_histograms(strategy.calibrated),
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
        "method_details": strategy.details(),
    }
    return Summary(metrics, posterior, predictions, preparation.schema, preparation.arrays, preparation.names)


def histograms(own: Answer) -> dict[str, np.ndarray]:
    """The histograms of an evaluation reply; they travel flat, as lists of numbers."""
    found: dict[str, np.ndarray] = {}
    for name, shape in HISTOGRAM_SHAPES.items():
        values = own.metrics.get(name)
        if isinstance(values, list):
            found[name] = np.asarray(values).reshape(shape)
    return found


def _labelled(strategy: BaseStrategy, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the per-site table with the site's name for people and its training rows."""
    preparation = strategy.preparation
    return [
        {**row, "label": preparation.labels[row["site"]], "training_rows": preparation.rows[row["site"]]}
        for row in rows
    ]


def _predictions(strategy: BaseStrategy) -> dict[str, NamedArrays]:
    specs = dict(CLASS_ARRAYS if strategy.config.model.likelihood == "bernoulli" else PREDICTION_ARRAYS)
    if strategy.preparation.num_inputs <= 2:
        specs["prediction.input"] = ArraySpec((None, strategy.preparation.num_inputs))
    specs |= strategy.row_specs()
    sites = list(strategy.evaluation_answers)
    answers = strategy.ask_rows("query.predictions", specs, sites)
    return {site: own.arrays for site, own in answers.items()}


def _simple(strategy: BaseStrategy) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The mean and the linear model as baselines; none where the method scores another kind of task than they."""
    logger.info("comparison: mean and linear model")
    classes = strategy.config.model.likelihood == "bernoulli"
    if strategy.evaluation is None or ("brier" in strategy.evaluation["test"]) != classes:
        return None, None
    mean, line = strategy.simple_baselines()
    return mean and as_baseline(mean), line and as_baseline(line)


def _baseline(strategy: BaseStrategy, phase: str, sites: list[str]) -> dict[str, Any] | None:
    logger.info("comparison: %s", phase.removeprefix("query.").replace("_", "-"))
    evaluation = strategy.compared(phase, sites)
    return None if evaluation is None else as_baseline(evaluation)
