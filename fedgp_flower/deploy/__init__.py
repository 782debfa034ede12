"""Processes and credentials of a federation on real machines."""
