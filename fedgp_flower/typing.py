"""Array types that carry the notation: N rows, M inducing points, D inputs, K sites, S samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[np.float64]

Indices: TypeAlias = NDArray[np.int64]

NamedArrays: TypeAlias = dict[str, NDArray[Any]]
"""Named arrays of a message or a file."""

Facts: TypeAlias = Mapping[str, Any]
"""Named JSON values: figures, labels, counts."""

Json: TypeAlias = dict[str, Any]
"""A mutable JSON object."""

Node: TypeAlias = Mapping[str, Any]
"""The configuration of a node: named strings, numbers and booleans."""

AnyShape: TypeAlias = Float[np.ndarray, "*_"]
"""A float64 array of any shape, in a message."""

Scalar: TypeAlias = Float[Tensor, ""]
Vector: TypeAlias = Float[Tensor, " M"]
Square: TypeAlias = Float[Tensor, "M M"]
Rows: TypeAlias = Float[Tensor, "N D"]
Targets: TypeAlias = Float[Tensor, "N ..."]  # possibly with a second target column
