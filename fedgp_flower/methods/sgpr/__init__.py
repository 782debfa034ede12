"""FSGP: federated sparse Gaussian processes."""
