"""LZ4 frames: standard, several, and bounded."""

import io
import shutil
import subprocess

import lz4.frame
import numpy as np
import pytest

from slipstream.codecs.bytes import FRAME_BYTES, compress_frames, decompress_frames, find_frames
from slipstream.errors import CodecError

TEXT = b"slipstream " * 900_000  # 9.9 MB: three frames


def test_the_frames_are_read_by_the_standard_library_for_lz4():
    frames = list(compress_frames(TEXT))
    assert len(frames) == 3
    with lz4.frame.open(io.BytesIO(b"".join(frames))) as stream:
        assert stream.read() == TEXT


@pytest.mark.skipif(shutil.which("lz4") is None, reason="the lz4 command is not installed")
def test_the_frames_are_read_by_the_lz4_command():
    packed = b"".join(compress_frames(TEXT, level=9))
    assert subprocess.run(["lz4", "-dc"], input=packed, capture_output=True, check=True).stdout == TEXT


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_content(threads):
    packed = b"".join(compress_frames(TEXT, threads=threads))
    assert b"".join(decompress_frames(packed, len(TEXT), threads)) == TEXT


def test_frames_of_other_programs_are_read_without_a_recorded_size():
    foreign = lz4.frame.compress(TEXT[:100_000], store_size=False, block_linked=True, block_checksum=True)
    ours = b"".join(compress_frames(TEXT[:50]))
    assert b"".join(decompress_frames(foreign + ours + foreign, 10**6)) == TEXT[:100_000] + TEXT[:50] + TEXT[:100_000]


def test_skippable_frames_are_skipped():
    skippable = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    packed = skippable + b"".join(compress_frames(b"content")) + skippable
    assert b"".join(decompress_frames(packed, 100)) == b"content"
    with pytest.raises(CodecError, match="skippable"):
        list(decompress_frames(packed[:-1], 100))


def test_frame_boundaries_are_found_without_decompressing():
    frames = list(compress_frames(TEXT))
    found = list(find_frames(memoryview(b"".join(frames))))
    assert [frame.stop - frame.start for frame in found] == [len(frame) for frame in frames]
    assert [frame.content_bytes for frame in found] == [FRAME_BYTES, FRAME_BYTES, len(TEXT) - 2 * FRAME_BYTES]


def test_a_frame_that_claims_more_than_lz4_can_hold_is_refused_unread():
    bomb = bytearray(b"".join(compress_frames(b"x" * 100)))
    bomb[6:14] = (2**60).to_bytes(8, "little")
    with pytest.raises(CodecError, match="claims 1152921504606846976 bytes"):
        list(decompress_frames(bytes(bomb), 2**62))


@pytest.mark.parametrize("store_size", [True, False])
def test_content_beyond_the_limit_is_refused(store_size):
    frame = lz4.frame.compress(bytes(10**6), store_size=store_size)
    with pytest.raises(CodecError):
        list(decompress_frames(frame, 10**6 - 1))
    assert b"".join(decompress_frames(frame, 10**6)) == bytes(10**6)


def test_a_flipped_bit_is_noticed_wherever_it_would_change_the_content():
    content = np.random.default_rng(0).bytes(300) + bytes(300)
    packed = b"".join(compress_frames(content))
    unharmed = 0
    for position in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[position // 8] ^= 1 << position % 8
        try:
            assert b"".join(decompress_frames(bytes(damaged), 10**6)) == content
        except CodecError:
            continue
        unharmed += 1
    assert unharmed < 10  # such as another distance to copy zeros from


def test_empty_frames_among_others_are_refused_as_a_waste_of_time():
    empty = b"".join(compress_frames(b""))
    assert b"".join(decompress_frames(empty, 0)) == b""
    tiny = b"\x04\x22\x4d\x18\x40\x40\xc0\x00\x00\x00\x00"
    with pytest.raises(CodecError, match="empty lz4 frame"):
        list(decompress_frames(tiny * 1000, 100))
