"""Structures that come from files: nothing that they claim is trusted, and reading them needs no torch."""

import json
import re
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from slipstream.errors import CorruptFileError, FormatVersionError, MissingEntryError
from slipstream.schema.dtypes import DTYPES, parse_numpy_dtype
from slipstream.schema.flatten import flatten
from slipstream.schema.structure import check_fits, drop_keys, leaves_of, select_keys
from slipstream.schema.unflatten import unflatten
from slipstream.schema.walk import leaf_nodes
from tests.schema.roundtrip import through_json

ERRORS = (CorruptFileError, FormatVersionError)


def test_a_file_cannot_name_the_objects_of_a_process():
    with pytest.raises(FormatVersionError, match="a value of kind 'object'"):
        unflatten({"$": "object", "v": 0}, [])


# What a forged file may say. All of it is JSON.
LEAF = {"$": "tensor", "dtype": "float32", "shape": [2], "region": 0}
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
    {"$": "Counter", "v": [["a", 1], ["a", 2]]},
    {"$": "Counter", "v": [["a", 1]], "metadata": {}},
    {"$": "TensorDict", "v": [], "batch_size": []},
    {"$": "TensorDict", "v": {}, "batch_size": ["x"]},
    {"$": "TensorDict", "v": {"a": "text"}, "batch_size": []},
    {"$": "TensorDict", "v": {"a": {"b": 1}}, "batch_size": []},
    {"$": "TensorDict", "v": {"a": {"$": "dict", "v": [[{"$": "tuple", "v": []}, 1]]}}, "batch_size": []},
    {"$": "TensorDict", "v": {}},
    {"$": "TensorDict", "v": {}, "batch_size": [2], "names": "t"},
    {"$": "TensorDict", "v": {}, "batch_size": [2], "names": []},
    {"$": "TensorDict", "v": {}, "batch_size": [2], "names": [None]},
    {"$": "TensorDict", "v": {}, "batch_size": [2], "names": [3]},
    {"$": "TensorDict", "v": {}, "batch_size": [2], "names": ["t", "u"]},
    {"$": "TensorDict", "v": {}, "batch_size": [2], "device": None},
    {"$": "TensorDict", "v": {}, "batch_size": [2], "device": "Moon!"},
    {"$": "int", "v": 5},
    {"$": "int", "v": "5"},
    {"$": "int", "v": "0xF"},
    {"$": "int", "v": "0x1_0"},
    {"$": "int", "v": "0x"},
    {"$": "numpy", "v": ["<f16", "00" * 16]},
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
        {"region": -1},
        {"region": 0.0},
        {"region": True},
        {"region": None},
        {"region": "w"},
        {"region": [0]},
        {"region": 2**63},
        {"shape": [0]},
        {"shape": [2, 0]},
    ],
    ids=json.dumps,
)
def test_a_leaf_that_cannot_have_been_written_is_refused(change):
    ((leaf, _),) = leaves_of({"w": LEAF})
    assert leaf.shape == (2,)
    with pytest.raises(CorruptFileError, match="'w' is not a valid 'tensor'"):
        list(leaves_of({"w": {**LEAF, **change}}))


@pytest.mark.parametrize("tag", ["tensor", "array"])
def test_a_leaf_names_a_region_exactly_if_it_has_elements(tag):
    dtype = {"tensor": "float32", "array": "<f4"}[tag]
    empty = {"$": tag, "dtype": dtype, "shape": [3, 0]}
    ((leaf, _),) = leaves_of([empty])
    assert leaf.nbytes == 0
    check_fits(leaf, empty, 0)
    for node in ({**empty, "region": 0}, {**empty, "offset": 4}, {**empty, "shape": [3]}, {**empty, "shape": []}):
        with pytest.raises(CorruptFileError, match=f"'0' is not a valid '{tag}'"):
            list(leaves_of([node]))


def test_a_tensor_with_content_in_its_node_is_refused():
    for content in ({"hex": "00" * 8}, {"entry": "w"}):
        with pytest.raises(CorruptFileError, match="'0' is not a valid 'tensor'"):
            list(leaves_of([{"$": "tensor", "dtype": "float32", "shape": [2], **content}]))


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
        ({"shape": []}, 4, True),
        ({"shape": [2**40], "stride": [2**40]}, 2**60, False),
        ({"$": "array", "dtype": "<f4"}, 8, True),
        ({"$": "array", "dtype": "<f4"}, 9, False),
    ],
    ids=str,
)
def test_a_leaf_stays_inside_the_memory_that_is_stored_for_it(change, stored_bytes, fits):
    node = {"$": "tensor", "dtype": "float32", "shape": [2], "region": 3, **change}
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
    for read in (
        lambda: unflatten(deep, []),
        lambda: list(leaves_of(deep)),
        lambda: drop_keys(deep, "x"),
        lambda: select_keys(deep, "x"),
    ):
        with pytest.raises(CorruptFileError, match="nested more than 100 levels deep"):
            read()


TAGS = [
    "tensor",
    "array",
    "tuple",
    "set",
    "frozenset",
    "dict",
    "OrderedDict",
    "Counter",
    "TensorDict",
    "float",
    "complex",
    "bytes",
    "int",
]
TAGS += ["bytearray", "numpy", "range", "slice", "path", "torch.dtype", "torch.device", "torch.Size", "object", "new"]
FUZZED_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.sampled_from(["<f8", "00" * 8, "<m8", "0x5", "float32", "cpu", "cuda:0", "bfloat16", "AA==", "state"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(
            lambda tag, members: {"$": tag, **members},
            st.sampled_from(TAGS),
            st.dictionaries(
                st.sampled_from(
                    ["v", "dtype", "shape", "region", "stride", "offset", "batch_size", "names", "device", "metadata"]
                ),
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
@example({"$": "dict", "v": [[{"$": "numpy", "v": ["<m8", "00" * 8]}, 1]]})
@example({"$": "dict", "v": [[{"$": "int", "v": hex(10**5000)}, {"$": "tensor"}]]})
def test_fuzzed_structures_raise_nothing_but_our_errors(structure):
    try:
        found = list(leaves_of(structure))
        for leaf, node in found:
            check_fits(leaf, node, 1000)
        unflatten(structure, [None] * len(found))
    except ERRORS:
        pass
    for function in (select_keys, drop_keys):
        try:
            function(structure, ["*a*", "x/*", "x", ("a", 1)])
        except (*ERRORS, MissingEntryError):
            pass


STATE = {
    "policy": OrderedDict({"weight": np.ones(2), "bias": np.zeros(0)}),
    1: (2.5, {3: None}, frozenset({b"x"})),
    "rng": [np.float32(1), slice(1, 2), 10**1000],
    "td": TensorDict({"a": torch.ones(2, 3)}, [2], names=["t"], device="cpu"),
    (1, "x"): torch.nn.Parameter(torch.ones(3)),
}


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_structure_with_one_node_exchanged_raises_nothing_but_our_errors(data):
    structure = through_json(flatten(STATE).structure)
    for number, (_, node) in enumerate(leaf_nodes(structure)):
        if 0 not in node["shape"]:
            node["region"] = number
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, member in members:
            places.append((node, key))
            collect(member)

    collect(structure)
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
        {{"$": "tensor", "dtype": name, "shape": [1], "region": 0}},
        {{"$": "array", "dtype": name, "shape": [1], "region": 0}},
        {{"$": "TensorDict", "v": {{}}, "batch_size": [], "device": f"{{name}}!"}},
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
    "td": {"$": "TensorDict", "v": {"a": {"$": "tensor", "dtype": "bfloat16", "shape": [3], "region": 0}},
           "batch_size": [3], "names": ["time"], "device": "cuda:0"},
}
((leaf, _),) = leaves_of(structure)
assert (leaf.name, leaf.nbytes, leaf.carrier.str) == ("td/a", 6, "<u2")
value = unflatten(structure, ["the leaf"])
assert value == {"dtype": "bfloat16", "device": "cuda:1", "size": (2, -1), "td": {"a": "the leaf"}}, value
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


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
