"""What a site keeps between rounds of SFVI and SFVI-Avg, and how a later round reads it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedgp_flower.models.structured import SiteData
from fedgp_flower.models.structured_family import AmortisedPosterior, LocalFamily, named, with_named
from fedgp_flower.shapes import NamedArrays

NOW, BEFORE = "now.", "before."
VALUES, LAYOUT = "values", "layout"
Values = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of Adam (Kingma & Ba 2015), by name of the parameter."""

    step: int = 0
    first: Values = field(default_factory=dict)
    second: Values = field(default_factory=dict)

    def ascend(
        self, values: Values, gradient: Values, rate: float, decays: tuple[float, float] = (0.9, 0.999)
    ) -> tuple[Values, Moments]:
        """One step uphill of the parameters that have a gradient."""
        one, two = decays
        step = self.step + 1
        moved, first, second = dict(values), dict(self.first), dict(self.second)
        for name, slope in gradient.items():
            zero = torch.zeros_like(slope)
            first[name] = one * first.get(name, zero) + (1 - one) * slope
            second[name] = two * second.get(name, zero) + (1 - two) * slope.square()
            scale = (second[name] / (1 - two**step)).sqrt() + 1e-8
            moved[name] = values[name].detach() + rate * first[name] / (1 - one**step) / scale
        return moved, Moments(step, first, second)

    def scaled(self, prefix: str, factor: float) -> Moments:
        """Moments as if the gradients of the parameters below a prefix had been ``factor`` times what they were.

        A site keeps those of its own latents for its own term of the bound. Local steps on a bound that stands in for
        all sites follow N / N_k times that, and would leave moments under which later gradients move nothing.
        """
        first = {name: value * factor if name.startswith(prefix) else value for name, value in self.first.items()}
        second = {n: value * factor**2 if n.startswith(prefix) else value for n, value in self.second.items()}
        return Moments(self.step, first, second)


@dataclass(frozen=True, slots=True)
class Memory:
    """All a site keeps between rounds: q(Z_Lk | Z_G), moments, and the μ_G that q was fitted around."""

    round: int
    averaged: bool
    """Whether the site took its own steps on q(Z_G): then it owes its latents the shift to the average."""
    about: str
    """What the latents belong to; see :func:`subject`."""
    centre: Tensor
    local: Values
    moments: Moments

    @property
    def finite(self) -> bool:
        """Whether a later round can start from it."""
        values = (self.centre, *self.local.values(), *self.moments.first.values(), *self.moments.second.values())
        return all(bool(torch.isfinite(value).all()) for value in values)

    def to_arrays(self, prefix: str) -> NamedArrays:
        """As two arrays, all numbers in one row and what they are; neither may leave the site."""
        parts = {"local": self.local, "first": self.moments.first, "second": self.moments.second}
        tensors = {f"{part}.{name}": value for part, own in parts.items() for name, value in own.items()}
        tensors["centre"] = self.centre
        layout = {
            "round": self.round,
            "averaged": self.averaged,
            "about": self.about,
            "step": self.moments.step,
            "shapes": {name: list(value.shape) for name, value in tensors.items()},
        }
        row = torch.cat([value.detach().reshape(-1) for value in tensors.values()]).numpy()
        return {prefix + VALUES: row, prefix + LAYOUT: np.frombuffer(json.dumps(layout).encode(), dtype=np.uint8)}

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray], prefix: str) -> Memory | None:
        """The inverse of :meth:`to_arrays`; None where there is nothing under the prefix."""
        if prefix + LAYOUT not in arrays:
            return None
        layout = json.loads(arrays[prefix + LAYOUT].tobytes())
        shapes: dict[str, list[int]] = layout["shapes"]
        parts = torch.tensor(arrays[prefix + VALUES]).split([math.prod(shape) for shape in shapes.values()])
        tensors = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        local, first, second = (below(tensors, part) for part in ("local.", "first.", "second."))
        moments = Moments(int(layout["step"]), first, second)
        facts = int(layout["round"]), bool(layout["averaged"]), str(layout["about"])
        return Memory(*facts, tensors["centre"], local, moments)


def below(values: Mapping[str, Tensor], prefix: str) -> Values:
    """The values whose name begins with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def recalled(arrays: Mapping[str, np.ndarray], server_round: int) -> Memory | None:
    """What a round starts from: what the latest one left, or, asked for the latest again, what it started from."""
    now = Memory.from_arrays(arrays, NOW)
    if now is not None and now.round >= server_round:
        return Memory.from_arrays(arrays, BEFORE)
    return now


def kept(arrays: Mapping[str, np.ndarray], memory: Memory) -> NamedArrays:
    """This memory, and what a repetition of its round would start from."""
    now = Memory.from_arrays(arrays, NOW)
    source = BEFORE if now is not None and now.round >= memory.round else NOW
    before = {BEFORE + n.removeprefix(source): array for n, array in arrays.items() if n.startswith(source)}
    return {**before, **memory.to_arrays(NOW)}


def subject(site: SiteData, start: LocalFamily) -> str:
    """A digest of the units whose latents q is about, and of the inputs they refer to; a network reads any units."""
    if isinstance(start, AmortisedPosterior):
        return "any"
    parts = (site.keys, site.anchors)
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()


def fits(memory: Memory, site: SiteData, start: LocalFamily) -> bool:
    """Whether a memory is about latents like these of the same units: a site may come back with other rows."""
    found = {name: value.shape for name, value in memory.local.items()}
    return memory.about == subject(site, start) and found == {n: value.shape for n, value in named(start).items()}


def read_around(memory: Memory, start: LocalFamily, centre: Tensor, server_round: int) -> LocalFamily:
    """The q(Z_Lk | Z_G) of a memory around another μ_G, for a site whose own was averaged or that missed rounds.

    A site that sends gradients every round owes no shift: the step of μ̄_k was taken together with that of μ_G.

    Args:
        memory: What the site keeps.
        start: q of the same family and shapes.
        centre: μ_G [M] as it is now.
        server_round: The round it is read in.
    """
    q_local = with_named(start, memory.local)
    if memory.averaged or server_round > memory.round + 1:
        return q_local.shifted(memory.centre, centre)
    return q_local
