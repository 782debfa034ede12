"""Privacy: site keys, masks that cancel in a total, differential privacy, a site's policy and its audit log."""
