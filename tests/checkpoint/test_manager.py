"""A folder of checkpoints that looks after itself, and survives whatever happens to it."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slipstream import CheckpointManager, CorruptFileError, Thin, load_checkpoint
from slipstream.checkpoint.native import NativeFile


def state(step: int) -> dict[str, object]:
    """A state whose every number tells its step."""
    moments = {"exp_avg": torch.full((4000,), step + 0.5)}
    return {"policy": {"weight": torch.full((5000,), float(step))}, "optimizer": {"state": {0: moments}}, "step": step}


def fill(manager: CheckpointManager, steps: list[int], rewards: list[float] | None = None) -> None:
    for number, step in enumerate(steps):
        manager.save(step, state(step), {"reward": rewards[number]} if rewards else None)


def check(manager: CheckpointManager, step: int) -> None:
    restored = manager.restore(step)
    assert restored.step == step
    assert restored.state["step"] == step
    assert restored.state["policy"]["weight"].unique().tolist() == [float(step)]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


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


def test_the_best_may_be_the_smallest_and_nan_is_never_best(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, keep_best=("loss", "min")) as manager:
        for step, loss in enumerate([3.0, float("nan"), 1.0, 2.0]):
            manager.save(step, state(step), {"loss": loss})
        manager.save(9, state(9))
        manager.flush()
        assert manager.best() == 2


def test_an_empty_folder_has_no_latest_and_nothing_to_restore(tmp_path):
    with CheckpointManager(tmp_path / "new", keep_best=("reward", "max")) as manager:
        assert (manager.latest(), manager.best(), manager.steps()) == (None, None, [])
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            manager.restore()
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 7"):
            manager.restore(7)


def test_metrics_are_restored_with_the_state(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, state(5), {"reward": 1.25, "note": "good"})
        assert manager.restore().metrics == {"reward": 1.25, "note": "good"}


def test_saving_a_step_again_replaces_it(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"x": torch.zeros(100)})
        manager.save(5, {"x": torch.ones(100)})
        assert manager.restore(5).state["x"].sum() == 100
    assert manager.steps() == [5]


def test_deleting_a_parent_by_hand_never_breaks_a_child(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None, full_every=10) as manager:
        fill(manager, list(range(8)))
    for step in range(7):
        manager.path(step).unlink()
    check(manager, 7)


def test_bases_go_when_nothing_needs_them_any_more(tmp_path):
    with CheckpointManager(tmp_path, keep_last=2, full_every=4) as manager:
        fill(manager, list(range(30)))
        manager.flush()
        for step in manager.steps():
            check(manager, step)
        assert len(list((tmp_path / ".bases").iterdir())) <= 5


def test_restore_falls_back_to_the_newest_sound_checkpoint_and_says_so(tmp_path, caplog):
    with CheckpointManager(tmp_path, full_every=1) as manager:
        fill(manager, [1, 2, 3])
    damage(manager.path(3))
    manager.path(2).write_bytes(b"")
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore().step == 1
        assert "restored step 1 instead of 3" in caplog.text
        with pytest.raises(CorruptFileError, match="checkpoint_iter_3"):
            manager.restore(3)
        damage(manager.path(1))
        with pytest.raises(CorruptFileError, match="none of its 3 checkpoints is sound"):
            manager.restore()


def test_damaged_files_are_not_deleted_by_retention(tmp_path):
    with CheckpointManager(tmp_path, full_every=1, keep_last=2) as manager:
        fill(manager, [1, 2])
        manager.flush()
        damaged = bytearray(manager.path(1).read_bytes())
        damaged[-1] ^= 1
        manager.path(1).write_bytes(damaged)
        fill(manager, [3, 4, 5])
    assert manager.steps() == [1, 4, 5]


def test_older_checkpoints_lose_what_the_policy_says(tmp_path):
    thin = Thin(keep_full=1, drop=("optimizer",), dtype=torch.bfloat16)
    with CheckpointManager(tmp_path, keep_last=3, thin=thin) as manager:
        fill(manager, [1, 2, 3], [0.1, 0.2, 0.3])
    old, new = load_checkpoint(manager.path(2)), load_checkpoint(manager.path(3))
    assert set(old) == {"policy", "step"}
    assert old["policy"]["weight"].dtype == torch.bfloat16
    assert set(new) == {"policy", "optimizer", "step"}
    assert new["policy"]["weight"].dtype == torch.float32
    assert manager.path(2).stat().st_size < manager.path(3).stat().st_size + 2000
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(2).metrics == {"reward": 0.2}


def test_thinning_a_parent_does_not_break_its_children(tmp_path):
    with CheckpointManager(tmp_path, keep_last=4, thin=Thin(drop=("optimizer",)), full_every=10) as manager:
        fill(manager, list(range(9)))
    check(manager, 8)
    assert manager.restore(8).state["optimizer"]["state"][0]["exp_avg"].unique().tolist() == [8.5]
    assert "optimizer" not in manager.restore(6).state


@pytest.mark.parametrize(
    "options", [{"keep_last": 0}, {"keep_every": 0}, {"full_every": 0}, {"keep_best": ("reward", "most")}]
)
def test_settings_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="expected"):
        CheckpointManager(tmp_path, **options)


def test_a_negative_step_is_refused(tmp_path):
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="step is -1"):
        manager.save(-1, {})


def test_foreign_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint_iter_x.slip").write_text("mine")
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        fill(manager, [1, 2])
    assert {"notes.txt", "checkpoint_iter_x.slip", "checkpoint_iter_2.slip"} <= {p.name for p in tmp_path.iterdir()}


def test_a_manager_that_comes_later_goes_on_where_the_first_stopped(tmp_path):
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        fill(manager, [1, 2])
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        assert manager.latest() == 2
        fill(manager, [3, 4])
    for step in (2, 3, 4):
        check(manager, step)


LOOP = """
import sys, torch
from slipstream import CheckpointManager

def state(step):
    moments = {"exp_avg": torch.full((4000,), step + 0.5)}
    return {"policy": {"weight": torch.full((5000,), float(step))}, "optimizer": {"state": {0: moments}}, "step": step}

folder, start = sys.argv[1], int(sys.argv[2])
with CheckpointManager(folder, keep_last=4, full_every=5) as manager:
    handles = []
    for step in range(start, start + 100_000):
        handles.append((step, manager.save(step, state(step))))
        while handles and handles[0][1].done():
            done, handle = handles.pop(0)
            handle.result()
            print(done, flush=True)
"""


def kill_at_random_instants(folder: Path, times: int) -> None:
    """Run a loop that saves as fast as it can, kill it, and look at what is left; again and again."""
    start = 0
    rng = random.Random(0)
    for _ in range(times):
        with subprocess.Popen(
            [sys.executable, "-c", LOOP, folder, str(start)], stdout=subprocess.PIPE, text=True
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


def test_kill_9_at_random_instants_never_loses_or_breaks_a_checkpoint(tmp_path):
    kill_at_random_instants(tmp_path, 8)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_kill_9_hundreds_of_times(tmp_path):
    kill_at_random_instants(tmp_path, 200)


def test_two_processes_may_save_into_one_folder(tmp_path):
    script = LOOP.replace("100_000", "25")
    processes = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path, start], stdout=subprocess.DEVNULL)
        for start in ("0", "1000")
    ]
    assert [process.wait(200) for process in processes] == [0, 0]
    with CheckpointManager(tmp_path, keep_last=4) as manager:
        for step in manager.steps():
            check(manager, step)
        assert manager.latest() == 1024


def test_a_read_only_folder_fails_with_a_sentence_and_training_goes_on(tmp_path):
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
print("training goes on", manager.latest())
"""
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o001:  # whoever is not root has to get there
            parent.chmod(0o755)
    folder = tmp_path / "run"
    result = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert "Permission denied" in result.stdout
    assert result.stdout.endswith("training goes on 1\n")
    folder.chmod(0o755)


def test_an_old_base_is_never_mistaken_for_the_parent(tmp_path):
    with CheckpointManager(tmp_path, keep_last=None) as manager:
        fill(manager, [0, 1])
        manager.flush()
        with NativeFile(manager.path(1)) as file:
            assert file.depth == 1
            assert file.open_parent().container.identity == file.parent["identity"]
