"""Options of mixed models, whose only configuration key is ``formula``."""

from __future__ import annotations

from typing import ClassVar

from fedgp_flower.config import CoreConfig
from fedgp_flower.errors import ConfigError
from fedgp_flower.options import MethodOptions


class MixedOptions(MethodOptions):
    """Checks of the core configuration; mixed models have no table of keys."""

    reads_formula: ClassVar[bool] = True
    fewer_parameters: ClassVar[str] = "fewer terms in `formula`"
    likelihoods: ClassVar[frozenset[str]] = frozenset({"gaussian", "bernoulli", "poisson", "negative-binomial"})

    def check(self, core: CoreConfig) -> None:
        """Raise ConfigError unless there is a formula and the other keys suit a mixed model."""
        wrong = {
            "`formula` is empty: write one such as 'y ~ x + (1 | group)'": not core.formula,
            f"`missing` = {core.missing!r}: allowed are 'error' and 'drop'": core.missing not in {"error", "drop"},
            "`transform.target` is set: write log(…) of the target into the table": core.transform.target != "none",
            f"`partitioner` = {core.partitioner!r} splits groups: use 'iid' or 'natural', which keep groups whole": (
                core.partitioner not in {"iid", "natural"}
            ),
            "`device`, `precision`: allowed are 'cpu' and 'float64'": (
                core.device == "cuda" or core.precision != "float64"
            ),
        }
        if reasons := [reason for reason, holds in wrong.items() if holds]:
            raise ConfigError(f"`method` = {core.method!r}: {'; '.join(reasons)}")
