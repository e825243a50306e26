"""The closed list of what can be stored: what is on it comes back bit for bit, everything else is refused by name."""

import collections
import datetime as dt
import decimal
import enum
import math
import re
import struct
from collections import OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensordict
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictParams, tensorclass

from slipstream.errors import UnsupportedStateError
from slipstream.schema import writer
from slipstream.schema.flatten import flatten
from slipstream.schema.nodes import MAX_DEPTH
from slipstream.schema.unflatten import unflatten
from slipstream.tensors import TORCH
from tests.schema.roundtrip import bits, round_trip


class Colour(enum.IntEnum):
    RED = 1


class Mode(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    FAST = "fast"


class Whole(int):
    pass


class Name(str):  # noqa: SLOT000
    pass


class Real(float):
    pass


class Table(dict[str, int]):
    pass


class Tally(collections.Counter[str]):
    pass


class Sorted(OrderedDict[str, int]):
    pass


class Pair(NamedTuple):
    first: int
    second: int


class Scalar(np.float64):
    pass


class Grid(np.ndarray):
    pass


class Image(torch.Tensor):
    pass


class Folder(type(Path())):  # type: ignore[misc]
    pass


@tensorclass
class Point:
    x: torch.Tensor


def point() -> Any:
    make: Any = Point
    return make(x=torch.ones(2), batch_size=[2])


def from_bits(digits: str) -> float:
    (value,) = struct.unpack("<d", bytes.fromhex(digits))
    return value


def with_attributes(value: Any, **attributes: Any) -> Any:
    value.__dict__.update(attributes)
    return value


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def after_backward() -> torch.Tensor:
    tensor = torch.ones(3, requires_grad=True)
    (2 * tensor).sum().backward()
    return tensor


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def named_tensordict() -> TensorDict:
    inner = TensorDict({"c": torch.ones(3, 4)}, [3, 4], names=["time", "agent"])
    return TensorDict({"a": torch.zeros(3, 4), "b": inner}, [3], names=["time"], device="cpu")


def tensordict_with_names_that_contradict() -> TensorDict:
    value = TensorDict({"b": TensorDict({"c": TensorDict({}, [3, 4])}, [3, 4]), "d": TensorDict({}, [3])}, [3])
    value["d"].names = ["other"]
    value["b", "c"].names = [None, "deep"]
    return value


COMPLEX = torch.complex(torch.tensor([1.0, -0.0]), torch.tensor([-0.0, math.nan]))
SIGNALLING = from_bits("010203040506f47f")
QUIET = from_bits("010203040506fc7f")

STORED: dict[str, Any] = {
    # Python's own values.
    "none": None,
    "bool": True,
    "int": -3,
    "int of 64 bits": 2**64,
    "int of 2,000 bits": 2**2000 - 1,
    "int of 2,001 bits": -(2**2000),
    "int of 5,000 decimal digits": 10**5000,
    "float": -0.0,
    "smallest float": 5e-324,
    "infinity": -math.inf,
    "quiet NaN": QUIET,
    "signalling NaN": SIGNALLING,
    "complex": complex(-0.0, QUIET),
    "text": "naïve 😀 \0",
    "lone surrogate": "\ud800",
    "bytes": b"\0a\0",
    "no bytes": b"",
    "bytearray": bytearray(b"ab"),
    "range": range(10, 0, -3),
    "range of large numbers": range(0, 10**30, 10**29),
    "slice": slice(None, "label", True),
    "path": Path("runs/demo"),
    "path with a byte that is no UTF-8": Path("a\udc80"),
    # Containers.
    "nested tuples": ((), (1, (2.0,))),
    "set": {1, 2.5, "x", (1, frozenset())},
    "frozenset": frozenset(),
    "keys of many types": {1: 0, "1": 0, 2.5: 0, (1, (2,)): 0, None: 0, b"1": 0, Path("a"): 0, np.int64(7): 0},
    "bools as keys": {True: 1, 0: 2},
    "NaN as a key": {math.nan: 1, QUIET: 2},
    "dtype as a key": {torch.float32: 1},
    "keys that look like tags": {"$": {"$": "tensor", "v": 1}},
    "OrderedDict": OrderedDict(b=1, a=2),
    "Counter": collections.Counter("abca"),
    "Counter with other keys": collections.Counter({5: 1, (2, "x"): 3}),
    "OrderedDict with metadata": with_attributes(OrderedDict(a=1), _metadata=OrderedDict({"": {"version": 1}})),
    # NumPy's scalars.
    "empty NumPy text": np.str_(""),
    "empty NumPy bytes": np.bytes_(b""),
    "NumPy text that ends in NUL": np.str_("a\0\0"),
    "NumPy bytes that end in NUL": np.bytes_(b"a\0\0"),
    "NumPy text with a lone surrogate": np.str_("\ud800"),
    "float64": np.float64(-0.0),
    "float32 NaN": np.frombuffer(bytes.fromhex("0100a07f"), "<f4")[0],
    "float16 NaN": np.frombuffer(bytes.fromhex("017d"), "<f2")[0],
    "complex64": np.frombuffer(bytes.fromhex("0100a07f00000080"), "<c8")[0],
    "NumPy bool": np.bool_(True),
    "uint64": np.uint64(2**64 - 1),
    "big-endian scalar": np.array([5], ">i4")[0],
    "void scalar": np.void(b"abc"),
    "date": np.datetime64("2026-11-18", "D"),
    "date with a multiple of a unit": np.datetime64(5, ("s", 7)),
    "no date": np.datetime64("NaT"),
    "duration": np.timedelta64(5, ("ms", 3)),
    "duration without a unit": np.timedelta64(5),
    # NumPy's arrays.
    "array": np.arange(6.0).reshape(2, 3),
    "array without axes": np.array(7),
    "empty array": np.zeros((0, 3)),
    "empty text array": np.zeros(0, "U5"),
    "big-endian array": np.arange(3, dtype=">i4"),
    "big-endian text array": np.array(["ab", "c"], ">U2"),
    "array of empty text": np.array(["", ""]),
    "text array": np.array(["x", "yz", "\ud800"]),
    "bytes array": np.array([b"x", b"yz"]),
    "void array": np.frombuffer(b"abcdef", "V3"),
    "dates": np.array(["2026", "NaT"], "M8[Y]"),
    "big-endian dates": np.array(["2026"], ">M8[ms]"),
    "bool array": np.array([True, False]),
    "half array": np.array([1.5, -0.0], np.float16),
    "complex array": np.array([complex(-0.0, QUIET)]),
    "longlong array": np.arange(3, dtype=np.longlong),
    "read-only array": read_only(np.arange(3)),
    "Fortran order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided array": np.arange(10)[::-3],
    "broadcast array": np.broadcast_to(np.arange(3), (4, 3)),
    # Torch.
    "tensor": torch.arange(6.0).reshape(2, 3),
    "tensor without axes": torch.tensor(True),
    "empty tensor": torch.zeros(2, 0, 3),
    "transposed tensor": torch.arange(6).reshape(2, 3).t(),
    "expanded tensor": torch.arange(3).expand(4, 3),
    "conjugate view": COMPLEX.conj(),
    "negative view": COMPLEX.conj().imag,
    "bfloat16": torch.tensor([1.5, -0.0, math.nan], dtype=torch.bfloat16),
    "float8": torch.ones(3).to(torch.float8_e5m2),
    "float4": torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "int3": torch.arange(4, dtype=torch.uint8).view(TORCH.dtype("int3")),
    "tensor with a gradient": after_backward(),
    "result that requires gradients": 2 * torch.ones(3, requires_grad=True),
    "inference tensor": inference_tensor(),
    "tensor with an attribute": with_attributes(torch.ones(2), note="lost"),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "integer parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
    "buffer": torch.nn.Buffer(torch.ones(2)),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
    "size": torch.Size([2, -1]),
    # tensordict.
    "TensorDict": TensorDict({"a": torch.ones(2, 3), "b": {"$": torch.zeros(2)}}, [2]),
    "empty TensorDict": TensorDict({}, []),
    "TensorDict with names and a device": named_tensordict(),
    "TensorDict with an empty name": TensorDict({}, [3, 2], names=["", None]),
    "TensorDict with a device but no members": TensorDict({}, [3], device="cpu"),
    "TensorDict whose names contradict": tensordict_with_names_that_contradict(),
    "TensorDict of parameters": TensorDict({"p": torch.nn.Parameter(torch.ones(2))}, []),
    "state dict of a module": torch.nn.BatchNorm1d(2).state_dict(),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "object": (object(), "builtins.object, which cannot be stored as data; convert it to plain data"),
    "function": (print, "builtins.builtin_function_or_method"),
    "class": (int, "builtins.type"),
    "ellipsis": (..., "builtins.ellipsis"),
    "date": (dt.date(2026, 1, 1), "datetime.date"),
    "decimal": (decimal.Decimal(1), "decimal.Decimal"),
    "memoryview": (memoryview(b"a"), "store bytes(value)"),
    "integer enum": (Colour.RED, "store value.value"),
    "text enum": (Mode.FAST, "store value.value"),
    "subclass of int": (Whole(3), "store int(value)"),
    "subclass of float": (Real(3), "store float(value)"),
    "subclass of str": (Name("x"), "store str(value)"),
    "subclass of str as a key": ({Name("x"): 1}, "k/keys is a"),
    "both halves of a surrogate pair": ("\ud83d\ude00", "k is text with a split surrogate pair"),
    "both halves of a surrogate pair in a key": ({"\ud83d\ude00": 1}, "k/keys is text with a split surrogate pair"),
    "named tuple": (Pair(1, 2), "store tuple(value)"),
    "subclass of dict": (Table(a=1), "store dict(value)"),
    "defaultdict": (collections.defaultdict(list), "store dict(value)"),
    "subclass of Counter": (Tally("ab"), "store collections.Counter(value)"),
    "Counter with attributes": (with_attributes(collections.Counter(), note=1), "has the attributes note"),
    "deque": (collections.deque([1]), "store list(value)"),
    "subclass of OrderedDict": (Sorted(a=1), "store collections.OrderedDict(value)"),
    "OrderedDict with attributes": (with_attributes(OrderedDict(), note=1), "has the attributes note"),
    "slice of NumPy integers": (slice(np.int64(1)), "store a tuple of start, stop and step"),
    "slice of very long integers": (slice(2**2000), "store a tuple of start, stop and step"),
    "range of very long integers": (range(2**2000), "store a tuple of start, stop and step"),
    "pure path": (PurePosixPath("a"), "pathlib.PurePosixPath, which cannot be stored as data; store str(value)"),
    "path of another system": (PureWindowsPath("a"), "store str(value)"),
    "subclass of Path": (Folder("a"), "store str(value)"),
    "tensor as a key": ({torch.ones(1): 1}, "k/keys is a Tensor used as a key or in a set"),
    "tensor in a set": ({torch.ones(1)}, "k/members is a Tensor used as a key or in a set"),
    "object deep in a set": ({1, frozenset([print])}, "cannot be stored as data"),
    "longlong scalar": (np.longlong(5), "store value.item()"),
    "long double": (np.longdouble(1), "store numpy.float64(value)"),
    "complex long double": (np.clongdouble(1), "store numpy.complex128(value)"),
    "subclass of a NumPy scalar": (Scalar(1), "cannot be stored as data"),
    "record": (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0], "store a dict of its fields"),
    "structured scalar": (np.zeros(1, [("x", "f4")])[0], "store a dict of its fields"),
    "empty void scalar": (np.void(b""), "numpy.void"),
    "NumPy dtype": (np.dtype("f4"), "store value.str"),
    "object array": (np.array([{}], object), "k is a numpy.ndarray of object"),
    "structured array": (np.zeros(2, [("x", "f4")]), "store a dict with an array per field"),
    "text array of no characters": (np.zeros(2, [("x", "U0")])["x"], "numpy.ndarray of <U0"),
    "record array": (np.rec.array([(1,)], dtype=[("a", "i4")]), "store a dict with an array per field"),
    "masked array": (np.ma.array([1, 2], mask=[False, True]), "store value.data and value.mask"),
    "masked value": (np.ma.masked, "cannot be stored as data"),
    "matrix": (np.ones((1, 2)).view(np.matrix), "store numpy.asarray(value)"),
    "subclass of ndarray": (np.zeros(2).view(Grid), "store numpy.asarray(value)"),
    "long double array": (np.ones(2, np.longdouble), "store value.astype(numpy.float64)"),
    "array with metadata": (np.zeros(2, np.dtype("f4", metadata={"unit": "m"})), "store value.astype(value.dtype.str)"),
    "sparse tensor": (torch.ones(2).to_sparse(), "has layout torch.sparse_coo"),
    "meta tensor": (torch.ones(2, device="meta"), "is a meta tensor without data"),
    "tensor of 65 axes": (torch.ones([1] * 65), "has 65 axes, at most 64"),
    "subclass of Tensor": (torch.ones(2).as_subclass(Image), "store a plain torch.Tensor"),
    "uninitialized parameter": (torch.nn.UninitializedParameter(), "run a forward pass first"),
    "uninitialized buffer": (torch.nn.UninitializedBuffer(), "run a forward pass first"),
    "memory format": (torch.channels_last, "store str(value)"),
    "layout": (torch.strided, "store str(value)"),
    "generator": (torch.Generator(), "store value.get_state()"),
    "module": (torch.nn.Linear(1, 1), "store value.state_dict()"),
    "storage": (torch.ones(2).untyped_storage(), "torch.storage.UntypedStorage"),
    "lazy stack": (tensordict.lazy_stack([TensorDict({}, [])]), "store value.to_tensordict()"),
    "TensorDictParams": (TensorDictParams(TensorDict({}, [])), "store value.to_tensordict()"),
    "tensorclass": (point(), "store value.to_tensordict()"),
    "text in a TensorDict": (
        TensorDict({"s": NonTensorData("x")}, []),
        "k/s is a tensordict.tensorclass.NonTensorData",
    ),
    "lazy stack in a TensorDict": (TensorDict({"s": tensordict.lazy_stack([TensorDict({}, [])])}, []), "k/s is a"),
    "TensorDict with a key of a subclass": (TensorDict({Name("x"): torch.ones(1)}, []), "has the key or name 'x'"),
    "TensorDict with a key that JSON joins": (TensorDict({"\ud83d\ude00": torch.ones(1)}, []), "has the key or name"),
}
if hasattr(np.dtypes, "StringDType"):
    REFUSED["StringDType"] = (np.array(["a"], np.dtypes.StringDType()), "store value.astype(str)")


@pytest.mark.parametrize("name", STORED)
def test_what_is_on_the_list_comes_back_with_the_same_type_and_bits(name):
    state = {"k": STORED[name]}
    assert bits(round_trip(state)) == bits(state)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_on_the_list_is_refused_with_its_key_and_a_workaround(name):
    value, problem = REFUSED[name]
    with pytest.raises(UnsupportedStateError, match=re.escape(problem)) as caught:
        flatten({"k": value})
    assert re.match(r"k[/ ]", str(caught.value))
    assert re.search(r"; .*, or save as \.pt, with weights_only=False if necessary$", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*quantize.*are deprecated")
def test_quantized_tensors_are_refused():
    with pytest.raises(UnsupportedStateError, match=r"k is quantized.*; store value\.dequantize\(\)"):
        flatten({"k": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_nested_tensors_are_refused():
    with pytest.raises(UnsupportedStateError, match=r"k is a nested tensor.*; store value\.unbind\(\)"):
        flatten({"k": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])})
    with pytest.raises(UnsupportedStateError, match="k is a torch.nested|k has layout"):
        flatten({"k": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)})


def test_a_memory_map_is_refused_because_it_would_come_back_as_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(3,))
    with pytest.raises(UnsupportedStateError, match=r"k is a numpy\.memmap.*; store numpy\.array\(value\)"):
        flatten({"k": mapped})
    assert bits(round_trip({"k": np.array(mapped)})) == bits({"k": np.zeros(3, np.float32)})


def test_a_tensordict_comes_back_unlocked():
    assert not round_trip(TensorDict({"a": torch.ones(2)}, [2]).lock_()).is_locked


def test_a_tensordict_that_had_a_device_is_read_on_the_cpu_and_follows_its_members_if_they_are_moved():
    tree = flatten(named_tensordict())
    structure = {**tree.structure, "device": "cuda:3"}
    assert unflatten(structure, tree.leaves, torch=TORCH).device == torch.device("cpu")
    moved = [leaf.to("meta") for leaf in tree.leaves]
    assert unflatten(structure, moved, torch=TORCH).device == torch.device("meta")


def test_a_tensordict_without_names_and_device_says_nothing_about_them():
    assert flatten(TensorDict({}, [3])).structure == {"$": "TensorDict", "v": {}, "batch_size": [3]}
    structure = flatten(TensorDict({}, [3, 2], names=[None, "agent"], device="cpu")).structure
    assert structure["names"] == [None, "agent"]
    assert structure["device"] == "cpu"


def stored(name: str) -> Any:
    return STORED[name]


def refused(name: str) -> Any:
    return REFUSED[name][0]


SPLIT_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
TEXT = st.text(st.characters(), max_size=8).filter(lambda text: not SPLIT_PAIR.search(text))
HASHABLE_TYPES = (np.generic, int, float, complex, Path)
HASHABLE_NAMES = [name for name, value in STORED.items() if isinstance(value, HASHABLE_TYPES)]
# NumPy cannot hash these scalars.
HASHABLE_NAMES.remove("void scalar")
HASHABLE_NAMES.remove("duration without a unit")
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.binary(max_size=9)
    | st.sampled_from(HASHABLE_NAMES).map(stored),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
PLAIN = (
    HASHABLE
    | st.complex_numbers()
    | st.integers(2**64, 2**9000)
    | st.binary(max_size=9).map(bytearray)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-3, 1, 2]))
    | st.builds(slice, st.none() | st.integers(-(2**70), 2**70), st.none() | TEXT, st.none() | st.booleans())
    | TEXT.map(lambda text: Path(text.replace("\0", "")))
    | st.sets(HASHABLE, max_size=3)
    | st.sampled_from(sorted(STORED)).map(stored)
)


def nested(members: Any) -> Any:
    return st.recursive(
        members,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(HASHABLE | TEXT.map(lambda text: f"${text}"), inner, max_size=4)
            | st.dictionaries(HASHABLE, inner, max_size=4).map(OrderedDict)
            | st.dictionaries(HASHABLE, st.integers(), max_size=4).map(collections.Counter)
            | st.dictionaries(TEXT, inner, max_size=4)
        ),
        max_leaves=15,
    )


@given(nested(PLAIN))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({1: "int", "1": "text", 2.5: "float", (1, (2,)): "tuple", None: "none", b"1": "bytes"})
@example({"$": {"$": "tensor", "dtype": "float32"}})
def test_nested_data_comes_back_bit_for_bit(value):
    assert bits(round_trip(value)) == bits(value)


@given(nested(PLAIN | st.sampled_from(sorted(REFUSED)).map(refused)))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nested_data_is_either_refused_when_it_is_saved_or_comes_back_bit_for_bit(value):
    try:
        flatten(value)
    except UnsupportedStateError:
        return
    assert bits(round_trip(value)) == bits(value)


def nested_to(depth: int, kind: Any = OrderedDict) -> Any:
    """Return data nested to a depth; the worst case for JSON are dicts with keys that are not text."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else kind({0: value})
    return value


def test_data_as_deep_as_the_limit_comes_back_and_deeper_data_is_refused_when_it_is_saved():
    assert bits(round_trip(nested_to(MAX_DEPTH))) == bits(nested_to(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(UnsupportedStateError, match=f"is nested more than {MAX_DEPTH} levels deep"):
            flatten(nested_to(depth, list))


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
    monkeypatch.setattr(writer, "MAX_NODES", 1000)
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(
        UnsupportedStateError, match="too long for a state of at most 1,000 values; store long lists as"
    ):
        flatten(value)


@pytest.mark.parametrize("value", [list(range(998)), {number: number for number in range(498)}])
def test_a_state_of_as_many_values_as_the_limit_can_be_read(monkeypatch, value):
    monkeypatch.setattr(writer, "MAX_NODES", 1000)
    monkeypatch.setattr("slipstream.schema.nodes.MAX_NODES", 1000)
    assert round_trip([value]) == [value]
    with pytest.raises(UnsupportedStateError, match="is too long for a state"):
        flatten([value, {0: 0}])


@pytest.mark.parametrize(
    ("small", "large"),
    [("x" * 900, "x" * 1001), (b"x" * 700, b"x" * 800), ("é" * 80, "é" * 90), (np.str_("x" * 100), np.str_("x" * 130))],
)
def test_text_and_bytes_that_no_index_can_hold_are_refused_when_they_are_saved(monkeypatch, small, large):
    monkeypatch.setattr(writer, "MAX_CHARACTERS", 1000)
    assert bits(round_trip({"k": small})) == bits({"k": small})
    for value in (large, [small, small]):
        with pytest.raises(
            UnsupportedStateError, match="^k.* exceeds 1,000 characters of text .*store large ones as arr"
        ):
            flatten({"k": value})


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


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_in_files_passes_through_as_an_object_in_the_same_process(name):
    value, _ = REFUSED[name]
    tree = flatten({"k": value}, opaque=True)
    back = unflatten(tree.structure, tree.leaves, tree.objects, TORCH)
    assert type(back["k"]) is type(value)
