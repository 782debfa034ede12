"""Kernels of GPyTorch for expressions of ``model.kernel``."""

import gpytorch


def rational_quadratic(num_inputs, ard):
    return gpytorch.kernels.RQKernel(ard_num_dims=num_inputs if ard else None)


def bounded(num_inputs, ard):
    return gpytorch.kernels.RBFKernel(lengthscale_constraint=gpytorch.constraints.Interval(0.1, 2.0))
