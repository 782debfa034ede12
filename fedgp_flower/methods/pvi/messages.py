"""Messages of PVI. The server stores every factor, so that sites are stateless."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from fedgp_flower.gp.gaussian import Gaussian
from fedgp_flower.messages import encode, leaves, message
from fedgp_flower.methods.sgpr.messages import PooledPosterior
from fedgp_flower.shared_messages import Described
from fedgp_flower.typing import AnyShape

SAVED_LATENTS, POINTS = {"inducing": "inducing.locations", "hyper": "hyper"}, "factor.points-0."
"""Names in files of the blocks of the posterior that are not u, Z and β, and of pseudo-observations."""
LATENTS = tuple(SAVED_LATENTS)
LIMIT = 1e8
"""Bound of standardised inputs, targets and weights; an honest site stays far below."""


# ---- Parts of messages ----------------------------------------------------------------------------------------------


@message()
class NaturalParameters:
    """A Gaussian factor t(x) = exp(η₁ᵀx + xᵀη₂x), which may be improper."""

    eta1: Float[ndarray, " _"] = leaves("η₁ = S⁻¹m")
    eta2: AnyShape = leaves("η₂ = −½S⁻¹: a matrix, or its diagonal")

    @staticmethod
    def of(gaussian: Gaussian) -> NaturalParameters:
        """From a Gaussian."""
        return NaturalParameters(*(part.detach().double().numpy() for part in (gaussian.eta1, gaussian.eta2)))

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.eta1)

    @cached_property
    def gaussian(self) -> Gaussian:
        """The factor as tensors."""
        return Gaussian(*(torch.tensor(part, dtype=torch.float64) for part in (self.eta1, self.eta2)))

    def refusal(self, name: str, _: int) -> str | None:
        """Return why this is no valid factor, or None; the merge checks the precision of v in the product."""
        shapes = [2 * self.eta1.shape] + [self.eta1.shape] * (name == "weights")
        if not self.size or self.eta2.shape not in shapes:
            return f"`{name}.eta2`: shape {self.eta2.shape}, expected a matrix for `eta1` of shape {self.eta1.shape}"
        size = float(np.abs(self.eta2).max())
        if max(size, float(np.abs(self.eta1).max())) > LIMIT**2:
            return f"`{name}`: numbers above {LIMIT**2:g}, which no standardised rows give"
        if self.eta2.ndim == 2 and np.abs(self.eta2 - self.eta2.T).max() > 1e-8 * size:
            return f"`{name}.eta2` is not symmetric"
        largest = np.linalg.eigvalsh(self.eta2)[-1] if self.eta2.ndim == 2 else self.eta2.max()
        return f"`{name}.eta2`: its precision has a negative eigenvalue" if largest > 1e-8 * size else None


@message()
class WeightsPosterior(NaturalParameters):
    """q of the weights, and the noise variance of numbers."""

    noise: float | None = leaves("noise variance of numbers", default=None)


@message()
class LatentFactor:
    """q(Z), q(β) or a site's factor of one of them in natural parameters; or the value of a point estimate."""

    eta1: Float[ndarray, " _"] | None = leaves("η₁, of a distribution", default=None)
    eta2: Float[ndarray, " _"] | None = leaves("η₂, of a distribution: the diagonal", default=None)
    value: Float[ndarray, " _"] | None = leaves("the value of a point", default=None)

    @staticmethod
    def of(gaussian: Gaussian) -> LatentFactor:
        """From a diagonal Gaussian."""
        factor = NaturalParameters.of(gaussian)
        return LatentFactor(factor.eta1, factor.eta2)

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(next(iter(encode(self).values())))

    def natural(self) -> NaturalParameters:
        """The natural parameters."""
        assert self.eta1 is not None
        assert self.eta2 is not None
        return NaturalParameters(self.eta1, self.eta2)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variances, which are zero for a point."""
        if self.value is not None:
            return torch.tensor(self.value), torch.zeros(len(self.value), dtype=torch.float64)
        return self.natural().gaussian.moments()

    def refusal(self, name: str, _: int) -> str | None:
        """Return why this is neither a point nor natural parameters, or None."""
        arrays = encode(self)
        if set(arrays) not in ({"value"}, {"eta1", "eta2"}):
            return f"`{name}`: expected `eta1` and `eta2`, or `value`"
        return None if len({len(array) for array in arrays.values()}) == 1 else f"`{name}`: arrays differ in length"


@message()
class Marginals:
    """q(Z) and q(β)."""

    inducing: LatentFactor = leaves("of Z, row by row")
    hyper: LatentFactor = leaves("of β, logarithms of standard deviations and lengthscales")


@message()
class PseudoPoints:
    """Pseudo-observations t(u | Z, β) ∝ N(K_VZ K_ZZ⁻¹ u; m, W⁻¹) with diagonal noise."""

    inputs: Float[ndarray, "_ D"] = leaves("V, pseudo-inputs")
    targets: Float[ndarray, " _"] = leaves("m, pseudo-targets")
    root: Float[ndarray, " _"] = leaves("√w, the precision is w, over σ² where tied")

    @property
    def size(self) -> int:
        """Number of pseudo-observations."""
        return len(self.targets)

    def refusal(self, name: str, rows: int) -> str | None:
        """Return why these cannot summarise this number of rows, or None."""
        number = len(self.inputs)
        if len({number, len(self.targets), len(self.root)}) != 1 or number == 0:
            return f"`{name}.*`: pseudo-inputs, targets and noise differ in number"
        if number > rows:
            return f"{number} pseudo-observations from {rows} rows"
        if any(np.abs(array).max() > LIMIT for array in vars(self).values()):
            return f"`{name}.*`: numbers above {LIMIT:g}, which no standardised rows give"
        return None if (self.root > 0).all() else f"`{name}.root` holds deviations and must be positive"


@message()
class Factors:
    """The product of sites' factors of u, in as few arrays as possible."""

    points: PseudoPoints | None = leaves("pseudo-observations", default=None)
    values: NaturalParameters | None = leaves("product of Gaussian factors of u", default=None)


# ---- Requests -------------------------------------------------------------------------------------------------------


@message()
class Visit:
    """Request to update a site's factors given those of all others."""

    context: Mapping[str, NaturalParameters] = leaves("cavity or prior of every block of the product")
    posterior: WeightsPosterior | None = leaves("q of the weights", default=None)
    q: Marginals | None = leaves("q(Z) and q(β); none for models of weights", default=None)
    others: Factors = leaves("factors of u of the other sites", default=Factors())
    before: Factors | None = leaves("the site's factor of u; none on its first visit", default=None)


@message()
class Predictive:
    """The posterior for prediction: q(Z), q(β) and the factors of all sites; or q(u) at agreed Z and β."""

    q: Marginals | None = leaves("q(Z) and q(β)", default=None)
    factors: Factors = leaves("factors of all sites", default=Factors())
    agreed: PooledPosterior | None = leaves("the posterior at agreed Z and β", default=None)


# ---- Answers --------------------------------------------------------------------------------------------------------


@message("train")
class Refined:
    """A site's new factors of u, Z and β; or new values of Z and β that are outside the product."""

    objective: float = leaves("local free energy, in nats per row")
    evaluations: int = leaves("evaluations of the objective, or steps")
    points: PseudoPoints | None = leaves("pseudo-observations", default=None)
    values: NaturalParameters | None = leaves("Gaussian factor of u", default=None)
    weights: NaturalParameters | None = leaves("Gaussian factor of the weights", default=None)
    inducing: LatentFactor | None = leaves("of Z: factor or point", default=None)
    hyper: LatentFactor | None = leaves("of β: factor", default=None)

    @property
    def parts(self) -> dict[str, PseudoPoints | NaturalParameters | LatentFactor]:
        """The new factors by name."""
        named = {name: part for name, part in vars(self).items() if name not in ("objective", "evaluations")}
        return {name: part for name, part in named.items() if part is not None}

    def num_parameters(self) -> int:
        """Pseudo-observations, inducing values or weights, and hyperparameters."""
        return sum(part.size for name, part in self.parts.items() if name != "inducing")

    def refusal(self, described: Described) -> str | None:
        """Return why this cannot come from the described rows, or None."""
        if self.evaluations < 0:
            return "the count of evaluations cannot be negative"
        reasons = (part.refusal(name, described.rows) for name, part in self.parts.items())
        return next((reason for reason in reasons if reason), None)


@message("query.log_likelihood", summand=True, counts="1")
class LogLikelihood:
    """A site's term of the global free energy."""

    value: Float[ndarray, ""] = leaves("E_q log p(y_k | f), in nats")
