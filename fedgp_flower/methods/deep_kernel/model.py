"""A Gaussian process on learned features, with a shared and a personal head at each site, in closed form.

    f_c(x) at site k = φ(x)ᵀ (w_c + v_kc),   w_c ~ N(0, (1 − ρ) I),   v_kc ~ N(0, ρ I),   φ(x) [F] from a network

so that cov(f_c(x), f_c(x')) = φ(x)ᵀφ(x') within a site and (1 − ρ) times that between sites. A site computes

    G = Φᵀ D⁻¹ Φ,   g = Φᵀ D⁻¹ t,   and with v_k integrated out
    B = (I + ρ G)⁻¹ G,   b = (I + ρ G)⁻¹ g,   log p(t | w) = e + bᵀw − ½ wᵀB w,

Sums ΣB, Σb, Σe over sites give q(w) and the evidence of all rows; ρ = 0 is the pooled Gaussian process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from fedgp_flower.errors import DataError
from fedgp_flower.gp.linalg import cholesky
from fedgp_flower.gp.models import set_parameters
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.deep_kernel.options import DeepKernelOptions
from fedgp_flower.options import ModelSection
from fedgp_flower.shared_messages import Described, indefinite
from fedgp_flower.typing import AnyShape, Array, NamedArrays, Rows, Scalar, Targets

Means = Float[Tensor, "C F"]
Covariances = Float[Tensor, "C F F"]
PREDICTION_SEED, PREDICTION_DRAWS = 24, 200
"""Draws have a fixed seed, so that a prediction is a function of the posterior."""
HIDDEN = 50
"""Units of the first dense layer."""
CONCENTRATION = 0.01
"""α of the classes other than the label; a small value trusts labels (Milios et al. 2018)."""


# Messages, in addition to those of federated averaging.


@message()
class HeadRequest:
    """Request for sums at given weights, for each share ρ of personal heads."""

    values: Mapping[str, AnyShape] = leaves("weights of the network")
    shares: Float[ndarray, " J"] = leaves("ρ, to choose from")


@message("query.heads", summand=True)
class Heads:
    """A site's sums for the shared head, with the personal one integrated out, for each ρ."""

    precision: Float[ndarray, "J C F F"] = leaves(
        "B = (I + ρ G)⁻¹ G, G = Φᵀ D⁻¹ Φ of the features Φ of its rows", symmetric=True
    )
    shift: Float[ndarray, "J C F"] = leaves("b = (I + ρ G)⁻¹ Φᵀ D⁻¹ t")
    constant: Float[ndarray, " J"] = leaves("log density of the rows if the shared head is zero")

    def num_parameters(self) -> int:
        """Number of entries of a head."""
        return int(np.prod(self.shift.shape[1:]))

    @np.errstate(over="ignore", invalid="ignore")
    def refusal(self, described: Described) -> str | None:
        """Return why these cannot be sums over rows, or None."""
        return indefinite("precision", self.precision)


@message()
class HeadPosterior:
    """Weights of the network, and the posterior of the shared head."""

    values: Mapping[str, AnyShape] = leaves("weights of the network")
    mean: Float[ndarray, "C F"] = leaves("E w_c")
    covariance: Float[ndarray, "C F F"] = leaves("Cov w_c", symmetric=True)
    share: float = leaves("ρ, personal heads' share of the prior variance")


# Computations of sites.


@dataclass(frozen=True, slots=True)
class HeadSums:
    """Sufficient statistics for heads w: log p(t | w) = constant + Σ_c (shiftᵀw − ½ wᵀ precision w)."""

    precision: Covariances
    """G, or B with the personal head integrated out."""
    shift: Means
    """g, or b."""
    constant: Scalar
    """log N(t; 0, D), or e."""

    def posterior(self, prior: float) -> tuple[Means, Covariances]:
        """Mean and covariance of w_c with prior N(0, prior · I)."""
        covariance = prior * torch.cholesky_inverse(self._factor(prior))
        return (covariance @ self.shift[..., None])[..., 0], covariance

    def log_evidence(self, prior: float) -> Scalar:
        """Log evidence of the rows with w_c ~ N(0, prior · I)."""
        factor = self._factor(prior)
        white = torch.linalg.solve_triangular(factor, self.shift[..., None], upper=False)
        return self.constant + 0.5 * prior * white.square().sum() - factor.diagonal(dim1=-2, dim2=-1).log().sum()

    def without_personal(self, share: float) -> HeadSums:
        """Sums for the shared head, with v_k ~ N(0, ρ I) integrated out."""
        factor = self._factor(share)
        precision = torch.cholesky_solve(self.precision, factor)
        shift = torch.cholesky_solve(self.shift[..., None], factor)[..., 0]
        return HeadSums((precision + precision.mT) / 2, shift, self.log_evidence(share))

    def personal(self, mean: Means, covariance: Covariances, share: float) -> tuple[Means, Covariances]:
        """Mean and covariance of w_c + v_kc, from those of w_c given all rows including these."""
        factor = self._factor(share)
        centre = torch.cholesky_solve((mean + share * self.shift)[..., None], factor)[..., 0]
        spread = torch.cholesky_solve(torch.cholesky_solve(covariance, factor).mT, factor)
        return centre, share * torch.cholesky_inverse(factor) + spread

    def _factor(self, scale: float) -> Covariances:
        eye = torch.eye(self.shift.shape[-1], dtype=self.shift.dtype)
        return cholesky(eye + scale * self.precision, of="precision of the heads")


def heads_of(each: Sequence[HeadSums]) -> Heads:
    """The message with sums at every ρ."""
    parts = zip(*((sums.precision, sums.shift, sums.constant) for sums in each), strict=True)
    return Heads(*(torch.stack(part).detach().numpy() for part in parts))


def sums_of(heads: Heads) -> list[HeadSums]:
    """The sums of a message at every ρ."""
    parts = map(torch.from_numpy, (heads.precision, heads.shift, heads.constant))
    return [HeadSums(*part) for part in zip(*parts, strict=True)]


def network(inputs: int, options: DeepKernelOptions) -> nn.Sequential:
    """Two rectified layers, or for square images two 3 × 3 convolutions of stride 2 and a layer."""
    if options.network == "dense":
        first, second = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, options.features)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
    side, channels = math.isqrt(inputs), (8, 16)
    if side**2 != inputs or not inputs:
        raise DataError(f"`deep.network` = 'convolutional' needs square images; a row has {inputs} inputs")
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for before, after in zip((1, *channels[:-1]), channels, strict=True):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        side = (side + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * side**2, options.features), nn.ReLU())


class Numbers(nn.Module):
    """The standardised target with Gaussian noise, whose variance is learned."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.log_noise = nn.Parameter(torch.tensor([math.log(noise)], dtype=torch.float64))

    def values(self, targets: Targets) -> tuple[Float[Tensor, "1 N"], Float[Tensor, "1 N"]]:
        """Values of f and the variances of their noise."""
        return targets[None], self.log_noise.exp().expand(1, len(targets))

    def predict(self, mean: Float[Tensor, "1 N"], variance: Float[Tensor, "1 N"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of an observation [N]."""
        return mean[0], variance[0] + self.log_noise.exp()


class Classes(nn.Module):
    """Classes 0 … C−1 as values of C functions (Milios et al., Dirichlet-based Gaussian processes, 2018).

    With α_nc = α + 1[y_n = c], s²_nc = log(1/α_nc + 1) is the variance of the noise of a value log α_nc − s²_nc/2, and
    P(y = c) = E softmax(f)_c; for bernoulli targets only the second.
    """

    noise: Tensor

    def __init__(self, classes: int, *, binary: bool, draws: int = PREDICTION_DRAWS) -> None:
        super().__init__()
        self.classes, self.binary = classes, binary
        generator = torch.Generator().manual_seed(PREDICTION_SEED)
        drawn = torch.randn(draws, classes, 1, generator=generator, dtype=torch.float64)
        self.register_buffer("noise", drawn, persistent=False)

    def values(self, targets: Targets) -> tuple[Float[Tensor, "C N"], Float[Tensor, "C N"]]:
        """Values of f for all classes, and the variances of their noise."""
        alpha = CONCENTRATION + nn.functional.one_hot(targets.long(), self.classes).double().mT
        variance = torch.log1p(1 / alpha)
        return alpha.log() - variance / 2, variance

    def predict(self, mean: Float[Tensor, "C N"], variance: Float[Tensor, "C N"]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the indicator of the second class [N], or of all classes [N, C], from draws."""
        every = (mean + variance.sqrt() * self.noise).softmax(1).mean(0).mT
        probability = every[:, 1] if self.binary else every
        return probability, probability * (1 - probability)


class DeepKernel(nn.Module):
    """φ(x) = (1, network(x)), and the likelihood."""

    def __init__(self, options: DeepKernelOptions, section: ModelSection, inputs: int, seed: int = 0) -> None:
        super().__init__()
        binary = section.likelihood == "bernoulli"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = network(inputs, options)
        classes = options.classes
        self.observed: Numbers | Classes = Classes(classes, binary=binary) if classes else Numbers(section.noise)
        self.double()

    def features(self, inputs: Rows) -> Float[Tensor, "N F"]:
        """The vectors φ(x)."""
        return torch.cat([inputs.new_ones(len(inputs), 1), self.network(inputs)], 1)

    def sums(self, inputs: Rows, targets: Targets) -> HeadSums:
        """Sums of rows for the heads."""
        features, (values, variances) = self.features(inputs), self.observed.values(targets)  # φ, t, diagonal of D
        weighted = features / variances[..., None]  # [C, N, F]
        constant = -0.5 * (values.square() / variances + variances.log() + math.log(2 * math.pi)).sum()
        return HeadSums(weighted.mT @ features, (weighted.mT @ values[..., None])[..., 0], constant)

    def to_arrays(self) -> NamedArrays:
        """Weights by name."""
        return {name: p.detach().numpy().copy() for name, p in self.named_parameters()}

    def load(self, values: Mapping[str, np.ndarray]) -> DeepKernel:
        """Set the weights, and return the model."""
        set_parameters(dict(self.named_parameters()), values)
        return self


@dataclass(frozen=True, slots=True)
class DeepPosterior:
    """The network, and q(w) of the shared head, or of a personal one with ρ = 0."""

    model: DeepKernel
    heads: Means
    covariance: Covariances
    share: float
    """ρ."""

    @torch.no_grad()
    def personal(self, inputs: Rows, targets: Targets) -> DeepPosterior:
        """The head of a site with these rows."""
        head = self.model.sums(inputs, targets).personal(self.heads, self.covariance, self.share)
        return DeepPosterior(self.model, *head, 0.0)

    @torch.no_grad()
    def moments(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and variance of an observation [N], or of indicators of classes [N, C]."""
        features = self.model.features(torch.from_numpy(inputs))
        spread = self.covariance + self.share * torch.eye(features.shape[1], dtype=features.dtype)
        function = self.heads @ features.mT, ((features @ spread) * features).sum(-1)  # [C, N] each
        mean, variance = self.model.observed.predict(*function)
        return mean.numpy(), variance.numpy()

    def __call__(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of an observation."""
        mean, variance = self.moments(inputs)
        return mean, np.sqrt(variance)
