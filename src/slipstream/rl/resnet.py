"""ResNet-18 with torchvision's parameter names, so that its weights load; torchvision itself is not needed."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import nn
from torch.nn import functional

Norm = Literal["batch", "frozen", "group"]
NORMS = ("batch", "frozen", "group")
_CHANNELS_PER_GROUP = 16


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that always normalizes with its running statistics, and never updates or trains anything.

    It has the entries of ``BatchNorm2d``, so the state of a trained network loads. Its output depends on each sample
    alone, in training mode too, which target networks and small batches need.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        for parameter in self.parameters():
            parameter.requires_grad = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return normalized values of the same shape."""
        return functional.batch_norm(
            values, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


def make_norm(norm: Norm, num_channels: int) -> nn.Module:
    """Return a layer that normalizes `num_channels` channels."""
    if norm == "group":
        return nn.GroupNorm(num_channels // _CHANNELS_PER_GROUP, num_channels)
    if norm == "frozen":
        return FrozenBatchNorm2d(num_channels)
    return nn.BatchNorm2d(num_channels)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = make_norm(norm, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = make_norm(norm, outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, make_norm(norm, outputs))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return features of the same or half the size."""
        around = values
        if self.downsample is not None:
            around = self.downsample(values)
        values = self.relu(self.bn1(self.conv1(values)))
        return cast("torch.Tensor", self.relu(self.bn2(self.conv2(values)) + around))


class ResNet18(nn.Module):
    """ResNet-18 with exactly torchvision's keys; `fc` gives `num_features` values.

    Args:
        num_features: What ``fc`` gives; torchvision's classifier has 1000.
        norm: ``batch``; ``frozen``, batch norm that is never updated; or ``group``, which has no running statistics.
    """

    def __init__(self, num_features: int, norm: Norm = "batch") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = make_norm(norm, 64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1, norm), BasicBlock(64, 64, 1, norm))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2, norm), BasicBlock(128, 128, 1, norm))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2, norm), BasicBlock(256, 256, 1, norm))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2, norm), BasicBlock(512, 512, 1, norm))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_features)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return features ``[batch, num_features]`` of normalized images ``[batch, 3, height, width]``."""
        values = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        values = self.layer4(self.layer3(self.layer2(self.layer1(values))))
        return cast("torch.Tensor", self.fc(self.avgpool(values).flatten(1)))
