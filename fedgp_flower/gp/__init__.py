"""The Gaussian-process toolbox: kernels, likelihoods, sums, Gaussians, optimisers."""
