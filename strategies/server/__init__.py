"""What every Strategy stands on."""
