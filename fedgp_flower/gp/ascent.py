"""L-BFGS whose line search is a few candidates at once, for objectives that cost a trip a time, however many points.

The first Hessian is a multiple of the identity for each of two blocks of coordinates (hyperparameters, inducing
points), whose scales have nothing to do with each other. A generator would hide what a resumed run must know, so the
memory is a value: :class:`Memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from fedgp_flower.typing import Array, Indices, NamedArrays

PAIRS = 20
"""Steps and gradient changes that are kept."""
RECENT = 3
"""Pairs that the scale of a block is judged by."""
CHANGE = 5.0
"""Factor by which that scale moves at most, from one step to the next."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Pairs, oldest first, and the scale γ of the inverse Hessian in each block."""

    steps: Array  # [R, S]
    changes: Array  # [R, S] of the gradient of −J: sᵀy > 0 where J is concave
    scales: Array  # [2]; zero before the first step

    def after(self, step: Array, change: Array) -> Memory:
        """With one more pair, if J was concave along it."""
        if step @ change <= 0:
            return self
        steps, changes = (np.vstack([own, new])[-PAIRS:] for own, new in ((self.steps, step), (self.changes, change)))
        return replace(self, steps=steps, changes=changes)


def forgotten(size: int) -> Memory:
    """Without pairs and scales."""
    return Memory(np.empty((0, size)), np.empty((0, size)), np.zeros(2))


def outlook(gains: Array, rounds: int) -> float | None:
    """What so many more rounds would add if gains go on to shrink as they did; None before there are three.

    Gains gᵢ are taken for a geometric series of the same sum, r = Σ gᵢ₊₁/Σ gᵢ ≤ 1, which smooths single rounds.

    >>> outlook(np.array([8.0, 4.0, 2.0]), 2)  # 1 + ½
    1.5
    """
    if len(gains) < 3 or gains[:-1].sum() <= 0 or gains[1:].sum() <= 0:
        return None if len(gains) < 3 else 0.0
    ratio = min(1.0, float(gains[1:].sum() / gains[:-1].sum()))
    latest = gains.sum() / (ratio ** -np.arange(len(gains))).sum()
    return float(latest * (ratio ** np.arange(1, rounds + 1)).sum())


def direction(gradient: Array, memory: Memory, blocks: Indices, first: Array, cap: Array) -> tuple[Array, Memory]:
    """Where to go uphill, and the memory with the scales that were used.

    Args:
        gradient: Of J [S].
        memory: Of the steps before.
        blocks: Block of each coordinate, 0 or 1 [S].
        first: Largest entry of a first step in each coordinate's units [S].
        cap: Largest entry of any later one [S].
    """
    scales = _scales(gradient, memory, blocks, first)
    moved, alphas = gradient.copy(), []
    curvatures = [step @ change for step, change in zip(memory.steps, memory.changes, strict=True)]
    pairs = list(zip(memory.steps, memory.changes, curvatures, strict=True))
    for step, change, curved in reversed(pairs):
        alphas.append(step @ moved / curved)
        moved = moved - alphas[-1] * change
    moved = scales[blocks] * moved
    for (step, change, curved), alpha in zip(pairs, reversed(alphas), strict=True):
        moved = moved + (alpha - change @ moved / curved) * step
    limit = cap if pairs else first
    return moved / max(1.0, float((np.abs(moved) / limit).max())), replace(memory, scales=scales)


def _scales(gradient: Array, memory: Memory, blocks: Indices, first: Array) -> Array:
    found = memory.scales.copy()
    for block in (0, 1):
        here = blocks == block
        if not found[block]:
            steepest = float((np.abs(gradient[here]) / first[here]).max(initial=0.0))
            found[block] = 1 / steepest if steepest else 0.0
        steps, changes = memory.steps[-RECENT:, here], memory.changes[-RECENT:, here]
        curved, size = float((steps * changes).sum()), float(np.square(changes).sum())
        if curved > 0 and size:
            found[block] = np.clip(curved / size, found[block] / CHANGE, found[block] * CHANGE)
    return found


def pack(arrays: Mapping[str, ndarray]) -> Array:
    """Named arrays as one vector w, in the order of their names."""
    return np.concatenate([np.asarray(arrays[name], dtype=np.float64).ravel() for name in sorted(arrays)])


def unpack(point: Array, like: Mapping[str, ndarray]) -> NamedArrays:
    """The inverse of :func:`pack`, with the names and shapes of ``like``."""
    names = sorted(like)
    pieces = np.split(point, np.cumsum([like[name].size for name in names])[:-1])
    return {name: piece.reshape(like[name].shape) for name, piece in zip(names, pieces, strict=True)}
