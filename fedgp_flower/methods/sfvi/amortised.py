"""Models of rows by latents that one network, shared by all sites, reads off the row itself.

    z_n ~ N(0, τ² I) [W],   h_n = (code(z_n), 1) [H + 1],   o_n = Z_G h_n [V + C],   entries of Z_G ~ N(0, 1)

The V features of row n depend on the first entries of o_n, its class on the others, P(y_n = c) ∝ exp(o_n,V+c). The
posterior q(z_n | x_n) = N(m, diag s²), (m, log s) = encoder(x_n), has parameters that all sites share: they are
part of θ and trained like all else, by the sum of the sites' gradients. With z = m + s ε the bound of a row is

    E_ε [log p(x_n, y_n | z_n, Z_G)] − KL(q(z_n | x_n) ‖ N(0, τ² I)),

so that what the family calls local latents is ε, of which q is N(0, I) and nothing is learned: a site keeps nothing,
and a new row, at any site, has a posterior. The class is not an input of the encoder.

``vae``: features are Bernoulli, code(z) a rectified layer, τ = 1 (Kingma and Welling 2014). ``prodlda``: features are
counts of words, multinomial with log odds o_n, so that Z_G holds topics, a background and the words of both; code(z) =
softmax(z), and τ² = (1 − 1/W)/α stands in for Dirichlet(α) (Srivastava and Sutton 2017; Hassan et al. 2023).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedgp_flower.errors import DataError
from fedgp_flower.methods.family import GlobalPosterior, LocalPosterior
from fedgp_flower.methods.sfvi.classes import Classifier, standard_normal
from fedgp_flower.methods.sfvi.options import SFVIOptions
from fedgp_flower.methods.sfvi.structured import IndexVector, ModelInputs, ReportTable, SiteRows
from fedgp_flower.options import ModelSection
from fedgp_flower.typing import Rows, Targets

START = 0
"""Seed of the networks' first weights: they are the same at every site."""
APART, LENGTH = 30.0, 3.0
"""``prodlda``: factor of the encoder's last layer at the start, and the length of what its first one sees."""
CONCENTRATION = 0.1
"""``prodlda``: α of the Dirichlet prior of a document's topics, as in ``simulations/results/amortised_prodlda.md``."""
SHOWN = 10
"""Words of a topic in a report."""


class AmortisedModel(Classifier):
    """V features, W latents, H entries of the code, C classes; every row is a unit."""

    prior_variance: float
    """τ²."""

    def __init__(self, num_inputs: int, width: int, options: SFVIOptions, *, binary: bool) -> None:
        """``width`` is H; the encoder gets its weights before the networks of a subclass."""
        size = (num_inputs + options.classes) * (width + 1)
        super().__init__(torch.zeros(size, dtype=torch.float64), classes=options.classes, binary=binary)
        self.num_inputs, self.latents, self.width = num_inputs, options.latents, width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(START)
            first, last = nn.Linear(num_inputs, options.hidden), nn.Linear(options.hidden, 2 * self.latents)
            self.encoder = nn.Sequential(first, nn.Softplus(), last)
            self.finish(last)
        self.double()

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> AmortisedModel:
        """A code of as many entries as there are hidden units."""
        return cls(num_inputs, options.hidden, options, binary=section.likelihood == "bernoulli")

    @abstractmethod
    def finish(self, last: nn.Linear) -> None:
        """Build other networks, or change the ``last`` layer of the encoder."""

    @abstractmethod
    def seen(self, features: Rows) -> Rows:
        """Features as the encoder has them.

        Raises:
            DataError: these are no features of the model.
        """

    @abstractmethod
    def code(self, z: Float[Tensor, "*S N W"]) -> Float[Tensor, "*S N H"]:
        """What the output layer is applied to."""

    @abstractmethod
    def log_features(self, features: Rows, outputs: Float[Tensor, "*S N V"]) -> Float[Tensor, "*S N"]:
        """The log density log p(x_n | o_n)."""

    def prepare(self, features: Rows, targets: Targets, groups: IndexVector | None = None, *, key: int = 0) -> SiteRows:
        """Every row is a unit."""
        self.seen(features)
        site, each = super().prepare(features, targets, groups, key=key), torch.arange(len(features))
        return replace(site, unit=each, keys=key + each)

    def located(self, site: SiteRows, rows: ModelInputs, *, trained: bool) -> Iterator[tuple[Tensor, SiteRows, bool]]:
        """New rows, whose q the encoder makes."""
        count = len(rows.features)
        yield torch.ones(count, dtype=torch.bool), self.prepare(rows.features, rows.features.new_zeros(count)), False

    def local_width(self, site: SiteRows) -> int:
        """That of ε."""
        return self.latents

    def initial_local(self, site: SiteRows, *, scale: float, coupled: bool, triangular: bool) -> LocalPosterior:
        """N(0, I), now and later."""
        zero = torch.zeros(len(site.keys), self.latents, dtype=torch.float64)
        return LocalPosterior(zero, zero, None, None, fixed=True)

    def encoded(self, features: Rows) -> tuple[Float[Tensor, "N W"], Float[Tensor, "N W"]]:
        """Mean m and log s of q(z | x)."""
        mean, log_scale = self.encoder(self.seen(features)).chunk(2, -1)
        return mean, log_scale

    def log_local(
        self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]
    ) -> Float[Tensor, "*S U"]:
        """The row's bound given ε and Z_G, + log N(ε | 0, I), which q takes away again."""
        bound = self.bound(site, z_global, z_local) + self.log_likelihood(site, z_global, z_local)
        return bound + standard_normal(z_local)

    def bound(
        self, site: SiteRows, z_global: Float[Tensor, "*S M"], noise: Float[Tensor, "*S N W"]
    ) -> Float[Tensor, "*S N"]:
        """The bound log p(x_n | z_n, Z_G) − KL of the features alone, without classes."""
        mean, log_scale = self.encoded(site.features)
        outputs = self._outputs(site, z_global, noise)[..., : self.num_inputs]
        squares = ((2 * log_scale).exp() + mean.square()) / self.prior_variance
        divergence = 0.5 * (squares - 1 + math.log(self.prior_variance)).sum(-1) - log_scale.sum(-1)
        return self.log_features(site.features, outputs) - divergence

    def logits(self, site: SiteRows, z_global: Float[Tensor, "*S M"], z_local: Float[Tensor, "*S U W"]) -> Tensor:
        """Of the classes."""
        return self._outputs(site, z_global, z_local)[..., self.num_inputs :]

    def _outputs(self, site: SiteRows, z_global: Tensor, noise: Tensor) -> Tensor:
        """The outputs o [*S, N, V + C]."""
        mean, log_scale = self.encoded(site.features)
        weights = self.layer(z_global)
        return self.code(mean + log_scale.exp() * noise) @ weights[..., :-1].mT + weights[..., None, :, -1]

    def layer(self, z_global: Float[Tensor, "*S M"]) -> Float[Tensor, "*S O H1"]:
        """Z_G as a matrix [V + C, H + 1]; the last column is a constant."""
        return z_global.unflatten(-1, (self.num_inputs + self.num_classes, self.width + 1))


class Autoencoder(AmortisedModel):
    """Features between 0 and 1."""

    prior_variance = 1.0

    def finish(self, last: nn.Linear) -> None:
        """The first layer of the decoder."""
        self.decoder = nn.Linear(self.latents, self.width)

    def seen(self, features: Rows) -> Rows:
        """As they are."""
        if len(features) and not bool(((features >= 0) & (features <= 1)).all()):
            raise DataError("`sfvi.model` = 'vae' takes features between 0 and 1 as they are: set `standardise` false")
        return features

    def code(self, z: Float[Tensor, "*S N W"]) -> Float[Tensor, "*S N H"]:
        """A rectified layer."""
        return torch.relu(self.decoder(z))

    def log_features(self, features: Rows, outputs: Float[Tensor, "*S N V"]) -> Float[Tensor, "*S N"]:
        """Σ_v x log σ(o) + (1 − x) log σ(−o)."""
        return (features * outputs - nn.functional.softplus(outputs)).sum(-1)


class TopicModel(AmortisedModel):
    """Counts of words; a latent is a topic."""

    @classmethod
    def configured(
        cls, options: SFVIOptions, section: ModelSection, num_inputs: int, inputs: Rows | None = None
    ) -> TopicModel:
        """A code of as many entries as there are topics."""
        return cls(num_inputs, options.latents, options, binary=section.likelihood == "bernoulli")

    def finish(self, last: nn.Linear) -> None:
        """Documents start far apart, each in few topics, or all would stay in the middle, where topics are alike.

        τ² is that of the Laplace approximation to Dirichlet(α) in the coordinates of a softmax.
        """
        self.prior_variance = (1 - 1 / self.latents) / CONCENTRATION
        with torch.no_grad():
            last.weight[: self.latents] *= APART
            last.bias[self.latents :] -= 1.0

    def seen(self, features: Rows) -> Rows:
        """Logarithms of counts, of the same length for all documents; one without words is 0."""
        if len(features) and not bool((features >= 0).all()):
            raise DataError("`sfvi.model` = 'prodlda' takes counts of words as they are: set `standardise` false")
        return LENGTH * nn.functional.normalize(features.log1p(), dim=-1)

    def code(self, z: Float[Tensor, "*S N W"]) -> Float[Tensor, "*S N H"]:
        """Shares of the topics."""
        return z.softmax(-1)

    def log_features(self, features: Rows, outputs: Float[Tensor, "*S N V"]) -> Float[Tensor, "*S N"]:
        """Σ_v x_v log softmax(o)_v, without the multinomial coefficient."""
        return (features * outputs.log_softmax(-1)).sum(-1)

    def sections(self, q_global: GlobalPosterior, names: Sequence[str]) -> list[ReportTable]:
        """The first words of every topic."""
        count = min(SHOWN, len(names))
        caption = f"The {count} words that each topic makes likeliest, beyond what the background does."
        rows = [(str(k + 1), ", ".join(words[:count])) for k, words in enumerate(self.topics(q_global.mean, names))]
        return [ReportTable("Topics", ("topic", "words"), [*rows], caption)]

    def topics(self, mean: Float[Tensor, " M"], names: Sequence[str]) -> list[list[str]]:
        """All words by how much each topic makes them likelier than the background does, most first."""
        weights = self.layer(mean)[: self.num_inputs, :-1]
        return [[names[int(v)] for v in column.argsort(descending=True)] for column in weights.mT]
