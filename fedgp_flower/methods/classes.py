"""What models of several classes count beside their scores: which class was taken for which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.messages import leaves, message
from fedgp_flower.shared_messages import Described
from fedgp_flower.typing import Array


@message("query.confusion", summand=True)
class Confusion:
    """Held-out rows by their class and by the one that was likeliest."""

    counts: Float[ndarray, "C C"] = leaves("held-out rows by class and likeliest class")

    @staticmethod
    def of(probabilities: Array, label: Array) -> Confusion:
        """From probabilities [N, C] and classes [N]."""
        size = probabilities.shape[1]
        cells = size * label.astype(int) + probabilities.argmax(axis=1)
        return Confusion(np.bincount(cells, minlength=size**2).reshape(size, size).astype(float))

    def num_parameters(self) -> int:
        """Cells."""
        return self.counts.size

    def coarse(self, least: int) -> Confusion:
        """The same without the rows of cells that have fewer."""
        return replace(self, counts=np.where(self.counts < least, 0.0, self.counts))

    def refusal(self, described: Described) -> str | None:
        """Why these are no counts, or None."""
        del described
        return "`counts` of rows cannot be negative" if (self.counts < 0).any() else None
