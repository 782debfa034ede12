"""Data sets, their partition over sites, and federated standardisation."""
