"""The one model that the programs make."""

from torchvision.models.resnet import resnet50

__all__ = ["resnet50"]
