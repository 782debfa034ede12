"""The end of a run: what is saved, and the comparison with local-only and pooled training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgp_flower.shapes import NamedArrays
from strategies.evaluation import CLASSIFICATION_SUMS, REGRESSION_SUMS, as_baseline, combine, combine_histograms
from strategies.wire import Answer, ArraySpec

if TYPE_CHECKING:
    from strategies.base import GPStrategy

logger = logging.getLogger("fedgp")

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


def sums_of(own: Answer) -> dict[str, float]:
    """The sums of scores in an evaluation reply."""
    names = CLASSIFICATION_SUMS if "brier" in own.metrics else REGRESSION_SUMS
    return {name: own.number(name) for name in names}


def close(strategy: GPStrategy) -> Summary:
    """Ask for the comparisons and rows the configuration wants, and put the figures of the run together."""
    network, config, preparation = strategy.network, strategy.config, strategy.preparation
    keeps_rows = strategy.predicts and preparation.simulated and config.keep_predictions
    predictions = _predictions(strategy) if keeps_rows else {}
    local_only = _baseline(strategy, "query.local_only", network.sites()) if config.baselines.local_only else None
    wants_pooled = config.baselines.pooled and preparation.simulated
    pooled = _baseline(strategy, "query.pooled", network.healthy()[:1]) if wants_pooled else None
    posterior = strategy.posterior()
    strategy.clock.switch("evaluation")
    evaluation = strategy.evaluation
    seconds = strategy.clock.seconds
    metrics = {
        "method": config.method,
        "dataset": config.dataset,
        "sites": len(network.sites()),
        "rounds": strategy.round,
        "communications": network.traffic.communications,
        "seconds": {"total": sum(seconds.values()), **seconds, "sites": network.site_seconds},
        "bytes": {"up": network.traffic.bytes_up, "down": network.traffic.bytes_down},
        "test": evaluation["test"] if evaluation else None,
        "test_standardised": evaluation["test_standardised"] if evaluation else None,
        "per_site": _labelled(strategy, evaluation["per_site"]) if evaluation else [],
        "pooled": pooled,
        "local_only": local_only,
        "calibration": combine_histograms([histograms(own) for own in strategy.evaluation_answers.values()]),
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
        "method_details": strategy.details(),
    }
    return Summary(metrics, posterior, predictions, preparation.schema, preparation.arrays, preparation.names)


def histograms(own: Answer) -> dict[str, np.ndarray]:
    """The histograms of an evaluation reply; they travel flat, as lists of numbers."""
    found: dict[str, np.ndarray] = {}
    for name, columns in (("evaluation.pit", 1), ("evaluation.reliability", 3)):
        values = own.metrics.get(name)
        if isinstance(values, list):
            found[name] = np.asarray(values).reshape(-1, columns) if columns > 1 else np.asarray(values)
    return found


def _labelled(strategy: GPStrategy, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the per-site table with the site's name for people and its training rows."""
    preparation = strategy.preparation
    return [
        {**row, "label": preparation.labels[row["site"]], "training_rows": preparation.rows[row["site"]]}
        for row in rows
    ]


def _predictions(strategy: GPStrategy) -> dict[str, NamedArrays]:
    specs = dict(PREDICTION_ARRAYS)
    if strategy.preparation.num_inputs <= 2:
        specs["prediction.input"] = ArraySpec((None, strategy.preparation.num_inputs))
    sites = list(strategy.evaluation_answers)
    return {
        site: own.arrays for site, own in strategy.ask("query.predictions", strategy.predictive(), specs, sites).items()
    }


def _baseline(strategy: GPStrategy, phase: str, sites: list[str]) -> dict[str, Any] | None:
    logger.info("comparison: %s", phase.removeprefix("query.").replace("_", "-"))
    answers = {site: own for site, own in strategy.ask(phase, {}, None, sites).items() if own.number("count") > 0}
    if not answers:
        return None
    sums = {site: sums_of(own) for site, own in answers.items()}
    return as_baseline(combine(sums, strategy.preparation.target_scale))
