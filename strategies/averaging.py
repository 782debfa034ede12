"""Strategies whose state is a set of named parameters, and federated averaging of them.

Averaging is Flower's own: FedAvg, FedAdam and FedYogi aggregate the replies. Here is only what they lack: seeded
sampling of sites by their stable ids, honest weights, and moments that survive a resume.
"""

from __future__ import annotations

import math
from abc import ABC
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedYogi

from fedgp_flower.errors import RunError
from fedgp_flower.shapes import Array, NamedArrays
from strategies.base import GPStrategy, Snapshot
from strategies.initialisation import initial_inducing_points
from strategies.wire import Answer, ArraySpec, Specs, answer, array_record, numpy_arrays, sums_over

PREFIX = "parameters."


class AveragingOptions(Protocol):
    """What the table of an averaging method has."""

    @property
    def fraction(self) -> float:
        """Share ρ of the sites in a round."""

    @property
    def server_optimizer(self) -> str:
        """``fedavg``, ``fedadam`` or ``fedyogi``."""

    @property
    def server_learning_rate(self) -> float:
        """Of ``fedadam`` and ``fedyogi``."""


def median_hyperparameters(answers: Mapping[str, Answer]) -> NamedArrays:
    """Initial hyperparameters; every honest site sends the same, so the median is theirs."""
    first = next(iter(answers.values())).arrays
    names = [name for name in first if name.startswith(("kernel.", "likelihood."))]
    return {name: np.median([own.arrays[name] for own in answers.values()], axis=0) for name in names}


def shape_refusal(own: Answer, rows: int) -> str | None:
    """Why an answer to ``query.shape`` cannot come from ``rows`` rows, or None."""
    histogram, products = own.arrays["input.histogram"], own.arrays["input.products"]
    if own.num_examples != rows or (histogram.sum(axis=1) != rows).any() or (histogram < 0).any():
        return f"`input.histogram` is not one of the {rows} rows it introduced itself with"
    eigenvalues = np.linalg.eigvalsh(products / 2 + products.T / 2)
    slack = 1e-6 * max(float(eigenvalues[-1]), 1e-300)
    if np.abs(products - products.T).max() > slack or eigenvalues[0] < -slack:
        return "`input.products` is not XᵀX of any rows"
    return None


class ParameterStrategy(GPStrategy, ABC):
    """Named parameters in unconstrained coordinates, kept in the checkpoint."""

    parameters: NamedArrays

    def shapes_of_inputs(self) -> dict[str, Answer]:
        """What sites say of where their inputs lie, with the initial hyperparameters of the configured model.

        Raises:
            RunError: if no site answers.
        """
        asked = self.ask("query.shape", {}, None, self.network.healthy(), retries=1)
        layouts = {
            site: frozenset((n, a.shape, a.dtype.str) for n, a in own.arrays.items()) for site, own in asked.items()
        }
        usual = Counter(layouts.values()).most_common(1)
        answers: dict[str, Answer] = {}
        for site, own in asked.items():
            odd = None if layouts[site] == usual[0][0] else "its arrays are not those that most sites send"
            reason = odd or shape_refusal(own, self.preparation.rows[site])
            if reason:
                self.network.fail(site, reason)
            else:
                answers[site] = own
        if not answers:
            raise RunError("no site answered where its inputs lie; see the failures above")
        return answers

    def initial_inducing_points(self, answers: Mapping[str, Answer]) -> Array:
        """The first Z [M, D], drawn from the sums of what sites say of their inputs."""
        return initial_inducing_points(
            self.config.model.inducing_init,
            self.config.model.num_inducing,
            sums_over(answers, "input.histogram"),
            sums_over(answers, "input.products"),
            float(sum(own.num_examples for own in answers.values())),
            np.random.default_rng([self.config.seed, *b"inducing"]),
        )

    def parameter_specs(self) -> Specs:
        """Shapes of the parameters."""
        return {name: ArraySpec(array.shape) for name, array in self.parameters.items()}

    def state(self) -> Snapshot:
        """The parameters."""
        return Snapshot({PREFIX + name: array for name, array in self.parameters.items()}, {})

    def restore(self, snapshot: Snapshot) -> None:
        """Parameters of the checkpoint."""
        self.parameters = {n.removeprefix(PREFIX): a for n, a in snapshot.arrays.items() if n.startswith(PREFIX)}


class Averaging(ParameterStrategy, ABC):
    """Sampled sites take local steps from the global parameters; Flower's rule averages what they send."""

    def __init__(self, config: Any, observer: Any, snapshot: Snapshot | None = None) -> None:
        super().__init__(config, observer, snapshot)
        own = cast(AveragingOptions, config.options)
        rules: dict[str, Callable[[], FedAvg]] = {
            "fedavg": FedAvg,
            "fedadam": lambda: FedAdam(eta=own.server_learning_rate),
            "fedyogi": lambda: FedYogi(eta=own.server_learning_rate),
        }
        self.fraction = own.fraction
        self.flower = rules[own.server_optimizer]()

    def round_metrics(self) -> dict[str, float]:
        """Figures of the method for the history, besides the mean objective."""
        return {}

    def train_specs(self) -> Specs:
        """Parameters come back."""
        return self.parameter_specs()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample max(⌈ρK⌉, 1) sites and send them the parameters and this round's learning rate."""
        del arrays, config, grid
        healthy = self.network.healthy()
        size = max(math.ceil(self.fraction * len(healthy)), 1)
        chosen = sorted(self.generator("sample").choice(len(healthy), size=size, replace=False))
        if isinstance(self.flower, FedAdam | FedYogi):
            self.flower.current_arrays = dict(self.parameters)
        rate = self.config.optimizer.learning_rate * self.config.optimizer.decay ** (server_round - 1)
        settings: dict[str, str | float] = {**self.preparation.settings, "learning-rate": rate}
        request = {**self.preparation.arrays, **self.parameters}
        return [self.network.message(healthy[i], "train", request, settings) for i in chosen]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's own rule, weights N_k / Σ N_k; a round nobody answered leaves the parameters as they are."""
        kept = [reply for reply in replies if self._honest_weight(reply)]
        answers = [answer(self.network.site_of(reply), reply) for reply in kept]
        for reply, own in zip(kept, answers, strict=True):  # Flower wants the same metrics of all, and needs one
            reply.content["metrics"] = MetricRecord({"num-examples": own.num_examples})
        aggregated, _ = self.flower.aggregate_train(server_round, kept)
        if aggregated is None:
            return None, None
        self.parameters = numpy_arrays(aggregated)
        weights = [own.num_examples for own in answers]
        objective = float(np.average([own.number("objective") for own in answers], weights=weights))
        return array_record(self.parameters), MetricRecord({"objective": objective, **self.round_metrics()})

    def _honest_weight(self, reply: Message) -> bool:
        """A site weighs as many rows as it said it had."""
        own = answer(self.network.site_of(reply), reply)
        known = self.preparation.rows[own.site]
        if own.num_examples != known:
            self.network.fail(own.site, f"claims {own.num_examples} rows, introduced itself with {known}")
        return own.num_examples == known

    def state(self) -> Snapshot:
        """Parameters and the moments of a server optimiser that has them."""
        moments = {
            f"{kind}.{name}": np.asarray(array)
            for kind in ("m_t", "v_t")
            for name, array in (getattr(self.flower, kind, None) or {}).items()
        }
        own = super().state()
        return Snapshot({**own.arrays, **moments}, own.facts)

    def restore(self, snapshot: Snapshot) -> None:
        """Parameters and moments of the checkpoint."""
        super().restore(snapshot)
        for kind in ("m_t", "v_t"):
            moments = {n.removeprefix(f"{kind}."): a for n, a in snapshot.arrays.items() if n.startswith(f"{kind}.")}
            if moments:
                setattr(self.flower, kind, moments)
