"""Sections that a deep-kernel Gaussian process adds to a report: what personal heads are worth, and confusion."""

from __future__ import annotations

import numpy as np

from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.figures import confusion
from fedgp_flower.run.report import Panel, html_table


def panels(run: RunData) -> list[Panel]:
    """The evidence by ρ, and which class was taken for which."""
    details = run.metrics.method_details
    rows = [
        (f"{share:g}", f"{value:,.1f}") for share, value in zip(details["shares"], details["evidence"], strict=True)
    ]
    caption = (
        "Share ρ of the prior variance that heads of sites have for themselves, and the log evidence of all training"
        f" rows, in nats. The largest one is taken: {details['share']:g}. At 0 all sites have the same head."
    )
    sections = [Panel("Personal heads", html_table(("ρ", "log evidence"), rows), caption)]
    if counts := details.get("confusion"):
        words = "Held-out rows of every class (rows of the figure) by the likeliest class (columns)."
        sections.append(Panel("Confusion of classes", confusion(np.array(counts)), words))
    return sections
