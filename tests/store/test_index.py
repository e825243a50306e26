"""The index of a container: arbitrary and hostile text is refused, in bounded time and memory."""

import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.codecs import Planes, Raw
from slipstream.errors import CorruptFileError, FormatVersionError
from slipstream.store import index as index_module
from slipstream.store.index import MAX_CONTAINERS, MAX_DEPTH, MAX_NODES, Chunk, Entry, Grid, Index

REFUSED = (CorruptFileError, FormatVersionError)


def sound_index(values: dict[str, Any] | None = None) -> Index:
    """Return an index of two arrays in 3 and 1 chunks, from byte 16 to byte 96."""
    chunks = (Chunk(16, 16, 1), Chunk(32, 16, 2), Chunk(48, 8, 3))
    entries = {
        "weights": Entry("weights", np.dtype("<f4"), Grid((10,), (4,)), Raw(), chunks),
        "名": Entry("名", np.dtype("<i8"), Grid((5, 1), (5, 1)), Planes(), (Chunk(56, 40, 2**64 - 1),)),
    }
    return Index("checkpoint", "slipstream 0", entries, values or {})


def with_values(values: str) -> bytes:
    """Return the text of an index without arrays, around JSON that is taken as it is."""
    return f'{{"kind":"c","written_by":"w","entries":[],"values":{values}}}'.encode()


def depth_of(value: Any) -> int:
    members: list[Any] = []
    if isinstance(value, dict):
        members = list(value.values())
    elif isinstance(value, list):
        members = value
    else:
        return 0
    return 1 + max(map(depth_of, members), default=0)


# Text that a careless scanner would take for structure.
tricky_text = st.text(alphabet='[]{}",:\\/un0 é', max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | tricky_text,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(tricky_text, children, max_size=3),
    max_leaves=12,
)


def test_an_index_comes_back_as_it_was_written():
    index = sound_index({"step": 7})
    assert Index.parse(index.to_json(), 16, 96) == index


@settings(max_examples=200, deadline=None)
@given(values=st.dictionaries(tricky_text, json_values, max_size=4))
def test_any_json_values_come_back(values):
    index = sound_index(values)
    assert Index.parse(index.to_json(), 16, 96) == index


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=st.dictionaries(tricky_text, json_values, max_size=4), ascii_only=st.booleans(), scan=st.integers(1, 40))
def test_nesting_is_counted_outside_strings_only_wherever_the_text_is_split(monkeypatch, values, ascii_only, scan):
    document = {"kind": "c", "written_by": "w", "entries": [], "values": values}
    text = json.dumps(document, ensure_ascii=ascii_only).encode()
    depth = max(2, depth_of(document))
    monkeypatch.setattr(index_module, "SCAN_BYTES", scan)
    monkeypatch.setattr(index_module, "MAX_DEPTH", depth)
    assert Index.parse(text, 16, 16).values == values
    monkeypatch.setattr(index_module, "MAX_DEPTH", depth - 1)
    with pytest.raises(CorruptFileError, match="nested too deeply"):
        Index.parse(text, 16, 16)


@settings(max_examples=300, deadline=None)
@given(text=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(text):
    with pytest.raises(CorruptFileError):
        Index.parse(text, 16, 96)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_no_damage_to_the_text_gives_anything_but_an_error_or_a_consistent_index(data):
    text = bytearray(sound_index({"step": 7}).to_json())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 6))
        text[start : start + length] = data.draw(
            st.sampled_from([b"", b'"', b"[", b"]", b",", b"0", b"-1", b"{}", b"\xff"])
        )
    try:
        index = Index.parse(bytes(text), 16, 96)
    except REFUSED:
        return
    covered = sorted((chunk.offset, chunk.length) for entry in index.entries.values() for chunk in entry.chunks)
    position = 16
    for offset, length in covered:
        assert offset == position
        position += length
    assert position == 96


@pytest.mark.parametrize(
    "values",
    [
        "[" + "[]," * (7 << 20) + "[]]",
        '{"x":[' + "[]," * MAX_CONTAINERS + "[]]}",
        '{"x":[' + "{}," * MAX_CONTAINERS + "{}]}",
        '{"x":[' + "0," * MAX_NODES + "0]}",
    ],
    ids=["21 MB of empty lists", "lists", "objects", "numbers"],
)
def test_an_index_of_too_many_values_is_refused_before_it_is_parsed(monkeypatch, values):
    def fail(*arguments: object, **options: object) -> None:
        pytest.fail("the text must not be parsed")

    monkeypatch.setattr(json, "loads", fail)
    with pytest.raises(CorruptFileError, match="index has too many values, expected at most"):
        Index.parse(with_values(values), 16, 16)


def test_as_many_values_as_allowed_are_parsed():
    text = with_values('{"x":[' + "[]," * 100_000 + '[]],"y":"' + "[" * 5_000_000 + '"}')
    index = Index.parse(text, 16, 16)
    assert len(index.values["x"]) == 100_001
    assert len(index.values["y"]) == 5_000_000


@pytest.mark.parametrize("levels", [MAX_DEPTH, 100_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_refused_whatever_the_recursion_limit_is(levels, brackets):
    opening = '{"a":' if brackets == "{}" else "["
    text = with_values('{"x":' + opening * levels + "0" + brackets[1] * levels + "}")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises(CorruptFileError, match="index is nested too deeply, expected at most 500 levels"):
            Index.parse(text, 16, 16)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-8-sig"])
def test_encodings_other_than_utf_8_are_refused(encoding):
    text = with_values("{}").decode().encode(encoding)
    with pytest.raises(CorruptFileError, match="index is not"):
        Index.parse(text, 16, 16)


def test_a_number_of_absurd_length_is_refused():
    with pytest.raises(CorruptFileError, match="a number of 1000002 characters"):
        Index.parse(with_values('{"x":0.' + "1" * 1_000_000 + "}"), 16, 16)


@pytest.mark.parametrize(
    "dtype",
    ["antigravity", "this.x", "O", "|O", "<U4", "V16", "f4,f4", "(1000000,1000000)f8", "float32", "<f4 ", "datetime64"],
)
def test_only_known_dtypes_are_created_and_no_name_is_imported(dtype):
    document = json.loads(sound_index().to_json())
    document["entries"][0]["dtype"] = dtype
    modules = set(sys.modules)
    with pytest.raises(CorruptFileError, match="entry 'weights': index has the unknown dtype"):
        Index.parse(json.dumps(document).encode(), 16, 96)
    assert set(sys.modules) == modules


def test_a_hostile_codec_header_does_not_make_a_message_of_its_size():
    document = json.loads(sound_index().to_json())
    document["entries"][0]["codec"] = {"name": "planes", "level": "x" * 1_000_000}
    with pytest.raises(CorruptFileError) as caught:
        Index.parse(json.dumps(document).encode(), 16, 96)
    assert len(str(caught.value)) < 1000


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    limit=st.integers(1, 200),
    itemsize=st.sampled_from([1, 4, 8]),
)
def test_the_chunks_of_a_grid_cover_the_array_once_and_know_their_elements(shape, limit, itemsize):
    from slipstream.codecs.base import part_shape

    grid = Grid(shape, part_shape(shape, itemsize, limit))
    position = 0
    for number in range(grid.count()):
        start, part = grid.part(number)
        assert start == position
        position += int(np.prod(part))
        for element in (start, position - 1):
            assert grid.number_of(element) == number
    assert position == int(np.prod(shape))
