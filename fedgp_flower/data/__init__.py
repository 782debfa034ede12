"""Data sets, how they are dealt to sites, and federated standardisation."""
