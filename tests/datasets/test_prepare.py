"""Frames of a live camera, prepared as recorded ones are."""

import cv2
import numpy as np
import pytest
import torch

from slipstream import ConfigurationError, prepare_frame

NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def test_a_frame_becomes_rgb_channels_first_and_resized():
    wanted = cv2.resize(NOISE, (32, 24), interpolation=cv2.INTER_LINEAR).transpose(2, 0, 1)
    found = prepare_frame(NOISE, (24, 32))
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), wanted)
    assert prepare_frame(NOISE).shape == (3, 224, 224)
    assert prepare_frame(torch.from_numpy(NOISE), (24, 32)).equal(found)
    assert prepare_frame(NOISE[..., ::-1], (24, 32), color="bgr").equal(found)
    first = np.ascontiguousarray(NOISE.transpose(2, 0, 1))
    assert prepare_frame(first, (24, 32), channels_first=True).equal(found)
    assert prepare_frame(first[::-1], (24, 32), channels_first=True, color="bgr").equal(found)
    # As slices of a camera's buffer are.
    assert prepare_frame(np.concatenate([NOISE, NOISE], 1)[:, :60], (24, 32)).equal(found)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_a_frame_may_have_other_channels(channels):
    frame = np.random.default_rng(1).integers(0, 256, (40, 60, channels), np.uint8)
    found = prepare_frame(frame, 16)
    for number in range(channels):
        assert np.array_equal(found[number].numpy(), cv2.resize(frame[..., number], (16, 16)))
    if channels == 1:
        assert prepare_frame(frame[..., 0], 16).equal(found)


def test_without_resizing_the_pixels_stay_and_the_memory_is_new():
    found = prepare_frame(NOISE, None)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), NOISE)
    found.zero_()
    assert NOISE.any()


@pytest.mark.parametrize(
    ("frame", "options", "sentence"),
    [
        (NOISE / 255, {}, "the frame is float64, expected uint8 from 0 to 255"),
        (NOISE.tolist(), {}, "the frame is a list, expected an array or a tensor"),
        (NOISE[None], {}, r"the frame has shape \[1, 40, 60, 3\], expected \[height, width, channels\]"),
        (NOISE[:0], {}, r"the frame has shape \[0, 60, 3\]"),
        (NOISE.transpose(2, 0, 1), {}, "so 60 channels with channels_first=False, expected 1 to 4"),
        (NOISE, {"channels_first": True}, "so 40 channels with channels_first=True, expected 1 to 4"),
        (NOISE, {"color": "yuv"}, "color is 'yuv', expected one of 'rgb', 'bgr'"),
        (NOISE[..., 0], {"color": "bgr"}, "has no colours, expected color='rgb'"),
        (NOISE, {"interpolation": "best"}, "interpolation is 'best'"),
        (NOISE, {"image_size": 1.5}, "image_size is 1.5"),
        (NOISE, {"image_size": (24, -1)}, "the width in image_size is -1"),
    ],
)
def test_what_is_no_frame_is_refused(frame, options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        prepare_frame(frame, **options)
