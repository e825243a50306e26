"""`ImageJointEncoder`: features of three camera images and joint positions.

The towers are ResNet-18 with torchvision's parameter names, so that its weights load into them; torchvision itself is
not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from slipstream.checks import require_count
from slipstream.errors import ConfigurationError, StateMismatchError

IMAGE_SIZE = 224
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return features of the same or half the size."""
        around = values if self.downsample is None else self.downsample(values)
        values = self.relu(self.bn1(self.conv1(values)))
        return cast("torch.Tensor", self.relu(self.bn2(self.conv2(values)) + around))


class ResNet18(nn.Module):
    """ResNet-18, to the key as torchvision has it; `fc` gives `num_features` values.

    Args:
        num_features: What ``fc`` gives; torchvision's classifier has 1000.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_features)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return features ``[batch, num_features]`` of normalised images ``[batch, 3, height, width]``."""
        values = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        values = self.layer4(self.layer3(self.layer2(self.layer1(values))))
        return cast("torch.Tensor", self.fc(self.avgpool(values).flatten(1)))


class ImageJointEncoder(nn.Module):
    """Turns three camera images and joint positions into one vector: a ResNet-18 each, an MLP, and a fusion of all.

    Images must be 224x224: they are never resized here, where it would be done again for every pass. They may be uint8,
    0 to 255, as `MultimodalReplayBuffer` gives them, or floats from 0 to 1; both are normalised with ImageNet's mean
    and deviation, as torchvision's weights expect. It knows nothing of files.

    Args:
        joint_dim: Values of a joint position.
        image_feature_dim: Features of each image.
        fusion_dim: Features of everything together.

    Example:
        >>> encoder = ImageJointEncoder().eval()
        >>> images = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
        >>> encoder(images, images, images, torch.zeros(1, 16)).shape
        torch.Size([1, 256])
    """

    def __init__(self, joint_dim: int = 16, image_feature_dim: int = 128, fusion_dim: int = 256) -> None:
        super().__init__()
        dims = {"joint_dim": joint_dim, "image_feature_dim": image_feature_dim, "fusion_dim": fusion_dim}
        for name, value in dims.items():
            require_count(name, value)
        self.joint_dim, self.fusion_dim = joint_dim, fusion_dim
        self.left = ResNet18(image_feature_dim)
        self.right = ResNet18(image_feature_dim)
        self.global_ = ResNet18(image_feature_dim)
        self.joint = nn.Sequential(
            nn.Linear(joint_dim, image_feature_dim),
            nn.ReLU(),
            nn.Linear(image_feature_dim, image_feature_dim),
            nn.ReLU(),
        )
        self.fusion = nn.Sequential(
            nn.Linear(4 * image_feature_dim, fusion_dim), nn.ReLU(), nn.Linear(fusion_dim, fusion_dim)
        )
        # Not in the state dict: they are constants.
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.register_buffer("mean", torch.tensor(_MEAN).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).reshape(3, 1, 1), persistent=False)

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, global_: torch.Tensor, joint: torch.Tensor
    ) -> torch.Tensor:
        """Return features ``[batch, fusion_dim]``.

        Args:
            left: Images ``[batch, 3, 224, 224]``, uint8 or floating.
            right: The same.
            global_: The same.
            joint: Joint positions ``[batch, joint_dim]``.

        Raises:
            ConfigurationError: If images or joint positions are of another shape or dtype.
        """
        views = {"left": left, "right": right, "global": global_}
        if joint.ndim != 2 or joint.shape[1] != self.joint_dim:
            raise ConfigurationError(
                f"the joint positions have shape {list(joint.shape)}, expected [{len(left)}, {self.joint_dim}]"
            )
        if not joint.is_floating_point():
            raise ConfigurationError(f"the joint positions are {joint.dtype}, expected floats")
        if any(len(images) != len(joint) for images in views.values()):
            counts = ", ".join(str(len(images)) for images in views.values())
            raise ConfigurationError(f"there are {counts} images of the cameras and {len(joint)} joint positions")
        features = [tower(self._prepare(name, views[name])) for name, tower in self.towers().items()]
        return cast("torch.Tensor", self.fusion(torch.cat([*features, self.joint(joint.to(self.mean.dtype))], -1)))

    def towers(self) -> dict[str, ResNet18]:
        """Return the networks of the cameras by the camera's name."""
        return {"left": self.left, "right": self.right, "global": self.global_}

    def load_tower_weights(self, weights: Mapping[str, Any]) -> None:
        """Load a state dict of torchvision's ``resnet18`` into every tower; its classifier ``fc`` is left out.

        Raises:
            StateMismatchError: If anything but ``fc`` is missing, unexpected or of another shape; nothing is loaded.
        """
        wanted = {name: value for name, value in self.left.state_dict().items() if not name.startswith("fc.")}
        given = {name: value for name, value in weights.items() if not name.startswith("fc.")}
        differ = [n for n in sorted(wanted.keys() | given.keys()) if _shape(wanted.get(n)) != _shape(given.get(n))]
        if differ:
            first = differ[0]
            raise StateMismatchError(
                f"{len(differ)} entries do not fit a ResNet-18, the first is {first!r}: expected "
                f"{_shape(wanted.get(first))}, given {_shape(given.get(first))}"
            )
        for tower in self.towers().values():
            tower.load_state_dict(given, strict=False)

    def _prepare(self, name: str, images: torch.Tensor) -> torch.Tensor:
        """Check images, and normalise them."""
        if images.ndim != 4 or images.shape[1:] != (3, IMAGE_SIZE, IMAGE_SIZE):
            raise ConfigurationError(
                f"the images of the camera {name} have shape {list(images.shape)}, expected "
                f"[batch, 3, {IMAGE_SIZE}, {IMAGE_SIZE}]; resize them where they are loaded, the encoder never does"
            )
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ConfigurationError(f"the images of the camera {name} are {images.dtype}, expected uint8 or floats")
        values = images.to(self.mean.dtype)
        return ((values / 255 if images.dtype == torch.uint8 else values) - self.mean) / self.std


def _shape(value: Any) -> str:
    return "nothing" if value is None else str(list(value.shape))
