"""The parts that all Strategies share."""
