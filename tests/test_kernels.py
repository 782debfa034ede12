"""Kernels from an expression, and kernels that a package of one's theirs brings."""

import sys
from pathlib import Path

import gpytorch
import pytest
import torch
from pydantic import ValidationError

from fedgp_flower.errors import ConfigError
from fedgp_flower.gp.kernels import BatchedKernel, build_kernel, log_positive
from fedgp_flower.gp.models import SparseGP
from fedgp_flower.options import ModelSection, kernel_names

TOY = """
import gpytorch

def rational_quadratic(num_inputs, ard):
    return gpytorch.kernels.RQKernel(ard_num_dims=num_inputs if ard else None)

def bounded(num_inputs, ard):
    return gpytorch.kernels.RBFKernel(lengthscale_constraint=gpytorch.constraints.Interval(0.1, 2.0))
"""
POINTS = "[fedgp_flower.kernels]\nrational_quadratic = toy_kernels:rational_quadratic\nbounded = toy_kernels:bounded\n"
POINTS += "with-dash = toy_kernels:bounded\n"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An installed package with two kernels."""
    (tmp_path / "toy_kernels.py").write_text(TOY)
    info = tmp_path / "toy_kernels-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("toy_kernels", None)


def rows(n: int = 6, d: int = 2) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.usefixtures("toy")
def test_a_kernel_of_another_package_is_part_of_expressions():
    assert {"rational_quadratic", "rbf"} <= set(kernel_names())
    kernel = build_kernel(ModelSection(kernel="rational_quadratic + linear", lengthscale=1.5, outputscale=2.0), 2)
    theirs = gpytorch.kernels.RQKernel(ard_num_dims=2).double()
    theirs.lengthscale = 1.5
    x = rows()
    expected = 2.0 * theirs(x).to_dense() + 2.0 * x @ x.mT
    torch.testing.assert_close(kernel(x).to_dense(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("toy")
def test_what_is_no_kernel_is_refused():
    """A dash would be a minus; a parameter may be bounded by zero alone."""
    assert "with-dash" not in kernel_names()
    with pytest.raises(ValidationError, match=r"expected a sum or product of .*rational_quadratic; example"):
        ModelSection(kernel="with-dash")
    with pytest.raises(ConfigError, match=r"bounded.*raw_lengthscale"):
        build_kernel(ModelSection(kernel="bounded"), 2)


@pytest.mark.usefixtures("toy")
def test_such_a_kernel_is_batched_over_its_hyperparameters():
    model, x = SparseGP(ModelSection(kernel="rational_quadratic"), rows()), rows(5)
    assert set(model.wire_parameters()) >= {"kernel.log_alpha", "kernel.log_lengthscale"}
    batched = BatchedKernel(model.kernel)
    hyper = batched.initial() + torch.tensor([[0.0], [0.3]], dtype=torch.float64)
    matrices = batched.matrix(hyper, x.expand(2, 5, 2), x)
    for s in range(2):
        torch.testing.assert_close(matrices[s], batched.at(hyper[s])(x).to_dense(), rtol=1e-12, atol=1e-12)


def test_a_season_that_drifts():
    """Matérn times periodic: one scale, a lengthscale for each factor and input, and a period for each input."""
    kernel = build_kernel(ModelSection(kernel="matern52 * periodic", lengthscale=0.8, outputscale=1.7), 2)
    theirs = gpytorch.kernels.MaternKernel(2.5, lengthscale_constraint=log_positive()).double()
    season = gpytorch.kernels.PeriodicKernel(ard_num_dims=2).double()
    theirs.lengthscale = season.lengthscale = season.period_length = 0.8
    x = rows()
    torch.testing.assert_close(kernel(x).to_dense(), 1.7 * theirs(x).to_dense() * season(x).to_dense())
