"""What a mixed model needs of the configuration; it has no keys besides ``formula``."""

from __future__ import annotations

from typing import ClassVar

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import MethodOptions


class MixedOptions(MethodOptions):
    """No table: the formula says it all."""

    reads_formula: ClassVar[bool] = True
    likelihoods: ClassVar[frozenset[str]] = frozenset({"gaussian", "bernoulli", "poisson", "negative-binomial"})

    def check(self, core: CoreConfig) -> None:
        """A formula, a likelihood that is known, and rows as they are."""
        wrong = {
            "`formula` is empty: write one such as 'y ~ x + (1 | group)'": not core.formula,
            f"`missing` = {core.missing!r}: allowed are 'error' and 'drop'": core.missing not in {"error", "drop"},
            "`transform.target` is set: write log(…) of the target into the table": core.transform.target != "none",
            f"`partitioner` = {core.partitioner!r} cuts groups apart: take 'iid', which deals whole groups, or"
            " 'natural'": core.partitioner not in {"iid", "natural"},
            "`device`, `precision`: it works on the 'cpu' in 'float64'": (
                core.device == "cuda" or core.precision != "float64"
            ),
        }
        if reasons := [reason for reason, holds in wrong.items() if holds]:
            raise ConfigError(f"`method` = {core.method!r}: {'; '.join(reasons)}")
