"""The former place of :mod:`fedgp_flower.files`."""

from fedgp_flower.files import *  # noqa: F403
