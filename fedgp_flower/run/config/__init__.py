"""The former place of :mod:`fedgp_flower.config`."""

from fedgp_flower.config import *  # noqa: F403
