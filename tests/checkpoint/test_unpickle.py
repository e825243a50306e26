"""Forged portable checkpoints: no code runs, nothing of the process changes, memory stays bounded, nothing crashes."""

import collections
import copyreg
import math
import pickle
import pickletools
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream import load_checkpoint
from slipstream.checkpoint.portable import torch_file
from slipstream.errors import CorruptFileError

HEAD = b"\x80\x02"


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def number(value: int) -> bytes:
    content = pickle.encode_long(value)
    return b"\x8a" + bytes([len(content)]) + content


def storage_id(key: str = "0", kind: str = "FloatStorage", count: int = 4) -> bytes:
    return b"(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(offset: int, shape: list[int], strides: list[int], **options: Any) -> bytes:
    """Return a pickle that builds a tensor over the storage of 16 bytes that every forged file has."""
    sizes = b"(" + b"".join(map(number, shape)) + b"t"
    steps = b"(" + b"".join(map(number, strides)) + b"t"
    arguments = storage_id(**options) + number(offset) + sizes + steps + b"\x89N"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def dtype(kind: str, state: bytes) -> bytes:
    """Return a pickle that builds a NumPy dtype and sets its state."""
    return name("numpy", "dtype") + text(kind) + b"\x89\x88\x87R" + state + b"b"


def array(element: bytes, content: bytes, count: int = 1) -> bytes:
    """Return a pickle that builds an array from a dtype and the pickle of its content."""
    bare = (
        name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85" + text("b") + b"\x87R"
    )
    return bare + b"(K\x01" + number(count) + b"\x85" + element + b"\x89" + content + b"tb"


def raw(content: bytes) -> bytes:
    return name("_codecs", "encode") + text(content.decode("latin1")) + text("latin1") + b"\x86R"


PLAIN_STATE = b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
# What makes any dtype one with a field of objects: NumPy would take the content of the array for pointers.
OBJECT_FIELD = (
    b"(K\x03" + text("|") + b"N" + text("a") + b"\x85}" + text("a")
    + name("numpy", "dtype") + text("O8") + b"\x89\x88\x87RK\x00\x86sK\x08K\x01K\x00t"
)  # fmt: skip


def forge(path: Path, content: bytes, *, compress: bool = False, members: dict[str, bytes] | None = None) -> Path:
    """Write a checkpoint whose pickle is `content`, and whose checksums match."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", np.arange(4, dtype="<f4").tobytes())
        for member, data in (members or {}).items():
            archive.writestr(member, data)
    if compress:
        path.write_bytes(lz4.frame.compress(path.read_bytes(), store_size=True))
    return path


def run_limited(script: str, path: Path, megabytes: int) -> str:
    """Run a script in a process that may take so much memory; return what it prints, and fail if it crashes."""
    limited = (
        "import resource, sys, torch, tensordict\n"
        "from slipstream import load_checkpoint\n"
        "from slipstream.errors import CorruptFileError\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + ({megabytes} << 20),) * 2)\n" + script
    )
    done = subprocess.run([sys.executable, "-c", limited, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


LOAD = "try:\n    load_checkpoint(sys.argv[1])\nexcept CorruptFileError as error:\n    print(error)\n"


CALLS = {
    "global": name("os", "system") + text("touch mark") + b"\x85R",
    "posix": name("posix", "system") + text("touch mark") + b"\x85R",
    "builtin": name("__builtin__", "eval") + text("open('mark', 'w')") + b"\x85R",
    "inst": b"(" + text("touch mark") + b"ios\nsystem\n",
    "obj": b"(" + name("os", "system") + text("touch mark") + b"o",
    "newobj": name("collections", "OrderedDict") + b")\x81",
    "newobj_ex": name("collections", "OrderedDict") + b")}\x92",
    "stack global": text("os") + text("system") + b"\x93" + text("touch mark") + b"\x85R",
    "dotted stack global": text("torch") + text("os.system") + b"\x93" + text("touch mark") + b"\x85R",
    "dotted global": name("torch", "os.system") + text("touch mark") + b"\x85R",
    "method of a class": name("collections", "OrderedDict.fromkeys") + b")R",
    "partial": name("functools", "partial") + name("os", "system") + b"\x85R",
    "getattr": name("__builtin__", "getattr") + name("torch", "Size") + text("__class__") + b"\x86R",
    "rebuild of any type": name("torch._tensor", "_rebuild_from_type_v2") + b")R",
    "storage with a file": name("torch", "FloatStorage") + text("mark") + b"\x85R",
    "untyped storage": name("torch.storage", "UntypedStorage") + number(10**12) + b"\x85R",
    "extension 1": b"\x82\x01",
    "extension 2": b"\x83\x01\x00",
    "extension 4": b"\x84\x01\x00\x00\x00",
    "a tensor is called": tensor(0, [2], [1]) + b")R",
    "dtype class": name("numpy.dtypes", "Float64DType") + b")R",
    "numpy load": name("numpy", "load") + text("x") + b"\x85R",
}
ATTRIBUTES = {
    "constructor": name("torch", "Size") + b"N}" + text("build") + b"Ns\x86b",
    "function of torch": name("torch._utils", "_rebuild_tensor_v2") + b"N}" + text("__code__") + b"Ns\x86b",
    "class": name("numpy", "ndarray") + b"}" + text("meaning") + b"Nsb",
    "tensor": tensor(0, [2], [1]) + b"}" + text("grad_fn") + b"Nsb",
    "tensor with slots": tensor(0, [2], [1]) + b"N}" + text("__class__") + b"Ns\x86b",
    "torch dtype": name("torch", "float32") + b"}" + text("itemsize") + b"K\x01sb",
    "finished NumPy dtype": dtype("f4", PLAIN_STATE) + OBJECT_FIELD + b"b",
    "finished array": array(dtype("f4", PLAIN_STATE), raw(bytes(4)))
    + b"(K\x01)"
    + dtype("f4", PLAIN_STATE)
    + b"\x89Ntb",
    "list": b"]}" + text("append") + b"Nsb",
    "method of a dict": name("collections", "OrderedDict") + b")R}" + text("items") + b"Nsb",
    "class of a dict": name("collections", "OrderedDict") + b")R}" + text("__class__") + b"Nsb",
    "slots of a dict": name("collections", "OrderedDict") + b")RN}" + text("x") + b"Ns\x86b",
    "persistent storage": storage_id() + b"}" + text("memory") + b"Nsb",
}
TENSORS = {
    "beyond the end": tensor(0, [5], [1]),
    "offset beyond the end": tensor(4, [1], [1]),
    "huge": tensor(0, [1 << 40], [1]),
    "overflowing": tensor(0, [1 << 62, 1 << 62], [0, 0]),
    "hidden by an empty axis": tensor(0, [0, 1 << 62, 1 << 62], [1, 1, 1]),
    "negative size": tensor(0, [-1], [1]),
    "negative stride": tensor(3, [2], [-1]),
    "negative offset": tensor(-1, [1], [1]),
    "stride beyond the end": tensor(0, [2], [1 << 60]),
    "too few strides": tensor(0, [2, 2], [1]),
    "many axes": tensor(0, [1] * 1000, [1] * 1000),
    "wider elements": tensor(0, [4], [1], kind="DoubleStorage"),
    "quantized without a scale": tensor(0, [4], [1], kind="QInt8Storage"),
    "missing storage": tensor(0, [4], [1], key="7"),
    "storage outside of the folder": tensor(0, [4], [1], key="../byteorder"),
}
NUMBERS = {
    "record with an object field": array(dtype("V8", OBJECT_FIELD), raw(bytes(range(8)))),
    "float with an object field": array(dtype("f8", OBJECT_FIELD), raw(bytes(range(8)))),
    "object dtype": array(dtype("O8", PLAIN_STATE), b"]"),
    "object content": array(dtype("f8", PLAIN_STATE), b"]K\x01a"),
    "built before it is used": dtype("f8", OBJECT_FIELD),
    "short content": array(dtype("f8", PLAIN_STATE), raw(bytes(7))),
    "long content": array(dtype("f8", PLAIN_STATE), raw(bytes(9))),
    "huge shape": array(dtype("f8", PLAIN_STATE), raw(bytes(8)), 1 << 60),
    "huge element": array(dtype("V999999999", PLAIN_STATE), raw(bytes(8))),
    "unfinished array in a list": b"]" + array(b"N", b"N")[: -len(b"(K\x01tb")] + b"a",
    "an array without a state": name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"))\x87R",
    "dtype without a state": name("numpy", "dtype") + text("f8") + b"\x89\x88\x87R",
    "an array of another class": name("numpy._core.multiarray", "_reconstruct") + name("torch", "Size") + b"))\x87R",
}
MACHINE = {
    "empty": b"",
    "nothing on the stack": b".",
    "no stop": b"]",
    "pop of nothing": b"a",
    "no mark": b"t",
    "below a mark": b"](Na",
    "memo with a gap": b"Nr\xff\xff\xff\xff0",
    "nothing in the memo": b"h\x05",
    "long text": b"X\xff\xff\xff\xffabc",
    "long integer": b"\x8b\xff\xff\xff\x7fabc",
    "negative length": b"\x8b\xff\xff\xff\xffabc",
    "frame": b"\x95" + b"\xff" * 8,
    "bytes of protocol 5": b"\x96" + b"\xff" * 8,
    "protocol 4": b"\x80\x04N",
    "decimal integer": b"I" + b"9" * 5000 + b"\n",
    "endless name": b"c" + b"a" * 100_000,
    "not UTF-8": b"X\x01\x00\x00\x00\xff",
    "persistent text": b"P0\n",
    "persistent number": b"K\x05Q",
    "persistent list": b"]Q",
    "persistent short tuple": b")Q",
    "persistent module": b"(" + text("module") + b"NNNNtQ",
    "persistent array": b"(" + array(dtype("f8", PLAIN_STATE), raw(bytes(16)), 2) + name("torch", "FloatStorage")
    + text("0") + text("cpu") + b"K\x04tQ",
    "unknown storage type": b"(" + text("storage") + name("numpy", "ndarray") + text("0") + text("cpu") + b"K\x04tQ",
    "key of a number": b"(" + text("storage") + name("torch", "FloatStorage") + b"K\x00" + text("cpu") + b"K\x04tQ",
    "list as a key": b"}]K\x01s",
    "list inside a key": b"}]\x85K\x01s",
    "tensor as a key": b"}" + tensor(0, [2], [1]) + b"K\x01s",
    "items of a tensor": tensor(0, [2], [1]) + b"K\x00K\x00s",
    "bytearray of a length": name("__builtin__", "bytearray") + number(10**12) + b"\x85R",
    "bytes of a length": name("__builtin__", "bytes") + number(10**12) + b"\x85R",
    "another encoding": name("_codecs", "encode") + text("a") + text("idna") + b"\x86R",
    "set of lists": name("__builtin__", "set") + b"]]a\x85R",
    "class in a slice": name("__builtin__", "slice") + name("torch", "Size") + b"NN\x87R",
    "class in a list": b"]" + name("torch", "Size") + b"a",
    "class in a tuple in a list": b"]" + name("torch", "Size") + b"\x85a",
    "class as a key": b"}" + name("torch", "Size") + b"Ns",
    "class as the result": name("torch", "Size"),
    "storage as the result": storage_id(),
    "storage in a dict": b"}" + text("a") + storage_id() + b"s",
    "sparse indices outside": name("torch._utils", "_rebuild_sparse_tensor")
    + name("torch.serialization", "_get_layout") + text("torch.sparse_coo")
    + b"\x85R(" + tensor(0, [1, 2], [2, 1], kind="LongStorage") + tensor(0, [2], [1]) + b"K\x02\x85\x89t\x86R",
    "a set with attributes of a tensor": name("torch._tensor", "_rebuild_from_type_v2") + b"("
    + name("__builtin__", "set") + name("torch", "Tensor") + b"]\x85}tR",
    "attributes of an array": name("torch._tensor", "_rebuild_from_type_v2") + b"("
    + name("torch", "Size") + name("numpy", "ndarray") + b")}tR",
    "attributes of attributes": name("torch._tensor", "_rebuild_from_type_v2") + b"q\x00" + name("torch", "Tensor")
    + b"q\x01\x86)q\x02" + b"(h\x00h\x01h\x02}tq\x02" * 5000 + b"h\x00h\x02R",
    "a device of another kind": name("torch", "device") + text("cpu; import os") + b"\x85R",
}  # fmt: skip


FORGED = {**CALLS, **{f"attributes of {key}": value for key, value in ATTRIBUTES.items()}, **TENSORS, **NUMBERS}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("compress", [False, True])
def test_a_forged_checkpoint_is_refused_and_changes_nothing(tmp_path, monkeypatch, forged, compress):
    monkeypatch.chdir(tmp_path)
    path = forge(tmp_path / "forged.pt", HEAD + forged + b".", compress=compress)
    before = snapshot_of_process()
    with pytest.raises(CorruptFileError, match=f"^{path}: "):
        load_checkpoint(path)
    assert not (tmp_path / "mark").exists()
    assert snapshot_of_process() == before


@pytest.mark.parametrize("forged", MACHINE.values(), ids=MACHINE)
def test_a_pickle_that_torch_does_not_write_is_refused(tmp_path, forged):
    for content in (HEAD + forged, HEAD + forged + b"."):
        path = forge(tmp_path / "forged.pt", content)
        if content.endswith(b"..") or forged in (b"", b"]"):
            continue
        with pytest.raises(CorruptFileError, match=f"^{path}: "):
            load_checkpoint(path)


def test_the_forged_pickles_are_otherwise_sound(tmp_path):
    """Without the attack, the same building blocks load: the attacks are refused for the right reason."""
    path = forge(tmp_path / "a.pt", HEAD + tensor(1, [3], [1]) + b".")
    assert load_checkpoint(path).tolist() == [1.0, 2.0, 3.0]
    # Torch accepts the file, too, so that it is a fair copy of a real one.
    assert torch.load(path, weights_only=True).tolist() == [1.0, 2.0, 3.0]
    path = forge(tmp_path / "a.pt", HEAD + array(dtype("f8", PLAIN_STATE), raw(np.float64(1.5).tobytes())) + b".")
    assert load_checkpoint(path).tolist() == [1.5]
    # Names of this shape are what `pickle` itself reads.
    assert pickletools.genops(HEAD + CALLS["global"] + b".")


def test_the_extension_registry_is_not_consulted(tmp_path, monkeypatch):
    """The standard unpickler returns what another one has cached, without asking for permission."""
    monkeypatch.chdir(tmp_path)
    copyreg.add_extension("os", "system", 77)
    try:
        pickle.loads(HEAD + b"\x82\x4d.")
        path = forge(tmp_path / "a.pt", HEAD + b"\x82\x4d" + text("touch mark") + b"\x85R.")
        with pytest.raises(CorruptFileError):
            load_checkpoint(path)
    finally:
        copyreg.remove_extension("os", "system", 77)
    assert not (tmp_path / "mark").exists()


def snapshot_of_process() -> Any:
    """Return what a hostile pickle might change: the allow-list of torch, and attributes of classes and functions."""
    return (
        torch.serialization.get_safe_globals(),
        dict(vars(collections.OrderedDict)),
        dict(vars(torch.Size)),
        dict(vars(torch._utils._rebuild_tensor_v2)),
        torch._utils._rebuild_tensor_v2.__code__,
        torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        list(torch._utils._sparse_tensors_to_validate),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_of_instructions_loads_or_is_refused(tmp_path, data):
    """Random programs of the machine raise nothing but `CorruptFileError`."""
    blocks = [*CALLS.values(), *ATTRIBUTES.values(), *TENSORS.values(), *NUMBERS.values(), *MACHINE.values()]
    blocks += [bytes([code]) for code in range(256)]
    blocks += [
        b"q\x00",
        b"h\x00",
        b"q\x01",
        b"h\x01",
        text("a"),
        b"]",
        b"}",
        b"(",
        b"t",
        b"a",
        b"e",
        b"s",
        b"u",
        b"R",
        b"b",
    ]
    parts = data.draw(st.lists(st.sampled_from(blocks), max_size=30))
    path = forge(tmp_path / "a.pt", HEAD + b"".join(parts) + b".")
    try:
        load_checkpoint(path)
    except CorruptFileError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)


DEEP = {
    "tuples": b"N" + b"\x85" * 300_000,
    "tuple as a key": b"}" + b"N" + b"\x85" * 300_000 + b"Ns",
    "tuple in a set": name("__builtin__", "set") + b"]N" + b"\x85" * 300_000 + b"a\x85R",
    "lists": b"]" * 300_000 + b"a" * 299_999,
    "dicts": b"}K\x01" * 100_000 + b"}" + b"s" * 100_000,
    "ordered dicts": name("collections", "OrderedDict") + b"q\x00)R"
    + b"K\x01h\x00)R" * 100_000 + b"s" * 100_000,
    "attributes": name("collections", "OrderedDict") + b"q\x00)R"
    + (b"}" + text("_x") + b"h\x00)R") * 100_000 + b"sb" * 100_000,
    "shared tuples as a key": b"}N" + b"q\x00h\x00\x86" * 60 + b"Ns",
    "counters": name("collections", "Counter")
    + b"q\x00}K\x01"
    + b"h\x00}K\x01" * 100_000
    + b"N"
    + b"s\x85R" * 100_001,
    "frozen sets": name("__builtin__", "frozenset") + b"q\x00]\x85R" + b"q\x01h\x00]h\x01a\x85R" * 300,
}  # fmt: skip


def test_deep_nesting_neither_crashes_nor_hangs(tmp_path):
    for key, program in DEEP.items():
        forge(tmp_path / f"{key}.pt", HEAD + program + b".")
    script = (
        "import pathlib\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    try:\n"
        "        load_checkpoint(path)\n"
        "    except CorruptFileError:\n"
        "        pass\n"
        "    print(path.stem)\n"
    )
    assert run_limited(script, tmp_path, 2000).splitlines() == sorted(DEEP)


def tensordicts() -> bytes:
    """Return TensorDicts in which every level contains the level below twice."""
    rest = (
        text("_batch_size") + name("torch", "Size") + b")\x85R" + text("_device") + b"N" + text("_td_dim_names") + b"N"
    )
    make = name("tensordict._reductions", "_make_td") + name("tensordict._td", "TensorDict")
    program = make + b"}(" + text("_tensordict") + b"}" + rest + b"u\x86Rq\x00"
    for _ in range(60):
        members = b"}(" + text("a") + b"h\x00" + text("b") + b"h\x00u"
        program += make + b"}(" + text("_tensordict") + members + rest + b"u\x86Rq\x00"
    return program


BOMBS = {
    "empty lists": b"(" + b"]" * (200 << 20) + b"t",
    "nothing": b"(" + b"N" * (300 << 20) + b"t",
    "marks": b"(" * (200 << 20),
    "copies of text": text("a" * (1 << 20)) + b"q\x00" + name("_codecs", "encode") + b"q\x01" + text("latin1")
    + b"q\x02(" + b"h\x01h\x00h\x02\x86R" * 100_000 + b"t",
    "sets of a list": b"](" + b"K\x01" * 100_000 + b"eq\x00" + name("__builtin__", "set") + b"q\x01("
    + b"h\x01h\x00\x85R" * 1_000_000 + b"t",
}  # fmt: skip


SLOW = ("empty lists", "nothing", "marks")


@pytest.mark.parametrize(
    "program", [pytest.param(key, marks=pytest.mark.slow) if key in SLOW else key for key in BOMBS]
)
def test_a_pickle_that_expands_is_refused_in_bounded_memory(tmp_path, program):
    path = forge(tmp_path / "bomb.pt", HEAD + BOMBS[program] + b".", compress=True)
    assert path.stat().st_size < 8 << 20
    # The content, the limit of 1.75 GiB, and three times the size of the content.
    assert "bytes, which is the limit" in run_limited(LOAD, path, 4000)


@pytest.mark.parametrize("block", [b"]", b"}", b"N", b"(", b"K\x01", b")\x85", b"N\x85"])
def test_every_instruction_counts(tmp_path, monkeypatch, block):
    monkeypatch.setattr(torch_file, "BASE_ALLOWANCE_BYTES", 1 << 20)
    path = forge(tmp_path / "bomb.pt", HEAD + block * 200_000 + b".")
    with pytest.raises(CorruptFileError, match="bytes, which is the limit"):
        load_checkpoint(path)


LONG = struct.pack("<I", 30_000) + b"a" * 30_000
KEYS = {
    "integer": b"\x8b" + LONG,
    "range": name("__builtin__", "range") + b"K\x00\x8b" + LONG + b"K\x01\x87R",
    "text": b"X" + LONG,
    "path": name("pathlib", "PurePosixPath") + b"X" + LONG + b"\x85R",
    "tuple": b"\x8b" + LONG + b"\x85",
}


@pytest.mark.parametrize("key", KEYS)
def test_the_time_that_long_keys_take_is_bounded(tmp_path, monkeypatch, key):
    monkeypatch.setattr(torch_file, "BASE_ALLOWANCE_BYTES", 1 << 20)
    # Two keys that are equal: the second one is compared with the first one whenever it is looked up.
    program = KEYS[key] + b"q\x00" + KEYS[key] + b"q\x01}h\x00Ns" + b"h\x01Ns" * 1000
    with pytest.raises(CorruptFileError, match="bytes, which is the limit"):
        load_checkpoint(forge(tmp_path / "keys.pt", HEAD + program + b"."))


@pytest.mark.parametrize("store_size", [True, False])
def test_a_small_file_that_expands_to_gigabytes_is_refused_in_little_memory(tmp_path, store_size):
    path = tmp_path / "bomb.pt.lz4"
    frame = lz4.frame.compress(bytes(64 << 20), store_size=store_size, block_size=lz4.frame.BLOCKSIZE_MAX4MB)
    path.write_bytes(frame * 84)
    assert path.stat().st_size < 35e6
    printed = run_limited(LOAD, path, 400)
    assert "hold 5637144576 bytes, more than the limit of" in printed
    assert "decompress it with `lz4 -d`" in printed


def test_an_archive_with_compressed_members_is_refused_in_little_memory(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(256 << 20))
    assert "'archive/data.pkl' is compressed" in run_limited(LOAD, path, 100)


def test_an_archive_whose_members_overlap_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
        first = archive.infolist()[0]
        # A directory may have many entries for one and the same member.
        for number_ in range(1000):
            copy = zipfile.ZipInfo(f"archive/data/{number_}")
            copy.header_offset = first.header_offset
            copy.file_size = first.file_size
            copy.compress_size = first.compress_size
            copy.CRC = first.CRC
            archive.filelist.append(copy)
    with pytest.raises(CorruptFileError, match="its members claim 1049624576 bytes, the file has"):
        load_checkpoint(path)


def test_a_directory_of_millions_of_entries_is_refused_in_bounded_memory(tmp_path):
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *[0] * 16)
    count = 4_000_000
    directory = entry * count
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), 4)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 4 + len(directory), 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path = tmp_path / "bomb.pt"
    path.write_bytes(lz4.frame.compress(b"PK\x03\x04" + directory + end64 + locator + end, store_size=True))
    assert "its directory has 184000000 bytes" in run_limited(LOAD, path, 600)


def test_tensordicts_that_share_members_do_not_take_exponential_time(tmp_path):
    path = forge(tmp_path / "shared.pt", HEAD + tensordicts() + b".")
    with pytest.raises(CorruptFileError, match="which is the limit"):
        load_checkpoint(path)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_torchscript_archive_is_refused_by_name(tmp_path, weights_only):
    path = forge(tmp_path / "a.pt", HEAD + b"N.", members={"archive/constants.pkl": HEAD + b")."})
    with pytest.raises(CorruptFileError, match="is a TorchScript archive, expected a checkpoint"):
        load_checkpoint(path, weights_only=weights_only)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_module_that_torchscript_saved_says_how_to_load_it(tmp_path, weights_only):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "a.pt")
    with pytest.raises(CorruptFileError, match="load it with torch.jit.load"):
        load_checkpoint(tmp_path / "a.pt", weights_only=weights_only)


@pytest.mark.parametrize("weights_only", [True, False])
def test_an_archive_of_another_library_is_refused_in_one_sentence(tmp_path, weights_only):
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    with pytest.raises(CorruptFileError, match="a.npz: .* not a checkpoint of torch.save: it has no member 'data.pkl'"):
        load_checkpoint(tmp_path / "a.npz", weights_only=weights_only)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_another_pickle_protocol_is_refused_with_a_workaround(tmp_path, protocol):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", pickle_protocol=protocol)
    with pytest.raises(CorruptFileError, match=f"has pickle protocol {protocol}, .* weights_only=False"):
        load_checkpoint(tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt", weights_only=False)["a"].sum() == 3


def test_very_long_integers_of_a_file_can_be_compared(tmp_path):
    torch.save({"seed": 3**20_000}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt")["seed"] == 3**20_000
    assert math.log2(load_checkpoint(tmp_path / "a.pt")["seed"]) > 30_000
