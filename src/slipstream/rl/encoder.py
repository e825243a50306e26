"""`ImageJointEncoder`: features of camera images and joint positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from slipstream.checks import require_choice, require_count, require_positive
from slipstream.errors import ConfigurationError, StateMismatchError
from slipstream.rl.resnet import NORMS, Norm, ResNet18

IMAGE_SIZE = 224
CAMERAS = ("left", "right", "global")
CHANNELS = {"rgb": 3, "rgba": 4, "grey": 1, "depth": 1}
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Floats outside of this range are not images from 0 to 1; interpolation may overshoot a little.
_LOW, _HIGH = -0.5, 1.5


class ImageJointEncoder(nn.Module):
    """Encodes camera images and joint positions as one vector: a ResNet-18 per camera, an MLP, and a fusion of all.

    By default there are three RGB cameras, ``left``, ``right`` and ``global``, with images of 224x224. Images are never
    resized here, because that would be repeated in every pass.

    *Scale.* uint8 always means 0 to 255. Floats are from 0 to 1, unless `image_scale` says otherwise: pass
    ``image_scale=255`` for floats from 0 to 255, or ``image_scale=buffer.image_scale``. Without a declared scale, every
    pass checks floats and raises if they are not from 0 to 1; on a GPU that waits for the device, so declare the scale.
    Colours are normalized with ImageNet's mean and deviation, as torchvision's weights expect.

    *Channels.* Cameras are RGB by default. ``cameras={"wrist": "rgb", "top": "depth"}`` has other kinds: ``rgba``,
    ``grey`` and ``depth`` pass through a learned 1x1 convolution to three channels. It starts as the obvious one: alpha
    is ignored, and grey and depth are repeated.

    *Target networks.* ``norm="frozen"`` has the same entries in its state dict as the default, but normalizes with the
    running statistics in training mode too, and never updates them: load the state of the online network into it.
    ``norm="group"`` has no running statistics: for small batches, and for networks that average others.

    Args:
        joint_dim: Values of a joint position.
        image_feature_dim: Features of each image.
        fusion_dim: Features of everything together.
        cameras: Names of the cameras, one or more; or their kind by name.
        image_size: Height and width of all images, or both as ``(height, width)``.
        image_scale: Value of white: 1, 255, or another; or by camera. For a depth camera the distance that becomes 1,
            in the unit of its images. Declared values are trusted.
        norm: ``batch``, ``frozen`` or ``group``.

    Raises:
        ConfigurationError: If a setting is invalid.

    Example:
        >>> encoder = ImageJointEncoder().eval()
        >>> images = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
        >>> encoder(images, images, images, torch.zeros(1, 16)).shape
        torch.Size([1, 256])
        >>> encoder = ImageJointEncoder(joint_dim=7, cameras={"wrist": "rgb", "top": "depth"}, image_scale={"top": 5.0})
        >>> images = {"wrist": torch.zeros(2, 3, 224, 224), "top": torch.full((2, 1, 224, 224), 3.2)}
        >>> encoder(images, torch.zeros(2, 7)).shape
        torch.Size([2, 256])
    """

    # The networks of these cameras, if there are such cameras.
    left: ResNet18
    right: ResNet18
    global_: ResNet18

    def __init__(
        self,
        joint_dim: int = 16,
        image_feature_dim: int = 128,
        fusion_dim: int = 256,
        *,
        cameras: Sequence[str] | Mapping[str, str] = CAMERAS,
        image_size: int | tuple[int, int] = IMAGE_SIZE,
        image_scale: float | Mapping[str, float] | None = None,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        dims = {"joint_dim": joint_dim, "image_feature_dim": image_feature_dim, "fusion_dim": fusion_dim}
        for name, value in dims.items():
            require_count(name, value)
        require_choice("norm", norm, NORMS)
        self.joint_dim = joint_dim
        self.fusion_dim = fusion_dim
        self.cameras = _kinds_of(cameras)
        self.image_size = _size_of(image_size)
        self.image_scale = _scales_of(image_scale, self.cameras)
        self._towers = _attributes_of(self.cameras)
        for attribute in self._towers.values():
            self.add_module(attribute, ResNet18(image_feature_dim, norm))
        self.joint = nn.Sequential(
            nn.Linear(joint_dim, image_feature_dim),
            nn.ReLU(),
            nn.Linear(image_feature_dim, image_feature_dim),
            nn.ReLU(),
        )
        self.fusion = nn.Sequential(
            nn.Linear((len(self.cameras) + 1) * image_feature_dim, fusion_dim),
            nn.ReLU(),
            nn.Linear(fusion_dim, fusion_dim),
        )
        for camera, kind in self.cameras.items():
            if kind != "rgb":
                self.add_module(f"{self._towers[camera]}_adapter", _make_adapter(CHANNELS[kind]))
        # Not in the state dict: they are constants.
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.register_buffer("mean", torch.tensor(_MEAN).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).reshape(3, 1, 1), persistent=False)

    def forward(self, *inputs: torch.Tensor | Mapping[str, torch.Tensor], **named: torch.Tensor) -> torch.Tensor:
        """Return features ``[batch, fusion_dim]``.

        Args:
            inputs: The images of each camera in the order of `cameras`, and the joint positions; or the images as a
                dict by camera, and the joint positions. Images are ``[batch, channels, height, width]``, uint8 or
                floating; joint positions are ``[batch, joint_dim]``.
            named: The same by name: cameras, and ``joint``.

        Raises:
            ConfigurationError: If images or joint positions are missing, of another shape or dtype, or floats without
                a declared scale are not from 0 to 1.
        """
        views, joint = self._sorted(inputs, named)
        num_images = [len(images) for images in views.values()]
        if joint.ndim != 2 or joint.shape[1] != self.joint_dim:
            raise ConfigurationError(
                f"the joint positions have shape {list(joint.shape)}, expected [{num_images[0]}, {self.joint_dim}]"
            )
        if not joint.is_floating_point():
            raise ConfigurationError(f"the joint positions are {joint.dtype}, expected floats")
        if set(num_images) != {len(joint)}:
            counts = ", ".join(map(str, num_images))
            raise ConfigurationError(f"there are {counts} images of the cameras and {len(joint)} joint positions")
        features = [tower(self._prepare(camera, views[camera])) for camera, tower in self.towers().items()]
        features.append(self.joint(joint.to(self.mean.dtype)))
        return cast("torch.Tensor", self.fusion(torch.cat(features, -1)))

    def towers(self) -> dict[str, ResNet18]:
        """Return the networks of the cameras by the camera's name."""
        return {camera: cast("ResNet18", getattr(self, attribute)) for camera, attribute in self._towers.items()}

    def load_tower_weights(self, weights: Mapping[str, Any]) -> None:
        """Load a state dict of torchvision's ``resnet18`` into every tower; its classifier ``fc`` is left out.

        Raises:
            StateMismatchError: If anything but ``fc`` is missing, unexpected or of another shape; nothing is loaded.
        """
        tower = next(iter(self.towers().values()))
        wanted = {name: value for name, value in tower.state_dict().items() if not name.startswith("fc.")}
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

    def _sorted(self, inputs: Sequence[Any], named: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return images by camera, and joint positions."""
        names = [*self.cameras, "joint"]
        found: dict[str, Any] = {}
        rest = list(inputs)
        if rest and isinstance(rest[0], Mapping):
            found.update(rest.pop(0))
            names = ["joint"]
        if len(rest) > len(names):
            raise ConfigurationError(f"{len(inputs)} inputs were given, expected {', '.join([*self.cameras, 'joint'])}")
        found.update(zip(names, rest, strict=False))
        for name, value in named.items():
            # The camera `global` is a keyword of Python.
            found[name.removesuffix("_") if name == "global_" else name] = value
        wanted = {*self.cameras, "joint"}
        if found.keys() != wanted:
            missing = ", ".join(sorted(wanted - found.keys())) or "nothing"
            unknown = ", ".join(sorted(found.keys() - wanted)) or "nothing"
            raise ConfigurationError(f"the inputs lack {missing}, and {unknown} is unknown; expected {sorted(wanted)}")
        joint = found.pop("joint")
        return found, joint

    def _prepare(self, camera: str, images: torch.Tensor) -> torch.Tensor:
        """Check images, scale them, and turn them into three normalized channels."""
        kind = self.cameras[camera]
        expected = (CHANNELS[kind], *self.image_size)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise ConfigurationError(
                f"the images of the camera {camera} have shape {list(images.shape)}, expected "
                f"[batch, {', '.join(map(str, expected))}]; resize them where they are loaded, the encoder never does"
            )
        values = self._scaled(camera, images)
        if kind != "rgb":
            values = getattr(self, f"{self._towers[camera]}_adapter")(values)
        return (values - self.mean) / self.std

    def _scaled(self, camera: str, images: torch.Tensor) -> torch.Tensor:
        """Return images as floats from 0 to 1."""
        values = images.to(self.mean.dtype)
        scale = self.image_scale.get(camera)
        # Depth is often stored as integers, such as millimetres: a declared scale says what they mean.
        if self.cameras[camera] == "depth" and scale is not None and images.dtype != torch.bool:
            return values / scale
        if images.dtype == torch.uint8:
            return values / 255
        if not images.is_floating_point():
            raise ConfigurationError(
                f"the images of the camera {camera} are {images.dtype}, expected uint8 or floats; integers of a depth "
                "camera need a declared image_scale"
            )
        if scale is not None:
            return values / scale
        self._check_range(camera, images)
        return values

    def _check_range(self, camera: str, images: torch.Tensor) -> None:
        """Raise unless floats without a declared scale are from 0 to 1."""
        if not images.numel():
            return
        low, high = (float(value) for value in images.detach().aminmax())
        # NaN fails both comparisons.
        if not (low >= _LOW and high <= _HIGH):
            what = "white is 255, pass image_scale=255"
            if self.cameras[camera] == "depth":
                what = f"these are distances, pass the largest one as image_scale={{{camera!r}: ...}}"
            raise ConfigurationError(
                f"the images of the camera {camera} are floats from {low:g} to {high:g}, expected 0 to 1; if {what} to "
                "ImageJointEncoder"
            )


def _kinds_of(cameras: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each camera.

    Raises:
        ConfigurationError: If there is none, one twice, or one of an unknown kind.
    """
    if isinstance(cameras, str):
        raise ConfigurationError(f"cameras is {cameras!r}, expected a list of names, such as [{cameras!r}]")
    kinds = dict.fromkeys(cameras, "rgb")
    if isinstance(cameras, Mapping):
        kinds = dict(cameras)
    if not kinds or len(kinds) != len(cameras):
        raise ConfigurationError(f"cameras is {list(cameras)}, expected one or more different names")
    for name, kind in kinds.items():
        if not isinstance(name, str) or not name or name == "joint":
            raise ConfigurationError(f"a camera is named {name!r}, expected a name other than 'joint'")
        require_choice(f"the kind of the camera {name}", kind, tuple(CHANNELS))
    return kinds


def _size_of(image_size: Any) -> tuple[int, int]:
    """Return height and width."""
    if not isinstance(image_size, tuple | list):
        side = require_count("image_size", image_size)
        return side, side
    if len(image_size) != 2:
        raise ConfigurationError(f"image_size is {image_size!r}, expected a whole number or (height, width)")
    height, width = image_size
    return require_count("the height in image_size", height), require_count("the width in image_size", width)


def _scales_of(image_scale: float | Mapping[str, float] | None, cameras: Mapping[str, str]) -> dict[str, float]:
    """Return the declared scales by camera."""
    if image_scale is None:
        return {}
    if not isinstance(image_scale, Mapping):
        image_scale = dict.fromkeys(cameras, image_scale)
    for name, scale in image_scale.items():
        if name not in cameras:
            raise ConfigurationError(f"image_scale is given for {name!r}, but the cameras are {', '.join(cameras)}")
        require_positive(f"the image_scale of {name}", scale)
    return dict(image_scale)


def _attributes_of(cameras: Mapping[str, str]) -> dict[str, str]:
    """Return the name of each camera's network in the state dict.

    Raises:
        ConfigurationError: If two cameras would have the same one.
    """
    known = {"left": "left", "right": "right", "global": "global_"}
    # Names of modules must not contain dots. The prefix keeps them apart from attributes of the module.
    found = {name: known.get(name, f"camera_{name.replace('.', '_')}") for name in cameras}
    if len(set(found.values())) != len(found):
        raise ConfigurationError(f"the cameras {', '.join(cameras)} differ only in dots and underscores; rename one")
    return found


def _make_adapter(num_channels: int) -> nn.Conv2d:
    """Return a convolution from some channels to three: alpha is ignored, and one channel is repeated."""
    adapter = nn.Conv2d(num_channels, 3, 1)
    weight = torch.ones(3, 1)
    if num_channels >= 3:
        weight = torch.eye(3, num_channels)
    with torch.no_grad():
        adapter.weight.copy_(weight[..., None, None])
        nn.init.zeros_(adapter.bias)  # type: ignore[arg-type]
    return adapter


def _shape(value: Any) -> str:
    if value is None:
        return "nothing"
    return str(list(value.shape))
