"""What server and sites of PVI say to each other: what the others know and the site's own factor down, its new one up.

The server keeps every factor and gives a site its own one back with each visit: a site needs no memory, and a restart
can neither lose nor double its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.gp.gaussian import DiagonalGaussian, Gaussian, NaturalGaussian
from fedgp_flower.messages import leaves, message
from fedgp_flower.methods.pvi.factors import Factor, InducingFactor, PseudoObservations, WhitenedFactor
from fedgp_flower.methods.pvi.hierarchical import Latent, Latents, Point
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
        return DiagonalGaussian.from_arrays(self._arrays)

    def full(self) -> NaturalGaussian:
        """As tensors, where ``eta2`` is known to be a matrix."""
        return NaturalGaussian.from_arrays(self._arrays)

    @property
    def _arrays(self) -> dict[str, ndarray]:
        return {"eta1": self.eta1, "eta2": self.eta2}

    def refusal(self, name: str, *, negative: bool) -> str | None:
        """Why this is no factor of u or v, or None.

        Whether prior and factors of v are a density together, the merge sees. The prior of u depends on Z and β, so
        that no negative precision of u is safe; an update by optimisation sends none.
        """
        if self.eta2.shape != 2 * self.eta1.shape:
            return f"`{name}.eta2`: shape {self.eta2.shape}, expected a matrix for `eta1` of shape {self.eta1.shape}"
        size = float(np.abs(self.eta2).max())
        if max(size, float(np.abs(self.eta1).max())) > LIMIT**2:
            return f"`{name}`: numbers above {LIMIT**2:g}, which no standardised rows give"
        if np.abs(self.eta2 - self.eta2.T).max() > 1e-8 * size:
            return f"`{name}.eta2` is not symmetric"
        if not negative and np.linalg.eigvalsh(self.eta2)[-1] > 1e-8 * size:
            return f"`{name}.eta2`: its precision has a negative eigenvalue"
        return None


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
    def is_point(self) -> bool:
        """Whether it is a value, and no distribution."""
        return self.value is not None

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
        if (self.eta1 is None) != (self.eta2 is None) or (self.eta1 is None) != self.is_point:
            return f"`{name}`: expected `eta1` and `eta2`, or `value`"
        return None if len({len(array) for array in self._given}) == 1 else f"`{name}`: not of one length"

    def improper(self, name: str) -> str | None:
        """Why this is no density of standardised inputs or logarithms, or None."""
        if self.eta2 is not None and not (self.eta2 < 0).all():
            return f"`{name}`: its precision is not positive"
        large = any(np.abs(array).max() > LIMIT for array in self._given)
        return f"`{name}`: numbers above {LIMIT:g}" if large else None

    @property
    def _given(self) -> list[Array]:
        return [array for array in (self.eta1, self.eta2, self.value) if array is not None]


@message()
class Marginals:
    """q(Z) and q(β), or their cavities."""

    inducing: Marginal = leaves("of Z, row by row")
    hyper: Marginal = leaves("of β, logarithms of standard deviations and lengthscales")

    def latents(self) -> Latents:
        """As tensors."""
        return Latents(self.inducing.latent(), self.hyper.latent())


@message()
class PseudoPoints:
    """Pseudo-observations t(u | Z, β) ∝ N(K_VZ K_ZZ⁻¹ u; m, S), and what they do not carry of a site's rows."""

    inputs: Float[ndarray, "_ D"] = leaves("V, pseudo-inputs")
    targets: Float[ndarray, " _"] = leaves("m, pseudo-targets")
    root: AnyShape = leaves("R, S⁻¹ = R Rᵀ, over σ² where tied; a matrix, or its diagonal")
    residual: Float[ndarray, ""] = leaves("c, squares that the pseudo-observations do not carry")
    count: Float[ndarray, ""] = leaves("number of rows that they stand for")

    @staticmethod
    def of(factor: PseudoObservations) -> PseudoPoints:
        """From tensors."""
        arrays = {name: getattr(factor, name) for name in ("inputs", "targets", "root", "residual")}
        own = {name: tensor.detach().cpu().numpy().copy() for name, tensor in arrays.items()}
        return PseudoPoints(**own, count=np.array(factor.count))

    def factor(self, *, tied: bool) -> PseudoObservations:
        """As tensors; whether the noise scales with σ² is a choice of the run."""
        inputs, targets, root, residual = (
            torch.as_tensor(np.array(array)) for array in (self.inputs, self.targets, self.root, self.residual)
        )
        return PseudoObservations(inputs, targets, root, tied, float(self.count), residual)

    def refusal(self, rows: int) -> str | None:
        """Why these cannot stand for so many rows, or None."""
        number = len(self.inputs)
        if len({number, len(self.targets), *self.root.shape}) != 1 or self.root.ndim not in (1, 2) or number == 0:
            return "`points.*`: pseudo-inputs, targets and noise are not of one number"
        if number > rows:
            return f"{number} pseudo-observations of {rows} rows"
        if any(np.abs(array).max() > LIMIT for array in vars(self).values()):
            return f"`points.*`: numbers above {LIMIT:g}, which no standardised rows give"
        if not 0 < self.count <= rows or self.residual < 0:
            return (
                f"`points.count` lies between 0 and the {rows} rows of the site, `points.residual` is a sum of squares"
            )
        if self.root.ndim == 1 and not (self.root > 0).all():
            return "`points.root` holds deviations and cannot be negative"
        return None


@message()
class Factors:
    """The product of sites' factors of u, in as few arrays as possible; see :meth:`product`."""

    points: tuple[PseudoPoints, ...] = leaves("pseudo-observations", default=())
    values: NaturalParameters | None = leaves("product of Gaussian factors of u", default=None)
    whitened: NaturalParameters | None = leaves("product of Gaussian factors of v = L⁻¹u", default=None)

    @staticmethod
    def of(factor: Factor) -> Factors:
        """A single factor."""
        if isinstance(factor, PseudoObservations):
            return Factors((PseudoPoints.of(factor),))
        natural = NaturalParameters.of(factor.natural)
        return Factors(values=natural) if isinstance(factor, InducingFactor) else Factors(whitened=natural)

    @staticmethod
    def product(parts: Iterable[Factors]) -> Factors:
        """Pseudo-observations with diagonal noise are joined into one set, Gaussian factors are multiplied."""
        every = list(parts)
        points = [own for part in every for own in part.points]
        diagonal = [own for own in points if own.root.ndim == 1]
        sets = [own for own in points if own.root.ndim == 2]
        if diagonal:
            joined = {name: np.concatenate([getattr(own, name) for own in diagonal]) for name in _LISTS}
            totals = {name: np.asarray(np.sum([getattr(own, name) for own in diagonal])) for name in _TOTALS}
            sets.insert(0, PseudoPoints(**joined, **totals))
        return Factors(tuple(sets), *(_multiplied(getattr(part, name) for part in every) for name in _GAUSSIANS))

    def factors(self, *, tied: bool) -> list[Factor]:
        """As tensors."""
        found: list[Factor] = [own.factor(tied=tied) for own in self.points]
        for own, kind in ((self.values, InducingFactor), (self.whitened, WhitenedFactor)):
            if own is not None:
                found.append(kind(own.full()))
        return found


_LISTS, _TOTALS, _GAUSSIANS = ("inputs", "targets", "root"), ("residual", "count"), ("values", "whitened")


def _multiplied(factors: Iterable[NaturalParameters | None]) -> NaturalParameters | None:
    product: Gaussian | None = None
    for own in factors:
        if own is not None:
            product = own.gaussian if product is None else product * own.gaussian
    return None if product is None else NaturalParameters.of(product)


@message()
class Leakage:
    """How near pseudo-observations are to the rows of their site, which the site measures before they leave it."""

    near: float = leaves("share of pseudo-observations within 0.05 of a row")
    low: float = leaves("5 % quantile of their distance to the nearest row, in row spacings")
    median: float = leaves("median of that distance")
    auc: float | None = leaves("simulation only: how well that distance tells rows from held-out ones", default=None)


# ---- What a site is asked -------------------------------------------------------------------------------------------


@message()
class Visit:
    """Refine your factors against what all others know."""

    q: Marginals
    posterior: Mapping[str, NaturalParameters] = leaves("q of blocks in the product besides Z and β, such as v = L⁻¹u")
    context: Mapping[str, NaturalParameters] = leaves("what the site's factors multiply, of every block in the product")
    others: Factors = leaves("factors of u of the other sites")
    known: float = leaves("share of all rows that the sites visited so far and this one hold")
    own: Factors | None = leaves("the site's factor of u; none on its first visit", default=None)


@message()
class Predictive:
    """All that predicts: q(Z), q(β), and the factors of all sites."""

    q: Marginals
    factors: Factors


# ---- What a site answers --------------------------------------------------------------------------------------------


@message("train")
class Refined:
    """A site's new factor of u; of Z and β its factors, or their new values where these are outside the product."""

    objective: float = leaves("local free energy, in nats per row")
    evaluations: int = leaves("evaluations of the objective")
    rejected: int = leaves("trial points of line searches at which a matrix lost positive definiteness")
    halvings: int = leaves("steps of a fixed point that were shortened")
    points: PseudoPoints | None = leaves("pseudo-observations", default=None)
    values: NaturalParameters | None = leaves("Gaussian factor of u", default=None)
    whitened: NaturalParameters | None = leaves("Gaussian factor of v = L⁻¹u", default=None)
    inducing: Marginal | None = leaves("of Z: factor, density or point", default=None)
    hyper: Marginal | None = leaves("of β: factor, density or point", default=None)
    leakage: Leakage | None = leaves("how near the pseudo-observations are to rows", default=None)
    moved: float | None = leaves("KL of the new q(Z), q(β) from the old ones, in nats", default=None)

    holds: ClassVar[tuple[str, ...]] = ("function", "latents")
    """What the answer is to hold: a factor of u, and what is said of Z and β."""

    def num_parameters(self) -> int:
        """Pseudo-observations or inducing values, and hyperparameters."""
        size = 0 if self.hyper is None else self.hyper.size
        if self.points is not None:
            size += len(self.points.targets)
        return size + sum(len(own.eta1) for own in (self.values, self.whitened) if own is not None)

    def refusal(self, rows: int) -> str | None:
        """Why this cannot come from so many rows, or None."""
        if min(self.evaluations, self.rejected, self.halvings) < 0:
            return "counts of evaluations, rejected points and halvings cannot be negative"
        reasons = (
            self.points and self.points.refusal(rows),
            self.values and self.values.refusal("values", negative=False),
            self.whitened and self.whitened.refusal("whitened", negative=True),
            self.inducing and self.inducing.refusal("inducing"),
            self.hyper and self.hyper.refusal("hyper"),
        )
        return next((reason for reason in reasons if reason), None)


@message("train.distil")
class Distilled(Refined):
    """A site's new pseudo-observations, at the q(Z) and q(β) of all."""

    holds: ClassVar[tuple[str, ...]] = ("function",)


@message("train.refit")
class Refitted(Refined):
    """q(Z) and q(β) that a site fitted to everybody's pseudo-observations, where they are not fixed."""

    holds: ClassVar[tuple[str, ...]] = ("latents",)

    def num_parameters(self) -> int:
        """None: pseudo-observations of all sites are behind it, and no row."""
        return 0


@message("query.free_energy")
class FreeEnergyShare:
    """A site's terms of the global free energy, in nats."""

    fit: float = leaves("E_q log p(y_k | f): adds over sites")
    divergence: float = leaves("E KL(q(u) ‖ p(u)): the same at every site")
