"""FedMGP: federated multi-output Gaussian processes."""
