"""Stands for torch's module of that name, whose import registers the backend: here it always is."""
