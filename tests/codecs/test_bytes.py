"""LZ4 frames: standard, several, and bounded in memory."""

import io
import shutil
import subprocess
import sys

import lz4.frame
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs import bytes as lz4_frames
from slipstream.codecs.bytes import (
    FRAME_BYTES,
    compress_frames,
    content_bytes,
    content_limit,
    decompress_frames,
    find_frames,
    ratio_padding,
)
from slipstream.errors import CodecError

TEXT = b"slipstream " * 900_000  # 9.9 MB: three frames


def decompress(data: bytes, max_bytes: int, threads: int | None = None) -> bytes:
    frames = find_frames(data, max_bytes)
    out = bytearray(content_bytes(frames))
    decompress_frames(data, frames, out, threads)
    return bytes(out)


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
    assert decompress(packed, len(TEXT), threads) == TEXT


def test_frames_of_other_programs_are_read_without_a_recorded_size():
    foreign = lz4.frame.compress(TEXT[:100_000], store_size=False, block_linked=True, block_checksum=True)
    ours = b"".join(compress_frames(TEXT[:50]))
    assert decompress(foreign + ours + foreign, 10**6) == TEXT[:100_000] + TEXT[:50] + TEXT[:100_000]


def test_skippable_frames_are_skipped():
    skippable = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    packed = skippable + b"".join(compress_frames(b"content")) + skippable
    assert decompress(packed, 100) == b"content"
    with pytest.raises(CodecError, match="skippable"):
        find_frames(packed[:-1], 100)


def test_frame_boundaries_are_found_without_decompressing():
    frames = list(compress_frames(TEXT))
    found = find_frames(b"".join(frames), len(TEXT))
    assert [frame.stop - frame.start for frame in found] == [len(frame) for frame in frames]
    assert [frame.content_bytes for frame in found] == [FRAME_BYTES, FRAME_BYTES, len(TEXT) - 2 * FRAME_BYTES]


def test_a_frame_that_claims_more_than_lz4_can_hold_is_refused_unread():
    bomb = bytearray(b"".join(compress_frames(b"x" * 100)))
    bomb[6:14] = (2**60).to_bytes(8, "little")
    with pytest.raises(CodecError, match="claims 1152921504606846976 bytes"):
        find_frames(bytes(bomb), 2**62)


@pytest.mark.parametrize("store_size", [True, False])
def test_content_beyond_the_limit_is_refused(store_size):
    frame = lz4.frame.compress(bytes(10**6), store_size=store_size)
    with pytest.raises(CodecError, match="lz4 content exceeds the limit"):
        find_frames(frame, 10**6 - 1)
    with pytest.raises(CodecError, match="lz4 content exceeds the limit"):
        find_frames(frame + frame, 2 * 10**6 - 1)
    assert decompress(frame, 10**6) == bytes(10**6)


def test_a_flipped_bit_is_noticed_wherever_it_would_change_the_content():
    content = np.random.default_rng(0).bytes(300) + bytes(300)
    packed = b"".join(compress_frames(content))
    unharmed = 0
    for position in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[position // 8] ^= 1 << position % 8
        try:
            assert decompress(bytes(damaged), 10**6) == content
        except CodecError:
            continue
        unharmed += 1
    assert unharmed < 10  # such as another distance to copy zeros from


def test_empty_frames_among_others_are_refused_as_a_waste_of_time():
    empty = b"".join(compress_frames(b""))
    assert decompress(empty, 0) == b""
    tiny = b"\x04\x22\x4d\x18\x40\x40\xc0\x00\x00\x00\x00"
    with pytest.raises(CodecError, match="is empty, which is allowed only if"):
        find_frames(tiny * 1000, 100)


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5),
    store_size=st.booleans(),
    linked=st.booleans(),
    block_checksum=st.booleans(),
    data=st.data(),
)
def test_frames_of_any_settings_are_restored_and_cut_ones_refused(contents, store_size, linked, block_checksum, data):
    frames = [
        lz4.frame.compress(content, store_size=store_size, block_linked=linked, block_checksum=block_checksum)
        for content in contents
    ]
    packed = b"".join(frames)
    whole = b"".join(contents)
    assert decompress(packed, len(whole)) == whole
    ends = [sum(map(len, frames[: number + 1])) for number in range(len(frames))]
    cut = data.draw(st.integers(1, len(packed) - 1).filter(lambda length: length not in ends))
    with pytest.raises(CodecError):
        decompress(packed[:cut], len(whole))


def test_a_frame_larger_than_a_piece_is_restored():
    content = np.random.default_rng(0).integers(0, 9, 3 * FRAME_BYTES + 5).astype(np.uint8).tobytes()
    for store_size in (True, False):
        frame = lz4.frame.compress(content, store_size=store_size, block_linked=True)
        assert decompress(frame, len(content)) == content


def test_memory_of_another_size_than_the_content_is_refused():
    packed = b"".join(compress_frames(b"x" * 100))
    frames = find_frames(packed, 100)
    with pytest.raises(CodecError, match="lz4 content exceeds|lz4 frame holds"):
        decompress_frames(packed, frames, bytearray(99))


def test_a_great_many_tiny_frames_are_refused():
    tiny = lz4.frame.compress(b"x", store_size=False)
    assert decompress(tiny * 1000, 1000) == b"x" * 1000
    with pytest.raises(CodecError, match="which is not plausible"):
        find_frames(tiny * 5000, 5000)


def test_padding_makes_highly_compressible_data_readable_and_no_other(monkeypatch):
    monkeypatch.setattr(lz4_frames, "UNCHECKED_BYTES", 1 << 20)
    content = bytes(9 << 20)
    packed = b"".join(compress_frames(content))
    assert len(content) > content_limit(len(packed))
    padded = packed + b"".join(ratio_padding(len(content), len(packed)))
    assert content_limit(len(padded)) >= len(content)
    assert len(padded) < len(content) / 31
    assert decompress(padded, len(content)) == content
    with lz4.frame.open(io.BytesIO(padded)) as stream:
        assert stream.read() == content
    assert list(ratio_padding(1 << 20, 10)) == []
    assert list(ratio_padding(len(content), len(content) // 2)) == []


BOMB = """
import resource, sys
import lz4.frame
from slipstream.codecs.bytes import decompress_frames, find_frames, content_limit
from slipstream.errors import CodecError

zeros = bytes(64 << 20)
frame = lz4.frame.compress(zeros, store_size={store_size}, block_size=lz4.frame.BLOCKSIZE_MAX4MB)
bomb = frame * 84
del zeros
assert len(bomb) < 35e6, len(bomb)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
try:
    find_frames(bomb, content_limit(len(bomb)))
except CodecError as error:
    print(error)
"""


@pytest.mark.parametrize("store_size", [True, False])
def test_a_bomb_is_refused_before_its_content_is_allocated(store_size):
    script = BOMB.format(store_size=store_size)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("lz4 content exceeds the limit")
