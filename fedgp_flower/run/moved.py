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
    "constant-columns": "real sites leave a constant column out of `features`; a simulation warns of it",
    "max-levels": "a column of text has at most 50 levels; leave it out of `features`, or merge its levels",
    "partition.bins": "columns of numbers are cut into 10 bins",
    "partition.classes-per-site": "every site sees 2 classes",
    "model.inducing-init": "inducing points always start from the sums that sites give of their inputs",
    "model.outputscale": "targets are standardised, so that the GP starts with variance 1",
    "model.jitter": "it is always 1e-8 of the prior variance",
}
"""Old key → what to write instead, as the end of a sentence."""
