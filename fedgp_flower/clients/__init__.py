"""One NumPyClient per method: a learner behind ``fit`` and ``evaluate``."""

# Whole and before anything else: Flower's simulation loads ClientApp and ServerApp in two threads of one process, and a
# thread that begins with a module inside GPyTorch can catch the other one's copy half made.
import gpytorch as gpytorch
