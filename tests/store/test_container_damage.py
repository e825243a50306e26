"""Damaged, cut off, hostile and foreign files: always an error that names the file, never wrong data."""

import copy
import json
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs import Planes, Raw, Zstd
from slipstream.errors import CorruptFileError, FormatVersionError, MissingEntryError
from slipstream.store.container import Container
from slipstream.store.header import END_MAGIC, FOOTER, HEADER, MAGIC
from slipstream.store.writer import write_container
from tests.contracts.file import FileContract, forge

Document = dict[str, Any]


def forged(path: Path, index: bytes, data: bytes = b"", reserved: int = 0) -> Path:
    """Write a forged container and return its path."""
    path.write_bytes(forge(index, data, reserved=reserved))
    return path


REFUSED = (CorruptFileError, FormatVersionError, MissingEntryError)


WEIGHTS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
COUNTS = np.arange(10, dtype=np.int16)


def write_small(path: Path) -> None:
    """Write a small container: two arrays, one of several chunks, and a value."""
    with write_container(path, chunk_bytes=64) as writer:
        writer.add("weights", WEIGHTS, Planes())
        writer.add("counts", COUNTS, Raw())
        writer.set("step", 7)


class TestContainer(FileContract):
    content = ({"step": 7}, {"weights": WEIGHTS.tobytes(), "counts": COUNTS.tobytes()})

    def write(self, path: Path) -> None:
        write_small(path)

    def read(self, path: Path) -> Any:
        with Container(path) as container:
            arrays = {name: container.read(name).tobytes() for name in container.entries}
            return container.values, arrays


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.slip"
    write_small(path)
    return path


def test_a_flipped_bit_in_an_array_leaves_the_others_readable_and_names_the_damaged_one(small):
    with Container(small) as container:
        chunk = container.entries["weights"].chunks[1]
    damaged = bytearray(small.read_bytes())
    damaged[chunk.offset + chunk.length // 2] ^= 4
    small.write_bytes(damaged)
    with Container(small) as container:
        assert (container.read("counts") == np.arange(10)).all()
        with pytest.raises(CorruptFileError) as caught:
            container.read("weights")
        found = [error for error in container.find_damage() if error is not None]
    assert str(caught.value) == (
        f"{small}: entry 'weights' is damaged in chunk 2 of 2: its bytes do not match their checksum"
    )
    assert [str(error) for error in found] == [str(caught.value)]


def test_two_chunks_that_changed_places_are_noticed(tmp_path):
    small = tmp_path / "small.slip"
    with write_container(small, chunk_bytes=64) as writer:
        writer.add("weights", np.arange(32, dtype=np.float32), Raw())
    with Container(small) as container:
        first, second = container.entries["weights"].chunks
    assert first.length == second.length
    content = bytearray(small.read_bytes())
    swapped = (
        content[second.offset : second.offset + second.length] + content[first.offset : first.offset + first.length]
    )
    content[first.offset : second.offset + second.length] = swapped
    small.write_bytes(content)
    with Container(small) as container, pytest.raises(CorruptFileError, match="'weights'"):
        container.read("weights")


# From here on, files whose checksums are all right and whose content is not: a hostile writer.


def document(payload: bytes, **changes: Any) -> Document:
    """Describe one array of 4 floats, stored in one chunk right behind the header."""
    entry = {
        "name": "x",
        "dtype": "<f4",
        "shape": [4],
        "codec": {"name": "raw"},
        "chunk_shape": [4],
        "chunks": [[HEADER.size, len(payload), f"{xxhash.xxh3_64_intdigest(payload):016x}"]],
    }
    return {"kind": "container", "written_by": "forger", "entries": [{**entry, **changes}], "values": {}}


def read_forged(path: Path, payload: bytes, index: Document) -> Any:
    path.write_bytes(forge(json.dumps(index).encode(), payload))
    with Container(path) as container:
        return container.read("x")


FLOATS = np.arange(4, dtype=np.float32)


def test_an_unknown_codec_is_refused_as_newer(tmp_path):
    with pytest.raises(FormatVersionError, match="f: entry 'x': codec 'quantum' is unknown to this release"):
        read_forged(tmp_path / "f", FLOATS.tobytes(), document(FLOATS.tobytes(), codec={"name": "quantum"}))


def test_a_reserved_field_in_use_is_refused(tmp_path):
    with pytest.raises(CorruptFileError, match="header or footer"):
        Container(forged(tmp_path / "f", b"{}", reserved=1))


CHECKSUM = f"{xxhash.xxh3_64_intdigest(FLOATS.tobytes()):016x}"
AT = HEADER.size


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2**60]},
        {"shape": [2**60], "chunk_shape": [2**60]},
        {"shape": [2**48], "chunk_shape": [2**48]},
        {"shape": [2**24], "chunk_shape": [2**24]},
        {"shape": [2**40], "chunk_shape": [1]},
        {"shape": [0, 2**47, 2**47], "chunk_shape": [0, 1, 1], "chunks": []},
        {"shape": [-4]},
        {"shape": [4.0]},
        {"shape": [True]},
        {"shape": "4"},
        {"shape": None},
        {"shape": [1] * 33, "chunk_shape": [1] * 33},
        {"shape": [2, 2], "chunk_shape": [4]},
        {"shape": [2, 2], "chunk_shape": [2, 1]},
        {"shape": [2, 2], "chunk_shape": [3, 2]},
        {"chunk_shape": [0]},
        {"chunk_shape": [5]},
        {"chunk_shape": [2]},
        {"shape": [0], "chunk_shape": [0]},
        {"dtype": "<f8"},
        {"dtype": "|O"},
        {"dtype": "O"},
        {"dtype": "<U4"},
        {"dtype": "V16"},
        {"dtype": "f4, (1000000,1000000)f8"},
        {"dtype": 3},
        {"name": 3},
        {"name": None},
        {"codec": None},
        {"codec": {"name": "planes", "level": 10**9}},
        {"codec": {"name": "planes", "evil": 1}},
        {"codec": {"name": ["raw"]}},
        {"codec": {"name": "planes"}},
        {"codec": {"name": "timewise"}},
        {"codec": {"name": "lz4"}},
        {"codec": {"name": "zstd"}},
        {"chunks": []},
        {"chunks": None},
        {"chunks": [None]},
        {"chunks": [[AT, 16]]},
        {"chunks": [[AT, 16, "0" * 16]]},
        {"chunks": [[AT, 16, "zz" * 8]]},
        {"chunks": [[AT, 16, 12345]]},
        {"chunks": [[-1, 16, CHECKSUM]]},
        {"chunks": [[AT, -16, CHECKSUM]]},
        {"chunks": [[AT, 0, CHECKSUM]]},
        {"chunks": [[0, 16, CHECKSUM]]},
        {"chunks": [[AT + 1, 15, CHECKSUM]]},
        {"chunks": [[AT, 15, CHECKSUM]]},
        {"chunks": [[AT, 2**63, CHECKSUM]]},
        {"chunks": [[2**70, 16, CHECKSUM]]},
        {"chunks": [[AT, 16, CHECKSUM], [AT, 16, CHECKSUM]]},
        {"chunks": [[AT, 16, CHECKSUM], [AT, 16, CHECKSUM]], "shape": [8]},
        {"chunks": [[AT, 10, CHECKSUM], [AT + 8, 8, CHECKSUM]], "shape": [8]},
    ],
    ids=str,
)
def test_an_index_that_lies_is_refused(tmp_path, changes):
    path = tmp_path / "forged.slip"
    with pytest.raises(CorruptFileError, match="forged.slip"):
        read_forged(path, FLOATS.tobytes(), document(FLOATS.tobytes(), **changes))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"kind":"c","written_by":"w","entries":[],"values":' + b"[" * 900 + b"]" * 900 + b"",
        b'{"kind":"c","written_by":"w","entries":[],"values":{"x":NaN}}',
        b'{"kind":"c","written_by":"w","entries":[],"values":{"x":-Infinity}}',
        b'{"kind":"c","written_by":"w","entries":[],"values":{"x":1e999}}',
        b'{"kind":"c","written_by":"w","entries":[],"values":{"x":' + b"9" * 5000 + b"}}",
        b'{"kind":"c","written_by":"w","entries":[],"values":{"x":1,"x":2}}',
        b'{"kind":"c","kind":"d","written_by":"w","entries":[],"values":{}}',
        b'{"kind":"c","written_by":"w","entries":{},"values":{}}',
        b'{"kind":"c","written_by":"w","entries":[[]],"values":{}}',
        b'{"kind":"c","written_by":"w","entries":[],"values":[]}',
        b'{"kind":1,"written_by":"w","entries":[],"values":{}}',
        b'{"kind":"c","written_by":"w","entries":[]}',
    ],
    ids=lambda index: repr(index[:60]),
)
def test_an_index_that_is_not_an_index_is_refused(tmp_path, index):
    path = forged(tmp_path / "forged.slip", index)
    with pytest.raises(CorruptFileError, match="forged.slip"):
        Container(path)


def test_two_entries_of_one_name_are_refused(tmp_path):
    data = FLOATS.tobytes()
    index = document(data)
    twin = copy.deepcopy(index["entries"][0])
    twin["chunks"][0][0] += len(data)
    index["entries"].append(twin)
    with pytest.raises(CorruptFileError, match="lists the entry 'x' twice"):
        read_forged(tmp_path / "f", data + data, index)


@pytest.mark.parametrize("gap", [b"hidden", b"\0"])
def test_bytes_that_no_chunk_accounts_for_are_refused(tmp_path, gap):
    with pytest.raises(CorruptFileError, match="ends its chunks at byte"):
        read_forged(tmp_path / "f", FLOATS.tobytes() + gap, document(FLOATS.tobytes()))


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_a_footer_that_points_elsewhere_is_refused(small, field, value):
    content = bytearray(small.read_bytes())
    offset, length, checksum, _, magic = FOOTER.unpack(content[-FOOTER.size :])
    offset, length = (value, length) if field == "offset" else (offset, value)
    fields = struct.pack("<QQQ", offset, length, checksum)
    header_checksum = xxhash.xxh3_64_intdigest(bytes(content[: HEADER.size]) + fields)
    content[-FOOTER.size :] = fields + struct.pack("<Q8s", header_checksum, magic)
    small.write_bytes(content)
    with pytest.raises(CorruptFileError, match="the footer does not fit the file"):
        Container(small)


@pytest.mark.parametrize("claim_size", [True, False])
def test_a_zstd_bomb_is_refused(tmp_path, claim_size):
    compressor = zstandard.ZstdCompressor(write_content_size=claim_size)
    bomb = compressor.compress(bytes(50_000_000))
    with pytest.raises(CorruptFileError, match="entry 'x' is damaged in chunk 1 of 1: zstd frame claims"):
        read_forged(tmp_path / "f", bomb, document(bomb, codec=Zstd().to_header()))


def test_a_frame_that_lies_about_its_size_is_refused(tmp_path):
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(200)))
    assert frame[5] == 200
    frame[5] = 16
    with pytest.raises(CorruptFileError, match="zstd frame"):
        read_forged(tmp_path / "f", bytes(frame), document(bytes(frame), codec=Zstd().to_header()))


def test_hostile_files_do_not_take_more_memory_than_they_are_given(tmp_path):
    """Read, in a process of limited memory, a file whose index claims more than there is."""
    chunk = Planes().encode(np.zeros(1 << 22, np.float32))
    count = 400  # 400 x 16 MiB of zeros
    rows = [[AT + i * len(chunk), len(chunk), f"{xxhash.xxh3_64_intdigest(chunk):016x}"] for i in range(count)]
    index = document(b"", shape=[count << 22], chunk_shape=[1 << 22], chunks=rows, codec={"name": "planes"})
    path = forged(tmp_path / "f", json.dumps(index).encode(), chunk * count)
    assert path.stat().st_size < 200_000
    script = """
import sys
from slipstream.errors import CorruptFileError
from slipstream.store.container import Container
with Container(sys.argv[1], max_entry_bytes=1 << 30) as container:
    try:
        container.read("x")
    except CorruptFileError as error:
        print(error)
    print(float(container.read("x", slice(10, 20)).sum()), list(container.find_damage()).count(None))
"""
    limit = 3 << 30
    output = subprocess.run(
        [sys.executable, "-c", script, path],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    ).stdout
    assert "claims 6710886400 bytes, more than the limit of 1073741824" in output
    assert output.endswith("0.0 400\n")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


def test_a_chunk_longer_than_any_codec_makes_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "f"
    length = 3 << 30
    index = json.dumps(document(b"", chunks=[[AT, length, CHECKSUM]], codec={"name": "zstd"})).encode()
    header = HEADER.pack(MAGIC, 1, 0)
    fields = struct.pack("<QQQ", AT + length, len(index), xxhash.xxh3_64_intdigest(index))
    footer = fields + struct.pack("<Q8s", xxhash.xxh3_64_intdigest(header + fields), END_MAGIC)
    with path.open("wb") as file:  # sparse: 3 GiB that take no room on the disk
        file.write(header)
        file.seek(AT + length)
        file.write(index + footer)
    with pytest.raises(CorruptFileError, match="a chunk of 3221225472 bytes for 16 bytes of content"):
        Container(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_mutation_of_a_sound_index_gives_anything_but_an_error_or_the_right_data(tmp_path_factory, data):
    payload = Planes().encode(FLOATS)
    index = document(payload, codec=Planes().to_header())
    target: Any = index
    for _ in range(data.draw(st.integers(1, 5))):
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(target[key], (dict, list)) and data.draw(st.booleans()):
            target = target[key]
            continue
        target[key] = data.draw(json_values | st.integers(0, 40))
        break
    path = tmp_path_factory.mktemp("mutant") / "f"
    try:
        array = read_forged(path, payload, index)
    except REFUSED as error:
        assert str(path) in str(error)
    else:
        assert array.tobytes() == FLOATS.tobytes() or index["entries"][0]["dtype"] != "<f4"
