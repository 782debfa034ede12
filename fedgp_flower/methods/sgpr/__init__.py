"""Sparse Gaussian processes from sums: sgpr, svgp, sgpr-private, fsgp."""
