"""Federated Gaussian-process learning on Flower."""

import warnings

# linear_operator says this at every import, in every process of a run; there is nothing a user could do about it.
warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
