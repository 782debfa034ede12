"""What server and sites of PVI say to each other: what the others know and the site's factor down, its new factor up.

The server keeps every factor and returns a site's factor to it with each visit: a site needs no memory, and a restart
can neither lose nor double its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.pvi.model import Factor, InducingFactor, Latent, Latents, Point, PseudoObservations
from fedgp_flower.methods.sgpr.messages import PooledPosterior
from fedgp_flower.shared_messages import Described
from fedgp_flower.typing import AnyShape, Array

LATENTS = ("inducing", "hyper")
"""Blocks of the posterior that are not u: Z and β."""
LIMIT = 1e8
"""Standardised inputs, targets and weights of an honest site are far below this."""


# ---- Parts of messages ----------------------------------------------------------------------------------------------


@message()
class NaturalParameters:
    """A Gaussian factor t(x) = exp(η₁ᵀx + xᵀη₂x), a density or not."""

    eta1: Float[ndarray, " _"] = leaves("η₁ = S⁻¹m")
    eta2: AnyShape = leaves("η₂ = −½S⁻¹: a matrix, or its diagonal")

    @staticmethod
    def of(gaussian: Gaussian) -> NaturalParameters:
        """Of a full or a diagonal Gaussian."""
        return NaturalParameters(**gaussian.to_arrays())

    @cached_property
    def gaussian(self) -> Gaussian:
        """As tensors."""
        return self.full() if self.eta2.ndim == 2 else self.diagonal()

    def diagonal(self) -> DiagonalGaussian:
        """As tensors, where ``eta2`` is known to be a diagonal."""
        return DiagonalGaussian.from_arrays({"eta1": self.eta1, "eta2": self.eta2})

    def full(self) -> NaturalGaussian:
        """As tensors, where ``eta2`` is known to be a matrix."""
        return NaturalGaussian.from_arrays({"eta1": self.eta1, "eta2": self.eta2})

    def refusal(self, name: str, *, diagonal: bool = False) -> str | None:
        """Why this is no factor of u or of weights, or None; a ``diagonal`` one is allowed for weights."""
        shapes = [2 * self.eta1.shape] + [self.eta1.shape] * diagonal
        if self.eta2.shape not in shapes:
            return f"`{name}.eta2`: shape {self.eta2.shape}, expected a matrix for `eta1` of shape {self.eta1.shape}"
        size = float(np.abs(self.eta2).max())
        if max(size, float(np.abs(self.eta1).max())) > LIMIT**2:
            return f"`{name}`: numbers above {LIMIT**2:g}, which no standardised rows give"
        if self.eta2.ndim == 2 and np.abs(self.eta2 - self.eta2.T).max() > 1e-8 * size:
            return f"`{name}.eta2` is not symmetric"
        largest = np.linalg.eigvalsh(self.eta2)[-1] if self.eta2.ndim == 2 else self.eta2.max()
        return f"`{name}.eta2`: its precision has a negative eigenvalue" if largest > 1e-8 * size else None


@message()
class Marginal:
    """q(Z), q(β) or a site's factor of one of them in natural parameters; or the value, where it is a point."""

    eta1: Float[ndarray, " _"] | None = leaves("η₁, of a distribution", default=None)
    eta2: Float[ndarray, " _"] | None = leaves("η₂, of a distribution: the diagonal", default=None)
    value: Float[ndarray, " _"] | None = leaves("the value of a point", default=None)

    @staticmethod
    def of(latent: Latent) -> Marginal:
        """From tensors."""
        if isinstance(latent, Point):
            return Marginal(value=latent.value.detach().numpy().copy())
        return Marginal(**latent.to_arrays())

    @staticmethod
    def narrow(mean: Array, scale: float) -> Marginal:
        """N(mean, scale²)."""
        return Marginal(mean / scale**2, np.full(len(mean), -0.5 / scale**2))

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self._given[0])

    def latent(self) -> Latent:
        """As tensors."""
        if self.value is not None:
            return Point(torch.as_tensor(np.array(self.value, dtype=np.float64)))
        return self.natural().diagonal()

    def natural(self) -> NaturalParameters:
        """As a factor of the product."""
        assert self.eta1 is not None
        assert self.eta2 is not None
        return NaturalParameters(self.eta1, self.eta2)

    def refusal(self, name: str) -> str | None:
        """Why this is neither a point nor natural parameters, or None."""
        if (self.eta1 is None) != (self.eta2 is None) or (self.eta1 is None) != (self.value is not None):
            return f"`{name}`: expected `eta1` and `eta2`, or `value`"
        return None if len({len(array) for array in self._given}) == 1 else f"`{name}`: not of one length"

    @property
    def _given(self) -> list[Array]:
        return [array for array in (self.eta1, self.eta2, self.value) if array is not None]


@message()
class Marginals:
    """q(Z) and q(β)."""

    inducing: Marginal = leaves("of Z, row by row")
    hyper: Marginal = leaves("of β, logarithms of standard deviations and lengthscales")

    def latents(self) -> Latents:
        """As tensors."""
        return Latents(self.inducing.latent(), self.hyper.latent())


@message()
class PseudoPoints:
    """Pseudo-observations t(u | Z, β) ∝ N(K_VZ K_ZZ⁻¹ u; m, W⁻¹) with diagonal noise."""

    inputs: Float[ndarray, "_ D"] = leaves("V, pseudo-inputs")
    targets: Float[ndarray, " _"] = leaves("m, pseudo-targets")
    root: Float[ndarray, " _"] = leaves("√w, the precision is w, over σ² where tied")

    def refusal(self, rows: int) -> str | None:
        """Why these cannot stand for so many rows, or None."""
        number = len(self.inputs)
        if len({number, len(self.targets), len(self.root)}) != 1 or number == 0:
            return "`points.*`: pseudo-inputs, targets and noise are not of one number"
        if number > rows:
            return f"{number} pseudo-observations of {rows} rows"
        if any(np.abs(array).max() > LIMIT for array in vars(self).values()):
            return f"`points.*`: numbers above {LIMIT:g}, which no standardised rows give"
        return None if (self.root > 0).all() else "`points.root` holds deviations and must be positive"


@message()
class Factors:
    """The product of sites' factors of u, in as few arrays as possible."""

    points: PseudoPoints | None = leaves("pseudo-observations", default=None)
    values: NaturalParameters | None = leaves("product of Gaussian factors of u", default=None)

    @staticmethod
    def of(factor: Factor) -> Factors:
        """A single factor."""
        if isinstance(factor, InducingFactor):
            return Factors(values=NaturalParameters.of(factor.natural))
        parts = (factor.inputs, factor.targets, factor.root)
        return Factors(PseudoPoints(*(part.detach().numpy().copy() for part in parts)))

    @staticmethod
    def product(parts: Iterable[Factors]) -> Factors:
        """Pseudo-observations are joined into one set, Gaussian factors are multiplied."""
        every = list(parts)
        points = [part.points for part in every if part.points is not None]
        joined = [np.concatenate(arrays) for arrays in zip(*(vars(each).values() for each in points), strict=True)]
        gaussians = [part.values for part in every if part.values is not None]
        values = None
        if gaussians:
            values = NaturalParameters(
                np.sum([each.eta1 for each in gaussians], 0), np.sum([each.eta2 for each in gaussians], 0)
            )
        return Factors(PseudoPoints(*joined) if points else None, values)

    def factors(self, *, tied: bool) -> list[Factor]:
        """As tensors; whether the noise of pseudo-observations scales with σ² is a choice of the run."""
        found: list[Factor] = [] if self.values is None else [InducingFactor(self.values.full())]
        if self.points is None:
            return found
        inputs, targets, root = (torch.as_tensor(np.array(array)) for array in vars(self.points).values())
        return [PseudoObservations(inputs, targets, root, tied), *found]


# ---- What a site is asked -------------------------------------------------------------------------------------------


@message()
class Visit:
    """Refine your factors against what all others know."""

    context: Mapping[str, NaturalParameters] = leaves("what the site's factors multiply, of every block in the product")
    posterior: NaturalParameters | None = leaves("q of the weights, where they are the model", default=None)
    q: Marginals | None = leaves("q(Z) and q(β); none where weights are the model", default=None)
    others: Factors = leaves("factors of u of the other sites", default=Factors())
    before: Factors | None = leaves("the site's factor of u; none on its first visit", default=None)


@message()
class Predictive:
    """All that predicts: q(Z), q(β) and the factors of all sites; or the posterior at agreed Z and β."""

    q: Marginals | None = leaves("q(Z) and q(β)", default=None)
    factors: Factors = leaves("factors of all sites", default=Factors())
    agreed: PooledPosterior | None = leaves("the posterior at agreed Z and β", default=None)


# ---- What a site answers --------------------------------------------------------------------------------------------


@message("train")
class Refined:
    """A site's new factor; of Z and β its factors, or their new values where these are outside the product."""

    objective: float = leaves("local free energy, in nats per row")
    evaluations: int = leaves("evaluations of the objective, or steps")
    points: PseudoPoints | None = leaves("pseudo-observations", default=None)
    values: NaturalParameters | None = leaves("Gaussian factor of u", default=None)
    weights: NaturalParameters | None = leaves("Gaussian factor of the weights", default=None)
    inducing: Marginal | None = leaves("of Z: factor or point", default=None)
    hyper: Marginal | None = leaves("of β: factor", default=None)

    def num_parameters(self) -> int:
        """Pseudo-observations, inducing values or weights, and hyperparameters."""
        size = 0 if self.hyper is None else self.hyper.size
        if self.points is not None:
            size += len(self.points.targets)
        return size + sum(len(factor.eta1) for factor in (self.values, self.weights) if factor is not None)

    def refusal(self, described: Described) -> str | None:
        """Why this cannot come from so many rows, or None."""
        rows = described.rows
        if self.evaluations < 0:
            return "the count of evaluations cannot be negative"
        reasons = (
            self.points and self.points.refusal(rows),
            self.values and self.values.refusal("values"),
            self.weights and self.weights.refusal("weights", diagonal=True),
            self.inducing and self.inducing.refusal("inducing"),
            self.hyper and self.hyper.refusal("hyper"),
        )
        return next((reason for reason in reasons if reason), None)


@message("query.log_likelihood", summand=True)
class LogLikelihood:
    """A site's term of the global free energy."""

    value: Float[ndarray, ""] = leaves("E_q log p(y_k | f), in nats")

    def num_parameters(self) -> int:
        """One number."""
        return 1
