"""FCN-8s (Long et al., Fully Convolutional Networks for Semantic Segmentation, 2015) on VGG-16's convolutions."""

from __future__ import annotations

from torch import Tensor, nn


def stage(inputs: int, outputs: int, count: int) -> nn.Sequential:
    """3x3 convolutions with ReLUs, then a maximum over 2x2."""
    layers: list[nn.Module] = []
    for number in range(count):
        layers += [nn.Conv2d(inputs if number == 0 else outputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(2, 2))


class FCN8s(nn.Module):
    """Scores of an eighth, a sixteenth and a thirty-second of the resolution, added up while upsampling."""

    def __init__(self, classes: int = 21, hidden: int = 1024, base: int = 64) -> None:
        super().__init__()
        self.eighth = nn.Sequential(stage(3, base, 2), stage(base, 2 * base, 2), stage(2 * base, 4 * base, 3))
        self.sixteenth, self.thirty_second = stage(4 * base, 8 * base, 3), stage(8 * base, 8 * base, 3)
        self.hidden = nn.Sequential(
            nn.Conv2d(8 * base, hidden, 7, padding=3),
            nn.ReLU(inplace=True),
            nn.Conv2d(hidden, hidden, 1),
            nn.ReLU(inplace=True),
        )
        self.score32, self.score16, self.score8 = (nn.Conv2d(c, classes, 1) for c in (hidden, 8 * base, 4 * base))
        self.up32, self.up16 = (nn.ConvTranspose2d(classes, classes, 4, 2, 1, bias=False) for _ in range(2))
        self.up8 = nn.ConvTranspose2d(classes, classes, 16, 8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        eighth = self.eighth(x)
        sixteenth = self.sixteenth(eighth)
        y = self.score32(self.hidden(self.thirty_second(sixteenth)))
        y = self.up32(y) + self.score16(sixteenth)
        return self.up8(self.up16(y) + self.score8(eighth))
