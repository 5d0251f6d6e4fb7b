"""Stands in for torchvision: its names that pytorch/examples' RPC programs use, with less behind them."""

from torchvision import datasets, models, transforms

__all__ = ["datasets", "models", "transforms"]
