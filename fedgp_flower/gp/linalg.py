"""Cholesky factors with one jitter policy, and a count of repairs.

A kernel matrix gets ``jitter`` times its prior variance on the diagonal. If that fails, a counted repair adds more.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from fedgp_flower.errors import NumericsError

LOG_RANGE = 20.0
"""Optimisers keep log hyperparameters within ± this, so that kernel matrices have a factor in float64."""

_repairs: ContextVar[Counter[str] | None] = ContextVar("repairs", default=None)


@contextmanager
def counting_repairs() -> Iterator[Counter[str]]:
    """Count repairs by name of the matrix, as in ``{"K_zz": 2}``, within this block."""
    counter: Counter[str] = Counter()
    token = _repairs.set(counter)
    try:
        yield counter
    finally:
        _repairs.reset(token)


def cholesky(matrix: Tensor, *, of: str, hint: str = "") -> Tensor:
    """Lower Cholesky factor of a matrix [..., M, M]; raise NumericsError with ``hint`` if not positive definite."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        raise NumericsError(_indefinite(matrix, of, hint))
    return factor


def kernel_cholesky(matrix: Tensor, *, variance: Tensor, jitter: float, of: str = "K_zz") -> Tensor:
    """L with L Lᵀ = K [..., M, M] + jitter · variance [...] · I; a repair is counted under the name ``of``."""
    stabilised = matrix
    if jitter:
        stabilised = matrix.clone()
        stabilised.diagonal(dim1=-2, dim2=-1).add_((jitter * variance)[..., None])
    return repaired_cholesky(stabilised, of=of, hint="Lower `model.num-inducing`: inducing points may coincide.")


def repaired_cholesky(matrix: Tensor, *, of: str, hint: str = "") -> Tensor:
    """As :func:`cholesky`, but a matrix that rounding makes indefinite gets jitter, which is counted under ``of``."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not bool(info.any()):
        return factor
    if (counter := _repairs.get()) is not None:
        counter[of] += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # counted above instead
            return psd_safe_cholesky(matrix, max_tries=6)
    except (NotPSDError, NanError):
        raise NumericsError(_indefinite(matrix, of, hint)) from None


def _indefinite(matrix: Tensor, of: str, hint: str) -> str:
    where = f"shape {tuple(matrix.shape)}, {matrix.dtype}"
    if not bool(torch.isfinite(matrix).all()):
        return f"{of} has entries that are not finite, {where}. {hint}".rstrip()
    smallest = float(torch.linalg.eigvalsh(matrix.detach()).min())
    return f"{of} is not positive definite: smallest eigenvalue {smallest:.2e}, {where}. {hint}".rstrip()


def symmetric(matrix: Tensor) -> Tensor:
    """½ (A + Aᵀ), which removes asymmetry by rounding."""
    return (matrix + matrix.mT) / 2
