"""Three towers and a joint MLP: shapes, torchvision's names, and what is refused."""

import subprocess
import sys

import pytest
import torch

from slipstream import ConfigurationError, ImageJointEncoder, StateMismatchError
from slipstream.rl.encoder import ResNet18


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
