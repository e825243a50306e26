"""Converting and comparing checkpoints: `convert_checkpoint`, `compare_checkpoints`."""

import itertools
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from slipstream import (
    CheckpointManager,
    ConfigurationError,
    CorruptFileError,
    UnsupportedStateError,
    WriteError,
    load_checkpoint,
)
from slipstream.checkpoint.convert import convert_checkpoint
from slipstream.checkpoint.diff import compare_checkpoints, diff_states
from slipstream.checkpoint.formats import find_format
from slipstream.checkpoint.inspect import inspect_checkpoint
from slipstream.checkpoint.native import encode_metadata, write_native
from slipstream.checkpoint.portable.format import write_portable


def tensors() -> dict[str, Any]:
    shared = torch.arange(300.0)
    return {
        "a": {"w": shared, "tied": shared, "tail": shared[100:]},
        "list": [torch.arange(5), torch.ones(2, 3).half(), torch.ones(3, 2).bfloat16().t()],
    }


def delta(folder: Path) -> Path:
    """Save a few checkpoints, and return the last one, which is stored against another."""
    generator = torch.Generator().manual_seed(7)
    frozen = torch.randn(500, 300, generator=generator)
    with CheckpointManager(folder, keep_last=None, differential=True) as manager:
        for step in (100, 200, 300):
            manager.save(step, {"frozen": frozen, "step": step}, {"reward": step / 100}).wait()
    path = folder / "checkpoint_iter_300.slip"
    assert inspect_checkpoint(path).parents
    return path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class TestConvert:
    def test_all_formats_convert_into_each_other_without_a_bit_lost(self, tmp_path):
        write_native(tmp_path / "0.slip", tensors())
        chain = ["0.slip", "1.pt", "2.pt.lz4", "3.slip", "4.safetensors", "5.pt", "6.safetensors", "7.pt.lz4", "8.slip"]
        for source, target in itertools.pairwise(chain):
            converted = convert_checkpoint(tmp_path / source, tmp_path / target)
            assert (converted.path, converted.left_out) == (tmp_path / target, ())
            assert converted.file_bytes == (tmp_path / target).stat().st_size
        assert compare_checkpoints(tmp_path / "0.slip", tmp_path / "8.slip").are_equal

    def test_tied_tensors_stay_tied_where_the_format_can_hold_that(self, tmp_path):
        write_native(tmp_path / "a.slip", tensors())
        for name in ("b.pt", "b.pt.lz4", "b.slip"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / name)
            loaded = load_checkpoint(tmp_path / name)["a"]
            assert loaded["w"].data_ptr() == loaded["tied"].data_ptr() == loaded["tail"].data_ptr() - 400
        convert_checkpoint(tmp_path / "a.slip", tmp_path / "b.safetensors")
        assert set(load_file(tmp_path / "b.safetensors")) == {"a/w", "a/tied", "a/tail", "list/0", "list/1", "list/2"}

    def test_a_delta_becomes_whole_and_keeps_step_metrics_and_sequence(self, tmp_path):
        source = delta(tmp_path / "run")
        convert_checkpoint(source, tmp_path / "whole.slip")
        before = inspect_checkpoint(source)
        after = inspect_checkpoint(tmp_path / "whole.slip")
        assert after.parents == ()
        assert (after.step, after.metrics, after.sequence) == (300, {"reward": 3.0}, before.sequence)
        assert after.metadata == before.metadata
        assert compare_checkpoints(source, tmp_path / "whole.slip").are_equal

    def test_the_result_says_what_the_format_cannot_hold(self, tmp_path):
        source = delta(tmp_path / "run")
        assert convert_checkpoint(source, tmp_path / "a.pt").left_out == ("its metadata",)
        converted = convert_checkpoint(source, tmp_path / "a.safetensors", tensors_only=True)
        assert converted.left_out == ("1 value that is not a tensor", "its metadata")
        assert converted.describe().endswith(
            "read back and equal; without 1 value that is not a tensor and its metadata, which this format cannot hold"
        )

    def test_safetensors_refuses_what_is_not_a_tensor_by_name(self, tmp_path):
        write_native(tmp_path / "a.slip", {"w": torch.ones(3), "optimizer": {"lr": 0.5}})
        with pytest.raises(UnsupportedStateError, match="a.slip: 'optimizer/lr' is of type float"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / "out" / "a.safetensors")
        write_native(tmp_path / "b.slip", {"a": {"b": torch.ones(3)}, "a/b": torch.ones(3)})
        with pytest.raises(UnsupportedStateError, match="two tensors would be called 'a/b'"):
            convert_checkpoint(tmp_path / "b.slip", tmp_path / "out" / "b.safetensors")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("target", ["b.pt", "b.pt.lz4"])
    @pytest.mark.parametrize(
        "value",
        [
            TensorDict({"x": torch.ones(3)}, batch_size=[3]),
            Path("a/b"),
            frozenset({1, 2}),
            range(3),
            b"",
            1 << 5000,
            np.float32(0.5),
            np.ones((0, 3)),
            np.array(["text"]),
            OrderedDict(a=1),
            slice(1, 2),
            float("nan"),
            torch.float16,
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_whatever_a_native_file_holds_converts_to_what_loads_by_default_or_is_refused(
        self, tmp_path, value, target
    ):
        write_native(tmp_path / "a.slip", {"weight": torch.ones(3), "value": value})
        try:
            convert_checkpoint(tmp_path / "a.slip", tmp_path / target)
        except UnsupportedStateError as error:
            assert "value" in str(error)
            assert not (tmp_path / target).exists()
            return
        assert diff_states(load_checkpoint(tmp_path / "a.slip"), load_checkpoint(tmp_path / target)).are_equal

    def test_sparse_tensors_convert_between_pt_and_lz4_only(self, tmp_path):
        torch.save({"sparse": torch.eye(4).to_sparse()}, tmp_path / "a.pt")
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt.lz4")
        assert torch.equal(load_checkpoint(tmp_path / "b.pt.lz4")["sparse"].to_dense(), torch.eye(4))
        with pytest.raises(UnsupportedStateError, match="sparse"):
            convert_checkpoint(tmp_path / "a.pt", tmp_path / "c.slip")
        with pytest.raises(UnsupportedStateError, match="sparse"):
            convert_checkpoint(tmp_path / "a.pt", tmp_path / "c.safetensors")

    def test_an_existing_file_is_replaced_only_if_asked_for(self, tmp_path):
        write_native(tmp_path / "a.slip", tensors())
        target = tmp_path / "b.pt"
        target.write_text("precious")
        target.chmod(0o640)
        with pytest.raises(FileExistsError, match="exists already"):
            convert_checkpoint(tmp_path / "a.slip", target)
        assert target.read_text() == "precious"
        convert_checkpoint(tmp_path / "a.slip", target, overwrite=True)
        assert compare_checkpoints(tmp_path / "a.slip", target).are_equal
        assert target.stat().st_mode & 0o777 == 0o640

    def test_a_file_that_appears_during_the_conversion_is_not_replaced(self, tmp_path, monkeypatch):
        write_native(tmp_path / "a.slip", tensors())
        target = tmp_path / "b.pt"

        def write_beside(*arguments: Any, **options: Any) -> Any:
            target.write_text("precious")
            return write_portable(*arguments, **options)

        monkeypatch.setattr("slipstream.checkpoint.convert.write_portable", write_beside)
        with pytest.raises(FileExistsError):
            convert_checkpoint(tmp_path / "a.slip", target)
        assert target.read_text() == "precious"

    @pytest.mark.parametrize("target", ["b.slip", "b.pt", "b.pt.lz4", "b.safetensors"])
    def test_a_damaged_source_leaves_the_old_target_and_nothing_else(self, tmp_path, target):
        write_native(tmp_path / "a.slip", {"w": torch.randn(10_000)})
        damage(tmp_path / "a.slip")
        (tmp_path / target).write_text("precious")
        with pytest.raises(CorruptFileError):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / target, overwrite=True)
        assert (tmp_path / target).read_text() == "precious"
        assert sorted(os.listdir(tmp_path)) == ["a.slip", target]

    def test_a_target_that_reads_back_differently_is_not_published(self, tmp_path, monkeypatch):
        write_native(tmp_path / "a.slip", {"w": torch.randn(10_000)})

        def write_wrong(path: Path, _: Any, **options: Any) -> Any:
            return write_portable(path, {"w": torch.zeros(10_000)}, **options)

        monkeypatch.setattr("slipstream.checkpoint.convert.write_portable", write_wrong)
        with pytest.raises(CorruptFileError, match=r"b\.pt: was not written, because it reads back differently"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / "b.pt")
        assert os.listdir(tmp_path) == ["a.slip"]

    def test_the_format_is_that_of_the_suffix_unless_it_is_given(self, tmp_path):
        write_native(tmp_path / "a.slip", tensors())
        with pytest.raises(ConfigurationError, match=r"expected \.slip, \.pt, \.pt\.lz4 or \.safetensors"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / "b.bin")
        with pytest.raises(ConfigurationError, match="format is 'zip'"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / "b.bin", "zip")  # type: ignore[arg-type]
        assert convert_checkpoint(tmp_path / "a.slip", tmp_path / "b.bin", "lz4").format == "lz4"
        assert inspect_checkpoint(tmp_path / "b.bin").format == "lz4"
        assert convert_checkpoint(tmp_path / "b.bin", tmp_path / "c.pth").format == "pt"

    def test_the_source_that_was_named_is_converted_and_not_a_newer_twin(self, tmp_path):
        torch.save({"old": torch.ones(3)}, tmp_path / "a.pt")
        torch.save({"new": torch.ones(3)}, tmp_path / "a.pt.lz4")
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.slip")
        assert list(load_checkpoint(tmp_path / "b.slip")) == ["old"]

    def test_a_checkpoint_can_replace_itself_in_another_format(self, tmp_path):
        write_native(tmp_path / "a", tensors(), encode_metadata({"step": 3}))
        convert_checkpoint(tmp_path / "a", tmp_path / "a", "pt", overwrite=True)
        assert inspect_checkpoint(tmp_path / "a").format == "pt"

    def test_a_folder_as_target_and_a_folder_that_cannot_be_made_are_errors(self, tmp_path):
        write_native(tmp_path / "a.slip", tensors())
        with pytest.raises(IsADirectoryError, match="is a folder"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path, "pt")
        with pytest.raises(WriteError, match="cannot write"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / "a.slip" / "b.pt")

    def test_a_fifo_is_never_replaced(self, tmp_path):
        write_native(tmp_path / "a.slip", tensors())
        os.mkfifo(tmp_path / "b.pt")
        with pytest.raises(WriteError, match=r"cannot write .*b\.pt: it exists and is not a regular file"):
            convert_checkpoint(tmp_path / "a.slip", tmp_path / "b.pt", overwrite=True)
        assert (tmp_path / "b.pt").is_fifo()

    def test_the_suffix_of_a_link_stands_for_the_format(self, tmp_path):
        write_native(tmp_path / "a.slip", tensors())
        (tmp_path / "latest.pt").symlink_to(tmp_path / "blob")
        assert convert_checkpoint(tmp_path / "a.slip", tmp_path / "latest.pt").format == "pt"
        assert find_format(tmp_path / "blob") == "pt"


class TestCompare:
    def test_equal_means_every_bit(self):
        nan = torch.tensor([1.0, float("nan")])
        values = {"nan": nan, "zero": torch.tensor([0.0]), "lr": float("nan")}
        assert diff_states(values, {**values, "nan": nan.clone(), "lr": float("nan")}).are_equal
        changes = diff_states(values, {**values, "zero": torch.tensor([-0.0])})
        assert changes.describe() == ["differs: zero float32[1]: 1 of 1 elements, by up to 0"]
        assert not diff_states({"lr": 0.0}, {"lr": -0.0}).are_equal

    def test_differences_say_how_many_elements_and_by_how_much(self):
        a = {"moved": torch.zeros(10), "big": torch.tensor([-(2**62), 5]), "flag": torch.tensor([True, False])}
        b = {"moved": torch.tensor([0.0] * 8 + [-1.5, 0.5]), "big": torch.tensor([2**62, 5]), "flag": torch.ones(2) > 0}
        assert diff_states(a, b).describe() == [
            "differs: moved float32[10]: 2 of 10 elements, by up to 1.5",
            f"differs: big int64[2]: 1 of 2 elements, by up to {2**63}",
            "differs: flag bool[2]: 1 of 2 elements, by up to 1",
        ]

    def test_other_dtypes_and_shapes_differ_even_if_the_numbers_are_equal(self):
        a = {"cast": torch.ones(4).bfloat16(), "shape": torch.ones(2, 2), "kind": torch.ones(2)}
        b = {"cast": torch.ones(4), "shape": torch.ones(4), "kind": np.ones(2, np.float32)}
        assert diff_states(a, b).describe() == [
            "differs: cast bfloat16[4] -> float32[4]: 0 of 4 elements, by up to 0",
            "differs: shape float32[2, 2] -> float32[4]",
            "differs: kind float32[2] -> numpy float32[2]: 0 of 2 elements, by up to 0",
        ]

    def test_what_only_one_has_is_named(self):
        changes = diff_states(
            {"a": torch.ones(2).char(), "x": 1, "same": 5}, {"b": torch.ones(1), "y": None, "same": 5}
        )
        assert changes.describe() == [
            "only in A: a int8[2]",
            "only in B: b float32[1]",
            "value differs: x 1 -> is absent",
            "value differs: y is absent -> None",
        ]

    def test_a_tensor_in_place_of_a_value_is_a_difference(self):
        changes = diff_states({"x": torch.ones(2)}, {"x": 1})
        assert not changes.are_equal
        assert changes.describe() == ["only in A: x float32[2]", "value differs: x is absent -> 1"]

    @pytest.mark.parametrize(
        "dtype",
        ["bool", "uint8", "int64", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"],
    )
    def test_every_dtype_can_be_compared_also_if_it_is_not_contiguous(self, dtype):
        tensor = torch.arange(12).reshape(3, 4).remainder(2).to(getattr(torch, dtype)).t()
        assert diff_states({"w": tensor}, {"w": tensor.clone()}).are_equal
        flipped = tensor.contiguous().clone()
        flipped.view(torch.uint8).view(-1)[-1] ^= 1
        (change,) = diff_states({"w": tensor}, {"w": flipped}).differ
        assert change.num_differing == 1

    def test_arrays_of_text_and_dates_can_be_compared(self):
        a = {"text": np.array(["ab", "cd"]), "date": np.array(["2024-01-01"], "M8[D]"), "empty": np.ones((0, 3))}
        assert diff_states(a, {name: array.copy() for name, array in a.items()}).are_equal
        (change,) = diff_states(a, {**a, "text": np.array(["ab", "ce"])}).differ
        assert (change.num_differing, change.largest) == (1, None)

    def test_sparse_tensors_are_compared(self):
        a = {"w": torch.eye(3).to_sparse()}
        assert diff_states(a, {"w": torch.eye(3).to_sparse()}).are_equal
        assert not diff_states(a, {"w": (2 * torch.eye(3)).to_sparse()}).are_equal

    def test_large_objects_that_look_alike_are_told_apart(self):
        # Their text is abbreviated in the middle, where they differ.
        changed = torch.zeros(5000)
        changed[2500] = 1
        a = {"box": np.array([torch.zeros(5000), None], dtype=object)}
        b = {"box": np.array([changed, None], dtype=object)}
        assert not diff_states(a, b).are_equal

    def test_the_result_is_json_whatever_the_numbers(self):
        a = {"w": torch.tensor([1.0, 2.0]), "x": 1}
        b = {"w": torch.tensor([1.0, float("nan")]), "y": 2}
        document = json.loads(json.dumps(diff_states(a, b).to_json(), allow_nan=False))
        (change,) = document["differ"]
        assert (change["elements_differing"], change["max_abs_difference"]) == (1, "nan")
        assert document["values"] == {"x": {"a": "1", "b": None}, "y": {"a": None, "b": "2"}}

    def test_keys_that_differ_only_in_type_are_told_apart(self):
        a = {0: torch.ones(1), "0": torch.zeros(1)}
        assert diff_states(a, a).same == ("0", "0#2")

    def test_sets_are_equal_whatever_their_order(self):
        assert diff_states({"s": {"b", "a", "c"}}, {"s": {"c", "b", "a"}}).are_equal
        assert not diff_states({"s": {1, 2}}, {"s": {1, 3}}).are_equal
