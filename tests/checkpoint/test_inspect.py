"""Listing and verifying checkpoints: `inspect_checkpoint`, `inspect_folder`, `verify_checkpoint`, `verify_folder`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream import CheckpointManager, CorruptFileError, load_checkpoint, write_container
from slipstream.checkpoint.formats import find_format
from slipstream.checkpoint.inspect import inspect_checkpoint, inspect_folder
from slipstream.checkpoint.layout import TABLE, Header, RegionTable, digest_of
from slipstream.checkpoint.native import encode_metadata, write_native
from slipstream.checkpoint.verify import verify_checkpoint, verify_folder
from slipstream.codecs import Raw

STEPS = (100, 200, 300, 400)


def state(step: int) -> dict[str, Any]:
    """A frozen tensor, and one that changes a little; both are large enough to have an entry each."""
    generator = torch.Generator().manual_seed(7)
    frozen = torch.randn(500, 300, generator=generator)
    weight = torch.randn(500, 300, generator=generator) + step * 1e-6
    return {"frozen": frozen, "policy": {"weight": weight, "tied": weight}, "step": torch.tensor(step), "lr": 0.25}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with CheckpointManager(folder, keep_last=None, differential=True) as manager:
        for step in STEPS:
            manager.save(step, state(step), {"reward": step / 100}).wait()
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A folder of four checkpoints; 300 is stored against 200, and 400 against 300."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def file_of(run: Path, step: int) -> Path:
    return run / f"checkpoint_iter_{step}.slip"


def damage(path: Path, at: int = 40) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def by_name(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in inspect_checkpoint(path).tensors}


class TestInspect:
    def test_a_whole_checkpoint_is_listed_with_its_identity_sequence_and_metrics(self, run):
        listing = inspect_checkpoint(file_of(run, 100))
        assert (listing.format, listing.step, listing.sequence) == ("native", 100, 1)
        assert listing.metrics == {"reward": 1.0}
        assert (listing.parents, listing.thinned) == ((), ())
        assert listing.identity
        # The tied tensor counts once.
        assert listing.raw_bytes == 2 * 600_000 + 8
        assert listing.file_bytes == file_of(run, 100).stat().st_size

    def test_every_tensor_has_its_dtype_shape_size_and_digest(self, run):
        tensors = by_name(file_of(run, 100))
        weight = tensors["policy/weight"]
        assert (weight.dtype, weight.shape, weight.nbytes) == ("float32", (500, 300), 600_000)
        assert 0 < weight.stored_bytes < 600_000
        assert not weight.is_packed_with_others
        assert tensors["policy/tied"].codec == "tied"
        assert tensors["policy/tied"].stored_bytes is None
        assert tensors["policy/tied"].digest == weight.digest
        assert len(bytes.fromhex(weight.digest)) == 16
        assert weight.digest != tensors["frozen"].digest

    def test_equal_tensors_have_equal_digests_in_different_files(self, run):
        before = by_name(file_of(run, 100))
        after = by_name(file_of(run, 400))
        assert before["frozen"].digest == after["frozen"].digest
        assert before["policy/weight"].digest != after["policy/weight"].digest

    def test_a_delta_is_listed_with_its_parents_even_if_they_are_missing(self, run, tmp_path):
        shutil.copy(file_of(run, 400), tmp_path / "alone.slip")
        listing = inspect_checkpoint(tmp_path / "alone.slip")
        assert [parent.file for parent in listing.parents] == ["checkpoint_iter_300.slip", "checkpoint_iter_200.slip"]
        tensors = by_name(tmp_path / "alone.slip")
        assert (tensors["frozen"].codec, tensors["frozen"].stored_bytes) == ("same", None)
        assert tensors["policy/weight"].codec == "difference"

    def test_small_tensors_share_what_they_take_in_the_file(self, tmp_path):
        small = {f"w{number}": torch.randn(1000) for number in range(10)}
        write_native(tmp_path / "a.slip", small)
        listing = inspect_checkpoint(tmp_path / "a.slip")
        assert all(tensor.is_packed_with_others for tensor in listing.tensors)
        assert sum(tensor.stored_bytes or 0 for tensor in listing.tensors) < listing.file_bytes

    def test_metadata_has_the_form_that_json_can_hold(self, tmp_path):
        metadata = {"nan": float("nan"), "bytes": b"abc", "set": {1}, 5: (np.float32(0.5), None), "path": Path("a/b")}
        write_native(tmp_path / "a.slip", {"w": torch.ones(3)}, encode_metadata(metadata))
        assert inspect_checkpoint(tmp_path / "a.slip").metadata == {
            "nan": "nan",
            "bytes": "YWJj",
            "set": [1],
            "5": [0.5, None],
            "path": "a/b",
        }

    def test_empty_tensors_arrays_and_unusual_dtypes_are_listed(self, tmp_path):
        write_native(
            tmp_path / "a.slip",
            {"empty": torch.ones(0, 3), "half": torch.ones(5).bfloat16(), "array": np.ones((2, 3))},
        )
        tensors = by_name(tmp_path / "a.slip")
        assert (tensors["empty"].shape, tensors["empty"].codec, tensors["empty"].digest) == ((0, 3), "-", None)
        assert tensors["half"].dtype == "bfloat16"
        assert (tensors["array"].dtype, tensors["array"].shape) == ("numpy float64", (2, 3))

    def test_other_formats_are_listed_without_codecs_and_digests(self, tmp_path):
        weight = torch.ones(3, 2)
        torch.save({"a": {"w": weight, "tied": weight}}, tmp_path / "a.pt")
        listing = inspect_checkpoint(tmp_path / "a.pt")
        assert (listing.format, listing.raw_bytes, listing.identity) == ("pt", 24, None)
        assert [(tensor.name, tensor.codec) for tensor in listing.tensors] == [("a/w", "-"), ("a/tied", "tied")]

    def test_the_file_that_was_named_is_listed_and_not_a_newer_twin(self, tmp_path):
        torch.save({"old": torch.ones(3)}, tmp_path / "a.pt")
        torch.save({"new": torch.ones(3)}, tmp_path / "a.pt.lz4")
        assert list(by_name(tmp_path / "a.pt")) == ["old"]

    @pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 100])
    def test_what_is_not_a_checkpoint_is_an_error_that_names_the_file(self, tmp_path, content):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(CorruptFileError, match=str(tmp_path / "a")):
            inspect_checkpoint(tmp_path / "a")

    def test_a_leaf_that_does_not_fit_its_region_is_an_error(self, tmp_path):
        forge(tmp_path / "a.slip", {"w": {"$": "tensor", "dtype": "float32", "shape": [9], "region": 0}})
        with pytest.raises(CorruptFileError, match="'w' reaches beyond"):
            inspect_checkpoint(tmp_path / "a.slip")
        forge(tmp_path / "b.slip", {"w": {"$": "tensor", "dtype": "float32", "shape": [1], "region": 5}})
        with pytest.raises(CorruptFileError, match="'w' is in region 5 of 1"):
            inspect_checkpoint(tmp_path / "b.slip")


class TestInspectFolder:
    def test_checkpoints_are_listed_in_the_order_of_saves_whatever_their_steps_and_names(self, run):
        with CheckpointManager(run, keep_last=None) as manager:
            manager.save(50, state(50)).wait()
        file_of(run, 400).rename(run / "best.slip")
        listing = inspect_folder(run)
        assert [checkpoint.step for checkpoint in listing.checkpoints] == [100, 200, 300, 400, 50]
        assert [checkpoint.sequence for checkpoint in listing.checkpoints] == [1, 2, 3, 4, 5]
        assert listing.unreadable == {}

    def test_unreadable_files_are_listed_with_the_reason(self, run):
        file_of(run, 200).write_bytes(b"")
        (run / "gone.slip").symlink_to(run / "nothing")
        listing = inspect_folder(run)
        assert [checkpoint.step for checkpoint in listing.checkpoints] == [100, 300, 400]
        assert {path.name for path in listing.unreadable} == {"checkpoint_iter_200.slip", "gone.slip"}
        assert all(listing.unreadable.values())

    def test_containers_of_another_kind_are_not_checkpoints(self, run):
        with write_container(run / "rollout.slip", kind="rollout") as writer:
            writer.add("x", np.ones(3))
        listing = inspect_folder(run)
        assert len(listing.checkpoints) == 4
        assert listing.unreadable == {}
        assert all(result.is_sound for result in verify_folder(run))

    def test_a_folder_without_checkpoints_is_an_error(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="contains no checkpoint"):
            inspect_folder(tmp_path)
        with pytest.raises(FileNotFoundError):
            inspect_folder(tmp_path / "absent")


class TestVerify:
    def test_sound_checkpoints_are_sound_with_all_their_parents(self, run):
        results = {result.path: result for result in verify_folder(run)}
        assert all(result.is_sound for result in results.values())
        assert [results[file_of(run, step)].num_parents for step in STEPS] == [0, 0, 1, 2]
        assert results[file_of(run, 100)].num_regions == 3
        assert results[file_of(run, 400)].num_regions == 9

    def test_a_flipped_byte_names_the_tensor(self, run):
        damage(file_of(run, 100))
        result = verify_checkpoint(file_of(run, 100))
        assert not result.is_sound
        assert result.problems[0].startswith(f"{file_of(run, 100)}: entry 'frozen' is damaged in chunk 1 of ")

    def test_any_flipped_byte_is_found(self, run):
        original = file_of(run, 400).read_bytes()
        for at in range(0, len(original), len(original) // 40):
            file_of(run, 400).write_bytes(original)
            damage(file_of(run, 400), at)
            assert not verify_checkpoint(file_of(run, 400)).is_sound, at

    def test_content_that_decodes_to_something_else_is_found_although_all_checksums_match(self, tmp_path):
        # As a bug in a codec, or a wrong floating-point mode, would write it.
        forge(tmp_path / "a.slip", {"w": {"$": "tensor", "dtype": "float32", "shape": [4], "region": 0}}, wrong=True)
        result = verify_checkpoint(tmp_path / "a.slip")
        assert len(result.problems) == 1
        assert "entry 'e' does not match its digest after decoding" in result.problems[0]

    def test_damage_in_a_parent_is_reported_once_and_names_the_parent(self, run):
        damage(file_of(run, 200))
        result = verify_checkpoint(file_of(run, 400))
        assert len(result.problems) == 1
        assert result.problems[0].startswith(f"{file_of(run, 200)}: entry 'frozen'")
        sound = [verification.is_sound for verification in verify_folder(run)]
        assert sound == [True, False, False, False]

    def test_a_missing_parent_says_which_files_are_needed(self, run, tmp_path):
        shutil.copy(file_of(run, 400), tmp_path / "alone.slip")
        (problem,) = verify_checkpoint(tmp_path / "alone.slip").problems
        assert "checkpoint_iter_300.slip" in problem
        assert "checkpoint_iter_200.slip" in problem
        file_of(run, 200).unlink()
        (problem,) = verify_checkpoint(file_of(run, 400)).problems
        assert "checkpoint_iter_200.slip, which is missing" in problem

    def test_own_damage_is_found_even_if_a_parent_is_missing(self, run, tmp_path):
        shutil.copy(file_of(run, 400), tmp_path / "alone.slip")
        damage(tmp_path / "alone.slip")
        problems = verify_checkpoint(tmp_path / "alone.slip").problems
        assert len(problems) == 2
        assert "missing" in problems[0]
        assert "does not match" in problems[1] or "do not match" in problems[1]

    def test_a_renamed_parent_is_found(self, run):
        file_of(run, 200).rename(run / "renamed.slip")
        assert verify_checkpoint(file_of(run, 400)).is_sound

    def test_one_unreadable_file_does_not_keep_others_from_being_verified(self, run):
        file_of(run, 100).write_bytes(b"")
        (run / "gone.slip").symlink_to(run / "nothing")
        os.mkfifo(run / "pipe.slip")
        sound = {result.path.name: result.is_sound for result in verify_folder(run)}
        assert sound == {
            "gone.slip": False,
            "pipe.slip": False,
            "checkpoint_iter_100.slip": False,
            "checkpoint_iter_200.slip": True,
            "checkpoint_iter_300.slip": True,
            "checkpoint_iter_400.slip": True,
        }

    def test_progress_reaches_the_end_of_every_file(self, run):
        calls: list[tuple[Path, int, int]] = []

        def note(path: Path, num_done: int, num_total: int) -> None:
            calls.append((path, num_done, num_total))

        assert verify_checkpoint(file_of(run, 400), note).is_sound
        finished = {path for path, num_done, num_total in calls if num_done == num_total}
        assert finished == {file_of(run, step) for step in (200, 300, 400)}

    @pytest.mark.parametrize("name", ["a.pt", "a.pt.lz4", "a.safetensors"])
    def test_other_formats_are_verified_as_far_as_they_have_checksums(self, tmp_path, name):
        from slipstream.checkpoint.convert import convert_checkpoint

        save_file({"w": torch.arange(5000.0)}, tmp_path / "source.safetensors")
        convert_checkpoint(tmp_path / "source.safetensors", tmp_path / name)
        result = verify_checkpoint(tmp_path / name)
        assert result.is_sound
        assert result.has_checksums == (name != "a.safetensors")

    def test_a_file_that_would_have_to_run_code_is_refused_and_not_called_damaged(self, tmp_path):
        torch.save({"w": torch.ones(3), "object": subprocess.Popen}, tmp_path / "a.pt")
        with pytest.raises(CorruptFileError, match="only running code"):
            verify_checkpoint(tmp_path / "a.pt")

    def test_a_file_older_than_torch_1_6_is_refused_and_not_called_damaged(self, tmp_path):
        torch.save({"w": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(CorruptFileError, match="before 1.6"):
            verify_checkpoint(tmp_path / "a.pt")

    def test_what_was_verified_can_be_loaded_bit_for_bit(self, run):
        assert verify_checkpoint(file_of(run, 400)).is_sound
        assert torch.equal(load_checkpoint(file_of(run, 400))["policy"]["weight"], state(400)["policy"]["weight"])


def test_native_files_are_listed_and_verified_without_torch(run):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from slipstream.checkpoint.inspect import inspect_checkpoint, inspect_folder\n"
        "from slipstream.checkpoint.verify import verify_checkpoint, verify_folder\n"
        f"folder, path = {str(run)!r}, {str(file_of(run, 400))!r}\n"
        "assert len(inspect_checkpoint(path).tensors) == 4\n"
        "assert len(inspect_folder(folder).checkpoints) == 4\n"
        "assert all(result.is_sound for result in verify_folder(folder))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_formats_are_recognized_by_content_and_not_by_name(tmp_path):
    write_native(tmp_path / "a.pt", {"w": torch.ones(3)})
    torch.save({"w": torch.ones(3)}, tmp_path / "b.slip")
    save_file({"w": torch.ones(3)}, tmp_path / "c.lz4")
    assert [find_format(tmp_path / name) for name in ("a.pt", "b.slip", "c.lz4")] == ["native", "pt", "safetensors"]


def forge(path: Path, structure: Any, *, wrong: bool = False) -> None:
    """Write a native file by hand: four floats in region 0, with a wrong digest if asked for."""
    content = np.arange(4, dtype=np.float32)
    with write_container(path, kind="checkpoint") as writer:
        rows = RegionTable(np.array([0]), np.array([0]), np.array([16]), [digest_of(content.view(np.uint8))]).to_array()
        if wrong:
            rows[0, 4] += 1
        writer.add("e", content)
        writer.add(TABLE, rows, Raw())
        writer.set("checkpoint", Header("identity", ("e",)).to_json())
        writer.set("state", structure)
        writer.set("metadata", None)
