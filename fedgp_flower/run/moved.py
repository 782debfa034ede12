"""Names of earlier versions and what replaced them, so that an old configuration is refused with the new name."""

MOVED_METHODS: dict[str, str] = {}
"""Old value of ``method`` → what to write instead, as the end of a sentence."""

MOVED_KEYS: dict[str, str] = {
    "sfvi.objective": "set `method` = 'hierarchical-gp' for the closed form; 'sfvi' always takes gradients",
    "sfvi.tolerance": "`method` = 'hierarchical-gp' stops by itself; leave it out",
    "sfvi.shared-inputs": "they always follow the sums that sites give of their inputs",
    "sfvi.site-inducing": "it is learned from where it starts; leave it out",
    "sfvi.site-noise": "it is learned from where it starts; leave it out",
    "sfvi.site-amplitude": "it is learned from where it starts; leave it out",
    "sfvi.site-lengthscale": "it is learned from where it starts; leave it out",
    "sfvi.site-slope": "it is learned from where it starts; leave it out",
    "sfvi.deviation": "it is learned from where it starts; leave it out",
    "sfvi.local-structure": "no measured case gained from it; leave it out",
    "sfvi.coupling": "no measured case gained from it; leave it out",
    "sfvi.learn-inputs": "no measured case gained from it; leave it out",
    "sfvi.scaling": "no measured case gained from it; leave it out",
    "sfvi.weights": "no measured case gained from it; leave it out",
    "sfvi.keep-moments": "no measured case gained from it; leave it out",
    "sfvi.own-steps": "no measured case gained from it; leave it out",
    "sfvi.centred": "no measured case gained from it; leave it out",
    "sfvi.amortised-units": "no measured case gained from it; leave it out",
    "sfvi.fraction": "no measured case gained from it; leave it out",
    "sfvi.initial-local-scale": "see `sfvi.initial-scale`, which holds for all latents",
    "sfvi.constant-share": "it is a constant; leave it out",
    "sfvi.final-rate": "it is a constant; leave it out",
    "sfvi.catch-up-steps": "it is a constant; leave it out",
    "sfvi.prediction-draws": "it is a constant; leave it out",
    "sfvi.prior-scale": "it is a constant; leave it out",
    "sfvi.concentration": "it is a constant; leave it out",
    "constant-columns": "real sites leave a constant column out of `features`; a simulation warns of it",
    "max-levels": "a column of text has at most 50 levels; leave it out of `features`, or merge its levels",
    "partition.bins": "columns of numbers are cut into 10 bins",
    "partition.classes-per-site": "every site sees 2 classes",
    "model.inducing-init": "inducing points always start from the sums that sites give of their inputs",
    "model.outputscale": "targets are standardised, so that the GP starts with variance 1",
    "model.jitter": "it is always 1e-8 of the prior variance",
}
"""Old key → what to write instead, as the end of a sentence."""
