"""Replaces torch's module of this name. Importing torch's registers the backend, which nbdist always has."""
