"""FGPR: averaged hyperparameters of exact GPs."""
