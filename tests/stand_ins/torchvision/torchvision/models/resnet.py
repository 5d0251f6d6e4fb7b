"""A ResNet of the same outline as torchvision's resnet50, with less arithmetic: two cores train it in seconds."""

from torch import nn

_GROUPS = 4


class Bottleneck(nn.Module):
    """A residual block of one grouped 1x1 convolution, where torchvision's has three convolutions."""

    expansion = 4

    def __init__(
        self,
        inplanes,
        planes,
        stride=1,
        downsample=None,
        groups=1,
        base_width=64,
        dilation=1,
        norm_layer=nn.BatchNorm2d,
    ):
        super().__init__()
        out = planes * self.expansion
        self.conv = nn.Conv2d(inplanes, out, kernel_size=1, stride=stride, groups=_GROUPS, bias=False)
        self.norm = norm_layer(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        beside = x if self.downsample is None else self.downsample(x)
        return self.relu(self.norm(self.conv(x)) + beside)


def resnet50(*, num_classes=1000):
    """Return a ResNet of four blocks, where torchvision's resnet50 has sixteen."""
    layers = [nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    planes_in = 64
    for stride, planes in ((1, 64), (2, 128), (2, 256), (2, 512)):
        out = planes * Bottleneck.expansion
        fit = nn.Sequential(
            nn.Conv2d(planes_in, out, kernel_size=1, stride=stride, groups=_GROUPS, bias=False), nn.BatchNorm2d(out)
        )
        layers.append(Bottleneck(planes_in, planes, stride, fit))
        planes_in = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(planes_in, num_classes))
