"""A folder for each method: what both halves share, and the half of the site."""
