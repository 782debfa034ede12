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
    "pvi.hyper": "gone: `pvi.inducing` = 'fixed' keeps Z and β",
    "pvi.small-sites": "gone: lower `model.num-inducing` to a third of the smallest site's rows, as the warning says",
    "pvi.alpha": "a constant now, 0.01",
    "pvi.samples": "a constant now, 4",
    "pvi.prediction-samples": "a constant now, 100",
    "pvi.points-fraction": "gone: a pseudo-observation starts as the average of five rows",
    "pvi.max-points": "a constant now, 500",
    "pvi.min-rows-per-pseudo-point": "a constant now, 5",
    "pvi.first-steps": "gone: a first visit takes twice `pvi.steps`",
    "pvi.step": "`pvi.learning-rate` now",
    "pvi.evaluations": "`pvi.steps` now",
    "pvi.refit-evaluations": "gone with replay; take `pvi.local-update` = 'sums'",
    "pvi.refit-steps": "gone with replay; take `pvi.local-update` = 'sums'",
    "glm.local-update": "gone: `pvi.preset` = 'global-vi' takes gradient steps of length `pvi.damping`",
    "glm.steps": "a constant now, 100",
    "bnn.steps": "`pvi.steps` now",
    "bnn.learning-rate": "`pvi.learning-rate` now",
    "bnn.batch-size": "a constant now, 128",
    "bnn.start-scale": "a constant now, 0.05",
    "bnn.early-stopping": "gone: a visit always stops where the fit rises no more",
    "bnn.prediction-draws": "a constant now, 30",
    **{
        f"{table}.{key}": f"`pvi.{key}` now"
        for table in ("glm", "bnn")
        for key in ("preset", "schedule", "order", "fraction", "concurrency", "damping", "deletion")
    },
    "constant-columns": "real sites leave a constant column out of `features`; a simulation warns of it",
    "max-levels": "a column of text has at most 50 levels; leave it out of `features`, or merge its levels",
    "partition.bins": "columns of numbers are cut into 10 bins",
    "partition.classes-per-site": "every site sees 2 classes",
    "model.inducing-init": "inducing points always start from the sums that sites give of their inputs",
    "model.outputscale": "targets are standardised, so that the GP starts with variance 1",
    "model.jitter": "it is always 1e-8 of the prior variance",
}
"""Old key → what to write instead, as the end of a sentence."""
