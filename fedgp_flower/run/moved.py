"""Names of earlier versions and what replaced them, so that an old configuration is refused with the new name."""

MOVED_METHODS: dict[str, str] = {}
"""Old value of ``method`` → what to write instead, as the end of a sentence."""

MOVED_KEYS: dict[str, str] = {
    "model.hyperparameters": "gone: predictions are at the best hyperparameters",
    "fsgp.objective": "three methods now: 'profiled' is `method` = 'sgpr' ('svgp' for classes, counts and outliers),"
    " 'average' is `method` = 'fsgp', 'exact' is gone",
    "fsgp.exact-optimizer": "gone with `fsgp.objective` = 'exact'; take `method` = 'sgpr'",
    "fsgp.tolerance": "a constant now; `sgpr.exchanges` limits training",
    "fsgp.intervals": "gone: lengthscales always get their intervals",
    "fsgp.exchanges": "`sgpr.exchanges` now, with `method` = 'sgpr' or 'svgp'",
    "fsgp.small-sites": "`sgpr.small-sites` now, with `method` = 'sgpr'",
    "fsgp.trials": "`sgpr.trials` now, with `method` = 'sgpr-private'",
    "fsgp.fraction": "`averaging.fraction` now",
    "fsgp.server-optimizer": "`averaging.server-optimizer` now",
    "fsgp.server-learning-rate": "`averaging.server-learning-rate` now",
    "fgpr.fraction": "`averaging.fraction` now",
    "fgpr.server-optimizer": "`averaging.server-optimizer` now",
    "fgpr.server-learning-rate": "`averaging.server-learning-rate` now",
}
"""Old key → what to write instead, as the end of a sentence."""
