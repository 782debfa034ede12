"""Shapes are code: while testing, jaxtyping checks every annotated shape of the mathematics at every call."""

from __future__ import annotations

from jaxtyping import install_import_hook

CHECKED = ("fedgp_flower.gp", "fedgp_flower.methods")

_hook = install_import_hook(CHECKED, "beartype.beartype")
