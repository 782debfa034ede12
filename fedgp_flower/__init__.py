"""Federated Gaussian-process learning on Flower."""
