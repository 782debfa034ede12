"""What a unit of FedMGP computes when it is asked: local steps of Algorithm 2, and φ_m fitted alone; and its memory.

A unit remembers φ_m between rounds. In an exact round it proposes new parameters, and the server's next message says
which trial move it took. If a reply is lost the server still counts the one before: the unit then goes back to the
parameters behind that one. So a memory carries the round that made it, and that of the report that counted then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from fedgp_flower.errors import NumericsError
from fedgp_flower.gp.optimisers import ascend
from fedgp_flower.gp.optimisers import maximise as maximise_function
from fedgp_flower.messages import message
from fedgp_flower.methods.fedmgp.gradient import GaussianRisk, descend
from fedgp_flower.methods.fedmgp.latents import Latents, Posterior
from fedgp_flower.methods.fedmgp.messages import Known
from fedgp_flower.methods.fedmgp.multi_output import (
    MultiOutputModel,
    load,
    personal_parameters,
    shared_parameters,
    to_arrays,
    to_exact,
)
from fedgp_flower.methods.fedmgp.unit import (
    SearchOptions,
    UnitData,
    UnitParameters,
    UnitState,
    maximise,
    moved,
    starting_parameters,
)
from fedgp_flower.typing import Array, NamedArrays

ALONE_SWEEPS = 20
"""Sweeps of a unit that fits φ_m to a g it took no part in."""


@message()
class Memory:
    """A unit's state of one start."""

    unit: UnitState
    round: int
    """Of the request that it answered with this."""
    based_on: int
    """Round of the report that counted then."""
    began: UnitParameters | None = None
    """Where the local steps of that round started."""

    def agreed(self, data: UnitData, known: Known) -> UnitParameters | None:
        """The parameters behind the report that counts; None where the unit must start afresh."""
        if known.report == self.round:
            return moved(data, self.unit, known.move)[1]
        return self.unit.before if known.report == self.based_on and known.report > 0 else None

    def start(self, server_round: int) -> UnitParameters:
        """Where the local steps of a round start; a round that is asked for again starts where it started."""
        return self.began if self.round == server_round and self.began is not None else self.unit.proposed


@message()
class Memories:
    """A unit's memory, by start: what its site keeps and nobody is sent."""

    starts: Mapping[str, Memory]


def fit_alone(data: UnitData, latents: Latents, q: Posterior, options: SearchOptions) -> UnitParameters:
    """φ_m fitted with g as it is: what a unit that joins late does, and nothing of it goes back."""
    phi = starting_parameters(data, latents, options)
    for sweep in range(ALONE_SWEEPS):
        phi = maximise(data, latents, q, phi, options, coarse=sweep == 0)
    return phi


def fit_personal(model: MultiOutputModel, x: Tensor, y: Tensor, *, max_evaluations: int = 200) -> UnitParameters:
    """φ_m that maximises E_q log p(y | f) with everything shared held as it is, for any likelihood."""
    leaves = list(personal_parameters(model).values())
    maximise_function(lambda: model.expected_log_likelihood(x, y).sum(), leaves, max_evaluations=max_evaluations)
    return to_exact(model)[1]


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """A unit's local optimisation in one round of Algorithm 2."""

    steps: int = 20
    learning_rate: float = 0.1
    optimizer: Literal["adam", "sgd"] = "adam"
    batch_size: int = 0
    """Rows of a mini-batch, drawn without replacement at each step; 0 takes all rows."""


def local_update(
    model: MultiOutputModel, x: Tensor, y: Tensor, options: LocalSteps, *, weight: float, generator: torch.Generator
) -> dict[str, Array]:
    """client_update of Algorithm 2: E local steps on (θ, φ_m), then the pseudo-gradient Δ_m = θ − θ_m.

    The optimiser starts afresh, φ_m stays in ``model``, and so does the unit's own θ_m until the next broadcast.

    Raises:
        NumericsError: a parameter is not finite, so that a diverged step is neither sent nor kept.
    """
    before = to_arrays(shared_parameters(model))
    whole = options.batch_size == 0 or options.batch_size >= len(y)

    def rows() -> Tensor | None:
        return None if whole else torch.randperm(len(y), generator=generator)[: options.batch_size]

    if isinstance(model.likelihood, GaussianLikelihood) and "inducing" not in before:
        _in_closed_form(model, x, y, rows, options, weight)
    else:
        _by_autograd(model, x, y, rows, options, weight)
    _refuse_diverged(model)
    after = to_arrays(shared_parameters(model))
    return {name: before[name] - after[name] for name in before}


Draw = Callable[[], Tensor | None]
"""Rows of the next mini-batch; None for all."""


def _in_closed_form(
    model: MultiOutputModel, x: Tensor, y: Tensor, draw: Draw, options: LocalSteps, weight: float
) -> None:
    """Local steps with the gradient of :class:`GaussianRisk`, a tenth of the time that autograd takes."""
    risk = GaussianRisk(x.numpy(), y.numpy(), model.inducing.numpy(), weight=weight, jitter=model.jitter)

    def slopes(parameters: NamedArrays) -> NamedArrays:
        rows = draw()
        return risk.gradient(parameters, None if rows is None else rows.numpy())[1]

    parameters = dict(model.named_parameters())
    start, adam = to_arrays(parameters), options.optimizer == "adam"
    load(parameters, descend(slopes, start, steps=options.steps, rate=options.learning_rate, adam=adam))


def _by_autograd(model: MultiOutputModel, x: Tensor, y: Tensor, draw: Draw, options: LocalSteps, weight: float) -> None:
    """Local steps for any likelihood, and where pseudo-inputs move."""

    def negative_risk() -> Tensor:
        drawn = draw()
        rows = slice(None) if drawn is None else drawn
        return -model.local_risk(x[rows], y[rows], num_data=len(y), weight=weight)

    rate, steps = options.learning_rate, options.steps
    ascend(negative_risk, list(model.parameters()), name=options.optimizer, steps=steps, learning_rate=rate)


def _refuse_diverged(model: MultiOutputModel) -> None:
    """Parameters are finite, and those that are logarithms in the model are positive numbers too."""
    latents, phi = to_exact(model)
    positive = np.concatenate([latents.scales.ravel(), phi.smoothing[phi.smoothing != 0], [phi.noise]])
    if not (np.isfinite(positive).all() and (positive > 0).all()) or not all(
        bool(torch.isfinite(p).all()) for p in model.parameters()
    ):
        raise NumericsError("local steps diverged: a parameter is not finite. Lower `optimizer.learning-rate`.")
