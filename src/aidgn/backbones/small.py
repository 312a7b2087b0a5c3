"""A small network of our own, for small images and CPUs."""

from torch import Tensor, nn

SMALL = "small"  # its name among the backbones


class SmallConvNet(nn.Module):
    """Three convolutions and a linear layer for images of 28 to 64 pixels, with early strides to be quick on a CPU.

    Group norm normalises each image separately, so no domain leaks into another. The last layer has no normalisation,
    so that features may have any norm. It reads a 4 x 4 grid, because the place of a stroke matters in digits.
    """

    num_features = 128

    def __init__(self, in_channels: int):
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((in_channels, 16, 2), (16, 32, 2), (32, 64, 1)):
            conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            layers += [conv, nn.GroupNorm(8, outputs), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, self.num_features), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
