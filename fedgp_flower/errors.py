"""The errors of this project; all descend from :class:`FedGPError`.

A message says what is wrong, what was expected, what was found, and what to try. An error may be sent from a site to
the server, so it names files, columns and rows but **never contains data values**.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence


def similar(name: str, known: Collection[str]) -> str:
    """Return a question about a misspelt name, with up to three similar known ones; empty without any."""
    folded = {other.casefold(): other for other in known}
    close = [f"`{folded[own]}`" for own in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def first_of(names: Sequence[str], most: int = 5) -> str:
    """Return the first names of a list, and the number of the others."""
    return ", ".join(names[:most]) + f" and {len(names) - most:,} more" * (len(names) > most)


def many(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


class FedGPError(Exception):
    """Base of all errors of this project."""


class ConfigError(FedGPError):
    """A configuration key is unknown, has a wrong type or value, or conflicts with another."""


class DataError(FedGPError):
    """A table cannot be used: names the site, the file, the column and the row."""


class NumericsError(FedGPError):
    """A matrix that must be positive definite is not, or an array is not finite."""


class ProtocolError(FedGPError):
    """A message has the wrong names, shapes, types, version or run."""


class PolicyError(FedGPError):
    """A rule of a site's policy refuses a message; the error names rule, value and file."""


class RunError(FedGPError):
    """A run cannot start, continue or be read."""


class DamagedError(RunError):
    """A file of a run was changed or is invalid."""
