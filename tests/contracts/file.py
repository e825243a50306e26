"""What every file format that is a container must do with damaged, foreign and forged files.

A test class per format inherits `FileContract` and supplies `write` and `read`.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any, ClassVar

import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipstream.errors import CorruptFileError, FormatVersionError, MissingEntryError
from slipstream.store.header import END_MAGIC, FOOTER, HEADER, MAGIC

REFUSED = (CorruptFileError, FormatVersionError)


def forge(index: bytes, data: bytes = b"", version: int = 1, reserved: int = 0) -> bytes:
    """Return a container around any index and data, with every checksum as it should be: a hostile writer."""
    header = HEADER.pack(MAGIC, version, reserved)
    fields = struct.pack("<QQQ", len(header) + len(data), len(index), xxhash.xxh3_64_intdigest(index))
    footer = fields + struct.pack("<Q8s", xxhash.xxh3_64_intdigest(header + fields), END_MAGIC)
    return header + data + index + footer


def split(content: bytes) -> tuple[bytes, Any]:
    """Return the chunks of a container, and its index as JSON."""
    offset, length, _, _, _ = FOOTER.unpack(content[-FOOTER.size :])
    return content[HEADER.size : offset], json.loads(content[offset : offset + length])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)


def mutate(document: Any, data: st.DataObject) -> None:
    """Change, add or remove one value somewhere in a JSON document."""
    target = document
    while True:
        keys = list(target)
        if isinstance(target, list):
            keys = list(range(len(target)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        # Go deeper most of the time: that is where the interesting values are.
        if isinstance(target[key], (dict, list)) and data.draw(st.integers(0, 4)):
            target = target[key]
            continue
        break
    action = data.draw(st.sampled_from(["replace", "delete", "repeat"]))
    if action == "replace":
        target[key] = data.draw(json_values)
    elif action == "delete":
        del target[key]
    elif isinstance(target, list):
        target.append(target[key])


class FileContract:
    """Tests that every format inherits.

    Attributes:
        content: What `read` returns of the file that `write` writes; compared with ``==``.
        flips: Test every n-th bit.
        cuts: Test every n-th length.
    """

    content: ClassVar[Any]
    flips = 1
    cuts = 1

    def write(self, path: Path) -> None:
        """Write a small file of this format."""
        raise NotImplementedError

    def read(self, path: Path) -> Any:
        """Read everything in a file of this format."""
        raise NotImplementedError

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "small.slip"
        self.write(path)
        return path

    def refuse(self, path: Path) -> str:
        """Read a file that must be refused, and return the message, which names it."""
        with pytest.raises(REFUSED) as caught:
            self.read(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    def test_a_file_comes_back_as_it_was_written(self, path):
        assert self.read(path) == self.content

    def test_every_flipped_bit_is_noticed(self, path):
        original = path.read_bytes()
        for position in range(0, 8 * len(original), self.flips):
            damaged = bytearray(original)
            damaged[position // 8] ^= 1 << position % 8
            path.write_bytes(damaged)
            self.refuse(path)

    def test_a_file_truncated_at_any_length_is_noticed(self, path):
        original = path.read_bytes()
        for length in range(0, len(original), self.cuts):
            path.write_bytes(original[:length])
            self.refuse(path)

    @pytest.mark.parametrize("tail", [b"\0", b"x" * 40, b"x" * 4096], ids=len)
    def test_a_file_that_was_appended_to_is_noticed(self, path, tail):
        path.write_bytes(path.read_bytes() + tail)
        assert "its footer is not at its end" in self.refuse(path)

    def test_a_file_written_twice_in_a_row_is_noticed(self, path):
        path.write_bytes(path.read_bytes() * 2)
        self.refuse(path)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"hello",
            b"PK\x03\x04" + bytes(100),
            b"\x89HDF\r\n\x1a\n" + bytes(100),
            MAGIC,
            MAGIC.replace(b"\r\n", b"\n") + bytes(100),
            bytes(5000),
        ],
        ids=lambda content: repr(content[:8]),
    )
    def test_an_empty_or_foreign_file_is_refused(self, path, content):
        path.write_bytes(content)
        self.refuse(path)

    def test_folders_pipes_and_devices_are_refused_without_waiting(self, path):
        folder = path.parent / "folder"
        folder.mkdir()
        pipe = path.parent / "pipe"
        os.mkfifo(pipe)
        assert self.refuse(folder).endswith("is a folder, expected a file")
        assert self.refuse(pipe).endswith("is a FIFO, expected a file")
        assert self.refuse(Path("/dev/zero")).endswith("is a character device, expected a file")

    def test_a_missing_file_is_not_a_damaged_one(self, path):
        path.unlink()
        with pytest.raises(FileNotFoundError, match="small.slip"):
            self.read(path)

    def test_a_newer_version_is_refused_by_number(self, path):
        data, index = split(path.read_bytes())
        path.write_bytes(forge(json.dumps(index).encode(), data, version=7))
        with pytest.raises(
            FormatVersionError, match=r"small\.slip: has format version 7, this release reads version 1"
        ):
            self.read(path)

    def test_the_forger_can_forge_a_sound_file(self, path):
        data, index = split(path.read_bytes())
        path.write_bytes(forge(json.dumps(index).encode(), data))
        assert self.read(path) == self.content

    def test_a_forged_index_gives_an_error_that_names_the_file_or_a_value_and_nothing_worse(self, path):
        data, index = split(path.read_bytes())
        text = json.dumps(index)

        @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
        @given(choice=st.data())
        def check(choice: st.DataObject) -> None:
            forged = json.loads(text)
            for _ in range(choice.draw(st.integers(1, 3))):
                mutate(forged, choice)
            path.write_bytes(forge(json.dumps(forged).encode(), data))
            try:
                self.read(path)
            except (*REFUSED, MissingEntryError) as error:
                assert str(path) in str(error)

        check()

    def test_forged_chunks_give_an_error_that_names_the_file_or_a_value_and_nothing_worse(self, path):
        """Chunks whose checksums match, so that decoders see arbitrary bytes."""
        data, index = split(path.read_bytes())
        text = json.dumps(index)

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(position=st.integers(0, len(data) - 1), replacement=st.binary(min_size=1, max_size=8))
        @example(position=0, replacement=b"\xff" * 8)
        def check(position: int, replacement: bytes) -> None:
            forged = bytearray(data)
            forged[position : position + len(replacement)] = replacement
            del forged[len(data) :]
            document = json.loads(text)
            for entry in document["entries"]:
                for chunk in entry["chunks"]:
                    start = chunk[0] - HEADER.size
                    chunk[2] = f"{xxhash.xxh3_64_intdigest(bytes(forged[start : start + chunk[1]])):016x}"
            path.write_bytes(forge(json.dumps(document).encode(), bytes(forged)))
            try:
                self.read(path)
            except REFUSED as error:
                assert str(path) in str(error)

        check()
