"""A shared trend and a deviation of each site or unit, in closed form."""
