"""Generalised linear mixed models by maximum likelihood, from sums over groups."""
