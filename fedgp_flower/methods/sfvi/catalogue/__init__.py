"""Rows and keys of the models, a module for each family; :mod:`fedgp_flower.methods.sfvi.rows` reads them all."""
