"""A Gaussian process on features that a network learns by federated averaging, with heads by exact sums."""
