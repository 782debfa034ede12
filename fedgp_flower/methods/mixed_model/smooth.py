"""Smooth terms s(x, …): Gaussian processes of some inputs, with features of inducing points.

f(x) = a σ φ(x)ᵀu with u ~ N(0, I), φ(x) = L⁻¹ k(Z, x), LLᵀ = k(Z, Z) and k(x, x') = exp(−½ Σ_d (x_d − x'_d)² / ℓ_d²),
for standardised inputs. The features do not explain the prior variance R = Σ_n 1 − |φ(x_n)|², which lowers the bound on
the log likelihood by ½ a² R (Titsias 2009). With random effects it remains a bound, because V ≥ I.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtri
from scipy.stats import qmc
from torch import Tensor

from fedgp_flower.data.standardisation import Preparation
from fedgp_flower.errors import DataError
from fedgp_flower.formula import Formula
from fedgp_flower.lazy import pd
from fedgp_flower.methods.mixed_model.design import Columns, reference
from fedgp_flower.typing import Array

COUNTS = 24, 64
"""Numbers of inducing points of a smooth term of one input, and of several."""
REACH = 3.0
"""Range of the inducing points of one input, in standard deviations from the mean."""
JITTER = 1e-8


@dataclass(frozen=True, slots=True)
class Smooth:
    """A smooth term s(…): its inputs, their agreed means and scales, and its inducing points."""

    inputs: tuple[str, ...]
    mean: Array  # [D]
    scale: Array  # [D]
    points: Array  # [M, D], standardised

    @property
    def called(self) -> str:
        """The term as in the formula, such as s(age)."""
        return f"s({', '.join(self.inputs)})"

    def at(self, frame: pd.DataFrame) -> Float[Tensor, "N D"]:
        """The standardised inputs of the rows of a table."""
        return torch.from_numpy((frame[list(self.inputs)].to_numpy(dtype=np.float64) - self.mean) / self.scale)

    def features(self, x: Float[Tensor, "N D"], log_lengthscales: Float[Tensor, " D"]) -> Float[Tensor, "N M"]:
        """Φ, with the row φ(x) for each input."""
        z, lengthscales = torch.from_numpy(self.points), log_lengthscales.exp()
        kzz, kxz = (squared_exponential(part / lengthscales, z / lengthscales) for part in (z, x))
        factor = torch.linalg.cholesky(kzz + JITTER * torch.eye(len(z), dtype=torch.float64))
        return torch.linalg.solve_triangular(factor, kxz.mT, upper=False).mT


def squared_exponential(x: Float[Tensor, "N D"], z: Float[Tensor, "M D"]) -> Float[Tensor, "N M"]:
    """exp(−½ |x − z|²)."""
    return (-0.5 * (x[:, None] - z).square().sum(2)).exp()


@dataclass(frozen=True, slots=True)
class Smooths:
    """The smooth terms of a formula. Their parameters are all log ℓ, then all amplitudes a."""

    terms: tuple[Smooth, ...]

    @property
    def lengths(self) -> list[int]:
        """The number of lengthscales of each term."""
        return [len(term.inputs) for term in self.terms]

    @property
    def widths(self) -> list[int]:
        """The number of features of each term."""
        return [len(term.points) for term in self.terms]

    @property
    def units(self) -> list[float]:
        """The scale of each input, which converts its standardised lengthscale to units of the table."""
        return [float(scale) for term in self.terms for scale in term.scale]

    @property
    def names(self) -> list[str]:
        """The name of each feature."""
        return [f"{term.called} {k}" for term in self.terms for k in range(1, 1 + len(term.points))]

    def at(self, frame: pd.DataFrame) -> list[Tensor]:
        """The standardised inputs [N, D] of each term."""
        return [term.at(frame) for term in self.terms]

    def features(self, inputs: Sequence[Tensor], log_lengthscales: Float[Tensor, " L"]) -> list[Tensor]:
        """Φ [N, M] of each term."""
        parts = zip(self.terms, inputs, log_lengthscales.split(self.lengths), strict=True)
        return [term.features(x, part) for term, x, part in parts]

    def unexplained(self, features: Sequence[Tensor], amplitudes: Tensor, count: int) -> Float[Tensor, " N"]:
        """The prior variance Σ a² (1 − |φ|²) of ``count`` rows that the features of all terms leave out, over σ²."""
        parts = [a**2 * (1 - phi.square().sum(1)) for a, phi in zip(amplitudes, features, strict=True)]
        return sum(parts, start=torch.zeros(count, dtype=torch.float64))

    def roots(self, parameters: Float[Tensor, " P"]) -> Array:
        """The block-diagonal matrix of a Φ at the inducing points [M, M] of each term, from log ℓ and a."""
        lengths, amplitudes = parameters.split([sum(self.lengths), len(self.terms)])
        parts = self.features([torch.from_numpy(term.points) for term in self.terms], lengths)
        return torch.block_diag(*(a * part for a, part in zip(amplitudes, parts, strict=True))).numpy()


NONE = Smooths(())


def smooths(formula: Formula, agreed: Preparation) -> Smooths:
    """The smooth terms of a formula; DataError if an input is not a column of numbers."""
    numeric = {c.name for c in agreed.columns if c.kind == "numeric"}
    names = [name for c in agreed.columns for name in ([c.name] if c.name in numeric else c.names)]
    terms = []
    for inputs in formula.smooths:
        if wrong := [name for name in inputs if name not in numeric]:
            raise DataError(f"`formula`: s({', '.join(inputs)}) needs columns of numbers; {wrong[0]} is not one")
        places, width = [names.index(name) for name in inputs], len(inputs)
        terms.append(Smooth(inputs, agreed.input_mean[places], agreed.input_scale[places], spread_out(width)))
    return Smooths(tuple(terms))


def agreed_parts(formula: Formula, arrays: Mapping[str, Array], schema: str) -> tuple[Columns, Smooths]:
    """The design matrices at reference rows and the smooth terms, from the agreed arrays and schema."""
    agreed = Preparation.from_wire(arrays, schema)
    return reference(formula, agreed), smooths(formula, agreed)


def spread_out(width: int) -> Array:
    """Standardised inducing points [M, width]: equally spaced for one input, else quantiles of a Sobol sequence."""
    if width == 1:
        return np.linspace(-REACH, REACH, COUNTS[0])[:, None]
    count = COUNTS[1]
    return ndtri(qmc.Sobol(width, scramble=False).random(2 * count)[1 : count + 1])
