"""SFVI and SFVI-Avg: structured federated variational inference."""
