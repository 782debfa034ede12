"""The site's half of sgpr, svgp and fsgp: sums, shares of gradients, expectations, local steps, prediction."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy import ndarray

from fedgp_flower.clients.numpy_client import AveragingClient, SiteClient
from fedgp_flower.gp.cells import LEAST_ROWS, cells
from fedgp_flower.gp.latent import LatentGP, sparse_gp
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.sparse import SparseGP, Whitener, pooled_bound, pooled_sums, rows_gradient
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.lazy import Lazy
from fedgp_flower.methods.sgpr.duals import expectations
from fedgp_flower.methods.sgpr.messages import (
    Anchors,
    Expectations,
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
from fedgp_flower.scores import Prediction, Scores, latent_scores
from fedgp_flower.shared_messages import Parameters, Step, Stepped
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from fedgp_flower.methods.sgpr import learner
else:
    learner = Lazy("fedgp_flower.methods.sgpr.learner")

_whiteners: dict[Hashable, Whitener] = {}
"""The latest parameters of this process, with what every site computes from them alone."""
LATEST = 4
"""How many: a message may ask for the sums at several parameters."""


class SparseClient(SiteClient):
    """A sparse GP at the server's parameters w = {β, Z}, seeing only this site's rows."""

    def model(self, values: Mapping[str, ndarray]) -> SparseGP:
        """The model at given parameters."""
        return self.placement.module(sparse_gp(self.config.model, values))

    def whitener(self, values: Mapping[str, ndarray]) -> Whitener:
        """What projects rows at given parameters; kept because the next message mostly comes with the same ones."""
        key = (self.config.model, self.placement, *((name, array.tobytes()) for name, array in values.items()))
        if key not in _whiteners:
            while len(_whiteners) >= LATEST:
                del _whiteners[next(iter(_whiteners))]
            _whiteners[key] = Whitener(self.model(values))
        return _whiteners[key]

    def statistics(self, request: Parameters) -> Statistics:
        """The additive sums of this site's rows (Guo et al. 2022, Eqs. 14-15)."""
        return Statistics(**vars(self.sums(request.values)))

    def sums(self, values: Mapping[str, ndarray]) -> SparseSums:
        """The sums of this site's rows at given parameters."""
        whitener = self.whitener(values)
        return pooled_sums(whitener.model, *self.tensors, whitener)

    def predict(self, request: PooledPosterior, inputs: Array) -> Prediction:
        """Prediction from the exact pooled posterior."""
        with torch.no_grad():
            mean, variance = self.model(request.values).predict(self.placement.tensor(inputs), request.whitened())
        return Prediction(to_array(mean), to_array(variance))


class SGPRClient(SparseClient):
    """Sums and shares of the exact gradient, at several parameters at once."""

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
        return TrialSums.of([self.sums(values) for values in apart(request.values)])

    def gradients(self, request: TrialAdjoints) -> TrialGradients:
        """The parts of several gradients that need this site's rows."""
        shares = []
        for values, adjoints in request.each():
            whitener = self.whitener(values)
            shares.append(rows_gradient(whitener.model, *self.tensors, adjoints, whitener))
        return TrialGradients(numbered(shares))


class SVGPClient(SparseClient):
    """Expectations at the posterior that a message carries, for classes, counts and outliers."""

    def latent(self, values: Mapping[str, ndarray]) -> tuple[LatentGP, torch.Tensor]:
        """The model at given parameters and its factor L."""
        whitener = self.whitener(values)
        assert isinstance(whitener.model, LatentGP)
        return whitener.model, whitener.factor

    def expectations(self, request: PooledPosterior) -> Expectations:
        """The expected log likelihood of this site's rows, and its derivatives."""
        model, factor = self.latent(request.values)
        return expectations(model, *self.tensors, request.whitened(), factor)

    def score(self, request: PooledPosterior) -> Scores:
        """Scores of the held-out rows by the configured likelihood."""
        (model, _), rows = self.latent(request.values), self.rows
        mean, variance = map(to_array, model.latent(self.placement.tensor(rows.x_test), request.whitened()))
        scale = self.preparation.target_scale
        return latent_scores(model.observed, model.hyper, mean, variance, rows.y_test, scale)


class FSGPClient(SparseClient, AveragingClient):
    """Local steps, whose result the server averages."""

    def train(self, request: Step) -> Stepped:
        """P local steps on the collapsed bound per row F_k (Guo et al. 2022, Eq. 9 and Algorithm 1)."""
        model, (inputs, targets) = self.model(request.values), self.tensors

        def objective() -> torch.Tensor:
            return pooled_bound(model, inputs, targets) / len(targets)

        return self.stepped(model, objective, request)
