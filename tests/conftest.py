"""Shapes are code: while testing, jaxtyping checks every annotated shape of the mathematics at every call."""

from __future__ import annotations

from jaxtyping import install_import_hook

CHECKED = (
    "fedgp_flower.linalg",
    "fedgp_flower.statistics",
    "fedgp_flower.gaussian",
    "fedgp_flower.barycentre",
    "fedgp_flower.latent",
    "fedgp_flower.models",
)

_hook = install_import_hook(CHECKED, "beartype.beartype")
