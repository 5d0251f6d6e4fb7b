"""Random pictures in the place of MNIST, which would have to be downloaded."""

import torch

_PICTURES = {True: 480, False: 160}
"""How many pictures there are to train with, and how many to test with."""


class MNIST(torch.utils.data.Dataset):
    """Random noise, normalised, in MNIST's shape, with random labels; the same numbers in every process."""

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        generator = torch.Generator().manual_seed(int(train))
        count = _PICTURES[train]
        self.pictures = torch.randn(count, 1, 28, 28, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator).tolist()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]
