"""`slipstream rollout`, as a person or a script meets it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from slipstream import RolloutStorage, load_rollout, save_rollout_compressed, write_container
from slipstream.checkpoint.native import write_native
from slipstream.store.container import Container

COMMANDS = ["inspect", "verify", "export"]
ENVS, STEPS = 6, 8
TERMINATED = [(1, 3), (4, 0), (4, 7)]
TRUNCATED = [(2, 5)]
EPISODES = [(0, 0, 8), (1, 0, 4), (1, 4, 8), (2, 0, 6), (2, 6, 8), (3, 0, 8), (4, 0, 1), (4, 1, 8), (5, 0, 8)]


def batch() -> TensorDict:
    """A batch as NavRL collects it; `next` is what follows, but where an episode ends: there it is 1000 more."""
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(ENVS, STEPS + 1, 3, generator=generator).cumsum(1)
    lidar = torch.rand(ENVS, STEPS + 1, 1, 12, generator=generator).clamp(max=0.5)
    state[0, 3, 0], state[0, 4, 1] = float("nan"), -0.0
    terminated, truncated = (torch.zeros(ENVS, STEPS, 1, dtype=torch.bool) for _ in range(2))
    after = {"state": state[:, 1:].clone(), "lidar": lidar[:, 1:].clone()}
    for flags, ends in ((terminated, TERMINATED), (truncated, TRUNCATED)):
        for env, step in ends:
            flags[env, step] = True
            after["state"][env, step] += 1000
    reward = torch.randn(ENVS, STEPS, 1, generator=generator)
    return TensorDict(
        {
            "agents": {
                "observation": {"state": state[:, :-1], "lidar": lidar[:, :-1]},
                "action": torch.rand(ENVS, STEPS, 2, generator=generator),
            },
            "value": torch.randn(ENVS, STEPS, generator=generator).bfloat16(),
            "next": {
                "agents": {"observation": after, "reward": reward},
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            },
        },
        batch_size=[ENVS, STEPS],
        names=[None, "time"],
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_rollout_compressed(batch(), tmp_path / "rollout.slip", metadata={"map": "forest"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with the rollouts of iterations 100, 200 and 1000."""
    with RolloutStorage(tmp_path / "run" / "rollouts") as storage:
        for iteration in (100, 200, 1000):
            storage.save(batch(), iteration, metadata={"frames": iteration * 48})
    return tmp_path / "run"


def of(run: Path, iteration: int) -> Path:
    return run / "rollouts" / f"rollout_{iteration:06d}.slip"


def damage(path: Path, entry: str) -> None:
    """Flip a bit in the middle of an array."""
    with Container(path) as container:
        chunk = container.entries[entry].chunks[0]
    content = bytearray(path.read_bytes())
    content[chunk.offset + chunk.length // 2] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **values: Any) -> None:
    """Write a file again with other values."""
    with Container(path) as container:
        arrays = {name: container.read(name) for name in container.entries}
        kept = {**container.values, **values}
    with write_container(path, kind="rollout") as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        for name, value in kept.items():
            writer.set(name, value)


def layout(path: Path) -> Any:
    with Container(path) as container:
        return container.values["rollout"]


def one_line(result: Any) -> bool:
    return (
        (result.code, result.out) == (2, "") and result.err.startswith("slipstream: ") and result.err.count("\n") == 1
    )


def leaves(td: TensorDict) -> dict[str, torch.Tensor]:
    return {"/".join((key,) if isinstance(key, str) else key): td[key] for key in td.keys(True, True)}


def same_bits(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(tree, (dict, h5py.Group)):
        return {above: tree}
    return {name: leaf for key, node in tree.items() for name, leaf in flat(node, f"{above}/{key}".strip("/")).items()}


def test_every_command_has_help_with_an_example(rollout):
    for command in COMMANDS:
        result = rollout(command, "--help")
        assert result.code == 0
        assert f"Example: slipstream rollout {command}" in result.out
    assert all(command in rollout("--help").out for command in COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["rollout", "--help"], ["rollout", "export", "--help"]])
def test_help_imports_neither_torch_nor_numpy_nor_rich(arguments):
    script = (
        "import sys, slipstream.cli\n"
        f"sys.argv = ['slipstream', *{arguments!r}]\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich.table', 'zstandard', 'h5py'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_inspect_reads_indexes_only_and_needs_neither_torch_nor_tensordict(run):
    damage(of(run, 100), "agents/observation/lidar")  # in a chunk, which is not read
    for path in (of(run, 100), run):
        script = (
            "import sys, slipstream.cli\n"
            f"sys.argv = ['slipstream', 'rollout', 'inspect', {str(path)!r}]\n"
            "try: slipstream.cli.main()\n"
            "except SystemExit as end: assert not end.code\n"
            "assert not {'torch', 'tensordict', 'h5py'} & set(sys.modules)"
        )
        result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        assert "6 " in result.stdout


def test_inspect_of_a_file_shows_every_key_and_what_next_shares(rollout, run):
    result = rollout("inspect", of(run, 100))
    assert (result.code, result.err) == (0, "")
    for words in (
        "rollout, ",
        "6 environments x 8 steps",
        "iteration: 100",
        "time: 2",
        "frames: 4800",
        "next/agents/observation/lidar",
        "6x8x1x12",
        "bfloat16",
        "agents/observation/state, but 3 steps",  # the fourth end is the last step, which is kept in any case
        "10 keys, ",
    ):
        assert words in result.out, words
    document = rollout.json("inspect", of(run, 100))
    assert [document[key] for key in ("iteration", "num_envs", "num_steps", "exceptions")] == [100, 6, 8, 3]
    assert document["metadata"] == {"frames": 4800}
    assert document["bytes"] == sum(tensor.nbytes for tensor in leaves(batch()).values())
    assert document["file_bytes"] == of(run, 100).stat().st_size
    keys = {"/".join(row["key"]): row for row in document["keys"]}
    assert list(keys) == list(leaves(load_rollout(of(run, 100))))
    assert keys["next/agents/observation/state"]["shares_with"] == "agents/observation/state"
    assert keys["next/agents/observation/state"]["exceptions"] == 3
    assert keys["value"]["shares_with"] is None
    with Container(of(run, 100)) as container:
        stored = sum(entry.stored_bytes for entry in container.entries.values())
    assert sum(row["stored_bytes"] for row in keys.values()) == stored


def test_inspect_shows_a_rollout_that_was_saved_by_itself(rollout, file):
    result = rollout("inspect", file)
    assert result.code == 0
    assert "map: forest" in result.out
    assert "iteration" not in result.out
    assert rollout.json("inspect", file)["iteration"] is None


@pytest.mark.parametrize("inside", [".", "rollouts"])
def test_inspect_of_a_folder_shows_a_row_per_rollout_and_totals(rollout, run, inside):
    (run / "rollouts" / "notes.slip").write_text("not ours")
    result = rollout("inspect", run / inside)
    assert (result.code, result.err) == (0, "")
    names = [word for word in result.out.split() if word.startswith("rollout_")]
    assert names == ["rollout_000100.slip", "rollout_000200.slip", "rollout_001000.slip"]
    assert "6 x 8" in result.out
    assert "3 rollouts, " in result.out
    document = rollout.json("inspect", run / inside)
    assert [row["iteration"] for row in document["rollouts"]] == [100, 200, 1000]
    assert document["bytes"] == 3 * document["rollouts"][0]["bytes"]
    assert document["unreadable"] == []


def test_inspect_of_a_folder_goes_on_after_a_rollout_that_cannot_be_read(rollout, run):
    of(run, 200).write_bytes(of(run, 200).read_bytes()[:-9])
    result = rollout("inspect", run)
    assert result.code == 1
    assert str(of(run, 200)) in result.out
    assert "2 rollouts, " in result.out
    assert "1 cannot be read" in result.out


def test_verify_tells_sound_rollouts_from_damaged_ones_and_goes_on(rollout, run, file):
    sound = rollout("verify", run, file)
    assert (sound.code, sound.err) == (0, "")
    assert sound.out.count(": sound, all ") == 4
    assert "0 of 4 rollouts damaged" in sound.out
    damage(of(run, 100), "agents/observation/state")
    of(run, 200).write_bytes(b"")
    result = rollout("verify", run, file)
    assert result.code == 1
    assert f"{of(run, 100)}: entry 'agents/observation/state' is damaged in chunk 1 of 1" in result.out
    assert "lost with it: agents/observation/state, next/agents/observation/state" in result.out
    assert f"{of(run, 200)}: damaged" in result.out
    assert result.out.count(": sound, all ") == 2
    document = rollout.json("verify", run, file)
    assert not document["sound"]
    assert [bool(one["problems"]) for one in document["files"]] == [True, True, False, False]


@pytest.mark.parametrize("entry", ["exceptions", "next/agents/observation/state", "value"])
def test_verify_finds_a_flipped_bit_in_any_array_and_export_refuses_it(rollout, file, tmp_path, entry):
    damage(file, entry)
    result = rollout("verify", file)
    assert result.code == 1
    key = "value" if entry == "value" else "next/agents/observation/state"
    assert f"entry {entry!r} is damaged" in result.out
    assert "lost with it: " in result.out
    assert key in result.out.partition("lost with it: ")[2]
    assert one_line(rollout("export", file, tmp_path / "out.npz"))
    assert not (tmp_path / "out.npz").exists()


def test_verify_finds_a_layout_that_does_not_fit_the_arrays(rollout, file):
    sound = layout(file)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": [6, 9]}, "expected float32[6, 10, 3]"),
        ({"time_dim": 2}, "time is axis 2 of a batch of size [6, 8]"),
        ({"version": 2}, "layout version 2"),
        (
            {"fields": [{**sound["fields"][0], "array": "absent"}]},
            "array 'absent' of agents/observation/s",
        ),
        ({"fields": [{**sound["fields"][0], "dtype": "float16"}]}, "expected float16"),
        ({"fields": [{**sound["fields"][0], "dtype": "load"}]}, "unknown dtype 'load'"),
        ({"fields": sound["fields"][:1] * 2}, "key 'agents/observation/state' occurs twice"),
        ({"fields": [*sound["fields"], {**sound["fields"][2], "key": ["agents"]}]}, "lies below the tensor 'agents'"),
    ]
    for change, reason in changes:
        rewrite(file, rollout={**sound, "nodes": [], **change})
        result = rollout("verify", file)
        assert (result.code, result.err) == (1, ""), change
        assert reason in result.out
        assert one_line(rollout("inspect", file))
    rewrite(file, rollout=None)
    assert "has no rollout layout" in rollout("verify", file).out
    rewrite(file, rollout=sound)
    assert rollout("verify", file).code == 0


def test_verify_counts_the_exceptions_of_next(rollout, file):
    with Container(file) as container:
        arrays = {name: container.read(name) for name in container.entries}
        values = container.values
    mask = next(name for name in arrays if name.startswith("exceptions") and arrays[name].any())
    arrays[mask][0, 0] = True
    with write_container(file, kind="rollout") as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        for name, value in values.items():
            writer.set(name, value)
    result = rollout("verify", file)
    assert result.code == 1
    assert "next/agents/observation/state has 4 exceptions, and values for 3" in result.out


def test_export_to_pt_loads_without_trust_as_the_same_batch(rollout, file, tmp_path):
    result = rollout("export", file, tmp_path / "out.pt")
    assert (result.code, result.err) == (0, "")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert type(loaded) is dict
    again, expected = leaves(TensorDict(loaded, batch_size=[ENVS, STEPS])), leaves(load_rollout(file))
    assert list(again) == list(expected)
    for name, tensor in expected.items():
        assert again[name].dtype == tensor.dtype
        assert same_bits(again[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_export_to_npz_has_every_array_by_name(rollout, file, tmp_path):
    result = rollout("export", file, tmp_path / "out.npz")
    assert result.code == 0
    assert "value is bfloat16, which NumPy lacks, and was written as float32, without loss" in result.out
    expected = leaves(load_rollout(file))
    with np.load(tmp_path / "out.npz") as arrays:
        assert list(arrays) == list(expected)
        for name, tensor in expected.items():
            assert same_bits(arrays[name], tensor.float() if name == "value" else tensor), name


def test_export_to_npz_takes_any_name_and_refuses_two_that_are_the_same(rollout, tmp_path):
    odd = TensorDict({"file": torch.ones(2, 3), "allow_pickle": torch.zeros(2, 3)}, batch_size=[2, 3])
    save_rollout_compressed(odd, tmp_path / "odd.slip")
    assert rollout("export", tmp_path / "odd.slip", tmp_path / "odd.npz").code == 0
    with np.load(tmp_path / "odd.npz") as arrays:
        assert set(arrays) == {"file", "allow_pickle"}
    odd["a/b"], odd["a", "b"] = torch.ones(2, 3), torch.zeros(2, 3)
    save_rollout_compressed(odd, tmp_path / "odd.slip")
    result = rollout("export", tmp_path / "odd.slip", tmp_path / "twice.npz")
    assert one_line(result)
    assert "two tensors would be called 'a/b'" in result.err
    assert not (tmp_path / "twice.npz").exists()


def test_export_takes_keys_environments_and_steps(rollout, file, tmp_path):
    expected = load_rollout(file)[2:5, 4:8]
    arguments = ["--keys", "agents/observation,next/done", "--keys", "value", "--envs", "2:5", "--steps", "-4:"]
    assert rollout("export", file, tmp_path / "out.pt", *arguments).code == 0
    part = leaves(TensorDict(torch.load(tmp_path / "out.pt"), batch_size=[3, 4]))
    assert set(part) == {"agents/observation/state", "agents/observation/lidar", "next/done", "value"}
    for name, tensor in part.items():
        assert same_bits(tensor.view(torch.uint8), leaves(expected)[name].contiguous().view(torch.uint8)), name


def check_episodes(root: Any, source: Path, envs: slice = slice(0, ENVS)) -> None:
    """Compare episodes, as nested dicts or groups of arrays, with what `load_rollout` returns."""
    whole = load_rollout(source)
    expected = [episode for episode in EPISODES if envs.start <= episode[0] < envs.stop]
    assert len(root) == len(expected)
    for episode, (env, begin, end) in zip(root, expected, strict=True):
        observations = flat(episode["observations"])
        assert set(observations) == {"state", "lidar"}
        for name, array in observations.items():
            key = ("agents", "observation", name)
            steps = torch.cat((whole[key][env, begin:end], whole["next", *key][env, end - 1 : end]))
            assert same_bits(array[:], steps), name
        assert same_bits(episode["actions"][:], whole["agents", "action"][env, begin:end])
        assert same_bits(episode["rewards"][:], whole["next", "agents", "reward"][env, begin:end, 0])
        last = np.arange(end - begin) == end - begin - 1
        terminated = (env, end - 1) in TERMINATED
        assert same_bits(episode["terminations"][:], last & terminated)
        assert same_bits(episode["truncations"][:], last & (not terminated))


@pytest.mark.parametrize("suffix", ["hdf5", "h5"])
def test_export_to_hdf5_has_a_group_per_episode_as_minari_stores_them(rollout, file, tmp_path, suffix):
    result = rollout("export", file, tmp_path / f"out.{suffix}")
    assert (result.code, result.err) == (0, "")
    assert "9 episodes of 48 steps together" in result.out
    assert result.out.count("\n") == 1  # nothing to note
    with h5py.File(tmp_path / f"out.{suffix}") as root:
        assert list(root) == [f"episode_{number}" for number in range(9)]
        check_episodes(list(root.values()), file)
        for number, (env, begin, end) in enumerate(EPISODES):
            attributes = dict(root[f"episode_{number}"].attrs)
            assert attributes == {"id": number, "total_steps": end - begin, "environment": env, "first_step": begin}


def test_export_of_a_part_to_hdf5_says_where_its_episodes_were(rollout, file, tmp_path):
    assert rollout("export", file, tmp_path / "out.h5", "--envs", "1:3", "--steps", "2:7").code == 0
    with h5py.File(tmp_path / "out.h5") as root:
        found = [
            [int(group.attrs[name]) for name in ("environment", "first_step", "total_steps")] for group in root.values()
        ]
        assert found == [[1, 2, 2], [1, 4, 3], [2, 2, 4], [2, 6, 1]]
        whole = load_rollout(file)
        steps = torch.cat(
            (whole["agents", "observation", "state"][1, 4:7], whole["next", "agents", "observation", "state"][1, 6:7])
        )
        assert same_bits(root["episode_1/observations/state"][:], steps)
    assert rollout("export", file, tmp_path / "three.h5", "--envs", "2:5").code == 0
    with h5py.File(tmp_path / "three.h5") as root:
        check_episodes(list(root.values()), file, slice(2, 5))


def test_export_to_minari_is_a_dataset_that_minari_opens(rollout, file, tmp_path):
    minari = pytest.importorskip("minari")
    pytest.importorskip("minari.dataset._storages.hdf5_storage", exc_type=ImportError)
    assert rollout("export", file, tmp_path / "forest-v3", "--format", "minari").code == 0
    dataset = minari.MinariDataset(tmp_path / "forest-v3" / "data")
    assert (dataset.total_episodes, dataset.total_steps, dataset.id) == (9, 48, "forest-v3")
    assert dataset.observation_space["lidar"].shape == (1, 12)
    assert dataset.action_space.dtype == np.float32
    check_episodes([vars(episode) for episode in dataset.iterate_episodes()], file)
    assert all(len(episode) == len(episode.actions) for episode in dataset.sample_episodes(3))
    assert dataset.filter_episodes(lambda episode: bool(episode.terminations[-1])).total_episodes == 3
    assert [m["total_steps"] for m in dataset.storage.get_episode_metadata([0, 1])] == [8, 4]


def test_export_to_minari_replaces_a_dataset_and_no_other_folder(rollout, file, tmp_path):
    out = tmp_path / "out"
    assert rollout("export", file, out, "--format", "minari").code == 0
    assert sorted(path.name for path in (out / "data").iterdir()) == ["main_data.hdf5", "metadata.json"]
    assert json.loads((out / "data" / "metadata.json").read_text())["dataset_id"] == "out-v0"
    assert one_line(rollout("export", file, out, "--format", "minari"))
    assert rollout("export", file, out, "--format", "minari", "--envs", "0:1", "--overwrite").code == 0
    with h5py.File(out / "data" / "main_data.hdf5") as root:
        assert list(root) == ["episode_0"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    result = rollout("export", file, precious, "--format", "minari", "--overwrite")
    assert one_line(result)
    assert "is no Minari dataset, and is not replaced" in result.err
    assert (precious / "file").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["out", "precious", "rollout.slip"]


def test_export_finds_the_names_of_torchrl_and_takes_others(rollout, tmp_path):
    td = TensorDict(
        {
            "observation": torch.arange(24.0).reshape(2, 4, 3),
            "pixels": torch.arange(8, dtype=torch.uint8).reshape(2, 4),
            "action": torch.arange(8).reshape(2, 4),
            "cost": torch.arange(8.0).reshape(2, 4),
            "next": {
                "observation": torch.arange(24.0).reshape(2, 4, 3) + 3,
                "pixels": torch.arange(8, dtype=torch.uint8).reshape(2, 4) + 1,
                "reward": torch.ones(2, 4, 1),
                "done": torch.zeros(2, 4, 1, dtype=torch.bool),
            },
        },
        batch_size=[2, 4],
    )
    path = save_rollout_compressed(td, tmp_path / "a.slip")
    assert rollout("export", path, tmp_path / "a.h5").code == 0
    with h5py.File(tmp_path / "a.h5") as root:
        assert same_bits(root["episode_1/observations"][:], torch.arange(12.0, 27.0).reshape(5, 3))
        assert list(root["episode_1/truncations"]) == [False, False, False, True]
    options = ["--observation", "observation,pixels", "--action", "action", "--action", "cost", "--reward", "cost"]
    assert rollout("export", path, tmp_path / "b.h5", *options).code == 0
    with h5py.File(tmp_path / "b.h5") as root:
        assert same_bits(root["episode_1/observations/pixels"][:], torch.arange(4, 9, dtype=torch.uint8))
        assert set(root["episode_0/actions"]) == {"action", "cost"}
        assert same_bits(root["episode_0/rewards"][:], torch.arange(4.0))


def test_export_to_episodes_notes_where_next_is_not_what_follows_and_leaves_out_padding(rollout, tmp_path):
    td = batch()
    td["next", "agents", "observation", "state"][3, 2] = 7
    mask = torch.ones(ENVS, STEPS, dtype=torch.bool)
    mask[3, 5:] = False
    mask[5] = False
    td["collector"] = TensorDict({"mask": mask}, batch_size=[ENVS, STEPS])
    path = save_rollout_compressed(td, tmp_path / "a.slip")
    result = rollout("export", path, tmp_path / "a.h5")
    assert "8 episodes of 37 steps together" in result.out
    assert "state: 1 step within episodes led to another one than follows, which is kept" in result.out
    with h5py.File(tmp_path / "a.h5") as root:
        assert [int(group.attrs["total_steps"]) for group in root.values()] == [8, 4, 4, 6, 2, 5, 1, 7]
        assert same_bits(root["episode_5/observations/state"][:-1], td["agents", "observation", "state"][3, :5])


def test_a_rollout_without_an_axis_for_environments_is_one_environment(rollout, tmp_path):
    path = save_rollout_compressed(batch()[1], tmp_path / "one.slip")
    assert rollout.json("inspect", path)["num_envs"] == 1
    assert rollout("export", path, tmp_path / "one.h5").code == 0
    with h5py.File(tmp_path / "one.h5") as root:
        assert [int(group.attrs["total_steps"]) for group in root.values()] == [4, 4]


def test_export_overwrites_only_if_told_to_and_never_with_less_than_a_whole_file(rollout, file, tmp_path):
    target = tmp_path / "out.npz"
    target.write_text("precious")
    result = rollout("export", file, target)
    assert result == (2, "", f"slipstream: {target}: exists already; --overwrite replaces it\n")
    result = rollout("export", file, file, "--format", "npz", "--overwrite")
    assert one_line(result)
    assert "is the rollout itself" in result.err
    assert load_rollout(file).batch_size == (ENVS, STEPS)
    assert rollout("export", file, target, "--overwrite").code == 0
    before = target.read_bytes()
    damage(file, "value")
    assert one_line(rollout("export", file, target, "--overwrite"))
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "rollout.slip"]


@pytest.mark.parametrize("name", ["out.npz", "out.pt", "out.h5", "out"])
def test_an_export_that_finds_no_room_leaves_nothing(file, tmp_path, name):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    command = [sys.executable, "-m", "slipstream", "rollout", "export", file, tmp_path / name]
    command += ["--format", "minari"] if name == "out" else []
    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert result.returncode == 2
    assert result.stderr.startswith(f"slipstream: cannot write {tmp_path / name}")
    assert result.stderr.endswith(": File too large\n")
    assert os.listdir(tmp_path) == ["rollout.slip"]


def test_errors_are_one_line_that_says_what_was_expected(rollout, file, tmp_path):
    write_native(tmp_path / "checkpoint.slip", {"w": torch.ones(3)})
    with write_container(tmp_path / "other.slip", kind="example") as writer:
        writer.add("a", np.ones(3))
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out.npz"
    for arguments, reason in [
        (["inspect", tmp_path / "checkpoint.slip"], "is a checkpoint, not a rollout"),
        (["verify", file, tmp_path / "checkpoint.slip"], "is a checkpoint, not a rollout"),
        (["export", tmp_path / "checkpoint.slip", out], "is a checkpoint, not a rollout"),
        (["inspect", tmp_path / "other.slip"], "is a container of kind 'example', expected a rollout"),
        (["inspect", tmp_path / "text"], "is not a Slipstream container"),
        (["export", tmp_path / "text", out], "is not a Slipstream container"),
        (["inspect", tmp_path / "empty"], "holds no rollout_*.slip"),
        (["verify", file, tmp_path / "empty"], "holds no rollout_*.slip"),
        (["inspect", tmp_path / "absent"], "No such file or directory"),
        (["verify", file, tmp_path / "absent"], "No such file or directory"),
        (["export", tmp_path / "absent", out], "No such file or directory"),
        (["export", tmp_path / "empty", out], "is a folder, expected a file"),
        (["export", file, tmp_path / "empty", "--format", "npz", "--overwrite"], "is a folder, expected a file"),
        (["export", file, tmp_path / "out.zarr"], "expected .pt, .pth, .npz, .hdf5, .h5, or --format"),
        (["export", file, out, "--format", "zarr"], "--format is 'zarr', expected pt, npz, hdf5, minari"),
        (["export", file, out, "--keys", "agents/obs"], "has no key 'agents/obs'; it has agents/observation/state"),
        (["export", file, out, "--envs", "4:7"], "--envs is 4:7, which is not within the 6 environments"),
        (["export", file, out, "--envs", "3:3"], "--envs is 3:3, which is not within"),
        (["export", file, out, "--steps", "0:9"], "--steps is 0:9, which is not within the 8 steps"),
        (["export", file, out, "--steps", "-9:"], "--steps is -9:, which is not within the 8 steps"),
        (["export", file, out, "--steps", "3"], "--steps is '3', expected A:B"),
        (["export", file, out, "--reward", "value"], "--reward is not for npz files"),
        (["export", file, tmp_path / "out.h5", "--keys", "value"], "--keys is not for hdf5 files"),
        (["export", file, tmp_path / "out.h5", "--reward", "agents/action"], "the reward of an episode is one value"),
        (["export", file, tmp_path / "out.h5", "--observation", "value"], "has no next/value"),
    ]:
        result = rollout(*arguments)
        assert one_line(result), result
        assert reason in result.err
    bare = TensorDict({"observation": torch.ones(2, 3, 4), "next": {"observation": torch.ones(2, 3, 4)}}, [2, 3])
    result = rollout("export", save_rollout_compressed(bare, tmp_path / "bare.slip"), tmp_path / "out.h5")
    assert one_line(result)
    assert "has no next/agents/reward or next/reward for the reward of an episode; name another key" in result.err
    assert not list(tmp_path.glob("out*"))


def test_names_in_a_rollout_cannot_steer_the_terminal(rollout, tmp_path):
    hostile = TensorDict({"\x1b[2J[red]x": torch.ones(2, 3)}, batch_size=[2, 3])
    path = save_rollout_compressed(hostile, tmp_path / "a.slip", metadata={"\x1b]0;t\x07": "\x1b[2J"})
    for arguments in (["inspect", path], ["inspect", "--json", path], ["verify", path]):
        result = rollout(*arguments)
        assert result.code == 0
        assert "\x1b" not in result.out
    assert "\\x1b[2J[red]x" in rollout("inspect", path).out
