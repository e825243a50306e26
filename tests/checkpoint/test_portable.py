"""Portable checkpoints: whatever a save accepts, the default load returns as it was; everything else is refused."""

import collections
import dataclasses
import enum
import functools
import math
import os
import pathlib
import subprocess
import sys
import types
from typing import Any, NamedTuple

import lz4.frame
import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from slipstream import AsyncCheckpointSaver, load_checkpoint
from slipstream.checkpoint.portable import format as portable
from slipstream.checkpoint.portable import torch_file
from slipstream.checkpoint.portable.format import PortableFormat, write_portable
from slipstream.codecs import bytes as lz4_frames
from slipstream.errors import CorruptFileError, UnsupportedStateError
from slipstream.schema.flatten import flatten


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Settings:
    width: int


class Color(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


class Scaled(torch.Tensor):
    pass


class Pretender:
    """Pickles itself as something else."""

    def __reduce__(self):
        return collections.OrderedDict, ()


@dataclasses.dataclass
class Later:
    """A value that is made in the test, because making it warns."""

    make: Any


def nest(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def with_metadata() -> collections.OrderedDict[str, Any]:
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert isinstance(state, collections.OrderedDict)
    return state


def quantized(per_channel: bool) -> torch.Tensor:
    values = torch.arange(6.0).reshape(2, 3)
    if per_channel:
        return torch.quantize_per_channel(values, torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0, torch.qint8)
    return torch.quantize_per_tensor(values, 0.1, 3, torch.quint8)


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.no_weight_decay = True  # type: ignore[attr-defined]
    return tensor


def float_quantized() -> torch.Tensor:
    scales = torch.tensor([0.1, 0.2])
    zero_points = torch.tensor([0.5, 1.5])
    return torch.quantize_per_channel(torch.ones(2, 3), scales, zero_points, 0, torch.quint8)


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)


def lazy_stack() -> Any:
    return LazyStackedTensorDict.lazy_stack(
        [TensorDict({"a": torch.ones(2)}, []), TensorDict({"a": torch.ones(3)}, [])]
    )


def matrix() -> Any:
    return np.asmatrix(np.eye(2))


def blocks(layout: torch.layout) -> torch.Tensor:
    return SPARSE.to_sparse(layout=layout, blocksize=(2, 2))


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def masked() -> Any:
    return np.ma.masked_array([1, 2, 3], mask=[False, True, False])


TENSOR_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.itemsize]
SMALL_DTYPES = [f"torch.int{bits}" for bits in range(1, 8)] + [f"torch.uint{bits}" for bits in range(1, 8)]
SPARSE = torch.eye(4, dtype=torch.float64) * torch.arange(4.0)
PLAIN_NUMPY = ["?", "b", "h", "i", "l", "B", "H", "I", "L", "e", "f", "d", "F", "D"]

ACCEPTED: dict[str, Any] = {
    "nothing": None,
    "bool": True,
    "negative": -5,
    "long int": 10**5_000,
    "long negative int": -(10**5_000),
    "float": 0.1,
    "nan": math.nan,
    "infinity": -math.inf,
    "complex": complex(math.nan, -0.0),
    "text": "héllo \U0001f600",
    "half a surrogate pair": "\ud83d",
    "split surrogate pair": "\ud83d\ude00",
    "empty text": "",
    "empty bytes": b"",
    "bytes": bytes(range(256)),
    "bytearray": bytearray(range(256)),
    "empty bytearray": bytearray(),
    "set": {1, "a", (2, 3)},
    "empty set": set(),
    "frozenset": frozenset([1, frozenset([2])]),
    "range": range(2, 10, 3),
    "long range": range(10**30),
    "slice": slice(None, 5, 2),
    "text slice": slice("a", "z"),
    "path": pathlib.Path("/tmp/a b"),
    "relative path": pathlib.Path("a/../b"),
    "empty path": pathlib.Path(),
    "pure path": pathlib.PurePosixPath("/tmp/x"),
    "windows path": pathlib.PureWindowsPath("c:\\x\\y"),
    "list": [1, [2, []]],
    "tuple": (1, (2, ())),
    "dict with odd keys": {1: "a", 2.5: "b", None: "c", (1, (2,)): "d", False: "e", b"k": "f", "$": "g"},
    "dict with a path as a key": {pathlib.PurePosixPath("a"): 1},
    "ordered dict": collections.OrderedDict(b=1, a=2),
    "ordered dict with metadata": with_metadata(),
    "counter": collections.Counter("abca"),
    "torch.dtype": torch.bfloat16,
    "torch.device": torch.device("cuda", 3),
    "torch.Size": torch.Size([2, -1]),
    "torch.layout": torch.sparse_csr,
    "numpy dtype": np.dtype(">f4"),
    "empty array": np.zeros((0, 3), np.int16),
    "scalar array": np.array(3.5),
    "fortran array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided array": np.arange(20)[::3],
    "big-endian array": np.arange(3, dtype=">i4"),
    "text array": np.array(["a", "bcd", "é"]),
    "bytes array": np.array([b"a", b"bcd"]),
    "void array": np.array([b"abc", b"de\0"], "V3"),
    "dates": np.array(["2020-01-01", "NaT"], "datetime64[D]"),
    "durations": np.array([1, 2], "timedelta64[25us]"),
    "generic durations": np.array([1, 2], "timedelta64"),
    "date": np.datetime64("2020-01-01T00:00", "ms"),
    "duration": np.timedelta64(7, "h"),
    "numpy text": np.str_("añ"),
    "empty numpy text": np.str_(""),
    "numpy bytes": np.bytes_(b"a\0"),
    "empty numpy bytes": np.bytes_(b""),
    "parameter": torch.nn.Parameter(torch.arange(3.0)),
    "frozen parameter": torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
    "tensor with gradients": torch.arange(3.0, requires_grad=True),
    "tensor with attributes": with_attribute(torch.arange(3.0, requires_grad=True)),
    "parameter with attributes": with_attribute(torch.nn.Parameter(torch.arange(3.0))),
    "buffer": torch.nn.Buffer(torch.arange(3.0)),
    "empty tensor": torch.zeros(2, 0, 3),
    "empty slice of an empty tensor": torch.zeros(0, 5)[:, 3:],
    "scalar tensor": torch.tensor(1.5),
    "transposed tensor": torch.arange(6.0).reshape(2, 3).t(),
    "conjugated tensor": torch.tensor([1 + 2j, 3j]).conj(),
    "sparse COO": Later(SPARSE.to_sparse),
    "uncoalesced": Later(uncoalesced),
    "sparse CSR": Later(SPARSE.to_sparse_csr),
    "sparse CSC": Later(SPARSE.to_sparse_csc),
    "sparse BSR": Later(functools.partial(blocks, torch.sparse_bsr)),
    "sparse BSC": Later(functools.partial(blocks, torch.sparse_bsc)),
    "quantized": Later(functools.partial(quantized, per_channel=False)),
    "quantized per channel": Later(functools.partial(quantized, per_channel=True)),
    "meta": torch.empty(3, 4, device="meta"),
    "generator state": torch.Generator().manual_seed(5).get_state(),
    "numpy generator state": np.random.default_rng(5).bit_generator.state,
    "TensorDict": TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.zeros(2)}}, [2]),
    "TensorDict with names": TensorDict({"a": torch.ones(2, 3)}, [2], names=["time"], device="cpu"),
    "nested TensorDicts with names": TensorDict(
        {"a": TensorDict({"x": torch.ones(2, 3)}, [2, 3], names=["time", "env"])}, [2], names=["time"]
    ),
    "empty TensorDict": TensorDict({}, [4]),
    "locked TensorDict": TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2]).lock_(),
    "TensorDict that was moved": TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2]).to("cpu"),
    "nested 200 levels": nest(200),
}
for _dtype in TENSOR_DTYPES:
    if not str(_dtype).startswith(("torch.q", "torch.bits")) and str(_dtype) not in SMALL_DTYPES:
        ACCEPTED[f"tensor of {_dtype}"] = torch.zeros(16, dtype=torch.uint8).view(_dtype)
for _code in PLAIN_NUMPY:
    ACCEPTED[f"array of {np.dtype(_code)}"] = np.arange(4).astype(_code)
    ACCEPTED[f"scalar of {np.dtype(_code)}"] = np.arange(4).astype(_code)[1]

REFUSED: dict[str, Any] = {
    "lambda": lambda: None,
    "partial": functools.partial(print, 1),
    "function": math.sqrt,
    "class": collections.OrderedDict,
    "module": math,
    "named tuple": Point(1, 2),
    "dataclass": Settings(3),
    "enum": Color.RED,
    "subclass of str": Text("a"),
    "namespace": types.SimpleNamespace(a=1),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "deque": collections.deque([1]),
    "pretender": Pretender(),
    "tensor subclass": torch.ones(3).as_subclass(Scaled),
    "jagged": Later(jagged),
    "float quantized": Later(float_quantized),
    "untyped storage": torch.ones(3).untyped_storage(),
    "generator": torch.Generator(),
    "numpy generator": np.random.default_rng(5),
    "nn.Module": torch.nn.Linear(2, 2),
    "object array": np.array([1, "a"], object),
    "structured array": np.zeros(3, [("a", "f4"), ("b", "i8")]),
    "record": np.zeros(3, [("a", "f4")])[0],
    "masked array": Later(masked),
    "matrix": Later(matrix),
    "lazy stack": Later(lazy_stack),
    "non-tensor data": TensorDict({"a": NonTensorData("text")}, []),
    "enum as a key": {Color.RED: 1},
    "enum in a set": {Color.RED},
    "class in a list": [dict],
    "nested 3,000 levels": nest(3_000),
}


def made(value: Any) -> Any:
    """Return a value of the tables."""
    if isinstance(value, Later):
        return value.make()
    return value


def bits(value: Any) -> Any:
    """Return something that is equal for values of the same type with the same bits."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, tensor_bits(value)
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, float | complex):
        return kind, np.array(value).tobytes()
    if isinstance(value, TensorDict):
        return (
            kind,
            value.batch_size,
            value.device,
            value.names,
            {key: bits(value.get(key)) for key in sorted(value.keys())},
        )
    if isinstance(value, dict):
        attributes = getattr(value, "__dict__", {}).items()
        return kind, [(bits(key), bits(member)) for key, member in [*value.items(), *attributes]]
    if isinstance(value, list | tuple):
        return kind, [bits(member) for member in value]
    return kind, value


def tensor_bits(tensor: torch.Tensor) -> Any:
    about = (tensor.dtype, tensor.shape, tensor.layout, tensor.requires_grad, tensor.device)
    tensor = tensor.detach()
    if tensor.is_meta:
        return about, tensor.stride()
    if tensor.is_quantized:
        return about, tensor.qscheme(), tensor_bits(tensor.int_repr()), tensor_bits(tensor.dequantize())
    if tensor.layout == torch.sparse_coo:
        return about, tensor.is_coalesced(), tensor_bits(tensor._indices()), tensor_bits(tensor._values())
    if tensor.layout != torch.strided:
        return about, tensor_bits(tensor.to_dense()), tensor_bits(tensor.values())
    view = (tensor.is_conj(), tensor.stride())
    # Torch cannot compare or copy elements of some dtypes, but it can copy the bytes that hold them.
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    return about, view, tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def resolved(value: Any) -> Any:
    """Return what a save promises to store: a tensor without lazy conjugation."""
    if isinstance(value, torch.Tensor) and value.is_conj():
        return value.resolve_conj()
    return value


def save(state: Any, path: pathlib.Path, **options: Any) -> pathlib.Path:
    """Save a state as a user does, and return the file."""
    with AsyncCheckpointSaver() as saver:
        return saver.save_async(state, path, **options).result().path


@pytest.mark.filterwarnings("ignore:Sparse C")
@pytest.mark.filterwarnings("ignore:Sparse B")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
class TestWhatCanBeStored:
    @pytest.mark.parametrize("name", ACCEPTED)
    def test_what_is_accepted_comes_back_with_the_same_type_and_bits(self, tmp_path, name):
        value = made(ACCEPTED[name])
        path = save({"some": {"where": value}}, tmp_path / "a.pt")
        assert bits(load_checkpoint(path)["some"]["where"]) == bits(resolved(value))

    @pytest.mark.parametrize("name", ACCEPTED)
    def test_what_torch_saved_comes_back_with_the_same_type_and_bits(self, tmp_path, name):
        value = made(ACCEPTED[name])
        torch.save([value, value], tmp_path / "a.pt")
        first, second = load_checkpoint(tmp_path / "a.pt")
        assert bits(first) == bits(value)
        assert bits(second) == bits(value)

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_the_default_load_would_refuse_is_refused_by_the_call_that_saves(self, tmp_path, name):
        state = {"some": {"where": made(REFUSED[name])}}
        expected = pytest.raises(UnsupportedStateError, match="weights_only=False to save_async and load_checkpoint")
        with AsyncCheckpointSaver() as saver, expected:
            saver.save_async(state, tmp_path / "a.pt")
        assert not list(tmp_path.iterdir())

    def test_the_error_names_the_key_and_the_class(self, tmp_path):
        state = {"model": torch.ones(3), "extra": [{"config": Settings(3)}]}
        with AsyncCheckpointSaver() as saver, pytest.raises(UnsupportedStateError) as caught:
            saver.save_async(state, tmp_path / "a.pt")
        assert str(caught.value).startswith("extra/0/config is a ")
        assert "Settings, which load_checkpoint refuses by default" in str(caught.value)
        assert "pass weights_only=False to save_async and load_checkpoint" in str(caught.value)

    @pytest.mark.parametrize("options", [{}, {"format": "native"}])
    def test_the_error_says_what_to_store_instead(self, tmp_path, options):
        with AsyncCheckpointSaver() as saver:
            with pytest.raises(
                UnsupportedStateError, match=r"model is a .*; store value\.state_dict\(\), or .*weights_only"
            ):
                saver.save_async({"model": torch.nn.Linear(2, 2)}, tmp_path / "a.pt", **options)
            with pytest.raises(
                UnsupportedStateError, match=r"a is a numpy.ndarray.*; store a dict with an array per field"
            ):
                saver.save_async({"a": np.zeros(3, [("x", "f4")])}, tmp_path / "a.pt", **options)

    @pytest.mark.parametrize("name", ["memmap", "longlong"])
    def test_what_pickle_would_turn_into_another_type_is_not_silently_changed(self, tmp_path, name):
        value: Any = np.longlong(3)
        if name == "memmap":
            value = np.memmap(tmp_path / "memory", np.float32, "w+", shape=(3,))
        with AsyncCheckpointSaver() as saver:
            try:
                path = saver.save_async({"a": value}, tmp_path / "a.pt").result().path
            except UnsupportedStateError as error:
                assert str(error).startswith("a is a ")
                return
        assert type(load_checkpoint(path)["a"]) is type(value)

    @pytest.mark.parametrize("name", ["named tuple", "dataclass", "enum", "defaultdict", "nn.Module", "object array"])
    def test_anything_that_can_be_pickled_is_saved_if_both_sides_trust_the_file(self, tmp_path, name):
        path = save({"a": REFUSED[name]}, tmp_path / "a.pt", weights_only=False)
        with pytest.raises(CorruptFileError, match="only running code from the file could load, which is refused"):
            load_checkpoint(path)
        assert type(load_checkpoint(path, weights_only=False)["a"]) is type(REFUSED[name])

    def test_jagged_tensors_and_subclasses_are_saved_if_both_sides_trust_the_file(self, tmp_path):
        state = {"jagged": jagged(), "scaled": REFUSED["tensor subclass"]}
        path = save(state, tmp_path / "a.pt", weights_only=False)
        back = load_checkpoint(path, weights_only=False)
        assert [part.tolist() for part in back["jagged"].unbind()] == [[1.0, 1.0], [1.0, 1.0, 1.0]]
        assert type(back["scaled"]) is Scaled

    def test_a_state_of_too_many_tensors_is_refused_by_the_call(self, monkeypatch):
        monkeypatch.setattr(portable, "MAX_TENSORS", 10)
        tree = flatten([torch.ones(1)] * 11, opaque=True)
        with pytest.raises(UnsupportedStateError, match="has 11 tensors, a .pt file takes at most 10"):
            PortableFormat(compress=True, level=0).check(tree)

    def test_a_state_of_too_many_text_and_date_scalars_is_refused_by_the_call(self, monkeypatch):
        monkeypatch.setattr(portable, "MAX_TENSORS", 10)
        state = {"rewards": list(np.ones(50)), "dates": list(np.zeros(6, "M8[s]")), "names": list(np.full(5, "a"))}
        expected = pytest.raises(UnsupportedStateError, match="^dates/0 is one of 11 .*; store an array instead")
        with AsyncCheckpointSaver() as saver, expected:
            saver.save_async(state, "never.pt")

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["M8[ms]", "f4"])
    def test_as_many_scalars_as_a_save_accepts_can_be_loaded(self, tmp_path, dtype):
        count = 1_040_000
        if dtype == "M8[ms]":
            count = portable.MAX_TENSORS
        scalars = list(np.arange(count).astype(dtype))
        back = load_checkpoint(save({"scalars": scalars}, tmp_path / "a.pt", compress=False))
        assert back["scalars"] == scalars

    def test_objects_that_only_together_are_too_many_are_refused_by_the_call(self, monkeypatch):
        monkeypatch.setattr(torch_file, "BASE_ALLOWANCE_BYTES", 1 << 20)
        tree = flatten([pathlib.PurePosixPath(f"run {number}") for number in range(9_000)], opaque=True)
        with pytest.raises(UnsupportedStateError, match="has 9,000 objects, .*; store fewer of them"):
            PortableFormat(compress=True, level=0).check(tree)

    def test_one_object_among_thousands_that_cannot_be_loaded_is_named(self):
        state: list[Any] = [pathlib.PurePosixPath("a")] * 5_000
        state[4_321] = Settings(3)
        with pytest.raises(UnsupportedStateError, match="^4321 is a .*Settings, which load_checkpoint refuses"):
            PortableFormat(compress=True, level=0).check(flatten(state, opaque=True))

    def test_an_array_that_occurs_twice_is_one_array_after_loading(self, tmp_path):
        array = np.arange(3)
        torch.save([array, array], tmp_path / "a.pt")
        first, second = load_checkpoint(tmp_path / "a.pt")
        assert first is second
        assert first.flags.writeable

    def test_tied_tensors_stay_tied_and_a_slice_stays_a_slice(self, tmp_path):
        weight = torch.arange(10.0)
        torch.save({"a": weight, "b": weight[2:4]}, tmp_path / "a.pt")
        back = load_checkpoint(tmp_path / "a.pt")
        back["a"][2] = 77
        assert back["b"][0] == 77

    @pytest.mark.parametrize("name", ["int1", "uint7"])
    def test_a_tensor_of_a_dtype_that_torch_cannot_save_is_refused_by_the_call(self, tmp_path, name):
        tensor = torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
        with AsyncCheckpointSaver() as saver, pytest.raises(UnsupportedStateError, match=f"a has dtype torch.{name}"):
            saver.save_async({"a": tensor}, tmp_path / "a.pt")

    def test_tensors_that_torch_cannot_save_together_are_refused_by_the_call(self, tmp_path):
        weight = torch.arange(10.0)
        with (
            AsyncCheckpointSaver() as saver,
            pytest.raises(UnsupportedStateError, match="b and a view the same memory"),
        ):
            saver.save_async({"a": weight, "b": weight.view(torch.int32)}, tmp_path / "a.pt")


class TestFiles:
    @pytest.mark.parametrize(("name", "compress", "expected"), [
        ("m.pt", False, "m.pt"),
        ("m.pt", True, "m.pt.lz4"),
        ("m.pt.lz4", True, "m.pt.lz4"),
        ("m.pt.lz4", False, "m.pt.lz4"),
        (".lz4", True, ".lz4.lz4"),
        (".lz4", False, ".lz4"),
    ])  # fmt: skip
    def test_the_suffix_is_added_once(self, tmp_path, name, compress, expected):
        assert save({"a": 1}, tmp_path / name, compress=compress) == tmp_path / expected
        assert [path.name for path in tmp_path.iterdir()] == [expected]
        assert load_checkpoint(tmp_path / name) == {"a": 1}

    def test_what_was_written_is_reported(self, tmp_path):
        written = write_portable(tmp_path / "a.pt", {"zeros": torch.zeros(100_000)}, compress=True)
        assert written.path == tmp_path / "a.pt.lz4"
        assert written.stored_bytes == written.path.stat().st_size
        assert written.raw_bytes > 400_000 > written.stored_bytes

    def test_torch_reads_it_without_us(self, tmp_path):
        path = save({"a": torch.arange(5.0)}, tmp_path / "a.pt", compress=False)
        assert torch.equal(torch.load(path, weights_only=True)["a"], torch.arange(5.0))
        packed = save({"a": torch.arange(5.0)}, tmp_path / "b.pt")
        (tmp_path / "plain.pt").write_bytes(lz4.frame.decompress(packed.read_bytes()))
        assert torch.equal(torch.load(tmp_path / "plain.pt", weights_only=True)["a"], torch.arange(5.0))

    def test_a_path_without_a_name_is_refused(self):
        for path in ("", ".", "/"):
            with pytest.raises(ValueError, match="expected the name of a file"):
                write_portable(path, {}, compress=True)

    def test_an_explicit_name_deletes_no_other_file(self, tmp_path):
        save({"a": 1}, tmp_path / "m.pt", compress=False)
        save({"a": 2}, tmp_path / "m.pt.lz4")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "m.pt.lz4"]

    def test_a_file_of_another_kind_is_not_deleted(self, tmp_path):
        (tmp_path / "m.lz4").write_bytes(b"notes of mine")
        save({"a": 1}, tmp_path / "m", compress=False)
        assert (tmp_path / "m.lz4").read_bytes() == b"notes of mine"

    def test_a_state_that_is_almost_constant_is_written_so_that_it_loads(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lz4_frames, "UNCHECKED_BYTES", 1 << 20)
        state: dict[str, Any] = {"replay": torch.zeros(6 << 20), "step": 7}
        written = write_portable(tmp_path / "a.pt", state, compress=True)
        assert written.raw_bytes / 33 < written.stored_bytes < written.raw_bytes / 30
        loaded = load_checkpoint(written.path)
        assert loaded["step"] == 7
        assert torch.equal(loaded["replay"], state["replay"])

    def test_a_crash_between_the_write_and_the_cleanup_leaves_the_newer_one_loadable(self, tmp_path):
        save({"step": 1}, tmp_path / "latest.pt", compress=False)
        script = (
            "import os, sys\n"
            "from slipstream import AsyncCheckpointSaver\n"
            "from pathlib import Path\n"
            "Path.unlink = lambda *arguments, **options: os._exit(9)\n"
            "with AsyncCheckpointSaver() as saver:\n"
            "    saver.save_async({'step': 2}, sys.argv[1])\n"
        )
        done = subprocess.run([sys.executable, "-c", script, tmp_path / "latest.pt"], check=False)
        assert done.returncode == 9
        assert {"latest.pt", "latest.pt.lz4"} <= set(os.listdir(tmp_path))
        assert load_checkpoint(tmp_path / "latest.pt") == {"step": 2}
