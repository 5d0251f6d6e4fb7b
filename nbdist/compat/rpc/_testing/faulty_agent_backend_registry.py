"""Replaces torch's module of this name. Importing torch's module registers the backend, which nbdist always has."""
