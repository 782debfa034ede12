"""Models of classes 0 … C−1: P(y_i = c) ∝ exp(f_ic), with logits f given all latents.

``multinomial``, multinomial logistic regression with learned prior scales (Hassan et al. 2023, Section S3.2):

    f_i = W x_i + b,   W_cd ~ N(0, σ_W²),   b_c ~ N(0, σ_b²),   θ = (log σ_W, log σ_b).

Z_G = (W row by row, b); there are no local latents, so a site is one unit of width 0.

``hierarchical-bnn`` and ``fedpop``, networks with personal layers at every site (Section 4.1):

    f_i = W⁽²ʲ⁾ relu(W⁽¹ʲ⁾ x_i),   W⁽¹ʲ⁾ [H, D],   W⁽²ʲ⁾ [C, H] ~ N(0, 1), without biases.

``hierarchical-bnn``: W⁽¹ʲ⁾ = μ + σ ε⁽ʲ⁾ with μ, ε⁽ʲ⁾ ~ N(0, 1) entry by entry and one σ ~ N₊(0, 1), not centred.
Z_G = (μ, z) with σ = F⁻¹(Φ(z)), F the distribution function of N₊(0, 1), so that p(Z_G) = N(0, I); Z_L = (ε, W⁽²ʲ⁾).
``fedpop``: the fully Bayesian form of FedPop (Kotelevskii et al. 2022). All sites share W⁽¹⁾ ~ N(0, 1), so that
Z_G = W⁽¹⁾ and Z_L = W⁽²ʲ⁾. A site is one unit, and matrices are flattened row by row.

``vae`` and ``prodlda``, models of rows with latents from an encoder that all sites share:

    z_n ~ N(0, τ² I) [W],   h_n = (code(z_n), 1) [H + 1],   o_n = Z_G h_n [V + C],   entries of Z_G ~ N(0, 1)

The V features of row n depend on the first entries of o_n, its class on the others, P(y_n = c) ∝ exp(o_n,V+c). The
posterior q(z_n | x_n) = N(m, diag s²), (m, log s) = encoder(x_n), has parameters that are part of θ
and trained by the sum of the sites' gradients. With z = m + s ε the bound of a row is

    E_ε [log p(x_n, y_n | z_n, Z_G)] − KL(q(z_n | x_n) ‖ N(0, τ² I)),

so that the local latents are ε with a fixed q = N(0, I). A site stores nothing, and a new row at any site has a
posterior. The class is not an input of the encoder.

``vae``: features are Bernoulli, code(z) a rectified layer, τ = 1 (Kingma and Welling 2014). ``prodlda``: features are
counts of words, multinomial with log odds o_n, so that Z_G holds topics, a background and the words of both; code(z) =
softmax(z), and τ² = (1 − 1/W)/α stands in for Dirichlet(α) (Srivastava and Sutton 2017; Hassan et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedgp_flower.errors import DataError
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import (
    IndexVector,
    ModelInputs,
    Placed,
    ReportTable,
    SampledModel,
    Shared,
    SiteRows,
    SoftmaxClasses,
    Units,
)
from fedgp_flower.typing import Rows, Targets

START = 0
"""Seed of the initial weights of networks, the same at all sites."""
LAST_FACTOR, LENGTH = 30.0, 3.0
"""``prodlda``: factor of the encoder's initial last layer, and norm of its inputs."""
CONCENTRATION = 0.1
"""``prodlda``: α of the Dirichlet prior of a document's topics, as in ``simulations/results/amortised_prodlda.md``."""
TOPIC_WORDS = 10
"""Words of a topic in a report."""


class Multinomial(SampledModel):
    """W [C, D] and b [C]."""

    def __init__(self, num_inputs: int, options: SFVIOptions, *, binary: bool = False) -> None:
        num_classes = options.classes
        weights = num_inputs * num_classes
        block = (torch.arange(weights + num_classes) >= weights).long()
        super().__init__(torch.zeros(len(block), dtype=torch.float64), block)
        self.observed, self.binary = SoftmaxClasses(binary), binary
        self.num_inputs, self.num_classes = num_inputs, num_classes

    def local_width(self, site: SiteRows) -> int:
        """No local latents."""
        return 0

    def function(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S N C"]:
        """W x + b."""
        split = self.num_inputs * self.num_classes
        weight = z_global[..., :split].unflatten(-1, (self.num_classes, self.num_inputs))
        return torch.einsum("nd,...cd->...nc", site.features, weight) + z_global[..., None, split:]


class PersonalNetwork(SampledModel):
    """D inputs, H hidden units and C classes; the last C H local latents are W⁽²ʲ⁾.

    In ``hierarchical-bnn`` first layers of sites are ``scattered`` around a shared one; otherwise they are equal.
    """

    def __init__(self, num_inputs: int, options: SFVIOptions, *, binary: bool = False) -> None:
        self.scattered = options.model == "hierarchical-bnn"
        self.first, self.second = (options.hidden, num_inputs), (options.classes, options.hidden)
        super().__init__(torch.zeros(math.prod(self.first) + self.scattered, dtype=torch.float64))
        self.observed, self.binary = SoftmaxClasses(binary), binary

    def local_width(self, site: SiteRows) -> int:
        """Size of the last layer, and of ε if first layers are scattered."""
        return math.prod(self.second) + self.scattered * math.prod(self.first)

    def initial_local(self, site: SiteRows, *, scale: float, whole: bool) -> LocalPosterior:
        """N(m, scale² I) with m = 0, except for random m of the last layer, to break the symmetry of hidden units."""
        start, head = super().initial_local(site, scale=scale, whole=whole), math.prod(self.second)
        generator = torch.Generator().manual_seed(START)
        mean = start.mean.clone()
        mean[:, -head:] = torch.randn(head, generator=generator, dtype=torch.float64) / math.sqrt(self.second[1])
        return replace(start, mean=mean)

    def function(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S N C"]:
        """W⁽²ʲ⁾ relu(W⁽¹ʲ⁾ x)."""
        head, first = math.prod(self.second), z_global
        if self.scattered:
            first = z_global[..., :-1] + half_normal(z_global[..., -1:]) * z_local[..., 0, :-head]
        second = z_local[..., 0, -head:].unflatten(-1, self.second)
        return torch.relu(site.features @ first.unflatten(-1, self.first).mT) @ second.mT


def half_normal(z: Tensor) -> Tensor:
    """σ = F⁻¹(Φ(z)) = −Φ⁻¹(Φ(−z) / 2), which is |N(0, 1)| where z is N(0, 1)."""
    return -torch.special.ndtri(0.5 * torch.special.ndtr(-z))


class AmortisedModel(SampledModel):
    """V features, ``counts`` of words or between 0 and 1; W latents, H entries of the code, C classes."""

    def __init__(self, num_inputs: int, options: SFVIOptions, *, binary: bool) -> None:
        counts = options.model == "prodlda"
        width = options.latents if counts else options.hidden
        self.layers = num_inputs + options.classes, width + 1
        super().__init__(torch.zeros(math.prod(self.layers), dtype=torch.float64))
        self.observed, self.binary, self.counts = SoftmaxClasses(binary), binary, counts
        self.num_inputs, self.latents = num_inputs, options.latents
        self.prior_variance = (1 - 1 / self.latents) / CONCENTRATION if counts else 1.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(START)
            first, last = nn.Linear(num_inputs, options.hidden), nn.Linear(options.hidden, 2 * self.latents)
            self.encoder = nn.Sequential(first, nn.Softplus(), last)
            if not counts:
                self.decoder = nn.Linear(self.latents, width)
        if counts:  # start with few topics in each document, since equal topics would stay equal
            with torch.no_grad():
                last.weight[: self.latents] *= LAST_FACTOR
                last.bias[self.latents :] -= 1.0
        self.double()

    def encoder_inputs(self, features: Rows) -> Rows:
        """Inputs of the encoder; log counts are scaled to equal norm. Raise DataError for other features."""
        if not bool((features >= 0).all()) or not (self.counts or bool((features <= 1).all())):
            name, words = ("prodlda", "counts of words") if self.counts else ("vae", "features between 0 and 1")
            raise DataError(f"`sfvi.model` = {name!r} needs {words}; the data have other values")
        return LENGTH * nn.functional.normalize(features.log1p(), dim=-1) if self.counts else features

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Every row is a unit."""
        self.encoder_inputs(features)
        site, unit = super().prepare(features, targets, groups, key=key), torch.arange(len(features))
        return replace(site, unit=unit, keys=key + unit)

    def placed(self, site: SiteRows, rows: ModelInputs, q_local: LocalPosterior | None) -> Placed:
        """New rows, whose q comes from the encoder."""
        return self.prepare(rows.features, rows.features.new_zeros(len(rows.features))), None

    def local_width(self, site: SiteRows) -> int:
        """The length of ε."""
        return self.latents

    def initial_local(self, site: SiteRows, *, scale: float, whole: bool) -> LocalPosterior:
        """The fixed N(0, I)."""
        zero = torch.zeros(len(site.keys), self.latents, dtype=torch.float64)
        return LocalPosterior(zero, zero, None, None, fixed=True)

    def log_local(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S U"]:
        """The row's bound given ε and Z_G, plus log N(ε | 0, I), which cancels with q."""
        return self.bound(site, z_global, z_local) + super().log_local(site, z_global, z_local)

    def bound(self, site: SiteRows, z_global: Shared, noise: Units) -> Float[Tensor, "*S N"]:
        """Bound log p(x_n | z_n, Z_G) − KL of the features; counts lack the multinomial coefficient."""
        mean, log_scale = self.encoder(self.encoder_inputs(site.features)).chunk(2, -1)
        outputs = self._outputs(site, z_global, noise)[..., : self.num_inputs]
        squares = ((2 * log_scale).exp() + mean.square()) / self.prior_variance
        divergence = 0.5 * (squares - 1 + math.log(self.prior_variance)).sum(-1) - log_scale.sum(-1)
        if self.counts:
            return (site.features * outputs.log_softmax(-1)).sum(-1) - divergence
        return (site.features * outputs - nn.functional.softplus(outputs)).sum(-1) - divergence

    def function(self, site: SiteRows, z_global: Shared, z_local: Units) -> Float[Tensor, "*S N C"]:
        """Logits of the classes."""
        return self._outputs(site, z_global, z_local)[..., self.num_inputs :]

    def _outputs(self, site: SiteRows, z_global: Tensor, noise: Tensor) -> Tensor:
        """The outputs o [*S, N, V + C]: Z_G as a matrix [V + C, H + 1] times the code of z and a constant."""
        mean, log_scale = self.encoder(self.encoder_inputs(site.features)).chunk(2, -1)
        z, weights = mean + log_scale.exp() * noise, z_global.unflatten(-1, self.layers)
        code = z.softmax(-1) if self.counts else torch.relu(self.decoder(z))
        return code @ weights[..., :-1].mT + weights[..., None, :, -1]

    def sections(self, q_global: GlobalPosterior, names: Sequence[str]) -> list[ReportTable]:
        """Table of the main words of every topic."""
        if not self.counts:
            return []
        count = min(TOPIC_WORDS, len(names))
        caption = f"The {count} words whose probability each topic raises most over the background."
        rows = [(str(k + 1), ", ".join(words[:count])) for k, words in enumerate(self.topics(q_global.mean, names))]
        return [ReportTable("Topics", ("topic", "words"), [*rows], caption)]

    def topics(self, mean: Float[Tensor, " M"], names: Sequence[str]) -> list[list[str]]:
        """All words for each topic, ordered by how much it raises their log odds over the background."""
        weights = mean.unflatten(-1, self.layers)[: self.num_inputs, :-1]
        return [[names[int(v)] for v in column.argsort(descending=True)] for column in weights.mT]
