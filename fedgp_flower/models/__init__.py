"""GPyTorch models."""
