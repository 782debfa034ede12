"""Old place of :mod:`fedgp_flower.scores`, for imports that are not changed yet."""

from fedgp_flower.scores import *  # noqa: F403
