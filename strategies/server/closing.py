"""The figures of a finished run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fedgp_flower.errors import RunError
from fedgp_flower.outcome import Summary
from fedgp_flower.shared_messages import LocalScoreSums, Nothing, PooledScoreSums
from strategies.server.algorithm import Algorithm
from strategies.server.checkpoint import Clock
from strategies.server.course import rise
from strategies.server.evaluation import Evaluation, combine_histograms, with_skill


def dataset_of(algorithm: Algorithm[Any]) -> str:
    """What is learned from."""
    return algorithm.config.dataset if algorithm.preparation.simulated else "the sites' own tables"


def close(algorithm: Algorithm[Any], state: Any, clock: Clock, scored_by: int, expected: dict[str, float]) -> Summary:
    """Ask for the comparisons and rows the configuration wants, and put the figures of the run together.

    Args:
        algorithm: With the session of its run.
        state: At the end of training.
        clock: The time so far.
        scored_by: How many sites answered the closing evaluation.
        expected: Exchanges and seconds of training, as announced before it.

    Raises:
        RunError: no site could score its held-out rows.
    """
    network, config, preparation = algorithm.network, algorithm.config, algorithm.preparation
    scoring, wanted = algorithm.scoring, algorithm.config.baselines
    predictions = scoring.predictions(algorithm.predicts)
    scoring.local_only = scoring.baseline(LocalScoreSums, Nothing()) if wanted.local_only else None
    pooled = scoring.baseline(PooledScoreSums, Nothing()) if wanted.pooled and preparation.simulated else None
    mean, line = scoring.simple_baselines() if wanted.linear else (None, None)
    posterior = scoring.predicted.posterior or algorithm.posterior_of(state)
    if scored_by == 0:
        raise RunError("no site could score its held-out rows, so the run has no result; see the failures above")
    facts = details(algorithm, state, expected)
    clock.switch("evaluation")
    evaluation = scoring.evaluation or Evaluation(test={}, test_standardised={}, per_site=[])
    baselines = {"mean": mean, "linear": line, "local_only": scoring.local_only, "pooled": pooled}
    seconds = {"total": sum(clock.seconds.values()), **clock.seconds, "sites": network.site_seconds}
    labels, rows = preparation.labels, preparation.rows
    metrics = {
        "method": config.method,
        "dataset": dataset_of(algorithm),
        "sites": len(network.took_part) or len(network.sites()),
        "rounds": network.round,
        "communications": network.traffic.communications,
        "exchanges": network.traffic.exchanges,
        "seconds": seconds,
        "bytes": {"up": network.traffic.bytes_up, "down": network.traffic.bytes_down},
        "test": with_skill(evaluation["test"], mean or {}),
        "test_standardised": evaluation["test_standardised"],
        "per_site": [
            {**row, "label": labels[row["site"]], "training_rows": rows[row["site"]]} for row in evaluation["per_site"]
        ],
        "names": dict(labels),
        **{name: None if scores is None else with_skill(scores, mean or {}) for name, scores in baselines.items()},
        "converged": algorithm.converged(state),
        "training_target": preparation.training_target,
        "data": preparation.data,
        "warnings": algorithm.session.warnings() + algorithm.warnings(),
        "calibration": combine_histograms(scoring.calibrated),
        "failures": [asdict(failure) for failure in network.failures],
        "repairs": network.repairs,
        "method_details": facts,
    }
    return Summary(metrics, posterior, predictions, preparation.schema, preparation.arrays, preparation.names)


def details(algorithm: Algorithm[Any], state: Any, expected: dict[str, float]) -> dict[str, Any]:
    """Facts of the method, those that sites are asked for among them."""
    asked = algorithm.session.run(algorithm.final(state, algorithm.roster()))
    facts = {**algorithm.scoring.predicted.details, **algorithm.details_of(state)} | expected | asked
    if (line := rise(algorithm.course.values)) is not None:
        facts["rise_per_round"] = line.slope
    return facts if algorithm.masking is None else facts | {"privacy": algorithm.masking.facts()}
