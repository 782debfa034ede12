"""The kinds of error this project raises; all descend from :class:`FedGPError`.

A message says what is wrong, what was expected, what was found, and what to try. Text of an error may travel from a
site to the server, so it names files, columns and rows but **never contains data values**.
"""


class FedGPError(Exception):
    """Anything this project raises on purpose."""


class ConfigError(FedGPError):
    """A configuration key is unknown, ill-typed, out of range, or at odds with another."""


class DataError(FedGPError):
    """A table cannot be used: names the site, the file, the column and the row."""


class NumericsError(FedGPError):
    """A matrix that must be positive definite is not, or an array is not finite."""


class ProtocolError(FedGPError):
    """A message has the wrong names, shapes, types, version or run."""


class PolicyError(FedGPError):
    """A site refuses by a rule of its policy; names rule, value and file."""


class RunError(FedGPError):
    """A run cannot start, go on, or be read."""


class DamagedError(RunError):
    """A file of a run is not what the run wrote."""
