"""Images as bytes and back."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slipstream import (
    CodecError,
    ConfigurationError,
    FormatVersionError,
    ReplayError,
    compress_image,
    compress_image_seq,
    decompress_image,
    decompress_image_seq,
)


def smooth(shape=(48, 40, 3)):
    height, width = shape[0], shape[1]
    plane = np.add.outer(np.arange(height), np.arange(width))
    return (plane[..., None] + np.arange(shape[2]) * 20).astype(np.uint8)


dtypes = st.sampled_from(["u1", "?", "i1", "<u2", ">u2", "<i4", "<f2", "<f4", "<f8"])


@settings(max_examples=60, deadline=None)
@given(
    dtypes.flatmap(lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=9)))
)
def test_every_image_comes_back_bit_for_bit(image):
    back = decompress_image(compress_image(image))
    assert back.shape == image.shape
    assert back.dtype == image.dtype.newbyteorder("<")
    assert back.tobytes() == image.astype(back.dtype).tobytes()


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((512, 512, 3), np.uint8),
        np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8),
        smooth(),
        smooth().transpose(2, 0, 1),
        smooth()[::2, ::3],
    ],
    ids=["black", "noise", "smooth", "channels first", "strided"],
)
def test_byte_images_of_every_kind_come_back(image):
    packed = compress_image(image)
    assert np.array_equal(decompress_image(packed), image)
    assert len(packed) < image.size + 64


def test_a_pil_image_is_an_image():
    from PIL import Image

    assert np.array_equal(decompress_image(compress_image(Image.fromarray(smooth()))), smooth())


def test_a_smooth_image_is_packed_many_times_smaller():
    assert len(compress_image(smooth((224, 224, 3)))) < 224 * 224 * 3 / 20


def test_jpeg_is_close_small_and_only_when_asked_for():
    generator = np.random.default_rng(0)
    noisy = np.clip(smooth((96, 96, 3)).astype(float) % 100 + 50 + generator.normal(0, 4, (96, 96, 3)), 0, 255).astype(
        np.uint8
    )
    packed = compress_image(noisy, jpeg=90)
    assert len(packed) < len(compress_image(noisy)) / 1.5
    assert np.abs(decompress_image(packed).astype(int) - noisy).mean() < 6
    for shape in ((96, 96), (96, 96, 1), (3, 96, 96)):
        image = noisy[..., 0].reshape(shape) if 3 not in shape else noisy.transpose(2, 0, 1)
        assert decompress_image(compress_image(image, jpeg=80)).shape == shape


def test_a_batch_comes_back_and_can_reuse_memory():
    batch = torch.randint(0, 255, (7, 3, 20, 30), dtype=torch.uint8)
    packed = compress_image_seq(batch)
    assert len(packed) == 7
    assert np.array_equal(decompress_image_seq(packed), batch.numpy())
    out = np.empty((7, 3, 20, 30), np.uint8)
    assert decompress_image_seq(packed, out=out) is out
    assert np.array_equal(out, batch.numpy())


def test_what_is_no_image_is_refused():
    with pytest.raises(ReplayError, match="expected a PIL image"):
        compress_image("photo.png")
    with pytest.raises(ReplayError, match="empty"):
        compress_image(np.zeros((0, 3), np.uint8))
    with pytest.raises(ReplayError, match="cannot be a JPEG"):
        compress_image(np.zeros((8, 8, 2), np.uint8), jpeg=80)
    with pytest.raises(ReplayError, match="expected bytes"):
        compress_image(np.zeros((8, 8), np.float32), jpeg=80)
    with pytest.raises(ConfigurationError, match="jpeg is 101"):
        compress_image(smooth(), jpeg=101)
    with pytest.raises(CodecError, match="image 1 is"):
        decompress_image_seq([compress_image(smooth()), compress_image(smooth((8, 8, 3)))])
    for threads in (0, 1.5):
        with pytest.raises(ConfigurationError, match=f"threads is {threads}"):
            compress_image_seq([smooth()], threads=threads)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=f"threads is {threads}"):
            decompress_image_seq([compress_image(smooth())], threads=threads)  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="out is"):
        decompress_image_seq([compress_image(smooth())], out=np.empty((1, 4), np.uint8))


@pytest.mark.parametrize("kind", ["lossless", "jpeg", "float"])
def test_a_packed_image_that_is_cut_off_or_changed_is_an_error_and_never_a_crash(kind):
    image = smooth((16, 16, 3)).astype(np.float32) if kind == "float" else smooth((16, 16, 3))
    packed = compress_image(image, jpeg=80 if kind == "jpeg" else None)
    for length in range(0, len(packed), 3):
        with pytest.raises(CodecError):
            decompress_image(packed[:length])
    generator = np.random.default_rng(0)
    for place in range(len(packed)):
        for change in (0xFF, 1 << int(generator.integers(8))):
            changed = bytearray(packed)
            changed[place] ^= change
            with pytest.raises(CodecError):
                decompress_image(changed)
            with pytest.raises(CodecError):
                decompress_image_seq([packed, bytes(changed)])
    with pytest.raises(CodecError, match="does not match its checksum"):
        decompress_image(packed + b"more")


def checked(content: bytes) -> bytes:
    """Return a packed image with a valid checksum, whatever it contains."""
    return content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")


def test_an_image_of_a_newer_version_says_so():
    content = bytearray(compress_image(smooth())[:-8])
    content[4] = 3
    with pytest.raises(FormatVersionError, match="has version 3, this release reads up to 2"):
        decompress_image(checked(bytes(content)))


def test_a_hostile_image_with_a_valid_checksum_is_an_error():
    content = compress_image(smooth((16, 16, 3)))[:-8]
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        try:
            assert decompress_image(checked(bytes(changed))).size
        except (CodecError, FormatVersionError):
            pass


@pytest.mark.parametrize("value", [np.uint8(200), np.float32(-1.5), np.int64(-(2**60)), True])
def test_a_single_number_keeps_having_no_axes(value):
    image = np.array(value)
    back = decompress_image(compress_image(image))
    assert (back.shape, back.dtype, back[()]) == ((), image.dtype, value)
    batch = decompress_image_seq(compress_image_seq([image, image]))
    assert batch.tolist() == [value, value]


def test_a_header_that_claims_a_huge_image_allocates_nothing():
    content = bytearray(compress_image(smooth((4, 4, 3)))[:-8])
    content[8:12] = (2**31 - 1).to_bytes(4, "little")
    with pytest.raises(CodecError, match="claims"):
        decompress_image(checked(bytes(content)))


def test_images_that_jpeg_or_numpy_cannot_hold_are_refused():
    with pytest.raises(ReplayError, match="65500"):
        compress_image(np.zeros((2, 70_000), np.uint8), jpeg=90)
    with pytest.raises(ReplayError, match="bfloat16"):
        compress_image(torch.zeros(3, 4, 4, dtype=torch.bfloat16))


def test_a_jpeg_that_claims_to_be_huge_is_damaged():
    content = bytearray(compress_image(np.zeros((8, 8), np.uint8), jpeg=90)[:-8])
    size = content.find(b"\xff\xc0") + 5
    content[size : size + 4] = (60_000).to_bytes(2, "big") * 2
    with pytest.raises(CodecError, match="a JPEG is damaged"):
        decompress_image(checked(bytes(content)))


def test_no_images_are_an_empty_batch():
    assert compress_image_seq(np.zeros((0, 3, 8, 8), np.uint8)) == []
    assert decompress_image_seq([]).shape == (0,)
    out = np.zeros((0, 3, 8, 8), np.float32)
    assert decompress_image_seq([], out=out) is out
    with pytest.raises(ReplayError, match="there are no images"):
        decompress_image_seq([], out=np.zeros((2, 3)))
