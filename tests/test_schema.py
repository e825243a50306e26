"""Nested data as JSON: what goes in comes out, and nothing that a file claims is trusted."""

import json
import math
import re
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipstream.errors import CorruptFileError, FormatVersionError, UnsupportedStateError
from slipstream.schema import flatten as flatten_module
from slipstream.schema.dtypes import DTYPES, parse_numpy_dtype
from slipstream.schema.flatten import flatten
from slipstream.schema.nodes import MAX_DEPTH
from slipstream.schema.structure import check_fits, drop, leaves_of, matching, select
from slipstream.schema.unflatten import unflatten

ERRORS = (CorruptFileError, FormatVersionError)


def bits(value: Any) -> Any:
    """Turn nested data into something that compares bit for bit, types and the order of keys included."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, dict):
        return (kind, [(bits(key), bits(member)) for key, member in value.items()])
    if isinstance(value, (list, tuple)):
        return (kind, [bits(member) for member in value])
    if isinstance(value, (set, frozenset)):
        return (kind, sorted(repr(bits(member)) for member in value))
    if isinstance(value, float):
        return (kind, struct.pack("<d", value))
    if isinstance(value, complex):
        return (kind, bits(value.real), bits(value.imag))
    return (kind, value)


def through_json(structure: Any) -> Any:
    """Return a structure as a file would give it back."""
    return json.loads(json.dumps(structure, allow_nan=False))


def round_trip(value: Any) -> Any:
    tree = flatten(value)
    return unflatten(through_json(tree.structure), tree.leaves)


def nan_with_payload() -> float:
    (value,) = struct.unpack("<d", bytes.fromhex("010203040506fc7f"))
    return value


SPLIT_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
TEXT = st.text(st.characters(), max_size=8).filter(lambda text: not SPLIT_PAIR.search(text))
SCALARS = st.sampled_from(
    [
        np.float32(-0.0),
        np.float64("nan"),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.datetime64("2026-11-18T01:02"),
        np.timedelta64(5, "ms"),
        np.str_(""),
        np.str_("ends in zero\0"),
        np.bytes_(b"a\0"),
    ]
)
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=9) | SCALARS,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
PLAIN = (
    HASHABLE
    | st.complex_numbers()
    | st.integers(2**64, 2**9000)
    | st.binary(max_size=9).map(bytearray)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-3, 1, 2]))
    | st.builds(slice, st.none() | st.integers(), st.none() | TEXT, st.none() | st.booleans())
    | TEXT.map(lambda text: Path(text.replace("\0", "")))
    | st.sets(HASHABLE, max_size=3)
    | st.sampled_from([np.arange(6.0).reshape(2, 3), np.array(["x", "yz"]), np.zeros((0, 3), ">i2"), np.array(7)])
)
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE | TEXT.map(lambda text: f"${text}"), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=15,
)


@given(NESTED)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({1: "int", "1": "text", 2.5: "float", (1, (2,)): "tuple", None: "none", b"1": "bytes"})
@example({True: "bool", 0: "int"})
@example({float("nan"): 1, -0.0: 2})
@example([nan_with_payload(), -0.0, math.inf, -math.inf, 5e-324])
@example({"$": {"$": "tensor", "dtype": "float32"}})
@example(["\ud800", "😀", "\udc00"])
@example([2**14_000 - 1, -(2**14_000) + 1])
def test_nested_data_comes_back_from_json_bit_for_bit(value):
    assert bits(round_trip(value)) == bits(value)


def test_the_version_numbers_of_a_module_survive_with_its_state_dict():
    state: Any = OrderedDict(weight=np.ones(2))
    state._metadata = OrderedDict({"": {"version": 2}})
    assert round_trip(state)._metadata == state._metadata
    assert type(round_trip(state)._metadata) is OrderedDict


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [object()]}, "a/0 is a builtins.object, which cannot be stored as data"),
        ({"f": print}, "f is a builtins.builtin_function_or_method"),
        (object(), "the state is a builtins.object"),
        ({"objects": np.array([{}], dtype=object)}, "objects is a numpy.ndarray of object"),
        ({"record": np.zeros(2, [("x", "f4"), ("y", "i2")])}, "record is a numpy.ndarray of"),
        ({"masked": np.ma.masked_array([1, 2], [False, True])}, "masked is a numpy.ma.MaskedArray"),
        ({"row": np.zeros(1, [("x", "f4")])[0]}, "row is a numpy.void"),
        ({"digits": 10**5000}, "digits is a builtins.int that JSON cannot hold"),
        ({"text": "\ud83d\ude00"}, "text is a builtins.str that JSON cannot hold"),
        ({"\ud83d\ude00": 1}, "keys is a builtins.str that JSON cannot hold"),
        ({"set": {1, frozenset([print])}}, "cannot be stored as data"),
    ],
)
def test_what_json_cannot_hold_exactly_is_refused_by_name(value, problem):
    with pytest.raises(UnsupportedStateError, match=re.escape(problem)):
        flatten(value)


def nested(depth: int, kind: Any = OrderedDict) -> Any:
    """Return data nested to a depth; the worst case for JSON are dicts with keys that are not text."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else kind({0: value})
    return value


def test_data_as_deep_as_the_limit_comes_back_and_deeper_data_is_refused_when_it_is_saved():
    assert bits(round_trip(nested(MAX_DEPTH))) == bits(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(UnsupportedStateError, match=f"is nested more than {MAX_DEPTH} levels deep"):
            flatten(nested(depth, list))


def test_data_that_contains_itself_is_refused():
    cycle: dict[str, Any] = {"a": 1}
    cycle["b"] = [cycle, cycle]
    for opaque in (False, True):
        with pytest.raises(UnsupportedStateError, match="b/0 contains itself"):
            flatten(cycle, opaque=opaque)


def test_data_that_occurs_twice_is_not_taken_for_a_cycle():
    shared = [1]
    assert round_trip([shared, {"x": shared}]) == [[1], {"x": [1]}]


def test_lists_that_share_lists_end_at_the_limit_instead_of_taking_exponential_time(monkeypatch):
    monkeypatch.setattr(flatten_module, "MAX_NODES", 1000)
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(UnsupportedStateError, match="comes after 1,000 other values: store long lists as arrays"):
        flatten(value)


def test_objects_pass_through_where_they_are_accepted():
    thing = object()
    value = {"object": thing, "path": PurePosixPath("a"), thing: 10**5000, "set": {thing}, "x": [np.ones(2)]}
    tree = flatten(value, opaque=True)
    back = unflatten(tree.structure, tree.leaves, tree.objects)
    assert list(back) == list(value)
    assert back["object"] is thing
    assert back["set"] == {thing}
    assert back[thing] == 10**5000
    assert type(back["path"]) is PurePosixPath


def test_a_file_cannot_name_the_objects_of_a_process():
    with pytest.raises(FormatVersionError, match="a value of kind 'object'"):
        unflatten({"$": "object", "v": 0}, [])


# What a forged file may say. All of it is JSON.
LEAF = {"$": "tensor", "dtype": "float32", "shape": [2], "hex": "00" * 8}
INVALID = [
    {"$": "float", "v": 1},
    {"$": "float", "v": "00"},
    {"$": "float", "v": "zz" * 8},
    {"$": "float"},
    {"$": "complex", "v": [1.0]},
    {"$": "bytes", "v": "?"},
    {"$": "bytes", "v": 5},
    {"$": "bytearray", "v": "a"},
    {"$": "numpy", "v": ["O", "00" * 8]},
    {"$": "numpy", "v": ["os.path", "00"]},
    {"$": "numpy", "v": ["<f8", "00"]},
    {"$": "numpy", "v": ["<U999999999", ""]},
    {"$": "numpy", "v": "<f8"},
    {"$": "range", "v": ["a"]},
    {"$": "range", "v": [0, 1, 0]},
    {"$": "slice", "v": [{}, 1, 2]},
    {"$": "path", "v": 3},
    {"$": "torch.dtype", "v": "load"},
    {"$": "torch.dtype", "v": ["float32"]},
    {"$": "torch.device", "v": "Moon!"},
    {"$": "torch.Size", "v": [2**64]},
    {"$": "torch.Size", "v": [True]},
    {"$": "tuple", "v": 3},
    {"$": "tuple"},
    {"$": "set", "v": [[1]]},
    {"$": "set", "v": [1, True]},
    {"$": "set", "v": [LEAF]},
    {"$": "dict", "v": [[1]]},
    {"$": "dict", "v": [[[1], 2]]},
    {"$": "dict", "v": [[1, "a"], [True, "b"]]},
    {"$": "dict", "v": [[LEAF, 2]]},
    {"$": "dict", "v": [[0, 1]], "metadata": {}},
    {"$": "OrderedDict", "v": [["a", 1], ["a", 2]]},
    {"$": "TensorDict", "v": [], "batch_size": []},
    {"$": "TensorDict", "v": {}, "batch_size": ["x"]},
    {"$": "TensorDict", "v": {}},
]


@pytest.mark.parametrize("node", INVALID, ids=json.dumps)
def test_a_node_that_cannot_have_been_written_is_refused_in_one_sentence(node):
    with pytest.raises(CorruptFileError) as caught:
        unflatten({"x": node}, [])
    assert "'x" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tag", ["hologram", 5, None, True, ["tuple"], {"a": 1}, "null", "list"])
def test_a_kind_of_value_from_the_future_is_a_version_error(tag):
    with pytest.raises(FormatVersionError, match="this release does not know"):
        unflatten([{"$": tag, "v": 1}], [])


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": 3},
        {"dtype": ["float32"]},
        {"shape": "two"},
        {"shape": [-1]},
        {"shape": [2.0]},
        {"shape": [True]},
        {"shape": [2**63]},
        {"shape": [2**40, 2**40]},
        {"shape": [0, 2**40, 2**40]},
        {"shape": [1] * 65},
        {"stride": [1, 1]},
        {"stride": [-1]},
        {"stride": 1},
        {"offset": -4},
        {"offset": 2},
        {"offset": "4"},
        {"parameter": 1},
        {"requires_grad": "yes"},
        {"requires_grad": True, "dtype": "int32"},
        {"entry": "w"},
        {"hex": 5},
        {"hex": None},
        {"hex": "zz" * 8},
        {"hex": "00" * 7},
        {"shape": [3]},
        {"stride": [2]},
        {"offset": 4},
    ],
    ids=json.dumps,
)
def test_a_leaf_that_cannot_have_been_written_is_refused(change):
    ((leaf, _),) = leaves_of({"w": LEAF})
    assert leaf.shape == (2,)
    with pytest.raises(CorruptFileError, match="'w' is not a valid 'tensor'"):
        list(leaves_of({"w": {**LEAF, **change}}))


@pytest.mark.parametrize(
    ("change", "stored_bytes", "fits"),
    [
        ({}, 8, True),
        ({}, 7, False),
        ({"stride": [5]}, 24, True),
        ({"stride": [5]}, 23, False),
        ({"offset": 4}, 12, True),
        ({"offset": 4}, 11, False),
        ({"stride": [0]}, 4, True),
        ({"shape": [0, 7]}, 0, True),
        ({"shape": []}, 4, True),
        ({"shape": [2**40], "stride": [2**40]}, 2**60, False),
        ({"$": "array", "dtype": "<f4"}, 8, True),
        ({"$": "array", "dtype": "<f4"}, 9, False),
    ],
    ids=str,
)
def test_a_leaf_stays_inside_the_memory_that_is_stored_for_it(change, stored_bytes, fits):
    node = {"$": "tensor", "dtype": "float32", "shape": [2], "entry": "e", **change}
    ((leaf, _),) = leaves_of({"w": node})
    if fits:
        check_fits(leaf, node, stored_bytes)
    else:
        with pytest.raises(CorruptFileError, match="'w' (needs|reaches beyond)"):
            check_fits(leaf, node, stored_bytes)


@pytest.mark.parametrize("dtype", ["O", "|O8", "f8,i4", "M8[fortnight]", "<V0", "float64", "numpy.int8", "(2,)f4", 3])
def test_an_array_has_a_dtype_of_plain_elements(dtype):
    with pytest.raises(ValueError, match="unknown NumPy dtype"):
        parse_numpy_dtype(dtype)


def test_a_structure_that_is_too_deep_is_refused_without_recursing_as_deep():
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for read in (lambda: unflatten(deep, []), lambda: list(leaves_of(deep)), lambda: drop(deep, matching(["x"]))):
        with pytest.raises(CorruptFileError, match="nested more than 100 levels deep"):
            read()
    with pytest.raises(CorruptFileError, match="nested more than 100 levels deep"):
        select(deep, matching(["x"]))


TAGS = [
    "tensor",
    "array",
    "tuple",
    "set",
    "frozenset",
    "dict",
    "OrderedDict",
    "TensorDict",
    "float",
    "complex",
    "bytes",
]
TAGS += ["bytearray", "numpy", "range", "slice", "path", "torch.dtype", "torch.device", "torch.Size", "object", "new"]
FUZZED_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.sampled_from(["<f8", "00" * 8, "float32", "cpu", "cuda:0", "bfloat16", "AA==", "state"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(
            lambda tag, members: {"$": tag, **members},
            st.sampled_from(TAGS),
            st.dictionaries(
                st.sampled_from(["v", "dtype", "shape", "hex", "entry", "stride", "offset", "batch_size", "metadata"]),
                inner,
                max_size=5,
            ),
        )
    ),
    max_leaves=12,
)


@given(FUZZED_VALUES)
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({"$": "dict", "v": [[{"$": "set", "v": []}, 1]]})
@example({"$": "dict", "v": [[{"$": "slice", "v": [1, 2, 3]}, 1]]})
@example({"$": "complex", "v": "ab"})
@example({"$": "numpy", "v": {"<f8": 1, "00": 2}})
@example({"$": "object", "v": "x"})
def test_fuzzed_structures_raise_nothing_but_our_errors(structure):
    matches = matching(["*a*", "x/*"])
    try:
        found = list(leaves_of(structure))
        for leaf, node in found:
            check_fits(leaf, node, 1000)
        unflatten(structure, [None] * len(found))
    except ERRORS:
        pass
    for function in (select, drop):
        try:
            function(structure, matches)
        except ERRORS:
            pass


@given(NESTED, st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_structure_with_one_node_exchanged_raises_nothing_but_our_errors(value, data):
    tree = flatten(value)
    structure = through_json(tree.structure)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, member in members:
            places.append((node, key))
            collect(member)

    collect(structure)
    if not places:
        return
    node, key = data.draw(st.sampled_from(places))
    node[key] = data.draw(FUZZED_VALUES)
    try:
        num_leaves = sum(1 for _ in leaves_of(structure))
        unflatten(structure, [None] * num_leaves)
    except ERRORS:
        pass


def test_a_dtype_name_never_imports_a_module():
    names = ["onnx", "_dynamo", "compiler", "os", "json.tool", "ml_dtypes.bfloat16", "turtle", "lib2to3.main"]
    script = f"""
import sys
import slipstream.tensors
from slipstream.errors import CorruptFileError
from slipstream.schema.structure import leaves_of
from slipstream.schema.unflatten import unflatten
before = set(sys.modules)
for name in {names!r}:
    for node in (
        {{"$": "torch.dtype", "v": name}},
        {{"$": "numpy", "v": [name, "00"]}},
        {{"$": "torch.device", "v": name}},
        {{"$": "tensor", "dtype": name, "shape": [1], "hex": "00"}},
        {{"$": "array", "dtype": name, "shape": [1], "hex": "00"}},
    ):
        try:
            list(leaves_of(node))
            unflatten(node, [], torch=slipstream.tensors.TORCH)
        except CorruptFileError:
            pass
        else:
            raise AssertionError(node)
assert set(sys.modules) == before, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", script], check=True)


def test_structures_with_torch_values_are_read_without_torch():
    script = """
import sys
from slipstream.schema.structure import leaves_of
from slipstream.schema.unflatten import unflatten
node = lambda tag, value: {"$": tag, "v": value}
structure = {
    "dtype": node("torch.dtype", "bfloat16"),
    "device": node("torch.device", "cuda:1"),
    "size": node("torch.Size", [2, -1]),
    "td": {"$": "TensorDict", "v": {"a": {"$": "tensor", "dtype": "bfloat16", "shape": [3], "entry": "w"}},
           "batch_size": [3]},
}
((leaf, _),) = leaves_of(structure)
assert (leaf.name, leaf.nbytes, leaf.carrier.str) == ("td/a", 6, "<u2")
value = unflatten(structure, ["the leaf"])
assert value == {"dtype": "bfloat16", "device": "cuda:1", "size": (2, -1), "td": {"a": "the leaf"}}, value
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


STATE = {
    "policy": OrderedDict([("actor.weight", np.ones(2)), ("critic.weight", np.zeros(3))]),
    "optimizer": {"state": {0: {"step": np.array(1)}, 1: {"step": np.array(2)}}, "lr": 0.1},
    "pair": (np.array([5]), {"optimizer": 6}),
    "lists": [np.array([7]), {"keep": 8}],
}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["policy"], ["policy/actor.weight", "policy/critic.weight"]),
        (["policy/actor*"], ["policy/actor.weight"]),
        (["optimizer/state/1"], ["optimizer/state/1/step"]),
        (["pair/0", "lists/0"], ["pair/0", "lists/0"]),
        (["*/step"], ["optimizer/state/0/step", "optimizer/state/1/step"]),
    ],
)
def test_select_keeps_the_branches_that_match(patterns, names):
    tree = flatten(STATE).select(matching(patterns))
    assert tree is not None
    whole = dict(flatten(STATE).values())
    assert [next(key for key, value in whole.items() if value is leaf) for leaf in tree.leaves] == [
        key for key in whole if "/".join(map(str, key)) in names
    ]
    back = unflatten(tree.structure, tree.leaves)
    assert type(back.get("policy", OrderedDict())) is OrderedDict
    assert type(back.get("pair", ())) is tuple


def test_select_of_nothing_is_none():
    assert flatten(STATE).select(matching(["polic", "optimizer/stat"])) is None


def test_drop_leaves_out_the_branches_that_match_wherever_they_are():
    tree = flatten(STATE)
    structure = drop(tree.structure, matching(["optimizer*", "*optimizer*", "policy/critic*", "lists/1"]))
    names = [leaf.name for leaf, _ in leaves_of(_with_content(structure))]
    assert names == ["policy/actor.weight", "pair/0", "lists/0"]
    back = unflatten(structure, ["a", "b", "c"])
    assert back == {"policy": {"actor.weight": "a"}, "pair": ("b", {}), "lists": ["c"]}
    assert len(tree.leaves) == 6


def _with_content(structure: Any) -> Any:
    """Return a structure whose leaves say where their content is, as those of files do."""
    text = json.dumps(structure).replace('"$": "array",', '"$": "array", "entry": "w",')
    return json.loads(text)


def test_values_lists_leaves_and_plain_values_by_key():
    values = list(flatten({"a": [1, {2: (3.5, None)}], "b": {4}, "c": np.ones(1), "empty": {}}).values())
    assert values[:4] == [(("a", 0), 1), (("a", 1, 2, 0), 3.5), (("a", 1, 2, 1), None), (("b",), {4})]
    assert values[4][0] == ("c",)


def test_more_leaves_than_nodes_is_an_error():
    with pytest.raises(ValueError, match="1 more leaves than the structure has nodes for"):
        unflatten({"a": 1}, [np.ones(1)])


def test_every_carrier_has_the_size_of_its_dtype_in_its_name():
    for name, dtype in DTYPES.items():
        digits = re.match(r"[a-z]+(\d+)", name)
        if digits and int(digits[1]) >= 8 and "x" not in name:
            assert dtype.itemsize == int(digits[1]) // 8, name
