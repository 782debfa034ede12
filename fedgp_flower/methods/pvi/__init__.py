"""PVI: partitioned variational inference."""
