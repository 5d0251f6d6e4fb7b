"""ResNet-50, as a Sequential that can be cut anywhere between its layers."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

EXPANSION = 4
"""A block gives so many times the channels that it works with."""


class Bottleneck(nn.Module):
    """Down to few channels, a 3×3 convolution there, up again; and the input past all that."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.past: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.past(x))


def stem() -> nn.Sequential:
    """From an image to 64 channels of a quarter of its size."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def layer(inputs: int, width: int, blocks: int, stride: int = 1) -> nn.Sequential:
    """Some blocks, of which the first changes size and channels."""
    outputs = width * EXPANSION
    first = Bottleneck(inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(outputs, width) for _ in range(blocks - 1)))


def head(classes: int) -> nn.Sequential:
    """From the last layer's channels to scores."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512 * EXPANSION, classes))


def initialize(model: nn.Module) -> nn.Module:
    """Draw the convolutions' weights as the paper of rectifiers has it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet50(classes: int = 1000) -> nn.Sequential:
    """All of it."""
    model = nn.Sequential(
        OrderedDict(
            stem=stem(),
            layer1=layer(64, 64, 3),
            layer2=layer(256, 128, 4, stride=2),
            layer3=layer(512, 256, 6, stride=2),
            layer4=layer(1024, 512, 3, stride=2),
            head=head(classes),
        )
    )
    initialize(model)
    return model
