"""A tower per camera and a joint MLP: shapes, names, scales, channels, norms, and what is refused."""

import subprocess
import sys

import pytest
import torch

from slipstream import ConfigurationError, ImageJointEncoder, StateMismatchError
from slipstream.rl.resnet import FrozenBatchNorm2d, ResNet18


@pytest.fixture(scope="module")
def encoder() -> ImageJointEncoder:
    torch.manual_seed(0)
    return ImageJointEncoder().eval()


def images(batch: int = 1, size: int = 224) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def torchvision_names() -> set[str]:
    """The entries of torchvision's resnet18, from its architecture."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{name}" for name in norm}
    for layer in range(1, 5):
        for block in range(2):
            above = f"layer{layer}.{block}"
            for number in (1, 2):
                names |= {f"{above}.conv{number}.weight"} | {f"{above}.bn{number}.{name}" for name in norm}
            if layer > 1 and block == 0:
                names |= {f"{above}.downsample.0.weight"} | {f"{above}.downsample.1.{name}" for name in norm}
    return names


def test_a_tower_has_torchvisions_names_and_as_many_parameters():
    tower = ResNet18(1000)
    assert set(tower.state_dict()) == torchvision_names()
    assert sum(parameter.numel() for parameter in tower.parameters()) == 11_689_512


def test_weights_of_torchvision_load_into_every_tower_but_for_the_classifier(encoder):
    torch.manual_seed(7)
    weights = ResNet18(1000).state_dict()
    heads = [tower.fc.weight.clone() for tower in encoder.towers().values()]
    encoder.load_tower_weights(weights)
    for tower, head in zip(encoder.towers().values(), heads, strict=True):
        assert torch.equal(tower.layer4[1].conv2.weight, weights["layer4.1.conv2.weight"])
        assert torch.equal(tower.bn1.running_var, weights["bn1.running_var"])
        assert torch.equal(tower.fc.weight, head)


def test_weights_of_another_network_are_refused_and_nothing_is_loaded(encoder):
    weights = ResNet18(10).state_dict()
    weights["conv1.weight"] = torch.zeros(64, 4, 7, 7)
    before = encoder.left.conv1.weight.clone()
    with pytest.raises(StateMismatchError, match=r"1 entries do not fit a ResNet-18, the first is 'conv1.weight'"):
        encoder.load_tower_weights(weights)
    assert torch.equal(encoder.left.conv1.weight, before)


def test_bytes_and_floats_give_the_same_features(encoder):
    image, joint = images(), torch.randn(1, 16)
    with torch.no_grad():
        whole = encoder(image, image, image, joint)
        parts = encoder(*[image.float() / 255] * 3, joint)
    assert whole.shape == (1, 256)
    torch.testing.assert_close(whole, parts)


def test_every_camera_and_the_joints_matter(encoder):
    inputs = [images(), images(), images(), torch.zeros(1, 16)]
    with torch.no_grad():
        before = encoder(*inputs)
        for number in range(4):
            changed = list(inputs)
            changed[number] = 255 - changed[number] if number < 3 else changed[number] + 1
            assert not torch.allclose(before, encoder(*changed))


def test_gradients_reach_every_parameter():
    encoder = ImageJointEncoder(joint_dim=5, image_feature_dim=8, fusion_dim=12)
    encoder(*[images(2)] * 3, torch.randn(2, 5)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("size", [64, 256])
def test_images_of_another_size_are_refused_and_never_resized(encoder, size):
    sentence = rf"camera right have shape \[1, 3, {size}, {size}\], expected \[batch, 3, 224, 224\]; resize them where"
    with pytest.raises(ConfigurationError, match=sentence):
        encoder(images(), images(size=size), images(), torch.zeros(1, 16))


def test_other_joints_and_dtypes_are_refused(encoder):
    with pytest.raises(ConfigurationError, match=r"joint positions have shape \[1, 14\], expected \[1, 16\]"):
        encoder(images(), images(), images(), torch.zeros(1, 14))
    with pytest.raises(ConfigurationError, match="camera left are torch.int64, expected uint8 or floats"):
        encoder(images().long(), images(), images(), torch.zeros(1, 16))
    with pytest.raises(ConfigurationError, match="fusion_dim is 0"):
        ImageJointEncoder(fusion_dim=0)


def test_constants_are_not_in_the_state_dict(encoder):
    assert {name.split(".")[0] for name in encoder.state_dict()} == {"left", "right", "global_", "joint", "fusion"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_floats_of_any_width_are_taken_for_those_of_the_encoder(encoder, dtype):
    image, joint = torch.zeros(2, 3, 224, 224), torch.zeros(2, 16)
    with torch.no_grad():
        wanted = encoder(image, image, image, joint)
        found = encoder(*[image.to(dtype)] * 3, joint.to(dtype))
    torch.testing.assert_close(found, wanted)


def test_cameras_with_different_numbers_of_images_are_refused(encoder):
    image = torch.zeros(2, 3, 224, 224, dtype=torch.uint8)
    with pytest.raises(ConfigurationError, match="there are 2, 1, 2 images of the cameras and 2 joint positions"):
        encoder(image, image[:1], image, torch.zeros(2, 16))


def test_the_encoder_needs_neither_tensordict_nor_torchrl():
    program = (
        "import sys\n"
        "sys.modules['tensordict'] = sys.modules['torchrl'] = None\n"
        "from slipstream import ImageJointEncoder\n"
        "from slipstream.rl import ValueNorm\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_default_has_three_towers_and_the_keys_it_always_had():
    encoder = ImageJointEncoder()
    assert (encoder.joint_dim, encoder.fusion_dim, encoder.left.fc.out_features) == (16, 256, 128)
    towers = {f"{tower}.{name}" for tower in ("left", "right", "global_") for name in torchvision_names()}
    linear = {f"joint.{number}.{name}" for number in (0, 2) for name in ("weight", "bias")}
    linear |= {f"fusion.{number}.{name}" for number in (0, 2) for name in ("weight", "bias")}
    assert set(encoder.state_dict()) == towers | linear
    assert next(iter(encoder.state_dict())) == "left.conv1.weight"
    assert encoder.state_dict()["fusion.0.weight"].shape == (256, 512)


def test_floats_up_to_255_without_a_declared_scale_are_refused(encoder):
    bright = images().float()
    with pytest.raises(
        ConfigurationError, match="camera right are floats from 0 to 255, expected 0 to 1; if white is 255"
    ):
        encoder(bright / 255, bright, bright, torch.zeros(1, 16))
    for wrong in (torch.full_like(bright, 1.6), torch.full_like(bright, float("nan")), bright / 255 - 0.7):
        with pytest.raises(ConfigurationError, match="camera left are floats from"):
            encoder(wrong, wrong, wrong, torch.zeros(1, 16))
    # Interpolation may overshoot a little.
    with torch.no_grad():
        encoder(*[bright / 255 * 1.4] * 3, torch.zeros(1, 16))


def small(**options) -> ImageJointEncoder:
    torch.manual_seed(0)
    return ImageJointEncoder(**{"joint_dim": 2, "image_feature_dim": 8, "fusion_dim": 12, "image_size": 32, **options})


@pytest.mark.parametrize("norm", ["batch", "frozen", "group"])
def test_a_declared_scale_gives_the_features_of_bytes(norm):
    image = images(2, 32)
    joint = torch.randn(2, 2)
    with torch.no_grad():
        expected = small(norm=norm).eval()(image, image, image, joint)
        for scale, values in ((255, image.float()), (1, image.float() / 255), (255.0, image), (1, image)):
            found = small(norm=norm, image_scale=scale).eval()(values, values, values, joint)
            torch.testing.assert_close(found, expected)
        # Per camera: the others are from 0 to 1.
        mixed = small(norm=norm, image_scale={"right": 255}).eval()(image / 255, image.float(), image, joint)
        torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("names", [["wrist"], ["left", "observation.images.top"], ["global", "left"], list("abcd")])
def test_cameras_may_be_named_and_any_number(names):
    encoder = small(cameras=names).eval()
    views = {name: images(2, 32) + number for number, name in enumerate(names)}
    joint = torch.randn(2, 2)
    with torch.no_grad():
        found = encoder(views, joint)
        assert found.shape == (2, 12)
        assert encoder(*views.values(), joint).equal(found)
        assert encoder(dict(reversed(views.items())), joint=joint).equal(found)
        assert encoder(joint=joint, **views).equal(found)
    assert list(encoder.towers()) == names
    twin = small(cameras=names)
    twin.load_state_dict(encoder.state_dict())


def test_named_inputs_of_the_default_cameras():
    encoder = small().eval()
    left, right, both, joint = images(1, 32), images(1, 32) + 1, images(1, 32) + 2, torch.zeros(1, 2)
    with torch.no_grad():
        expected = encoder(left, right, both, joint)
        assert encoder(left, right, global_=both, joint=joint).equal(expected)
        assert encoder({"left": left, "right": right, "global": both}, joint).equal(expected)


@pytest.mark.parametrize(
    ("inputs", "named", "sentence"),
    [
        (2, {}, "the inputs lack global, joint, and nothing is unknown"),
        (5, {}, "5 inputs were given, expected left, right, global, joint"),
        (4, {"top": 0}, "the inputs lack nothing, and top is unknown"),
    ],
)
def test_missing_and_unknown_inputs_are_refused(inputs, named, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        small()(*[images(1, 32)] * inputs, **named)


def test_other_channels_pass_through_an_adapter():
    cameras = {"color": "rgb", "overlay": "rgba", "infrared": "grey", "far": "depth"}
    encoder = small(cameras=cameras, image_scale={"far": 5000.0})
    assert {name for name in encoder.state_dict() if "adapter" in name} == {
        f"camera_{name}_adapter.{part}" for name in ("overlay", "infrared", "far") for part in ("weight", "bias")
    }
    color = images(2, 32)
    views = {
        "color": color,
        "overlay": torch.cat([color, color[:, :1]], 1),
        "infrared": color[:, :1],
        "far": torch.randint(0, 5000, (2, 1, 32, 32), dtype=torch.int32).to(torch.uint16),
    }
    encoder(views, torch.randn(2, 2)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    # An untrained adapter is the obvious one.
    state = encoder.towers()["color"].state_dict()
    for tower in encoder.towers().values():
        tower.load_state_dict(state)
    seen: list[torch.Tensor] = []
    for tower in encoder.towers().values():
        tower.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        encoder.eval()(views, torch.zeros(2, 2))
    mean, std = encoder.mean, encoder.std
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(seen[2], (color[:, :1] / 255 - mean) / std)
    torch.testing.assert_close(seen[3], (views["far"].float() / 5000 - mean) / std)


def test_depth_in_metres_needs_a_declared_scale():
    encoder = small(cameras={"far": "depth"})
    with pytest.raises(
        ConfigurationError, match=r"if these are distances, pass the largest one as image_scale=\{'far'"
    ):
        encoder(torch.full((1, 1, 32, 32), 3.0), torch.zeros(1, 2))
    with pytest.raises(ConfigurationError, match="integers of a depth camera need a declared image_scale"):
        encoder(torch.full((1, 1, 32, 32), 3, dtype=torch.int32), torch.zeros(1, 2))


def test_a_target_network_with_frozen_norms_has_the_same_state_and_never_changes_it():
    online, target = small(), small(norm="frozen")
    batch = [images(4, 32)] * 3
    joint = torch.randn(4, 2)
    online.train()(*batch, joint)  # the running statistics are no longer those of a new network
    target.load_state_dict(online.state_dict())
    assert list(target.state_dict()) == list(online.state_dict())
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with torch.no_grad():
        found = target.train()(*batch, joint)
        torch.testing.assert_close(found, online.eval()(*batch, joint))
        # A sample does not depend on the others of its batch.
        torch.testing.assert_close(target(*[image[:1] for image in batch], joint[:1]), found[:1])
    assert all(value.equal(before[name]) for name, value in target.state_dict().items())
    frozen = [module for module in target.modules() if isinstance(module, FrozenBatchNorm2d)]
    assert len(frozen) == 3 * 20
    assert not any(parameter.requires_grad for module in frozen for parameter in module.parameters())


def test_group_norm_has_no_running_statistics():
    encoder = small(norm="group").train()
    assert not any("running" in name for name in encoder.state_dict())
    batch, joint = [images(4, 32)] * 3, torch.randn(4, 2)
    with torch.no_grad():
        found = encoder(*batch, joint)
        torch.testing.assert_close(encoder(*[image[:1] for image in batch], joint[:1]), found[:1])
        torch.testing.assert_close(encoder.eval()(*batch, joint), found)
    with pytest.raises(StateMismatchError, match="do not fit a ResNet-18, the first is 'bn1.num_batches_tracked'"):
        encoder.load_tower_weights(ResNet18(1000).state_dict())


def test_images_may_have_another_shape():
    encoder = small(cameras=["front"], image_size=(32, 48)).eval()
    with torch.no_grad():
        assert encoder(torch.zeros(1, 3, 32, 48), torch.zeros(1, 2)).shape == (1, 12)
    with pytest.raises(ConfigurationError, match=r"shape \[1, 3, 48, 32\], expected \[batch, 3, 32, 48\]"):
        encoder(torch.zeros(1, 3, 48, 32), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cameras": []}, "expected one or more different names"),
        ({"cameras": ["a", "a"]}, "expected one or more different names"),
        ({"cameras": "left"}, r"cameras is 'left', expected a list of names"),
        ({"cameras": ["joint"]}, "a camera is named 'joint'"),
        ({"cameras": ["a.b", "a_b"]}, "differ only in dots and underscores"),
        ({"cameras": {"a": "thermal"}}, "the kind of the camera a is 'thermal', expected one of 'rgb', 'rgba', 'grey'"),
        ({"image_scale": 0}, "the image_scale of left is 0"),
        ({"image_scale": {"top": 1}}, "image_scale is given for 'top', but the cameras are left, right, global"),
        ({"norm": "layer"}, "norm is 'layer', expected one of 'batch', 'frozen', 'group'"),
        ({"image_size": 0.5}, "image_size is 0.5"),
        ({"image_size": (1, 2, 3)}, r"image_size is \(1, 2, 3\)"),
    ],
)
def test_invalid_settings_are_refused(options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        ImageJointEncoder(**options)
