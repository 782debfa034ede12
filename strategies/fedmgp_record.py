"""FedMGP's server states as arrays and JSON, for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgp_flower.latent import Latents, from_wire, moves_from_wire, moves_to_wire, pack, to_wire, unpack
from fedgp_flower.shapes import NamedArrays
from strategies.exact_q import ExactState, Report
from strategies.pseudo_gradient import Late, PseudoState


def _prefixed(prefix: str, arrays: Mapping[str, Any]) -> NamedArrays:
    return {f"{prefix}.{name}": np.asarray(array) for name, array in arrays.items()}


def _within(prefix: str, arrays: NamedArrays) -> NamedArrays:
    return {name.removeprefix(f"{prefix}."): a for name, a in arrays.items() if name.startswith(f"{prefix}.")}


def exact_to_record(state: ExactState) -> tuple[NamedArrays, dict[str, Any]]:
    """Arrays and facts of an exact-mode state; sites are numbered, since their ids may hold any character."""
    arrays = to_wire(state.latents, state.posterior)
    arrays |= {"steps.gain": state.gain_steps, "steps.width": state.width_steps}
    sites = sorted(state.reports)
    for index, site in enumerate(sites):
        report = state.reports[site]
        own = pack([report.statistics]) | moves_to_wire([report.move], "move")
        own |= {"scales": report.latents.scales, "amplitudes": report.latents.amplitudes}
        arrays |= _prefixed(f"report.{index}", own)
    bound = state.bound if math.isfinite(state.bound) else None
    return arrays, {"bound": bound, "stretch": state.stretch, "round": state.round, "sites": sites}


def exact_from_record(arrays: NamedArrays, facts: Mapping[str, Any], jitter: float) -> ExactState:
    """The inverse of :func:`exact_to_record`."""
    latents, posterior = from_wire(arrays, jitter)
    reports = {}
    for index, site in enumerate(facts["sites"]):
        own = _within(f"report.{index}", arrays)
        then = Latents(latents.inducing, own["scales"], own["amplitudes"], jitter)
        reports[site] = Report(unpack(own)[0], then, moves_from_wire(own, "move")[0])
    return ExactState(
        latents=latents,
        posterior=posterior,
        bound=-math.inf if facts["bound"] is None else float(facts["bound"]),
        gain_steps=arrays["steps.gain"],
        width_steps=arrays["steps.width"],
        stretch=float(facts["stretch"]),
        round=int(facts["round"]),
        reports=reports,
    )


def pseudo_to_record(state: PseudoState) -> tuple[NamedArrays, dict[str, Any]]:
    """Arrays and facts of a pseudo-gradient state."""
    arrays = _prefixed("parameters", state.parameters) | _prefixed("velocity", state.velocity)
    arrays |= _prefixed("squares", state.squares)
    sites = sorted(state.late)
    for index, site in enumerate(sites):
        arrays |= _prefixed(f"late.{index}", state.late[site].update)
    return arrays, {"sites": sites, "rounds": [state.late[site].round for site in sites], "steps": state.steps}


def pseudo_from_record(arrays: NamedArrays, facts: Mapping[str, Any]) -> PseudoState:
    """The inverse of :func:`pseudo_to_record`."""
    late = {
        site: Late(_within(f"late.{index}", arrays), int(when))
        for index, (site, when) in enumerate(zip(facts["sites"], facts["rounds"], strict=True))
    }
    theta, velocity, squares = (_within(name, arrays) for name in ("parameters", "velocity", "squares"))
    return PseudoState(theta, velocity, squares, int(facts["steps"]), late)
