"""What a unit of FedMGP remembers between rounds, and which of it the server knows of.

In an exact round a unit proposes new parameters, and the server's next message says which trial move it took. If a
reply is lost the server still counts the one before: the unit then goes back to the parameters behind that one. Each
memory carries the number of the update that made it and the number the server had named by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedgp_flower.latent import moves_from_wire
from fedgp_flower.models.exact_q import UnitData, UnitParameters, UnitState, moved
from fedgp_flower.shapes import NamedArrays


@dataclass(frozen=True, slots=True)
class Memory:
    """A unit's state of one start."""

    unit: UnitState
    number: int
    """Of the update that made it."""
    based_on: int
    """Number of the last report that the server had then."""

    def agreed(self, data: UnitData, own: NamedArrays) -> UnitParameters | None:
        """The parameters behind the server's last report of this unit; None where the unit must start afresh."""
        known = int(own["own.updates"])
        if known == self.number:
            return moved(data, self.unit, moves_from_wire(own, "own.move")[0])[1]
        return self.unit.before if known == self.based_on and known > 0 else None

    def to_arrays(self, start: int) -> NamedArrays:
        """Arrays for :class:`fedgp_flower.clients.state.SiteState`."""
        arrays: NamedArrays = {"numbers": np.array([self.number, self.based_on]), "scales": self.unit.scales}
        for name, phi in (("before", self.unit.before), ("proposed", self.unit.proposed)):
            arrays |= {
                f"{name}.smoothing": phi.smoothing,
                f"{name}.amplitudes": phi.amplitudes,
                f"{name}.noise": np.array([phi.noise]),
            }
            if phi.likelihood:
                arrays[f"{name}.likelihood"] = np.array(phi.likelihood)
        return {f"start-{start}.{name}": array for name, array in arrays.items()}

    @staticmethod
    def of(arrays: NamedArrays, start: int) -> Memory | None:
        """The inverse of :meth:`to_arrays`; None where nothing is remembered of this start."""
        prefix = f"start-{start}."
        if f"{prefix}numbers" not in arrays:
            return None

        def parameters(name: str) -> UnitParameters:
            smoothing, amplitudes, noise = (
                np.array(arrays[f"{prefix}{name}.{part}"]) for part in ("smoothing", "amplitudes", "noise")
            )
            own = arrays.get(f"{prefix}{name}.likelihood", np.empty(0))
            return UnitParameters(smoothing, amplitudes, float(noise[0]), tuple(own.tolist()))

        number, based_on = (int(value) for value in arrays[f"{prefix}numbers"])
        unit = UnitState(parameters("before"), parameters("proposed"), np.array(arrays[f"{prefix}scales"]))
        return Memory(unit, number, based_on)
