"""One NumPyClient per method: a learner behind ``fit`` and ``evaluate``."""
