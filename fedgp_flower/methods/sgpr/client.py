"""The site's half of sgpr, svgp, sgpr-private, fsgp and fgpr: sums, gradients, expectations, steps, prediction."""

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
from fedgp_flower.gp.fitc import WeightedSums, weighted_gradient, weighted_sums
from fedgp_flower.gp.models import LOCATIONS, ExactGP, LatentGP, SparseGP, WiredModel, sparse_gp
from fedgp_flower.gp.optimisers import LOGARITHM, ascend, gather, maximise, pack, scatter
from fedgp_flower.gp.placement import to_array
from fedgp_flower.gp.priors import hyperpriors, log_prior
from fedgp_flower.gp.sparse import Whitener, pooled_bound, pooled_sums
from fedgp_flower.gp.sums import SparseSums
from fedgp_flower.messages import decode, encode
from fedgp_flower.methods.sgpr.duals import expectations
from fedgp_flower.methods.sgpr.messages import (
    Anchors,
    CommonValues,
    EvidenceGradient,
    Expectations,
    PairCounts,
    PooledPosterior,
    PrivateRequest,
    PrivateSums,
    Sketch,
    SparseStatistics,
    TrialSums,
    apart,
)
from fedgp_flower.methods.sgpr.private import EDGE, Budget, disturbed
from fedgp_flower.options import SECOND_COLUMN, ModelSection
from fedgp_flower.privacy.questions import content_digest
from fedgp_flower.scores import Prediction, Scores
from fedgp_flower.shared_messages import Parameters, Step, Stepped
from fedgp_flower.typing import Array, NamedArrays, Rows, Targets

ROWS = 250
"""Of a site, at most, that its fit sees: O(n³)."""
EVALUATIONS = 60
LEAST_CURVATURE = 0.25
"""Of a log posterior along any direction, that of the widest prior: where rows leave a logarithm open, its sd is 2."""
DIFFERENCE = 1e-3
"""Step of a central difference, in logarithms."""
_whiteners: dict[Hashable, Whitener] = {}
"""What all sites of this process compute from the latest parameters alone."""
LATEST, LARGEST = 8, 2e7
"""How many: a message asks for the sums at several parameters; and numbers in them, if each is as large as the next."""
ANSWERED = frozenset({"private", "evaluate", "score_sums", "predictions"})
"""What says nothing of training rows beyond their number, and what is paid for, with differential privacy."""
ASKED = "asked"
"""Array of the site's state: the hash of the question that its latest release answered."""


class SparseClient(SiteClient):
    """A sparse GP at the server's parameters w = {β, Z}, seeing only this site's rows."""

    model: SparseGP
    """At the parameters of the message; it is one of GPyTorch and predicts by the q(v) that the message carries."""

    def load(self, values: Mapping[str, ndarray]) -> SparseGP:
        """The model at given parameters; it is built once for all parameters of a message that are alike."""
        known = vars(self).get("model")
        if (
            known
            and known.inducing_points.shape == values[LOCATIONS].shape
            and set(known.wire_parameters()) <= {*values}
        ):
            known.load(values)
        else:
            self.model = self.placement.module(sparse_gp(self.config.model, values))
        return self.model

    def whitener(self, values: Mapping[str, ndarray]) -> Whitener:
        """What projects rows at given parameters, which the model then has; in one process the next site has them."""
        model, key = self.load(values), (self.config.model, self.placement, *(a.tobytes() for a in values.values()))
        if key not in _whiteners:
            entries = values[LOCATIONS].shape[0] ** 2
            while _whiteners and (len(_whiteners) == LATEST or (len(_whiteners) + 1) * entries > LARGEST):
                del _whiteners[next(iter(_whiteners))]
            _whiteners[key] = Whitener(model, cached=0)
        return _whiteners[key]

    def statistics(self, request: Parameters) -> SparseStatistics:
        """The additive sums of this site's rows (Guo et al. 2022, Eqs. 14-15)."""
        return SparseStatistics(**vars(self.sums(request.values)))

    def sums(self, values: Mapping[str, ndarray]) -> SparseSums:
        """The sums of this site's rows at given parameters."""
        whitener = self.whitener(values)
        return pooled_sums(self.model, *self.tensors, whitener)

    def predict(self, request: PooledPosterior, inputs: Array) -> Prediction:
        """Prediction from the exact pooled posterior."""
        q, x = request.whitened(), self.placement.tensor(inputs)
        with torch.no_grad():
            mean, variance = self.load(request.values).hold(q).predict(x, q)
        return Prediction(to_array(mean), to_array(variance))


class SGPRClient(SparseClient):
    """Sums and shares of the exact gradient, at several parameters at once."""

    def sketch(self, request: Anchors) -> Sketch:
        """Cells of this site's rows, and the mode of a GP of them alone with its curvature."""
        inputs, targets = self.tensors
        found = cells(self.rows.x, request.points, max(LEAST_ROWS, self.least_cell))
        values = values_of(self.rows.x, request.points, max(LEAST_ALIKE, self.least_cell))
        mode = local_mode(self.config.model, inputs, targets, np.random.default_rng([self.config.seed, *b"mode"]))
        return Sketch(*found, *values, repeats(self.rows.x, self.rows.y), *mode)

    def pairs(self, request: CommonValues) -> PairCounts:
        """How many of this site's rows have each two of the common values."""
        return PairCounts(pair_counts(self.rows.x, request.values, max(LEAST_ALIKE, self.least_cell)))

    def trials(self, request: Parameters) -> TrialSums:
        """The additive sums of this site's rows at each of several parameters."""
        return TrialSums.of([self.evidence_sums(values) for values in apart(request.values)])

    def evidence_sums(self, values: Mapping[str, ndarray]) -> WeightedSums:
        """The sums at given parameters."""
        whitener = self.whitener(values)
        return weighted_sums(self.model, *self.tensors, whitener)

    def gradients(self, request: PooledPosterior) -> EvidenceGradient:
        """The part of the gradient that needs this site's rows."""
        whitener = self.whitener(request.values)
        gradient, noise = weighted_gradient(self.model, *self.tensors, request.whitened(), whitener)
        return EvidenceGradient(pack(gradient), noise)


class SVGPClient(SparseClient):
    """Expectations at the posterior that a message carries, for classes, counts and outliers."""

    def latent(self, values: Mapping[str, ndarray]) -> tuple[LatentGP, torch.Tensor]:
        """The model at given parameters and its factor L."""
        factor = self.whitener(values).factor
        assert isinstance(self.model, LatentGP)
        return self.model, factor

    def expectations(self, request: PooledPosterior) -> Expectations:
        """The expected log likelihood of this site's rows, and its derivatives."""
        model, factor = self.latent(request.values)
        return expectations(model, *self.tensors, request.whitened(), factor)

    def held_out(self, request: PooledPosterior) -> Prediction:
        """Predict the held-out rows, each with what stands beside its target."""
        (model, _), rows, tensor = self.latent(request.values), self.rows, self.placement.tensor
        moments = model.latent(tensor(rows.x_test), request.whitened())
        with torch.no_grad():
            return Prediction(*map(to_array, model.observed.observed(tensor(rows.y_test), *moments, model.hyper)))

    confusion = confusion

    def held_out_rows(self, request: PooledPosterior) -> NamedArrays:
        """As usual; nothing of times, which may be censored."""
        return {} if SECOND_COLUMN.get(self.config.model.likelihood) == "event" else super().held_out_rows(request)

    def score(self, request: PooledPosterior) -> Scores:
        """Scores of the held-out rows by the configured likelihood."""
        (model, _), rows = self.latent(request.values), self.rows
        mean, variance = map(to_array, model.latent(self.placement.tensor(rows.x_test), request.whitened()))
        return model.observed.scores(mean, variance, rows.y_test, model.hyper, self.units)


class FSGPClient(SparseClient):
    """Local steps, whose result the server averages."""

    def train(self, request: Step) -> Stepped:
        """P local steps on the collapsed bound per row F_k (Guo et al. 2022, Eq. 9 and Algorithm 1)."""
        model, (inputs, targets) = self.load(request.values), self.tensors

        def objective() -> torch.Tensor:
            return pooled_bound(model, inputs, targets) / len(targets)

        return stepped(self, model, objective, request)


class FGPRClient(SiteClient):
    """An exact GP of this site's rows at the server's hyperparameters."""

    model: ExactGP
    """Conditioned on this site's rows, at the hyperparameters of the message."""

    def load(self, values: Mapping[str, ndarray]) -> ExactGP:
        """The model of this site's rows at given hyperparameters."""
        model = ExactGP(self.config.model, torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y))
        model.load(values)
        self.model = self.placement.module(model)
        return self.model

    def train(self, request: Step) -> Stepped:
        """P local steps on the log evidence per row."""
        model = self.load(request.values)
        return stepped(self, model, model.log_evidence, request)

    def predict(self, request: Parameters, inputs: Array) -> Prediction:
        """Prediction from this site's rows."""
        mean, variance = self.load(request.values).predict(self.placement.tensor(inputs))
        return Prediction(to_array(mean), to_array(variance))


def stepped(client: SiteClient, model: WiredModel, objective: Callable[[], Tensor], request: Step) -> Stepped:
    """Local steps uphill. None where all targets are one number: noise would vanish, and the mean with it."""
    local = client.config.optimizer
    if np.ptp(client.rows.y) == 0:
        value = float(objective().detach())
    else:
        rate, parameters = request.learning_rate, list(model.parameters())
        value = ascend(objective, parameters, name=local.name, steps=local.steps, learning_rate=rate)
    return Stepped.of(request, model.to_arrays(), value)


class PrivateSGPRClient(SparseClient):
    """SGPR with differential privacy: noisy sums; the latest, and how many there were, stand in the site's state."""

    def request_of(self, kind: str, arrays: NamedArrays, numbers: Mapping[str, Any]) -> Any:
        """As usual, of few kinds."""
        if (kind.partition(".")[2] or kind) not in ANSWERED:
            raise ProtocolError(f"`privacy.epsilon` is set: `{kind}` would tell more of rows than is accounted for")
        return super().request_of(kind, arrays, numbers)

    def private(self, request: PrivateRequest) -> PrivateSums:
        """Sums of the clipped rows with this site's part of the noise.

        Who did not get a release asks for it again and gets the same one, which tells nothing more: where it has all of
        its noise. A part of it would tell more, since the total may have been of others.
        """
        budget, asked = Budget.of(self.config), np.frombuffer(bytes.fromhex(content_digest("", encode(request))), "u1")
        kept = dict(self.state.arrays)
        if request.sharing == 1 and np.array_equal(kept.pop(ASKED, ()), asked):
            return decode(PrivateSums, kept)
        if self.state.updates >= budget.releases:
            raise ProtocolError(f"the budget of {budget.releases} release(s) is spent; see `sgpr.trials`")
        if request.sharing < 1:
            raise ProtocolError("`sharing` is a number of sites")
        whitener, (inputs, targets) = self.whitener(request.values), self.tensors
        simulated = [self.config.seed, self.setting.round, *b"noise", *self.site.site.encode()]
        generator = np.random.default_rng(simulated if self.site.simulated else None)  # else from the operating system
        sums = pooled_sums(self.model, inputs, targets.clamp(-EDGE, EDGE), whitener)
        released = disturbed(sums, float(whitener.variance), budget.noise / request.sharing**0.5, generator)
        self.state.replace({**encode(released), ASKED: asked})
        return released


def local_mode(section: ModelSection, inputs: Rows, targets: Targets, rng: np.random.Generator) -> tuple[Array, Array]:
    """Precision H [H, H] and H θ [H] of a Gaussian around the mode of the site's log posterior.

    θ are the logarithms of kernel and noise; the mode of all sites is (Σ H)⁻¹ Σ Hθ. H is by central differences. Where
    the fit sees some rows, each of them stands for several.
    """
    chosen = np.sort(rng.permutation(len(inputs))[:ROWS])
    model = ExactGP(section, inputs[chosen].cpu().double(), targets[chosen].cpu().double())
    named, priors = model.wire_parameters(), hyperpriors(model.kernel, inputs.shape[1])
    parameters = list(named.values())
    model.load({name: np.full(p.shape, priors[name][0]) for name, p in named.items()})

    def objective() -> torch.Tensor:
        return len(chosen) * model.log_evidence() + log_prior(named, priors)

    def slopes(place: Array) -> Array:
        scatter(place, parameters)
        return gather(torch.autograd.grad(objective(), parameters))

    maximise(objective, parameters, max_evaluations=EVALUATIONS, bounds=[LOGARITHM for _ in parameters])
    mode = gather(parameters)
    steps = DIFFERENCE * np.eye(len(mode))
    whole = np.stack([slopes(mode - step) - slopes(mode + step) for step in steps]) / (2 * DIFFERENCE)
    alone = np.diag(np.concatenate([np.full(p.numel(), priors[n][1] ** -2.0) for n, p in named.items()]))
    whole = alone + (whole / 2 + whole.T / 2 - alone) * len(inputs) / len(chosen)
    bends, axes = np.linalg.eigh(whole)
    precision = (axes * np.maximum(bends, LEAST_CURVATURE)) @ axes.T
    return precision, precision @ mode
