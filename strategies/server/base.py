"""What a run needs whatever the algorithm: a clock, rounds and their history, evaluation, checkpoints.

:mod:`strategies.server.strategy` puts an algorithm's questions on top.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedgp_flower.errors import RunError
from fedgp_flower.run.artefacts import Snapshot
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import NamedArrays
from strategies.server import enrolment, finalise
from strategies.server.enrolment import Enrolment, Preparation
from strategies.server.evaluation import Evaluation, as_baseline, combine, combine_histograms, with_skill
from strategies.server.finalise import Posterior, Summary
from strategies.server.network import Expected, Network
from strategies.server.wire import Answer, ArraySpec, Specs, answers

logger = logging.getLogger("fedgp")

CLASS_ARRAYS = ("prediction.probability", "prediction.target")
PREDICTION_ARRAYS = ("prediction.mean", "prediction.sd", "prediction.target")


class Observer:
    """What the run's folder and progress display want to know; this one keeps nothing."""

    def on_round(self, row: Mapping[str, float], total: int) -> None:
        """A round is complete; ``row`` is its line of the history."""

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        """Keep this; it replaces the one before."""


@dataclass(slots=True)
class Clock:
    """Seconds spent in the parts of a run, carried over a resume."""

    seconds: dict[str, float] = field(default_factory=lambda: {"setup": 0.0, "training": 0.0, "evaluation": 0.0})
    started: float = field(default_factory=time.perf_counter)
    part: str = "setup"

    def switch(self, part: str) -> str:
        """Book the time so far and go on in another part; returns the part left."""
        now = time.perf_counter()
        self.seconds[self.part] += now - self.started
        self.started, left, self.part = now, self.part, part
        return left


class BaseStrategy(Strategy):
    """The part of a Strategy that knows no algorithm."""

    predicts = True
    """Whether sites can predict single rows with what :meth:`predictive` returns."""
    trains = True
    """Whether rounds change the state by what sites answer."""
    row_arrays: tuple[str, ...] = ()
    """Arrays that a simulated site sends for its held-out rows besides target, prediction and inputs."""

    def __init__(self, config: RunConfig, observer: Observer, snapshot: Snapshot | None = None) -> None:
        self.config = config
        self.observer = observer
        self.snapshot = snapshot
        self.clock = Clock()
        self.round = 0
        self.merged = False
        """Whether what a site answered to training has ever changed the state."""
        self.booked: dict[str, float] = {}
        self.evaluated_round = -1
        self.evaluation_answers: dict[str, Answer] = {}
        self.predicted_with: Any = {}
        self.evaluated_sites = 0
        self.evaluation: Evaluation | None = None
        self.local_only: Mapping[str, Any] | None = None
        self.calibrated: Sequence[NamedArrays] = ()
        """Histograms of the latest evaluation."""
        self.network: Network
        self.enrolment: Enrolment
        self.preparation: Preparation
        self.outcome: Summary | None = None

    @abstractmethod
    def ask_rows(self, phase: str, specs: Specs | None, sites: Iterable[str]) -> dict[str, Answer]:
        """Answers of rows of a simulation, and of the scores of baselines."""

    @abstractmethod
    def posterior(self) -> Posterior | None:
        """What is saved to predict without any site; None for a personal method."""

    @abstractmethod
    def simple_baselines(self) -> tuple[Evaluation | None, Evaluation | None]:
        """The scores of the mean of the target, and of a linear model; None where nobody has any."""

    @abstractmethod
    def converged_now(self) -> bool | None:
        """Whether training had come to its end by itself; None where the method cannot tell."""

    @abstractmethod
    def state(self) -> Snapshot:
        """The method's own part of a checkpoint."""

    def evaluation_specs(self) -> Expected:
        """What the arrays of an evaluation reply must look like: scores are numbers, so there are none."""
        return {}

    def compared(self, phase: str, sites: list[str]) -> Evaluation | None:
        """The scores of a baseline; None if no site has any."""
        return self.combined(self.ask_rows(phase, None, sites))

    def combined(self, scored: Mapping[str, Answer]) -> Evaluation | None:
        """The figures of answers that hold scores; None if no site has any, a failure for one that cannot be scores."""
        usable = finalise.usable_scores(self.network, scored)
        sums = {site: finalise.sums_of(own) for site, own in usable.items()}
        arrays = map(finalise.histograms, usable.values())
        return combine(sums, self.preparation.target_scale, arrays) if sums else None

    def warnings(self) -> list[str]:
        """What a reader of the results should know."""
        labels = self.preparation.labels
        said = [
            f"{warning} (sites {', '.join(sorted(labels.get(site, site) for site in own))})"
            for warning, own in self.network.warned.items()
        ]
        return self.preparation.warnings + said

    def details(self) -> dict[str, Any]:
        """Facts of the method worth keeping in ``metrics.json``."""
        return {}

    def adjusted(self, preparation: Preparation) -> Preparation:
        """The agreed standardisation, changed where the model needs another one."""
        return preparation

    def begin_round(self) -> None:
        """Count a round, greet sites that are new or back, and check that there are enough."""
        self.round += 1
        self.network.round = self.round
        enrolment.greet(self.network, self.preparation)
        self.network.require(self.config.min_sites)

    def complete_round(self, metrics: Mapping[str, float]) -> None:
        """Record a round, evaluate when it is due, and keep a checkpoint."""
        figures = dict(metrics)
        every = self.config.evaluate_every
        if every and self.round % every == 0:
            figures |= self.evaluate()
        traffic = self.network.traffic
        self.clock.switch(self.clock.part)
        row = {
            "round": self.round,
            "communications": traffic.communications,
            "exchanges": traffic.exchanges,
            **self.since_last_round(),
            **figures,
            "failures": len(self.network.failures),
            "repairs": sum(self.network.repairs.values()),
        }
        self.observer.on_round(row, self.most_rounds)
        self.observer.on_checkpoint(self._checkpoint())

    @property
    def most_rounds(self) -> int:
        """With how many rounds training ends at the latest."""
        return self.config.num_server_rounds

    def since_last_round(self) -> dict[str, float]:
        """Seconds and bytes since the round before was complete."""
        traffic = self.network.traffic
        total = {
            "seconds": sum(self.clock.seconds.values()),
            "bytes_up": traffic.bytes_up,
            "bytes_down": traffic.bytes_down,
        }
        spent = {name: value - self.booked.get(name, 0) for name, value in total.items()}
        self.booked = total
        return spent

    def _checkpoint(self) -> Snapshot:
        own = self.state()
        facts = enrolment.accounts(self.network) | {"round": self.round, "seconds": self.clock.seconds}
        facts["merged"] = self.merged
        return Snapshot(
            {**self.preparation.arrays, **own.arrays},
            {**own.facts, **facts, "preparation": self.preparation.facts()},
        )

    def agree_without(self, contradicted: Mapping[str, str]) -> None:
        """Dismiss sites whose first answers contradict their descriptions; the others agree again without them."""
        self.enrolment = enrolment.agree_again(self.network, self.enrolment, contradicted)
        self.preparation = self.adjusted(self.enrolment.preparation)

    def generator(self, purpose: str) -> np.random.Generator:
        """Randomness for a purpose in this round, from the seed of the run."""
        return np.random.default_rng([self.config.seed, self.round, *purpose.encode()])

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Figures over all held-out rows, from the sites' sums; None if nobody has any."""
        del server_round
        self.evaluation_answers = finalise.usable_scores(self.network, answers(replies))
        if not self.evaluation_answers:
            return None
        sums = {site: finalise.sums_of(own) for site, own in self.evaluation_answers.items()}
        self.calibrated = [finalise.histograms(own) for own in self.evaluation_answers.values()]
        self.evaluation = combine(sums, self.preparation.target_scale, self.calibrated)
        return MetricRecord({f"test_{name}": value for name, value in self.evaluation["test"].items()})

    def evaluate(self) -> dict[str, float]:
        """Evaluate once per round; later calls in the same round return nothing new."""
        if self.evaluated_round == self.round:
            return {}
        left = self.clock.switch("evaluation")
        self.network.round = self.round
        messages = list(self.configure_evaluate(self.round, ArrayRecord(), ConfigRecord(), self.network.grid))
        replies = self.network.exchange(messages, self.evaluation_specs(), retries=1)
        record = self.aggregate_evaluate(self.round, replies)
        self.evaluated_round = self.round
        self.clock.switch(left)
        self.evaluated_sites = len(replies)
        return {} if record is None else {name: float(np.mean(value)) for name, value in record.items()}

    def close(self) -> Summary:
        """Ask for the comparisons and rows the configuration wants, and put the figures of the run together.

        Raises:
            RunError: no site could score its held-out rows.
        """
        network, config, preparation = self.network, self.config, self.preparation
        shows_rows = preparation.simulated and not config.privacy.secure_aggregation
        keeps_rows = self.predicts and shows_rows and config.keep_predictions
        predictions = self._predictions() if keeps_rows else {}
        local_only = self._baseline("query.local_only", network.sites()) if config.baselines.local_only else None
        self.local_only = local_only
        wants_pooled = config.baselines.pooled and preparation.simulated
        pooled = self._baseline("query.pooled", network.healthy()[:1]) if wants_pooled else None
        mean, line = self._simple() if config.baselines.linear else (None, None)
        posterior = self.posterior()
        if self.evaluated_sites == 0:
            raise RunError("no site could score its held-out rows, so the run has no result; see the failures above")
        details = self.details()
        self.clock.switch("evaluation")
        evaluation = self.evaluation or Evaluation(test={}, test_standardised={}, per_site=[])
        labels, rows, seconds = preparation.labels, preparation.rows, self.clock.seconds
        metrics = {
            "method": config.method,
            "dataset": self.data,
            "sites": len(network.took_part) or len(network.sites()),
            "rounds": self.round,
            "communications": network.traffic.communications,
            "exchanges": network.traffic.exchanges,
            "seconds": {"total": sum(seconds.values()), **seconds, "sites": network.site_seconds},
            "bytes": {"up": network.traffic.bytes_up, "down": network.traffic.bytes_down},
            "test": with_skill(evaluation["test"], mean or {}),
            "test_standardised": evaluation["test_standardised"],
            "per_site": [
                {**row, "label": labels[row["site"]], "training_rows": rows[row["site"]]}
                for row in evaluation["per_site"]
            ],
            "names": dict(labels),
            **{
                name: None if own is None else with_skill(own, mean or {})
                for name, own in {"mean": mean, "linear": line, "local_only": local_only, "pooled": pooled}.items()
            },
            "converged": self.converged_now(),
            "training_target": preparation.training_target,
            "data": preparation.data,
            "warnings": self.warnings(),
            "calibration": combine_histograms(self.calibrated),
            "failures": [asdict(failure) for failure in network.failures],
            "repairs": network.repairs,
            "method_details": details,
        }
        return Summary(metrics, posterior, predictions, preparation.schema, preparation.arrays, preparation.names)

    def _predictions(self) -> dict[str, NamedArrays]:
        """Held-out rows of simulated sites with their predictions."""
        names = CLASS_ARRAYS if self.config.model.likelihood == "bernoulli" else PREDICTION_ARRAYS
        ends = ("prediction.low", "prediction.high") if self.preparation.transformed else ()
        specs = {name: ArraySpec((None,)) for name in (*names, *ends, *self.row_arrays)}
        if self.preparation.num_inputs <= 2:
            specs["prediction.input"] = ArraySpec((None, self.preparation.num_inputs))
        rows = self.ask_rows("query.predictions", specs, list(self.evaluation_answers))
        return {site: own.arrays for site, own in rows.items()}

    def _simple(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The mean and the linear model as baselines; none where the method scores another kind of task than they."""
        logger.info("comparison: mean and linear model")
        classes = self.config.model.likelihood == "bernoulli"
        if self.evaluation is None or ("brier" in self.evaluation["test"]) != classes:
            return None, None
        mean, line = self.simple_baselines()
        return mean and as_baseline(mean), line and as_baseline(line)

    def _baseline(self, phase: str, sites: list[str]) -> dict[str, Any] | None:
        logger.info("comparison: %s", phase.removeprefix("query.").replace("_", "-"))
        evaluation = self.compared(phase, sites)
        return None if evaluation is None else as_baseline(evaluation)

    def require_training(self) -> None:
        """A run of rounds that left the state as it was at the start has no result.

        Raises:
            RunError: with the latest failures.
        """
        if self.trains and self.round and not self.merged:
            raise RunError(
                f"no answer to training could be used in {self.round} round(s), so nothing was learned."
                f" {self.network.latest_failures()}"
            )

    def summary(self) -> None:
        """Log what is about to run, once the sites are known."""
        logger.info("method %s on %s", self.config.method, self.data)

    @property
    def data(self) -> str:
        """What is learned from."""
        return self.config.dataset if self.preparation.simulated else "the sites' own tables"
