"""The clients of sgpr, svgp, sgpr-private, fsgp and fgpr: sums, gradients, expectations, local steps, predictions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from fedgp_flower.clients.numpy_client import SiteClient, confusion
from fedgp_flower.errors import ProtocolError
from fedgp_flower.gp.cells import LEAST_ALIKE, LEAST_ROWS, cells, pair_counts, repeats, values_of
from fedgp_flower.gp.error_law import BEFORE, PRECISION, SCALE, TAILS
from fedgp_flower.gp.fitc import WeightedSums, left_out, weighted_gradient, weighted_sums
from fedgp_flower.gp.likelihoods.classes import tempered
from fedgp_flower.gp.models import LOCATIONS, ExactGP, LatentGP, SparseGP, WhitenedPosterior, WiredModel, sparse_gp
from fedgp_flower.gp.optimisers import ascend, pack
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.sparse import Whitener, pooled_bound, pooled_sums
from fedgp_flower.gp.steps import common_values
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.sgpr.duals import expectations
from fedgp_flower.methods.sgpr.messages import (
    Candidates,
    ErrorSums,
    EvidenceGradient,
    Expectations,
    PairCounts,
    PooledPosterior,
    PrivateRequest,
    PrivateSums,
    Sketch,
    SparseStatistics,
    TemperedScores,
    TrialSums,
    ValueCounts,
)
from fedgp_flower.methods.sgpr.private import EDGE, Budget, disturbed
from fedgp_flower.options import SECOND_COLUMN
from fedgp_flower.privacy.questions import content_digest
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.shared_messages import Nothing, OneArray, Parameters, Step, Stepped
from fedgp_flower.typing import Array, NamedArrays

_whiteners: dict[Hashable, Whitener] = {}
"""Whiteners at the latest parameters; all sites in this process share them."""
CACHED_WHITENERS, CACHED_ENTRIES = 8, 2e7
"""Largest number of cached whiteners, and of entries in their M × M matrices."""
_posteriors: list[WhitenedPosterior] = []
"""The latest q(v) of a prediction, with its root; all sites in this process share it."""
ANSWERED = frozenset({"private", "evaluate", "score_sums", "predictions"})
"""Messages answered under differential privacy: noisy sums, and those that disclose only the number of rows."""
ASKED, LEFT_OUT, MEAN = "asked", "left_out", "mean"
"""Arrays of the site's state: the hash of what was asked, and errors and means of left-out rows; name of m in it."""


class SparseClient(SiteClient):
    """The site's part of a sparse GP at the server's parameters w = {β, Z}."""

    model: SparseGP
    """The model at the parameters of the latest message."""

    def load(self, values: Mapping[str, ndarray]) -> SparseGP:
        """Return the model at these parameters; parameters of the same names and shapes reuse the model."""
        known: Any = vars(self).get("model")
        same = known and known.inducing_points.shape == values[LOCATIONS].shape
        if same and set(known.wire_parameters()) == {*values}:
            known.load(values)
        else:
            self.model = self.placement.module(sparse_gp(self.config.model, values))
        return self.model

    def whitened(self, values: Mapping[str, ndarray]) -> tuple[SparseGP, Whitener]:
        """Return the model at these parameters, and its whitener, which other sites of this process may have made."""
        model, key = self.load(values), (self.config.model, self.placement, *(a.tobytes() for a in values.values()))
        if key not in _whiteners:
            entries = values[LOCATIONS].shape[0] ** 2
            limit = min(CACHED_WHITENERS, int(CACHED_ENTRIES // entries))
            while _whiteners and len(_whiteners) >= limit:
                del _whiteners[next(iter(_whiteners))]
            _whiteners[key] = Whitener(model, cached=0)
        return model, _whiteners[key]

    def statistics(self, request: Parameters) -> SparseStatistics:
        """Return the sums over this site's rows (Guo et al. 2022, Eqs. 14-15)."""
        model, whitener = self.whitened(request.values)
        return SparseStatistics(**vars(pooled_sums(model, *self.tensors, whitener)))

    def predict(self, request: PooledPosterior, inputs: Array) -> Prediction:
        """Return mean and variance of noisy observations at new inputs [N, D], under the q(v) of the message."""
        values = dict(request.values)
        tails = values.pop(TAILS, None)
        model, whitener = self.whitened(values)
        with torch.no_grad():
            found = model.predict(self.placement.tensor(inputs), shared(request.whitened()), whitener.factor)
        mean, variance = map(to_array, found)
        return Prediction(mean, variance, tails)


class SGPRClient(SparseClient):
    """The site's sketch, its sums at several parameters at once, and its share of the exact gradient."""

    def sketch(self, request: OneArray) -> Sketch:
        """Return sums over cells of this site's rows at the nearest anchors."""
        found = cells(self.rows.x, request.values, max(LEAST_ROWS, self.least_cell))
        values = values_of(self.rows.x, request.values, max(LEAST_ALIKE, self.least_cell))
        return Sketch(*found, *values, repeats(self.rows.x, self.rows.y))

    def pairs(self, request: OneArray) -> PairCounts:
        """Return how many of this site's rows have each pair of common values [D, V]."""
        return PairCounts(pair_counts(self.rows.x, request.values, max(LEAST_ALIKE, self.least_cell)))

    def trials(self, request: Candidates) -> TrialSums:
        """Return the sums over this site's rows at each of several parameters."""
        return TrialSums.of([self.evidence_sums(at.values) for at in request.each])

    def evidence_sums(self, values: Mapping[str, ndarray]) -> WeightedSums:
        """Return the FITC sums over this site's rows at these parameters."""
        model, whitener = self.whitened(values)
        return weighted_sums(model, *self.tensors, whitener)

    def gradients(self, request: PooledPosterior) -> EvidenceGradient:
        """Return this site's share of the gradient of the log evidence."""
        model, whitener = self.whitened(request.values)
        return EvidenceGradient(pack(weighted_gradient(model, *self.tensors, request.whitened(), whitener)))

    def errors(self, request: PooledPosterior) -> ErrorSums:
        """Return the sums of the next regression of the log scale of errors, and histograms under the latest one."""
        values = {name: array for name, array in request.values.items() if name not in (SCALE, BEFORE, PRECISION)}
        z, mean = self.left_out(values, request.whitened())
        with torch.no_grad():
            features = self.load(values).scale_features(self.tensors[0], self.placement.tensor(mean))
        return ErrorSums.of(z, to_array(features), request.values)

    def left_out(self, values: Mapping[str, ndarray], q: WhitenedPosterior) -> Array:
        """Return z and μ of each row predicted from all others [2, N], which the site keeps until q(v) changes."""
        asked = np.frombuffer(bytes.fromhex(content_digest("", {**values, MEAN: q.mean.numpy()})), "u1")
        if not np.array_equal(self.state.arrays.get(ASKED, ()), asked):
            model, whitener = self.whitened(values)
            found = to_array(left_out(model, *self.tensors, q, whitener))
            self.state.replace({ASKED: asked, LEFT_OUT: found})
        return self.state.arrays[LEFT_OUT]


class SVGPClient(SparseClient):
    """Expected log likelihoods under the q(v) of a message, for classes, counts and outliers."""

    def latent(self, values: Mapping[str, ndarray]) -> tuple[LatentGP, torch.Tensor]:
        """Return the model at these parameters, and L with L Lᵀ = K_zz + jitter."""
        model, whitener = self.whitened(values)
        assert isinstance(model, LatentGP)
        return model, whitener.factor

    def common_values(self, request: Nothing) -> ValueCounts:
        """Return how many of this site's rows have each common value of an input."""
        return ValueCounts(*common_values(self.rows.x, max(LEAST_ALIKE, self.least_cell)))

    def expectations(self, request: PooledPosterior) -> Expectations:
        """Return the expected log likelihood of this site's rows, and its derivatives."""
        model, factor = self.latent(request.values)
        return expectations(model, *self.tensors, request.whitened(), factor)

    def tempered(self, request: PooledPosterior) -> TemperedScores:
        """Return the log scores of this site's rows, each predicted from all other rows, by the temperature."""
        model, (inputs, targets) = self.latent(request.values)[0], self.tensors
        moments = model.left_out(inputs, targets, request.whitened())
        return TemperedScores(to_array(tempered(model.observed, targets, *moments)))

    def held_out(self, request: PooledPosterior) -> Prediction:
        """Return predictions of the held-out rows, given any second column of their targets."""
        (model, factor), rows, tensor = self.latent(request.values), self.rows, self.placement.tensor
        moments = model.latent(tensor(rows.x_test), shared(request.whitened()), factor)
        with torch.no_grad():
            return Prediction(*map(to_array, model.observed.observed(tensor(rows.y_test), *moments, model.hyper)))

    confusion = confusion

    def held_out_rows(self, request: PooledPosterior) -> NamedArrays:
        """Return the inherited figures; none of times to events, which may be censored."""
        return {} if SECOND_COLUMN.get(self.config.model.likelihood) == "event" else super().held_out_rows(request)

    def score(self, request: PooledPosterior) -> Scores:
        """Return the scores of the held-out rows under the configured likelihood."""
        (model, factor), rows = self.latent(request.values), self.rows
        moments = model.latent(self.placement.tensor(rows.x_test), shared(request.whitened()), factor)
        mean, variance = map(to_array, moments)
        return model.observed.scores(mean, variance, rows.y_test, model.hyper, self.units)


class FSGPClient(SparseClient):
    """Local steps of federated averaging."""

    def train(self, request: Step) -> Stepped:
        """Take P local steps on the collapsed bound per row F_k (Guo et al. 2022, Eq. 9 and Algorithm 1)."""
        model, rows = self.load(request.values), self.tensors
        return stepped(self, model, lambda: pooled_bound(model, *rows) / len(rows[1]), request)


class FGPRClient(SiteClient):
    """An exact GP of this site's rows at the server's hyperparameters."""

    def load(self, values: Mapping[str, ndarray]) -> ExactGP:
        """Return the model of this site's rows at these hyperparameters."""
        model = ExactGP(self.config.model, torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y))
        model.load(values)
        return self.placement.module(model)

    def train(self, request: Step) -> Stepped:
        """Take P local steps on the log evidence per row."""
        model = self.load(request.values)
        return stepped(self, model, model.log_evidence, request)

    def predict(self, request: Parameters, inputs: Array) -> Prediction:
        """Return mean and variance of noisy observations at new inputs [N, D], from this site's rows."""
        mean, variance = self.load(request.values).predict(self.placement.tensor(inputs))
        return Prediction(to_array(mean), to_array(variance))


def stepped(client: SiteClient, model: WiredModel, objective: Callable[[], Tensor], request: Step) -> Stepped:
    """Take local gradient steps; none if all targets are equal, since the noise variance would shrink to zero."""
    local, parameters = client.config.optimizer, list(model.parameters())
    steps = local.steps if np.ptp(client.rows.y) else 0
    value = ascend(objective, parameters, name=local.name, steps=steps, learning_rate=request.learning_rate)
    return Stepped.of(request, model.to_arrays(), value)


class PrivateSGPRClient(SparseClient):
    """Noisy sums with differential privacy; the site's state holds the latest release and the number of releases."""

    def request_of(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        """Return the request; raise ProtocolError for a message that the privacy budget does not cover."""
        if (kind.partition(".")[2] or kind) not in ANSWERED:
            raise ProtocolError(
                f"`privacy.epsilon` is set: `{kind}` would disclose more about rows than the budget covers"
            )
        return super().request_of(kind, arrays, numbers)

    def private(self, request: PrivateRequest) -> PrivateSums:
        """Return the sums over the clipped rows with this site's part of the noise.

        A repeated request gets the same release, which discloses nothing more, if the site adds the full noise. A part
        of the noise is never sent twice, because the sites in the total may have changed. Raise ProtocolError if the
        budget is spent, or if fewer sites than share the noise are in the total that the server sees.
        """
        if not 1 <= request.sharing <= self.setting.summands:
            raise ProtocolError(
                f"`sharing` = {request.sharing}: the server sees a sum of {self.setting.summands} site(s)"
            )
        budget, asked = Budget.of(self.config), np.frombuffer(bytes.fromhex(content_digest("", encode(request))), "u1")
        kept = dict(self.state.arrays)
        if request.sharing == 1 and np.array_equal(kept.pop(ASKED, ()), asked):
            return decode(PrivateSums, kept)
        if self.state.updates >= budget.releases:
            raise ProtocolError(f"the budget of {budget.releases} release(s) is spent; see `sgpr.trials`")
        (model, whitener), (inputs, targets) = self.whitened(request.values), self.tensors
        simulated = [self.config.seed, self.setting.round, *b"noise", *self.site.site.encode()]
        generator = np.random.default_rng(simulated if self.site.simulated else None)  # None: the operating system
        sums = pooled_sums(model, inputs, targets.clamp(-EDGE, EDGE), whitener)
        released = disturbed(sums, float(whitener.variance), budget.noise / request.sharing**0.5, generator)
        self.state.replace({**encode(released), ASKED: asked})
        return released


def shared(q: WhitenedPosterior) -> WhitenedPosterior:
    """Return q(v), or the equal one of another site in this process, whose root is known."""
    if not all(
        torch.equal(q.mean, known.mean) and torch.equal(q.covariance, known.covariance) for known in _posteriors
    ):
        _posteriors.clear()
    if not _posteriors:
        _posteriors.append(q)
    return _posteriors[0]
