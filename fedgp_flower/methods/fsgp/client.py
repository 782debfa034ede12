"""The site's half of FSGP: local steps, sums, shares of the exact gradient, prediction."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.gp import sparse
from fedgp_flower.gp.cells import LEAST_ROWS, cells
from fedgp_flower.gp.latent import sparse_gp
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.sparse import SparseGP, Whitener, pooled_sums
from fedgp_flower.gp.sums import collapsed_bound
from fedgp_flower.lazy import Lazy
from fedgp_flower.methods.fsgp.dual_client import DualClient
from fedgp_flower.methods.fsgp.messages import (
    Adjoints,
    Anchors,
    GradientShare,
    PooledPosterior,
    Sketch,
    Statistics,
    TrialAdjoints,
    TrialGradients,
    Trials,
    TrialSums,
    apart,
    numbered,
)
from fedgp_flower.scores import Prediction
from fedgp_flower.shared_messages import Parameters, Step, Stepped
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.methods.fsgp import learner
else:
    learner = Lazy("fedgp_flower.methods.fsgp.learner")

_whiteners: dict[Hashable, Whitener] = {}
"""The latest parameters of this process, with what every site computes from them alone."""
LATEST = 4
"""How many: a message may ask for the sums at several parameters."""


class FSGPClient(DualClient):
    """A sparse GP at the server's parameters w = {β, Z}, seeing only this site's rows."""

    def model(self, values: Mapping[str, ndarray]) -> SparseGP:
        """The model at given parameters."""
        return self.placement.module(sparse_gp(self.config.model, values))

    def factorised(self, values: Mapping[str, ndarray]) -> tuple[SparseGP, torch.Tensor]:
        """The model and its factor L."""
        whitener = self.whitener(values)
        return whitener.model, whitener.factor

    def whitener(self, values: Mapping[str, ndarray]) -> Whitener:
        """What projects rows at given parameters; kept for the next message, which mostly comes with the same ones."""
        key = (self.config.model, self.placement, *((name, own.tobytes()) for name, own in values.items()))
        if key not in _whiteners:
            while len(_whiteners) >= LATEST:
                del _whiteners[next(iter(_whiteners))]
            _whiteners[key] = Whitener(self.model(values))
        return _whiteners[key]

    def train(self, request: Step) -> Stepped:
        """P local steps on the collapsed bound per row F_k (Guo et al. 2022, Eq. 9 and Algorithm 1)."""
        model, (inputs, targets) = self.model(request.values), self.tensors

        def objective() -> torch.Tensor:
            return collapsed_bound(model.sums(inputs, targets), model.noise) / len(targets)

        return self.stepped(model, objective, request)

    def statistics(self, request: Parameters) -> Statistics:
        """The additive sums of this site's rows (Guo et al. 2022, Eqs. 14-15)."""
        whitener = self.whitener(request.values)
        return Statistics.of(pooled_sums(whitener.model, *self.tensors, whitener))

    def gradient(self, request: Adjoints) -> GradientShare:
        """The part of the pooled bound's gradient that needs this site's rows."""
        whitener, (inputs, targets) = self.whitener(request.values), self.tensors
        adjoints = sparse.Adjoints.of(request.gram, request.projection, request.prior_variance, inputs)
        return GradientShare(sparse.rows_gradient(whitener.model, inputs, targets, adjoints, whitener))

    def sketch(self, request: Anchors) -> Sketch:
        """Cells of this site's rows, and the mode of a GP of them alone with its curvature."""
        inputs, targets = self.tensors
        found = cells(self.rows.x, request.points, max(LEAST_ROWS, self.least_cell))
        mode = learner.local_mode(
            self.config.model, inputs, targets, np.random.default_rng([self.config.seed, *b"mode"])
        )
        return Sketch(*found, *mode)

    def trials(self, request: Trials) -> TrialSums:
        """The additive sums of this site's rows at each of several parameters."""
        return TrialSums.of([self.statistics(Parameters(values)) for values in apart(request.values)])

    def gradients(self, request: TrialAdjoints) -> TrialGradients:
        """The parts of several gradients that need this site's rows."""
        return TrialGradients(numbered([self.gradient(own).values for own in request.each()]))

    def predict(self, request: PooledPosterior, inputs: Array) -> Prediction:
        """Prediction from the exact pooled posterior."""
        with torch.no_grad():
            mean, variance = self.model(request.values).predict(self.placement.tensor(inputs), request.whitened())
        return Prediction(to_array(mean), to_array(variance))
