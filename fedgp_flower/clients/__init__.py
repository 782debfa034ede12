"""The ClientApp of a site: app, guard, state, and the NumPyClient that the methods extend."""

# Import all of GPyTorch first. Flower's simulation loads ClientApp and ServerApp in two threads of one process; a
# thread that starts with a submodule of GPyTorch may see the partial import of the other thread.
import gpytorch as gpytorch
