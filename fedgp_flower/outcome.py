"""What a run hands over: rounds and checkpoints while it goes, and its figures and posterior at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgp_flower.typing import NamedArrays


@dataclass(frozen=True, slots=True)
class Posterior:
    """What predicts without any site: arrays, what each is, and the equation that uses them."""

    arrays: NamedArrays
    meanings: Mapping[str, str]
    coordinates: Mapping[str, str]
    equation: str
    model: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a finished run and what goes into its folder beside them."""

    metrics: dict[str, Any]
    posterior: Posterior | None
    predictions: Mapping[str, NamedArrays]
    schema: str
    preparation: NamedArrays
    input_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All a run needs to go on after a kill: arrays, and facts of JSON's types, the ``round`` among them."""

    arrays: NamedArrays
    facts: dict[str, Any]


class Observer:
    """Receives what a run reports while it goes; this one keeps nothing."""

    def on_round(self, row: Mapping[str, float], total: int) -> None:
        """A round is complete; ``row`` is its line of the history, ``total`` the most rounds there will be."""

    def on_checkpoint(self, snapshot: Snapshot) -> None:
        """Keep this; it replaces the checkpoint before."""
