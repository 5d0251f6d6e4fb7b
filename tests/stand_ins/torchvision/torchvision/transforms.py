"""Transforms that do nothing: the stand-in's pictures are normalised tensors already."""


class Compose:
    """Takes the transforms to run one after the other, and runs none."""

    def __init__(self, transforms):
        self.transforms = transforms


class ToTensor:
    """Takes no arguments, as torchvision's does."""


class Normalize:
    """Takes the arguments of torchvision's."""

    def __init__(self, mean, std, inplace=False):
        self.mean, self.std = mean, std
