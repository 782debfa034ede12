"""Kernels, likelihoods, sums, Gaussians and optimisers."""
