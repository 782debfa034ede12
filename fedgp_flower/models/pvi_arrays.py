"""Latents and factors of a partitioned posterior as named arrays: what messages and files of a run hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from fedgp_flower.config import ModelSection
from fedgp_flower.errors import ProtocolError
from fedgp_flower.gaussian import DiagonalGaussian, NaturalGaussian
from fedgp_flower.models.batched_kernel import BatchedKernel
from fedgp_flower.models.factors import Factor, InducingFactor, PseudoObservations, WhitenedFactor
from fedgp_flower.models.hierarchical import Latent, Latents, Point, SparseModel
from fedgp_flower.models.kernels import build_kernel
from fedgp_flower.models.likelihoods import build_point_likelihood
from fedgp_flower.shapes import NamedArrays

Arrays = Mapping[str, NDArray[np.generic]]


def sparse_model(section: ModelSection, num_inputs: int) -> SparseModel:
    """Kernel and likelihood of the configuration, for ``num_inputs`` encoded inputs."""
    likelihood = build_point_likelihood(section.likelihood, noise=section.noise)
    return SparseModel(BatchedKernel(build_kernel(section, num_inputs)), likelihood, num_inputs, section.jitter)


def part(arrays: Arrays, prefix: str) -> dict[str, NDArray[np.generic]]:
    """The arrays whose names start with ``prefix.``, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def named(prefix: str, arrays: Arrays) -> NamedArrays:
    """The same arrays with ``prefix.`` before their names."""
    return {f"{prefix}.{name}": np.asarray(array) for name, array in arrays.items()}


def latent_arrays(latent: Latent) -> NamedArrays:
    """A distribution as natural parameters, a point as ``value``."""
    if isinstance(latent, Point):
        return {"value": latent.value.detach().numpy().copy()}
    return latent.to_arrays()


def latent_of(arrays: Arrays) -> Latent:
    """The inverse of :func:`latent_arrays`."""
    if "value" in arrays:
        return Point(torch.as_tensor(np.array(arrays["value"], dtype=np.float64)))
    return DiagonalGaussian.from_arrays(arrays)


def latents_of(arrays: Arrays, prefix: str) -> Latents:
    """Z and β under ``prefix.inducing`` and ``prefix.hyper``.

    Raises:
        ProtocolError: one of the two is missing.
    """
    found = [part(arrays, f"{prefix}.{name}") for name in ("inducing", "hyper")]
    if not all(found):
        raise ProtocolError(f"arrays `{prefix}.inducing` and `{prefix}.hyper`: at least one of them is missing")
    return Latents(*(latent_of(own) for own in found))


def factor_arrays(factor: Factor) -> NamedArrays:
    """A site's factor under the names of a reply: ``points.*``, ``values.*`` or ``whitened.*``."""
    if isinstance(factor, PseudoObservations):
        own = factor.to_arrays()
        return named("points", {name: own[name] for name in ("inputs", "targets", "root", "residual", "count")})
    kind = "values" if isinstance(factor, InducingFactor) else "whitened"
    return named(kind, factor.natural.to_arrays())


def factors_of(arrays: Arrays, prefix: str) -> list[Factor]:
    """All factors under ``prefix.points-0``, ``prefix.points-1``, …, ``prefix.values``, ``prefix.whitened``."""
    factors: list[Factor] = []
    while own := part(arrays, f"{prefix}.points-{len(factors)}"):
        factors.append(PseudoObservations.from_arrays(own))
    if own := part(arrays, f"{prefix}.values"):
        factors.append(InducingFactor(NaturalGaussian.from_arrays(own)))
    if own := part(arrays, f"{prefix}.whitened"):
        factors.append(WhitenedFactor(NaturalGaussian.from_arrays(own)))
    return factors
