"""A folder of checkpoints that looks after itself, and survives whatever happens to it."""

import itertools
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import (
    CheckpointManager,
    ConfigurationError,
    CorruptFileError,
    DiskFullError,
    Thin,
    UnsupportedStateError,
    load_checkpoint,
)
from slipstream.checkpoint import native, series
from slipstream.checkpoint.native import NativeFile
from slipstream.store.container import Container
from slipstream.store.writer import write_container


def state(step: int) -> dict[str, Any]:
    """A state whose every number tells its step."""
    moments = {"exp_avg": torch.full((4000,), step + 0.5)}
    return {
        "policy": {"weight": torch.full((5000,), float(step))},
        "optimizer": {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "step": step,
    }


def large_state(step: int) -> dict[str, Any]:
    """A state with a frozen encoder, of which deltas hold only what changes."""
    encoder = torch.linspace(0, 1, 140_000)
    weight = torch.linspace(-1, 1, 30_000) + step * 1e-7
    return {"encoder": encoder, "policy": {"weight": weight}, "step": step}


def fill(manager: CheckpointManager, steps: Any, rewards: list[float] | None = None, make: Any = state) -> None:
    for number, step in enumerate(steps):
        manager.save(step, make(step), {"reward": rewards[number]} if rewards else None)


def check(manager: CheckpointManager, step: int) -> None:
    restored = manager.restore(step)
    assert restored.step == step
    assert restored.state["step"] == step
    assert restored.state["policy"]["weight"].unique().tolist() == [float(step)]


def check_large(path: Path, step: int) -> None:
    found = load_checkpoint(path)
    assert found["step"] == step
    assert torch.equal(found["encoder"], large_state(step)["encoder"])
    assert torch.equal(found["policy"]["weight"], large_state(step)["policy"]["weight"])


def flip(path: Path, position: int | None = None) -> None:
    """Flip a bit, in the middle of the data by default."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3 if position is None else position] ^= 1
    path.write_bytes(content)


def parents_of(path: Path) -> list[str]:
    with NativeFile(path) as file:
        return [parent.file for parent in file.header.parents]


# ---- retention


def test_the_newest_are_kept(tmp_path):
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        fill(manager, [10, 20, 30, 40, 50])
    assert manager.steps() == [30, 40, 50]
    assert manager.latest() == 50
    for step in manager.steps():
        check(manager, step)


def test_multiples_and_the_best_are_kept_too(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1, keep_every=40, keep_best=("reward", "max")) as manager:
        fill(manager, [10, 20, 30, 40, 50, 60], [1, 9, 3, 2, 4, 5])
        manager.flush()
        assert manager.best() == 20
    assert manager.steps() == [20, 40, 60]


def test_a_second_run_in_the_same_folder_keeps_its_checkpoints(tmp_path):
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        fill(manager, [1000, 2000, 3000])
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        for step in (10, 20, 30):
            path = manager.save(step, state(step)).result().path
            assert path.exists()
            assert manager.latest() == step
            assert manager.restore().step == step
        assert manager.steps() == [10, 20, 30]


def test_a_run_that_was_rolled_back_keeps_both_branches_until_retention_expires_them(tmp_path):
    with CheckpointManager(tmp_path, keep_last=4) as manager:
        fill(manager, [100, 200, 300])
        fill(manager, [150])
        manager.flush()
        assert manager.steps() == [100, 150, 200, 300]
        assert manager.latest() == 150
        fill(manager, [160, 170])
        manager.flush()
        assert manager.steps() == [150, 160, 170, 300]


def test_saving_a_step_again_replaces_it(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"x": torch.zeros(100)})
        manager.save(5, {"x": torch.ones(100)})
        assert manager.restore(5).state["x"].sum() == 100
    assert manager.steps() == [5]
    assert len(list(tmp_path.glob("*.slip"))) == 1


@pytest.mark.parametrize(
    "convert", [float, np.float32, np.int64, np.array, torch.tensor, np.bool_, lambda value: torch.tensor([value])[0]]
)
def test_the_best_is_kept_whatever_kind_of_number_the_metric_is(tmp_path, convert):
    with CheckpointManager(tmp_path, keep_last=1, keep_best=("reward", "max")) as manager:
        for step, reward in enumerate([0, 1, 0, 0]):
            manager.save(step, state(step), {"reward": convert(reward)})
        manager.flush()
        assert manager.best() == 1
        assert manager.restore(1).metrics["reward"] in (1, True)
    assert manager.steps() == [1, 3]


@pytest.mark.parametrize("value", ["0.5", "high", [1.0], {"mean": 1}, 1j, 10**400])
def test_a_metric_that_is_not_a_number_is_refused(tmp_path, value):
    manager = CheckpointManager(tmp_path, keep_best=("reward", "max"))
    with manager, pytest.raises(ConfigurationError, match=r"metric 'reward' is .*expected a number"):
        manager.save(1, state(1), {"reward": value})
    assert not list(tmp_path.glob("*.slip"))


def test_a_misspelt_metric_is_refused_before_it_costs_the_best(tmp_path):
    with CheckpointManager(tmp_path, keep_best=("rewrad", "max")) as manager:
        with pytest.raises(ConfigurationError, match="needs metric 'rewrad', but metrics are 'reward', 'loss'"):
            manager.save(1, state(1), {"reward": 1.0, "loss": 2.0})
        manager.save(2, state(2))
        manager.save(3, state(3), {"rewrad": None, "loss": 1.0})
        # Not measured every time: allowed once the name has occurred.
        manager.save(4, state(4), {"loss": 1.0})
    assert manager.steps() == [2, 3, 4]


def test_a_metric_that_was_refused_does_not_count_as_seen(tmp_path):
    with CheckpointManager(tmp_path, keep_best=("reward", "max")) as manager:
        with pytest.raises(ConfigurationError, match="expected a number"):
            manager.save(1, state(1), {"reward": "high"})
        with pytest.raises(ConfigurationError, match="needs metric 'reward'"):
            manager.save(1, state(1), {"rewrad": 1.0})


def test_metrics_that_cannot_be_stored_are_refused_at_the_call(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UnsupportedStateError, match=r"metadata/metrics/model"):
            manager.save(1, state(1), {"model": torch.nn.Linear(1, 1)})
        with pytest.raises(UnsupportedStateError, match=r"metadata/metrics/curve"):
            manager.save(1, state(1), {"curve": np.zeros(3)})


def test_metrics_are_captured_at_the_call(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        metrics: dict[str, Any] = {"reward": 1.0, "nested": {"list": [1]}}
        manager.save(1, state(1), metrics)
        metrics["reward"] = 2.0
        metrics["nested"]["list"].append(2)
        assert manager.restore().metrics == {"reward": 1.0, "nested": {"list": [1]}}


def test_a_changed_working_directory_does_not_move_the_run(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run") as manager:
        handle = manager.save(1, state(1))
        os.chdir("elsewhere")
        assert handle.result().path == tmp_path / "run" / "checkpoint_iter_1.slip"
        manager.save(2, state(2))
        assert manager.restore().step == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("step", [5.0, 1e6, True, "5", None, -1, float("nan"), np.float32(3), 10**300])
def test_a_step_that_is_not_a_whole_number_is_refused(tmp_path, step):
    with CheckpointManager(tmp_path) as manager, pytest.raises(ConfigurationError, match="step is"):
        manager.save(step, {})


@pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), torch.tensor(7)])
def test_a_step_may_be_any_kind_of_integer(tmp_path, step):
    with CheckpointManager(tmp_path) as manager:
        manager.save(step, state(7))
    assert manager.steps() == [7]


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"keep_every": 0},
        {"keep_last": 2.5},
        {"keep_best": ("reward", "most")},
        {"keep_best": "reward"},
        {"keep_best": (3, "max")},
        {"thin": 3},
        {"differential": "no"},
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(ConfigurationError, match="expected"):
        CheckpointManager(tmp_path, **options)


def test_a_failure_to_delete_an_old_checkpoint_does_not_fail_the_save(tmp_path, caplog, monkeypatch):
    original = Path.unlink

    def refuse(path: Path, **options: Any) -> None:
        if path.name == "checkpoint_iter_1.slip":
            raise PermissionError(13, "Permission denied", str(path))
        original(path, **options)

    with CheckpointManager(tmp_path, keep_last=1) as manager:
        monkeypatch.setattr(Path, "unlink", refuse)
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
        assert manager.get_stats()["retention_failures"] == 2
        assert manager.steps() == [1, 3]
        assert "checkpoint_iter_1.slip" in caplog.text
        # It is tried again at the next save.
        monkeypatch.undo()
        manager.save(4, state(4)).result()
        assert manager.steps() == [4]


def test_prune_applies_the_policy_and_plan_only_tells(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        fill(manager, range(6))
    strict = CheckpointManager(tmp_path, keep_last=2)
    assert strict.plan().describe() == [f"delete checkpoint_iter_{step}.slip" for step in range(4)]
    assert strict.steps() == list(range(6))
    assert strict.prune() == [0, 1, 2, 3]
    assert strict.steps() == [4, 5]
    strict.close()


# ---- files that move, vanish and break


def test_a_renamed_file_restores_under_its_own_step(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [1, 2])
        manager.flush()
        manager.path(1).rename(tmp_path / "checkpoint_iter_999.slip")
        assert manager.steps() == [1, 2]
        assert manager.restore().step == 2
        check(manager, 1)
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 999, the folder has 1, 2"):
            manager.restore(999)


def test_saving_over_a_renamed_file_keeps_it(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [1])
        manager.flush()
        manager.path(1).rename(tmp_path / "checkpoint_iter_2.slip")
        fill(manager, [2])
        manager.flush()
        check(manager, 1)
        check(manager, 2)


@pytest.mark.parametrize("name", ["first.slip", "checkpoint_iter_1_2024.slip", "checkpoint_iter_\u0661.slip"])
def test_a_file_with_a_name_of_the_users_choice_is_never_deleted(tmp_path, name):
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        fill(manager, [1])
        manager.flush()
        shutil.copy(manager.path(1), tmp_path / name)
        fill(manager, [2, 3])
    assert manager.steps() == [1, 3]
    check(manager, 1)


@pytest.mark.parametrize("differential", [False, True])
def test_copies_in_another_folder_stay_readable_whatever_happens_here(tmp_path, differential):
    backup = tmp_path / "backup"
    backup.mkdir()
    with CheckpointManager(tmp_path / "run", keep_last=4, differential=differential) as manager:
        fill(manager, range(6), make=large_state)
        manager.flush()
        for path in (tmp_path / "run").glob("*.slip"):
            shutil.copy(path, backup)
        fill(manager, range(6, 12), make=large_state)
    for step in (2, 3, 4, 5):
        check_large(backup / f"checkpoint_iter_{step}.slip", step)


def test_a_whole_file_can_be_copied_alone(tmp_path):
    with CheckpointManager(tmp_path / "run", keep_last=2) as manager:
        fill(manager, range(4), make=large_state)
    shutil.copy(manager.path(3), tmp_path / "anything.bin")
    shutil.rmtree(tmp_path / "run")
    check_large(tmp_path / "anything.bin", 3)


def test_restore_falls_back_to_the_newest_intact_checkpoint_and_says_so(tmp_path, caplog):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [1, 2, 3])
    flip(tmp_path / "checkpoint_iter_3.slip")
    (tmp_path / "checkpoint_iter_2.slip").write_bytes(b"")
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore().step == 1
        assert "restored step 1 from" in caplog.text
        assert "checkpoint_iter_2.slip" in caplog.text
        with pytest.raises(CorruptFileError, match="checkpoint_iter_3"):
            manager.restore(3)
        with pytest.raises(CorruptFileError, match="no checkpoint of step 2 can be read.*is empty"):
            manager.restore(2)
        flip(tmp_path / "checkpoint_iter_1.slip")
        with pytest.raises(CorruptFileError, match="none of its 3 checkpoints is intact"):
            manager.restore()


def test_restore_moves_on_whatever_is_wrong_with_a_file(tmp_path, caplog):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [1])
        manager.flush()
    (tmp_path / "checkpoint_iter_2.slip").symlink_to(tmp_path / "nowhere")
    (tmp_path / "checkpoint_iter_3.slip").mkdir()
    os.mkfifo(tmp_path / "checkpoint_iter_4.slip")
    (tmp_path / "checkpoint_iter_5.slip").write_bytes(bytes(10_000))
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore().step == 1
        for step in (2, 3, 4, 5):
            assert f"checkpoint_iter_{step}.slip" in caplog.text
        # None of them keeps the folder from being tidied up.
        manager.save(6, state(6)).result()
        assert CheckpointManager(tmp_path, keep_last=1).prune() == [1]


def test_restore_is_not_stopped_by_an_earlier_save_that_failed(tmp_path, caplog, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1)).result()
        with monkeypatch.context() as patch:
            patch.setattr(series, "write_native", _disk_full)
            manager.save(2, state(2))
            restored = manager.restore()
        assert restored.step == 1
        assert "disk is full" in caplog.text


def _disk_full(path: Path, *_: Any, **__: Any) -> None:
    raise DiskFullError(28, f"cannot write {path}: the disk is full")


def test_damaged_files_are_not_deleted_by_retention(tmp_path):
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        fill(manager, [1, 2])
        manager.flush()
        flip(tmp_path / "checkpoint_iter_1.slip", -1)
        fill(manager, [3, 4, 5])
    assert manager.steps() == [4, 5]
    assert (tmp_path / "checkpoint_iter_1.slip").exists()


def test_foreign_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint_iter_x.slip").write_text("mine")
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        fill(manager, [1, 2])
    assert {"notes.txt", "checkpoint_iter_x.slip", "checkpoint_iter_2.slip"} <= {p.name for p in tmp_path.iterdir()}


def test_a_folder_that_was_deleted_is_created_again(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        fill(manager, [1])
        manager.flush()
        shutil.rmtree(tmp_path / "run")
        assert manager.steps() == []
        manager.save(2, state(2)).result()
        check(manager, 2)


def test_looking_for_checkpoints_does_not_create_the_folder(tmp_path):
    with CheckpointManager(tmp_path / "mistyped", keep_best=("reward", "max")) as manager:
        assert (manager.latest(), manager.best(), manager.steps(), manager.prune()) == (None, None, [], [])
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            manager.restore()
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 7"):
            manager.restore(7)
    assert not (tmp_path / "mistyped").exists()


def test_keys_that_do_not_exist_are_an_error_and_not_a_reason_to_try_older_ones(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [1, 2])
        assert set(manager.restore(keys="policy").state) == {"policy"}
        with pytest.raises(KeyError, match="polcy"):
            manager.restore(keys=["polcy"])


def test_after_a_full_disk_later_saves_succeed(tmp_path, monkeypatch):
    real = native.write_native
    failures = itertools.count()

    def full_three_times(*args: Any, **options: Any) -> Any:
        if next(failures) in (2, 3, 6):
            raise DiskFullError(28, "cannot write: no space left")
        return real(*args, **options)

    monkeypatch.setattr(series, "write_native", full_three_times)
    with CheckpointManager(tmp_path, keep_last=3, differential=True) as manager:
        outcomes = []
        for step in range(8):
            outcomes.append(manager.save(step, large_state(step)).exception() is None)
        # The third save failed, and its second attempt, too. The sixth succeeded at the second attempt.
        assert outcomes == [True, True, False, True, True, True, True, True]
        for step in manager.steps():
            check_large(manager.path(step), step)
        assert manager.steps() == [5, 6, 7]


def test_a_disk_that_looks_too_small_is_tried_anyway(tmp_path, monkeypatch):
    """A compressed file may fit where its content would not: only the kernel knows."""
    status = os.statvfs(tmp_path)
    empty = os.statvfs_result((*status[:2], status[2], 0, 0, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: empty)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1)).result()
    check(manager, 1)


# ---- deltas


def test_frozen_tensors_are_stored_once(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        fill(manager, range(5), make=large_state)
    sizes = [manager.path(step).stat().st_size for step in range(5)]
    assert not parents_of(manager.path(0))
    assert not parents_of(manager.path(1))
    assert parents_of(manager.path(4)) == [f"checkpoint_iter_{step}.slip" for step in (3, 2, 1)]
    assert sizes[4] < sizes[0] / 3
    for step in range(5):
        check_large(manager.path(step), step)


def test_by_default_every_file_is_whole(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        fill(manager, range(4), make=large_state)
    for step in range(4):
        assert parents_of(manager.path(step)) == []


def test_a_chain_has_at_most_16_links(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        fill(manager, range(40), make=large_state)
    lengths = [len(parents_of(manager.path(step))) for step in range(40)]
    assert max(lengths) == 16
    for step in range(40):
        check_large(manager.path(step), step)


def test_deltas_find_renamed_parents(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        fill(manager, range(5), make=large_state)
    for step in range(4):
        (tmp_path / f"checkpoint_iter_{step}.slip").rename(tmp_path / f"{9 - step}.renamed")
    check_large(tmp_path / "checkpoint_iter_4.slip", 4)


def test_a_delta_without_its_parents_names_them(tmp_path):
    with CheckpointManager(tmp_path / "run", keep_last=None, differential=True) as manager:
        fill(manager, range(4), make=large_state)
    shutil.copy(manager.path(3), tmp_path)
    with pytest.raises(CorruptFileError, match=r"since checkpoint_iter_2.slip.*\(checkpoint_iter_2.slip, checkpoint_"):
        load_checkpoint(tmp_path / "checkpoint_iter_3.slip")
    for step in (1, 2):
        shutil.copy(manager.path(step), tmp_path)
    check_large(tmp_path / "checkpoint_iter_3.slip", 3)


@pytest.mark.parametrize("keep_last", [1, 2, 3, 5])
def test_retention_leaves_exactly_what_the_policy_says_and_all_of_it_readable(tmp_path, keep_last):
    with CheckpointManager(tmp_path, keep_last=keep_last, differential=True) as manager:
        for step in range(12):
            manager.save(step, large_state(step)).result()
            expected = list(range(max(0, step + 1 - keep_last), step + 1))
            assert manager.steps() == expected
            assert len(list(tmp_path.glob("*.slip"))) == len(expected)
            for kept in expected:
                check_large(manager.path(kept), kept)


@pytest.mark.parametrize("keep_last", [2, 3, 5, None])
def test_one_damaged_byte_never_costs_all_checkpoints(tmp_path, keep_last):
    with CheckpointManager(tmp_path, keep_last=keep_last, differential=True) as manager:
        fill(manager, range(9), make=large_state)
    whole = [path.read_bytes() for path in sorted(tmp_path.glob("*.slip"))]
    for path, content in zip(sorted(tmp_path.glob("*.slip")), whole, strict=True):
        flip(path)
        with CheckpointManager(tmp_path, keep_last=None) as reader:
            restored = reader.restore()
            assert torch.equal(restored.state["encoder"], large_state(0)["encoder"])
        path.write_bytes(content)


def test_nothing_is_stored_against_a_damaged_parent(tmp_path, caplog):
    with CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        for step in range(8):
            manager.save(step, large_state(step)).result()
            if step == 2:
                flip(tmp_path / "checkpoint_iter_1.slip")
    assert "the next checkpoint does not refer to it" in caplog.text
    for step in range(3, 8):
        check_large(manager.path(step), step)


def test_the_best_checkpoint_is_whole(tmp_path):
    with CheckpointManager(tmp_path, keep_last=4, keep_best=("reward", "max"), differential=True) as manager:
        for step, reward in enumerate([1, 2, 3, 9, 4, 5, 6, 7, 8, 1, 1]):
            manager.save(step, large_state(step), {"reward": reward}).result()
            best = manager.best()
            assert best is not None
            assert parents_of(manager.path(best)) == []
    assert 3 in manager.steps()


def test_the_folder_takes_no_more_space_than_whole_files(tmp_path, monkeypatch):
    """Random weights have nothing in common from one save to the next."""
    # The digits of the time are in the files.
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    for name, differential in (("whole", False), ("deltas", True)):
        with CheckpointManager(tmp_path / name, keep_last=5, differential=differential) as manager:
            for step in range(12):
                torch.manual_seed(step)
                manager.save(step, {"noise": torch.randn(50_000), "step": step})
    sizes = {}
    for name in ("whole", "deltas"):
        sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).glob("*.slip"))
    assert sizes["deltas"] <= sizes["whole"]


def test_replacing_a_parent_does_not_break_its_children(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        fill(manager, range(5), make=large_state)
        # Rolled back: steps 2 and 3 are saved again, and 4 is stored against the old 3.
        manager.save(2, large_state(2)).result()
        manager.save(3, large_state(3)).result()
        for step in range(5):
            check_large(manager.path(step), step)
        assert manager.latest() == 3


def test_files_written_and_read_under_other_floating_point_modes_are_equal_bit_for_bit(tmp_path):
    generator = np.random.default_rng(0)
    # Denormal numbers, which flushing turns into zeros.
    bits = generator.integers(0, 1 << 20, 40_000, dtype=np.uint32)
    script = """
import sys
import numpy as np, torch
from slipstream import CheckpointManager
mode, folder = sys.argv[1], sys.argv[2]
torch.set_flush_denormal(mode == "flush")
bits = np.random.default_rng(0).integers(0, 1 << 20, 40_000, dtype=np.uint32)
with CheckpointManager(folder, keep_last=None, differential=True) as manager:
    for step in range(4):
        manager.save(step, {"x": torch.from_numpy((bits + np.uint32(step)).view(np.float32))})
for step in range(4):
    found = manager.restore(step).state["x"].numpy().view(np.uint32)
    assert (found == bits + np.uint32(step)).all(), step
"""
    for mode in ("flush", "keep"):
        subprocess.run([sys.executable, "-c", script, mode, tmp_path / mode], check=True)
        for step in range(4):
            found = load_checkpoint(tmp_path / mode / f"checkpoint_iter_{step}.slip")["x"]
            assert np.array_equal(found.numpy().view(np.uint32), bits + np.uint32(step))


# ---- thinning


def test_older_checkpoints_lose_what_the_policy_says(tmp_path):
    thin = Thin(keep_full=1, dtype=torch.bfloat16)
    with CheckpointManager(tmp_path, keep_last=3, thin=thin) as manager:
        fill(manager, [1, 2, 3], [0.1, 0.2, 0.3])
    old, new = manager.restore(2), manager.restore(3)
    assert set(old.state) == {"policy", "step"}
    assert old.state["policy"]["weight"].dtype == torch.bfloat16
    assert old.metrics == {"reward": 0.2}
    assert old.thinned == ("without optimizer", "1 tensor as bfloat16")
    assert new.thinned == ()
    assert set(new.state) == {"policy", "optimizer", "step"}
    assert new.state["policy"]["weight"].dtype == torch.float32


def test_a_restore_that_falls_back_to_a_thinned_checkpoint_says_so(tmp_path, caplog):
    with CheckpointManager(tmp_path, thin=Thin()) as manager:
        fill(manager, [1, 2, 3])
        manager.flush()
        flip(tmp_path / "checkpoint_iter_3.slip")
        assert manager.restore().thinned == ("without optimizer",)
    assert "step 2 was thinned (without optimizer), so a run cannot resume from it exactly" in caplog.text


def test_thinning_a_parent_does_not_break_its_children(tmp_path):
    with CheckpointManager(tmp_path, keep_last=4, thin=Thin(keep_full=2), differential=True) as manager:
        fill(manager, range(9))
    check(manager, 8)
    assert manager.restore(7).state["optimizer"]["state"][0]["exp_avg"].unique().tolist() == [7.5]
    for step in (5, 6):
        assert "optimizer" not in manager.restore(step).state
        check(manager, step)


# ---- processes


LOOP = """
import sys, torch
from slipstream import CheckpointManager

def state(step):
    moments = {"exp_avg": torch.full((4000,), step + 0.5)}
    return {"policy": {"weight": torch.full((5000,), float(step))}, "optimizer": {"state": {0: moments}}, "step": step}

folder, start, differential = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "differential"
with CheckpointManager(folder, keep_last=4, differential=differential) as manager:
    handles = []
    for step in range(start, start + 100_000):
        handles.append((step, manager.save(step, state(step))))
        while handles and handles[0][1].done():
            done, handle = handles.pop(0)
            handle.result()
            print(done, flush=True)
"""


def kill_at_random_instants(folder: Path, times: int, mode: str) -> None:
    """Run a loop that saves as fast as it can, kill it, and look at what is left; again and again."""
    start = 0
    rng = random.Random(0)
    for _ in range(times):
        with subprocess.Popen(
            [sys.executable, "-c", LOOP, folder, str(start), mode], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            reported = [int(line) for line in process.stdout.read().splitlines() if line.strip().isdigit()]
        with CheckpointManager(folder, keep_last=4) as manager:
            newest = manager.latest()
            assert newest is not None
            assert newest >= max(reported, default=0), "a checkpoint that was reported durable is gone"
            for step in manager.steps():
                check(manager, step)
        start = newest + 1


@pytest.mark.parametrize("mode", ["whole", "differential"])
def test_kill_9_at_random_instants_never_loses_or_breaks_a_checkpoint(tmp_path, mode):
    kill_at_random_instants(tmp_path, 5, mode)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", ["whole", "differential"])
def test_kill_9_hundreds_of_times(tmp_path, mode):
    kill_at_random_instants(tmp_path, 150, mode)


@pytest.mark.parametrize("mode", ["whole", "differential"])
def test_two_processes_may_save_into_one_folder(tmp_path, mode):
    script = LOOP.replace("100_000", "25")
    processes = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path, start, mode], stdout=subprocess.DEVNULL)
        for start in ("0", "1000")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    with CheckpointManager(tmp_path, keep_last=4) as manager:
        assert len(manager.steps()) == 4
        for step in manager.steps():
            check(manager, step)
        assert manager.latest() in (24, 1024)


def test_a_read_only_folder_fails_with_a_sentence_and_training_continues(tmp_path):
    script = """
import os, sys, torch
from slipstream import CheckpointManager
folder = sys.argv[1]
manager = CheckpointManager(folder)
manager.save(1, {"x": torch.ones(3)}).wait()
os.chmod(folder, 0o555)
if os.geteuid() == 0:
    os.setuid(65534)
try:
    manager.save(2, {"x": torch.ones(3)}).result()
except OSError as error:
    print(type(error).__name__, error)
print("training continues", manager.latest())
"""
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o001:  # users other than root have to get there
            parent.chmod(0o755)
    folder = tmp_path / "run"
    result = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert "Permission denied" in result.stdout
    assert result.stdout.endswith("training continues 1\n")
    folder.chmod(0o755)


def _save_in_child(manager: CheckpointManager, step: int) -> None:
    manager.save(step, state(step)).result()


@pytest.mark.usefixtures("forks_on_another_thread")
def test_a_child_forked_during_a_write_can_save_and_does_not_hold_up_its_parent(tmp_path, monkeypatch):
    """Workers of a DataLoader are forked at any moment, and may live as long as training."""
    context = multiprocessing.get_context("fork")
    real = native.write_native
    children: list[Any] = []
    release = context.Event()

    def fork_while_writing(*args: Any, **options: Any) -> Any:
        if not children:
            children.append(context.Process(target=release.wait))
            children.append(context.Process(target=_save_in_child, args=(manager, 100)))
            for child in children:
                child.start()
        return real(*args, **options)

    with CheckpointManager(tmp_path, keep_last=None) as manager:
        monkeypatch.setattr(series, "write_native", fork_while_writing)
        manager.save(1, state(1)).result()
        monkeypatch.undo()
        # One child is still alive, and was forked while the lock of the folder was held.
        manager.save(2, state(2)).result()
        release.set()
        for child in children:
            child.join()
            assert child.exitcode == 0
    assert manager.steps() == [1, 2, 100]
    for step in manager.steps():
        check(manager, step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_and_exit_finish_what_is_queued(tmp_path, number):
    script = f"""
import os, signal, sys, torch
from slipstream import CheckpointManager
signal.signal(signal.SIGINT, signal.default_int_handler)
manager = CheckpointManager({str(tmp_path)!r}, keep_last=None, max_queue_size=8)
for step in range(6):
    manager.save(step, {{"x": torch.full((200_000,), float(step))}})
os.kill(os.getpid(), {number.value})
signal.pause()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert process.returncode != 0
    manager = CheckpointManager(tmp_path)
    assert manager.steps() == list(range(6))
    for step in range(6):
        assert manager.restore(step).state["x"].unique().tolist() == [float(step)]


def test_a_worker_thread_that_keeps_the_folder_locked_is_waited_for(tmp_path, caplog):
    """Prune on the main thread while saves are written in the background."""
    caplog.set_level(logging.ERROR)
    with CheckpointManager(tmp_path, keep_last=2, max_queue_size=4) as manager:
        for step in range(12):
            manager.save(step, state(step))
            manager.prune()
    assert manager.steps() == [10, 11]
    assert not caplog.records


def test_other_containers_in_the_folder_are_not_mistaken_for_damaged_checkpoints(tmp_path, caplog):
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        fill(manager, [1, 2])
    with write_container(tmp_path / "rollout_000002.slip", kind="rollout"):
        pass
    (tmp_path / "notes.slip").write_text("mine")
    assert manager.restore().step == 2
    assert not caplog.records


# ---- what users do to folders with deltas


def test_a_link_to_a_checkpoint_is_not_taken_for_a_copy(tmp_path):
    """People link best.slip or latest.slip to a checkpoint."""
    with CheckpointManager(tmp_path, keep_last=3, differential=True) as manager:
        for step in range(10):
            manager.save(step, large_state(step)).result()
            link = tmp_path / f"link {step}.slip"
            link.symlink_to(f"checkpoint_iter_{step}.slip")
            for kept in manager.steps():
                check_large(manager.path(kept), kept)
    assert manager.steps() == [7, 8, 9]


def test_saving_over_a_link_leaves_the_file_that_it_points_to(tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    with CheckpointManager(tmp_path / "run", thin=Thin()) as manager:
        fill(manager, [3])
        manager.flush()
        manager.path(3).rename(archive / "best.slip")
        content = (archive / "best.slip").read_bytes()
        (tmp_path / "run" / "checkpoint_iter_3.slip").symlink_to(archive / "best.slip")
        fill(manager, [3, 4])
        manager.flush()
        check(manager, 3)
    assert (archive / "best.slip").read_bytes() == content


def test_a_damaged_copy_of_a_parent_costs_nothing(tmp_path):
    with CheckpointManager(tmp_path, keep_last=3, differential=True) as manager:
        for step in range(10):
            manager.save(step, large_state(step)).result()
            # Sorts before and after the names that the manager gives.
            for name in ("a copy.slip", "the copy.slip"):
                shutil.copy(manager.path(step), tmp_path / name)
                flip(tmp_path / name)
            for kept in range(max(0, step - 2), step + 1):
                check_large(tmp_path / f"checkpoint_iter_{kept}.slip", kept)


def test_an_intact_copy_of_a_damaged_parent_is_used(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        fill(manager, range(4), make=large_state)
    shutil.copy(tmp_path / "checkpoint_iter_2.slip", tmp_path / "zz.slip")
    flip(tmp_path / "checkpoint_iter_2.slip", 1000)
    check_large(tmp_path / "checkpoint_iter_3.slip", 3)
    assert manager.restore(2).step == 2


def test_a_parent_that_cannot_be_read_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, keep_last=None, differential=True) as manager:
        fill(manager, range(5), make=large_state)
    hidden = tmp_path / "checkpoint_iter_1.slip"
    original = Container.__init__

    def fail(self: Container, path: Any, **options: Any) -> None:
        if Path(path) == hidden:
            raise OSError(5, "Input/output error", str(path))
        original(self, path, **options)

    with CheckpointManager(tmp_path, keep_last=2) as strict:
        monkeypatch.setattr(Container, "__init__", fail)
        strict.prune()
        monkeypatch.undo()
        for step in (3, 4):
            check_large(tmp_path / f"checkpoint_iter_{step}.slip", step)
        strict.prune()
        assert strict.steps() == [3, 4]
        for step in (3, 4):
            check_large(tmp_path / f"checkpoint_iter_{step}.slip", step)


def test_after_an_error_of_the_disk_a_file_is_read_again(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [7, 8])
    reader = CheckpointManager(tmp_path)
    original = Container.__init__
    failing = [tmp_path / "checkpoint_iter_8.slip"]

    def fail(self: Container, path: Any, **options: Any) -> None:
        if Path(path) in failing:
            raise OSError(5, "Input/output error", str(path))
        original(self, path, **options)

    monkeypatch.setattr(Container, "__init__", fail)
    assert reader.latest() == 7
    failing.clear()
    assert reader.latest() == 8
    reader.close()


def test_a_number_is_not_used_again_while_its_file_cannot_be_read(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [1, 2])
        manager.flush()
        content = manager.path(2).read_bytes()
        manager.path(2).write_bytes(b"")
        fill(manager, [0])
        manager.flush()
        (tmp_path / "checkpoint_iter_2.slip").write_bytes(content)
        assert manager.latest() == 0


def test_a_file_that_makes_way_replaces_no_other(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
            manager.path(step).rename(tmp_path / "checkpoint_iter_9.slip")
            manager.save(9, state(9)).result()
        for step in (1, 2, 3, 9):
            check(manager, step)


def test_after_a_full_disk_the_next_checkpoint_depends_on_no_memory_that_was_returned(tmp_path, monkeypatch):
    real = native.write_native
    calls = itertools.count()
    is_full = threading.Event()
    has_saved = threading.Event()

    def full_once(*args: Any, **options: Any) -> Any:
        call = next(calls)
        if call == 5:
            raise DiskFullError(28, "cannot write: no space left")
        if call == 6:
            # Training saves again before the second attempt, and the pool hands out memory that is free.
            is_full.set()
            has_saved.wait()
        return real(*args, **options)

    monkeypatch.setattr(series, "write_native", full_once)
    with CheckpointManager(tmp_path, keep_last=None, differential=True, max_queue_size=8) as manager:
        for step in range(6):
            manager.save(step, {"x": torch.linspace(-1, 1, 200_000) + step * 1e-7})
        is_full.wait()
        for step in range(6, 12):
            manager.save(step, {"x": torch.linspace(-1, 1, 200_000) + step * 1e-7})
        has_saved.set()
    for step in range(12):
        found = load_checkpoint(manager.path(step))["x"]
        assert torch.equal(found, torch.linspace(-1, 1, 200_000) + step * 1e-7)


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "run").write_text("mine")
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(NotADirectoryError):
        manager.latest()


@pytest.mark.parametrize("step", ["7", 7.0, True])
def test_restoring_a_step_that_is_no_number_is_refused(tmp_path, step):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [7])
        with pytest.raises(ConfigurationError, match="step is"):
            manager.restore(step)


def test_restoring_to_a_missing_device_is_an_error_about_the_device(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [7])
        with pytest.raises(ConfigurationError, match="device 'cuda:99' is not available"):
            manager.restore(device="cuda:99")


def test_an_intact_copy_of_the_step_is_restored(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        fill(manager, [7])
        manager.flush()
        shutil.copy(manager.path(7), tmp_path / "backup.slip")
        flip(tmp_path / "checkpoint_iter_7.slip", 100)
        check(manager, 7)


def test_a_pickled_manager_saves_whole_checkpoints(tmp_path):
    with CheckpointManager(tmp_path, differential=True, keep_last=None) as manager:
        fill(manager, range(3), make=large_state)
        manager.flush()
        series_copy = pickle.loads(pickle.dumps(manager._series))
    assert series_copy.plan().delete == ()


def test_polling_while_another_process_saves_never_finds_an_empty_folder(tmp_path):
    script = LOOP.replace("100_000", "60").replace("keep_last=4", "keep_last=1")
    fill_first = CheckpointManager(tmp_path, keep_last=1)
    fill_first.save(0, state(0)).result()
    fill_first.close()
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path, "1", "whole"], stdout=subprocess.DEVNULL)
    manager = CheckpointManager(tmp_path, keep_last=None)
    while process.poll() is None:
        assert manager.latest() is not None
        assert manager.restore().step >= 0
    assert process.returncode == 0
    manager.close()
