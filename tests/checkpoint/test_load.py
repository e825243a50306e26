"""`load_checkpoint`: finds the newest file, loads what was asked for, and says in one sentence why it cannot."""

import os
import pickle
import socket
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from slipstream import AsyncCheckpointSaver, load_checkpoint
from slipstream.checkpoint.load import find_format, move
from slipstream.checkpoint.portable.format import read_portable
from slipstream.errors import ConfigurationError, CorruptFileError, SlipstreamError

STATE: dict[str, Any] = {
    "policy": OrderedDict(weight=torch.arange(300.0), bias=torch.ones(3)),
    "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "lr": [1e-3, (1, 2)]},
    "array": np.arange(40, dtype=np.int16),
    "name": "run",
}


def save(state: Any, path: Path, **options: Any) -> Path:
    with AsyncCheckpointSaver() as saver:
        return saver.save_async(state, path, **options).result().path


def assert_same(found: Any, expected: Any) -> None:
    """Raise unless two nested states are equal, types and order included."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert found == expected


class TestTwins:
    @pytest.mark.parametrize("order", [[False, True], [True, False], [False, True, False], [True, False, True, True]])
    def test_the_newest_save_is_loaded_whatever_its_suffix(self, tmp_path, order):
        for step, compress in enumerate(order):
            save({"step": step}, tmp_path / "latest.pt", compress=compress)
            assert load_checkpoint(tmp_path / "latest.pt") == {"step": step}
            assert len(list(tmp_path.iterdir())) == 1

    def test_a_native_checkpoint_takes_the_place_of_a_compressed_one(self, tmp_path):
        save({"step": 1}, tmp_path / "latest.pt")
        save({"step": 2}, tmp_path / "latest.pt", format="native")
        assert load_checkpoint(tmp_path / "latest.pt") == {"step": 2}

    @pytest.mark.parametrize("newer", ["a.pt", "a.pt.lz4"])
    def test_of_two_files_that_a_crash_left_the_newer_one_is_loaded(self, tmp_path, newer):
        torch.save({"name": "a.pt"}, tmp_path / "a.pt")
        torch.save({"name": "a.pt.lz4"}, tmp_path / "packed")
        (tmp_path / "a.pt.lz4").write_bytes(lz4.frame.compress((tmp_path / "packed").read_bytes()))
        for name in ("a.pt", "a.pt.lz4"):
            os.utime(tmp_path / name, (1_000_000 + (name == newer), 1_000_000 + (name == newer)))
        assert load_checkpoint(tmp_path / "a.pt") == {"name": newer}
        assert load_checkpoint(tmp_path / "a.pt.lz4") == {"name": "a.pt.lz4"}

    def test_a_save_is_the_newest_even_if_the_clock_went_back(self, tmp_path, monkeypatch):
        old = save({"step": 1}, tmp_path / "latest.pt", compress=False)
        os.utime(old, (4e9, 4e9))

        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise PermissionError(1, "not allowed", str(path))

        # The stale file cannot be deleted, so that both stay.
        monkeypatch.setattr(Path, "unlink", refuse)
        save({"step": 2}, tmp_path / "latest.pt")
        monkeypatch.undo()
        assert old.exists()
        assert load_checkpoint(tmp_path / "latest.pt") == {"step": 2}

    def test_a_load_during_saves_that_change_the_suffix_always_finds_a_checkpoint(self, tmp_path):
        path = tmp_path / "latest.pt"
        save({"step": -1}, path)
        done = threading.Event()

        def save_repeatedly() -> None:
            with AsyncCheckpointSaver() as saver:
                for step in range(100):
                    saver.save_async({"step": step}, path, compress=step % 2 == 0).wait()
            done.set()

        with ThreadPoolExecutor() as pool:
            saves = pool.submit(save_repeatedly)
            steps = []
            while not done.is_set() and not saves.done():
                steps.append(load_checkpoint(path)["step"])
            saves.result()
        assert steps == sorted(steps)
        assert load_checkpoint(path) == {"step": 99}


class TestOtherFiles:
    def test_what_is_not_a_file_is_refused_at_once(self, tmp_path):
        os.mkfifo(tmp_path / "fifo.pt")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "socket.pt"))
        (tmp_path / "folder.pt").mkdir()
        with listener:
            for kind, words in {"fifo": "a FIFO", "socket": "a socket", "folder": "a folder"}.items():
                with pytest.raises(CorruptFileError, match=f"{kind}.pt: is {words}, expected a file"):
                    load_checkpoint(tmp_path / f"{kind}.pt")

    def test_a_fifo_as_the_compressed_twin_does_not_block(self, tmp_path):
        save({"a": 1}, tmp_path / "m.pt", compress=False)
        os.mkfifo(tmp_path / "m.pt.lz4")
        assert load_checkpoint(tmp_path / "m.pt") == {"a": 1}

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="absent.pt"):
            load_checkpoint(tmp_path / "absent.pt")

    @pytest.mark.parametrize(
        "content", [b"", b"hello world, this is text", bytes(100), b"\x80\x02garbage", b"PK\x03\x04"]
    )
    def test_a_file_of_another_kind_is_refused_by_name(self, tmp_path, content):
        (tmp_path / "c").write_bytes(content)
        for weights_only in (True, False):
            with pytest.raises(CorruptFileError, match=f"^{tmp_path / 'c'}: "):
                load_checkpoint(tmp_path / "c", weights_only=weights_only)

    def test_a_file_of_torch_before_1_6_is_refused_clearly_and_loads_if_it_is_trusted(self, tmp_path):
        path = tmp_path / "old.pt"
        torch.save(STATE, path, _use_new_zipfile_serialization=False)
        assert find_format(path) == "pt"
        with pytest.raises(CorruptFileError, match="format of torch before 1.6, which has no checksums") as caught:
            load_checkpoint(path)
        assert "damaged" not in str(caught.value)
        assert_same(load_checkpoint(path, weights_only=False), STATE)

    def test_a_bare_malicious_pickle_is_refused(self, tmp_path):
        class Malice:
            def __reduce__(self) -> Any:
                return os.system, (f"touch {tmp_path / 'mark'}",)

        (tmp_path / "evil.pt").write_bytes(pickle.dumps(Malice(), protocol=2))
        with pytest.raises(CorruptFileError, match="evil.pt: "):
            load_checkpoint(tmp_path / "evil.pt")
        assert not (tmp_path / "mark").exists()

    def test_a_class_that_cannot_be_imported_is_not_called_damage(self, tmp_path, monkeypatch):
        module = tmp_path / "departed.py"
        module.write_text("class Config:\n    pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        import departed  # type: ignore[import-not-found]

        path = save({"config": departed.Config()}, tmp_path / "a.pt", weights_only=False)
        monkeypatch.delitem(sys.modules, "departed")
        module.unlink()
        with pytest.raises(ModuleNotFoundError, match="departed"):
            load_checkpoint(path, weights_only=False)


class TestSoundFiles:
    @pytest.mark.parametrize("compress", [False, True])
    @pytest.mark.parametrize("weights_only", [False, True])
    def test_a_file_without_checksums_loads(self, tmp_path, compress, weights_only):
        path = tmp_path / "a.pt"
        torch.serialization.set_crc32_options(compute_crc32=False)
        try:
            torch.save(STATE, path)
        finally:
            torch.serialization.set_crc32_options(compute_crc32=True)
        if compress:
            path.write_bytes(lz4.frame.compress(path.read_bytes()))
        assert_same(load_checkpoint(path, weights_only=weights_only), STATE)

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_a_program_that_maps_files_into_memory_by_default_loads(self, tmp_path, weights_only):
        from torch.utils.serialization import config

        path = save(STATE, tmp_path / "a.pt")
        with config.patch({"load.mmap": True}):  # type: ignore[attr-defined]
            assert_same(load_checkpoint(path, weights_only=weights_only), STATE)

    @pytest.mark.parametrize("options", [{"format": "native"}, {"compress": False}, {}])
    @pytest.mark.parametrize("device", ["cuda:9", "mps", "nonsense", "cpu:x"])
    def test_a_device_that_is_missing_is_an_error_about_the_device(self, tmp_path, options, device):
        path = save(STATE, tmp_path / "a.pt", **options)
        with pytest.raises(ConfigurationError, match=f"^device '{device}' is not available") as caught:
            load_checkpoint(path, device)
        assert not isinstance(caught.value, CorruptFileError)
        assert "\n" not in str(caught.value)

    def test_a_tensor_of_a_missing_device_says_which_one(self, tmp_path):
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
        with pytest.raises(ConfigurationError, match="a.pt: device 'cuda:9' is not available"):
            read_portable(tmp_path / "a.pt", compressed=False, device={"cpu": "cuda:9"}, weights_only=True)

    def test_every_kind_of_map_location_of_torch_is_accepted(self, tmp_path):
        path = save(STATE, tmp_path / "a.pt", compress=False)

        def stay(storage: Any, location: str) -> Any:
            assert location == "cpu"
            return storage

        def undecided(storage: Any, location: str) -> None:
            return None

        for location in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, stay, undecided):
            assert_same(read_portable(path, compressed=False, device=location, weights_only=True), STATE)

    def test_an_error_of_a_map_location_is_passed_on(self, tmp_path):
        def fail(storage: Any, location: str) -> Any:
            raise ValueError("my own error")

        path = save(STATE, tmp_path / "a.pt", compress=False)
        with pytest.raises(ValueError, match=r"^my own error$"):
            read_portable(path, compressed=False, device=fail, weights_only=True)

    def test_the_environment_decides_as_it_does_for_torch(self, tmp_path, monkeypatch):
        path = save({"a": {1, 2}, "b": complex}, tmp_path / "a.pt", weights_only=False, compress=False)
        refused = pytest.raises(CorruptFileError, match="which is refused")
        with refused:
            read_portable(path, compressed=False, device=None, weights_only=None)
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert read_portable(path, compressed=False, device=None, weights_only=None)["b"] is complex
        with refused:
            read_portable(path, compressed=False, device=None, weights_only=True)
        monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
        with refused:
            load_checkpoint(path, weights_only=False)

    def test_loads_in_many_threads_succeed_and_leave_the_settings_of_torch_alone(self, tmp_path):
        paths = [save({**STATE, "number": number}, tmp_path / f"{number}.pt") for number in range(4)]
        before = torch.serialization.get_safe_globals()

        def load(turn: int) -> None:
            assert_same(load_checkpoint(paths[turn % 4]), {**STATE, "number": turn % 4})

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(load, range(400)))
        assert torch.serialization.get_safe_globals() == before


class TestDamage:
    @settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data(), compress=st.booleans(), weights_only=st.sampled_from([True, True, False]))
    def test_a_flipped_bit_is_noticed_or_harmless(self, tmp_path, data, compress, weights_only):
        original = portable_file(tmp_path, compress).read_bytes()
        damaged = bytearray(original)
        for position in data.draw(st.lists(st.integers(0, 8 * len(original) - 1), min_size=1, max_size=3)):
            damaged[position // 8] ^= 1 << position % 8
        self.load_damaged(tmp_path, damaged, weights_only)

    @settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data(), compress=st.booleans())
    def test_a_file_that_is_cut_or_overwritten_is_noticed(self, tmp_path, data, compress):
        original = portable_file(tmp_path, compress).read_bytes()
        start = data.draw(st.integers(0, len(original)))
        stop = data.draw(st.integers(start, len(original)))
        filling = data.draw(st.sampled_from([b"", bytes(stop - start), original[: stop - start]]))
        self.load_damaged(tmp_path, original[:start] + filling + original[stop:], weights_only=True)

    @pytest.mark.parametrize("compress", [False, True])
    def test_a_file_that_is_cut_off_anywhere_is_refused(self, tmp_path, compress):
        original = portable_file(tmp_path, compress).read_bytes()
        for length in range(0, len(original), 11):
            (tmp_path / "damaged").write_bytes(original[:length])
            with pytest.raises(CorruptFileError, match=f"^{tmp_path / 'damaged'}: "):
                load_checkpoint(tmp_path / "damaged")

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_every_flipped_bit_of_the_directory_is_noticed_or_harmless(self, tmp_path, weights_only):
        """The directory tells which tensor is where: a flipped bit must not exchange two of them."""
        state = {str(number): torch.full((4,), float(number)) for number in range(3)}
        torch.save(state, tmp_path / "a.pt")
        original = (tmp_path / "a.pt").read_bytes()
        for position in range(8 * original.index(b"PK\x01\x02"), 8 * len(original)):
            damaged = bytearray(original)
            damaged[position // 8] ^= 1 << position % 8
            self.load_damaged(tmp_path, damaged, weights_only, expected=state)

    def load_damaged(self, folder: Path, content: Any, weights_only: bool, expected: Any = STATE) -> None:
        path = folder / "damaged"
        path.write_bytes(content)
        try:
            found = load_checkpoint(path, weights_only=weights_only)
        except CorruptFileError as error:
            assert str(error).startswith(f"{path}: ")
            assert "\n" not in str(error)
        else:
            assert_same(found, expected)


def portable_file(folder: Path, compress: bool) -> Path:
    """Return a sound file, which is written once per test."""
    path = folder / f"sound-{compress}.pt"
    if compress:
        path = path.with_name(path.name + ".lz4")
    if not path.exists():
        save(STATE, path, compress=compress)
    return path


class TestSelection:
    @pytest.mark.parametrize("options", [{"format": "native"}, {"compress": False}, {}])
    def test_a_plain_string_is_one_key(self, tmp_path, options):
        path = save(STATE, tmp_path / "a.pt", **options)
        assert_same(load_checkpoint(path, keys="name"), {"name": "run"})
        assert_same(load_checkpoint(path, keys="policy/bias"), {"policy": OrderedDict(bias=torch.ones(3))})

    @pytest.mark.parametrize("options", [{"format": "native"}, {"compress": False}, {}])
    def test_names_patterns_and_tuples_select(self, tmp_path, options):
        path = save(STATE, tmp_path / "a.pt", **options)
        part = load_checkpoint(path, keys=["policy/w*", ("optimizer", "state", 0)])
        assert list(part) == ["policy", "optimizer"]
        assert list(part["policy"]) == ["weight"]
        assert part["optimizer"]["state"][0]["step"] == 7

    def test_a_dict_whose_keys_are_not_plain_values_does_not_keep_others_from_being_selected(self, tmp_path):
        path = save({**STATE, torch.strided: {"mask": torch.zeros(2)}}, tmp_path / "a.pt")
        assert_same(load_checkpoint(path, keys="name"), {"name": "run"})
        assert_same(load_checkpoint(path, keys="torch.strided/mask"), {torch.strided: {"mask": torch.zeros(2)}})

    @pytest.mark.parametrize("options", [{"format": "native"}, {"compress": False}, {}])
    def test_every_key_that_matches_nothing_is_named(self, tmp_path, options):
        path = save(STATE, tmp_path / "a.pt", **options)
        with pytest.raises(KeyError) as caught:
            load_checkpoint(path, keys=["name", "polcy", "optimiser"])
        for expected in (str(path), "polcy", "optimiser"):
            assert expected in str(caught.value)
        assert isinstance(caught.value, SlipstreamError)


class TestMove:
    """The device ``meta`` stands for an accelerator: memory really moves there."""

    def test_tensors_move_and_tied_ones_stay_tied(self):
        weight = torch.arange(6.0).reshape(2, 3)
        state: dict[str, Any] = {
            "a": weight,
            "b": [weight.t()],
            "c": torch.nn.Parameter(torch.ones(2)),
            "d": "text",
            "e": np.ones(2),
        }
        moved = move(state, "meta")
        assert moved["a"].device.type == "meta"
        assert moved["b"][0].untyped_storage()._cdata == moved["a"].untyped_storage()._cdata
        assert moved["b"][0].stride() == (1, 3)
        assert type(moved["c"]) is torch.nn.Parameter
        assert moved["c"].requires_grad
        assert moved["d"] == "text"
        assert state["a"].device.type == "cpu"

    @pytest.mark.parametrize("options", [{"format": "native"}, {"compress": False}, {}])
    def test_tensordicts_keep_their_names_and_get_the_device(self, tmp_path, options):
        state = {
            "fixed": TensorDict({"a": torch.ones(2, 3)}, [2], names=["time"], device="cpu"),
            "free": TensorDict({"a": torch.ones(2, 3)}, [2], names=["env"]),
        }
        path = save(state, tmp_path / "a.pt", **options)
        back = load_checkpoint(path, "meta")
        assert back["fixed"].names == ["time"]
        assert back["fixed"].device == torch.device("meta")
        assert back["free"].names == ["env"]
        assert back["free"]["a"].device == torch.device("meta")
        back = load_checkpoint(path)
        assert back["fixed"].device == torch.device("cpu")
        assert back["free"].device is None

    def test_a_loaded_checkpoint_is_on_the_device(self, tmp_path):
        for options in ({"format": "native"}, {"compress": False}, {}):
            path = save({"w": torch.ones(3)}, tmp_path / "a.pt", **options)
            assert load_checkpoint(path, torch.device("meta"))["w"].device.type == "meta"

    def test_a_safetensors_file_loads_to_every_device_of_torch(self, tmp_path):
        safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
        assert load_checkpoint(tmp_path / "a.safetensors", "meta")["w"].device.type == "meta"
