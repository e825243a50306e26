"""Rollouts in files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from slipstream import (
    CorruptFileError,
    FormatVersionError,
    RolloutError,
    load_rollout,
    save_rollout_compressed,
    write_container,
)
from slipstream.codecs import Difference
from slipstream.errors import ConfigurationError
from slipstream.rollout.batch import BatchFile, split_batch
from slipstream.rollout.files import RolloutFile
from slipstream.store.container import Container
from tests.contracts.file import FileContract
from tests.rollout.conftest import rollout


def test_a_rollout_comes_back_from_a_file_bit_for_bit(tmp_path, make_rollout, same):
    batch = make_rollout(40, 20)
    path = save_rollout_compressed(batch, tmp_path / "r.slip", metadata={"policy": 7})
    same(load_rollout(path), batch)
    with RolloutFile(path) as file:
        assert file.metadata == {"policy": 7}
        assert file.layout.raw_bytes == sum(value.nbytes for value in batch.values(True, True))


def test_arrays_beside_a_rollout_come_back_and_are_no_part_of_it(tmp_path, make_rollout, same):
    batch = make_rollout()
    extra: dict[str, np.ndarray] = {
        "boxes": np.arange(10, dtype=np.float32).reshape(2, 5),
        "nothing": np.zeros((0, 3), np.int64),
    }
    path = save_rollout_compressed(batch, tmp_path / "r.slip", extra=extra)
    same(batch, load_rollout(path))
    with RolloutFile(path) as file:
        assert file.extra == ["boxes", "nothing"]
        for name, array in extra.items():
            found = file.read_extra(name)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        with pytest.raises(KeyError, match="has no extra array 'obstacles'"):
            file.read_extra("obstacles")


def test_an_array_beside_a_rollout_never_replaces_one_of_its_tensors(tmp_path):
    batch = TensorDict({"extra:boxes": torch.zeros(2, 3)}, batch_size=[2, 3])
    with pytest.raises(RolloutError, match="rename it"):
        save_rollout_compressed(batch, tmp_path / "r.slip", extra={"boxes": np.zeros(1)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", [0, 1, 9, 10, 12])
def test_every_level_is_lossless(tmp_path, make_rollout, same, level):
    batch = make_rollout()
    same(load_rollout(save_rollout_compressed(batch, tmp_path / "r", level)), batch)


@pytest.mark.parametrize("level", [-1, 13, 1.5, True])
def test_an_invalid_level_is_refused(tmp_path, make_rollout, level):
    with pytest.raises(ConfigurationError, match="compression_level is .*, expected a whole number from 0 to 12"):
        save_rollout_compressed(make_rollout(), tmp_path / "r", level)
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_rollout_reads_a_part_of_the_file(tmp_path, make_rollout, monkeypatch):
    batch = make_rollout(3000, 16)
    path = save_rollout_compressed(batch, tmp_path / "r")
    with BatchFile(path) as file:
        read: list[tuple[str, int]] = []
        original = file.container._read_chunk

        def recording(entry, number, *args):
            read.append((entry.name, number))
            return original(entry, number, *args)

        monkeypatch.setattr(file.container, "_read_chunk", recording)
        part = file.load(keys=[("agents", "observation")], envs=slice(2900, 2910), steps=slice(3, 9))
        assert {name for name, _ in read} == {"agents/observation/lidar", "agents/observation/state"}
        lidar = file.container.entries["agents/observation/lidar"]
        assert len(lidar.chunks) > 2
        assert {number for name, number in read if name.endswith("lidar")} == {len(lidar.chunks) - 1}
    assert torch.equal(part["agents", "observation", "lidar"], batch["agents", "observation", "lidar"][2900:2910, 3:9])
    assert part.batch_size == (10, 6)


def test_constants_and_zeros_are_nearly_free_and_flags_take_bits(tmp_path):
    steps = [256, 32]
    batch = TensorDict(
        {
            "zeros": torch.zeros(*steps, 100),
            "constant": torch.full((*steps, 100), 1.5),
            "flags": torch.rand(*steps, 1) < 0.5,
        },
        batch_size=steps,
    )
    path = save_rollout_compressed(batch, tmp_path / "r")
    with RolloutFile(path) as file:
        stored = {name: entry.stored_bytes for name, entry in file.container.entries.items()}
    assert stored["zeros"] < 1000
    assert stored["constant"] < 1000
    assert stored["flags"] < 256 * 32 / 8 * 1.1


def test_packing_beats_what_people_do(tmp_path, make_rollout):
    import pickle

    import lz4.frame

    batch = make_rollout(256, 32)
    path = save_rollout_compressed(batch, tmp_path / "r")
    plain = pickle.dumps({str(key): value.numpy() for key, value in batch.items(True, True)})
    assert path.stat().st_size < 0.65 * len(lz4.frame.compress(plain, compression_level=9))


def test_device_moves_what_is_loaded(tmp_path, make_rollout):
    path = save_rollout_compressed(make_rollout(), tmp_path / "r")
    assert load_rollout(path).device is None
    assert load_rollout(path, "cpu").device == torch.device("cpu")
    assert load_rollout(path, "meta")["action"].is_meta


def flat_bytes(batch: TensorDict) -> list[tuple[object, bytes]]:
    """Return every key of a batch with the bits of its value."""
    return [(key, value.contiguous().numpy().tobytes()) for key, value in batch.items(True, True)]


class TestRolloutFile(FileContract):
    content = flat_bytes(rollout(2, 3))
    flips = 7
    cuts = 5

    def write(self, path: Path) -> None:
        save_rollout_compressed(rollout(2, 3), path)

    def read(self, path: Path) -> Any:
        return flat_bytes(load_rollout(path))


def test_a_file_of_another_kind_or_of_the_future_is_said_to_be_so(tmp_path, make_rollout):
    with write_container(tmp_path / "other", kind="checkpoint"):
        pass
    with pytest.raises(CorruptFileError, match="is a container of kind 'checkpoint', expected a rollout"):
        load_rollout(tmp_path / "other")
    with write_container(tmp_path / "future", kind="rollout") as writer:
        writer.set("rollout", {"version": 2})
    with pytest.raises(FormatVersionError, match="future: holds a rollout of layout version 2"):
        load_rollout(tmp_path / "future")


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": [-1, 3]},
        {"nodes": [], "batch_size": [2, 4]},
        {"fields": [{"key": ["x"], "dtype": "float32", "shape": [9], "array": "action"}], "nodes": []},
        {"fields": [{"key": ["x"], "dtype": "float16", "shape": [3], "array": "action"}], "nodes": []},
        {"fields": [{"key": ["x"], "dtype": "float32", "shape": [3], "array": "nothing"}], "nodes": []},
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_the_arrays_is_damage(tmp_path, make_rollout, change):
    rollout = split_batch(make_rollout(2, 3))
    with write_container(tmp_path / "r", kind="rollout") as writer:
        for name, array in rollout.arrays.items():
            writer.add(name, array)
        writer.set("rollout", {**rollout.layout.to_json(), **change})
    with pytest.raises(CorruptFileError, match="r: "):
        load_rollout(tmp_path / "r")


def test_an_array_stored_as_a_difference_is_damage(tmp_path, make_rollout):
    rollout = split_batch(make_rollout(2, 3))
    for difference in rollout.arrays:
        with write_container(tmp_path / "r", kind="rollout") as writer:
            for name, array in rollout.arrays.items():
                if name == difference:
                    writer.add(name, array, Difference(), array)
                else:
                    writer.add(name, array)
            writer.set("rollout", rollout.layout.to_json())
        with pytest.raises(CorruptFileError, match="r: .* is stored as a difference, which a rollout cannot be"):
            load_rollout(tmp_path / "r")


def test_arrays_are_read_without_torch(tmp_path, make_rollout):
    batch = make_rollout()
    path = save_rollout_compressed(batch, tmp_path / "r")
    script = (
        "import sys\n"
        "from slipstream.rollout.files import RolloutFile\n"
        f"with RolloutFile({str(path)!r}) as file:\n"
        "    arrays = file.read(['next'], envs=slice(1, 4), steps=slice(2, 7))\n"
        "print(float(arrays['next', 'reward'].sum()))\n"
        "assert not {'torch', 'tensordict'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert float(result.stdout) == pytest.approx(float(batch["next", "reward"][1:4, 2:7].sum()))


def test_the_arrays_of_a_file_are_those_of_its_tensors(tmp_path, make_rollout):
    batch = make_rollout(40, 20)
    batch["half"] = batch["action"].bfloat16()
    with RolloutFile(save_rollout_compressed(batch, tmp_path / "r")) as file:
        arrays = file.read(envs=slice(7, 33), steps=slice(4, 11))
    assert arrays.pop(("half",)).tobytes() == batch["half"][7:33, 4:11].contiguous().view(torch.int16).numpy().tobytes()
    for key, array in arrays.items():
        assert array.tobytes() == batch[key][7:33, 4:11].contiguous().numpy().tobytes(), key


def golden_batch() -> TensorDict:
    """Return a batch made of whole numbers and their halves, which every machine makes alike."""
    env, step = torch.arange(8.0)[:, None, None], torch.arange(17.0)[None, :, None]
    moving = env * 3 + step * 0.5 + torch.arange(4.0)
    jumpy = (moving * 37 % 11) / 4 * (1 - 2 * (moving % 2))
    content = {"moving": moving, "jumpy": jumpy, "still": torch.full((8, 17, 3), 2.5)}
    after = {key: value[:, 1:].clone() for key, value in content.items()}
    done = (env[..., 0] + step[:, :-1, 0]) % 13 == 12
    for value in after.values():
        value[done] = -1.0
    root = {key: value[:, :-1] for key, value in content.items()}
    flags, counts = done.unsqueeze(-1), (env * step[:, :-1]).to(torch.int64)
    members = {"observation": root, "counts": counts, "half": (jumpy[:, :-1] / 8).bfloat16()}
    return TensorDict({**members, "next": {"observation": after, "done": flags}}, [8, 16], names=[None, "time"])


DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", ["rollout_v1.slip", "rollout_v1_encoded.slip"])
def test_rollouts_of_layout_version_1_load_for_ever(same, name):
    same(load_rollout(DATA / name), golden_batch())


def test_a_rollout_is_encoded_to_the_same_bytes_as_before(tmp_path):
    # The older golden file has other bytes: codecs have learned to pack the same values smaller since.
    golden = DATA / "rollout_v1_encoded.slip"
    path = save_rollout_compressed(golden_batch(), tmp_path / "again.slip", metadata={"golden": True})
    with Container(golden) as old, Container(path) as new:
        # The index also names the release that wrote it, which may differ.
        assert new.values == old.values
        assert list(new.entries.items()) == list(old.entries.items())
        ends = [chunk.offset + chunk.length for entry in old.entries.values() for chunk in entry.chunks]
    assert path.read_bytes()[: max(ends)] == golden.read_bytes()[: max(ends)]


def test_what_cannot_be_saved_leaves_the_older_file_alone(tmp_path, make_rollout, same):
    batch = make_rollout()
    path = save_rollout_compressed(batch, tmp_path / "r")
    with pytest.raises(RolloutError):
        save_rollout_compressed(TensorDict({"x": torch.zeros(2)}, batch_size=[]), path)
    same(load_rollout(path), batch)
    assert [item.name for item in tmp_path.iterdir()] == ["r"]


def test_a_codec_that_does_not_give_back_what_it_got_is_caught_before_anything_is_written(tmp_path, monkeypatch):
    from slipstream.codecs import Planes, Timewise, Zstd
    from slipstream.errors import CodecError

    def wrong(self, payload, out):
        out[...] = 0

    for codec in (Planes, Timewise, Zstd):
        monkeypatch.setattr(codec, "decode", wrong)
    batch = TensorDict({"x": torch.arange(2000.0).reshape(20, 100)}, batch_size=[20, 100])
    with pytest.raises(CodecError, match="'x' does not come back"):
        save_rollout_compressed(batch, tmp_path / "r")
    assert not list(Path(tmp_path).iterdir())
