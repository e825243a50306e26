"""Rollouts kept on disk while training goes on."""

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from slipstream import BackgroundError, CorruptFileError, RolloutError, RolloutStorage


def test_rollouts_are_saved_in_the_background_and_come_back(tmp_path, make_rollout, same):
    batches = {number: make_rollout(seed=number) for number in (100, 0, 1234567)}
    with RolloutStorage(tmp_path / "rollouts") as storage:
        for number, batch in batches.items():
            path = storage.save(batch, number)
            assert path.name == f"rollout_{number:06d}.slip"
        for number, batch in batches.items():
            same(storage.load(number), batch)
        assert storage.iterations() == [0, 100, 1234567]
        assert [number for number, _ in storage] == [0, 100, 1234567]
        assert len(storage) == 3
        stats = storage.get_stats()
    assert stats["save_count"] == 3
    assert stats["compression_ratio"] == stats["raw_bytes"] / stats["stored_bytes"] > 1


def test_a_batch_that_the_collector_overwrites_is_saved_as_it_was(tmp_path, make_rollout, same):
    batch = make_rollout(64, 32)
    before = batch.clone()
    with RolloutStorage(tmp_path) as storage:
        storage.save(batch, 1)
        for value in batch.values(True, True):
            value.zero_()
        same(storage.load(1), before)


def test_rollouts_of_other_shapes_and_dtypes_may_follow_each_other(tmp_path, make_rollout, same):
    batches = [make_rollout(6, 8), make_rollout(3, 5), make_rollout(6, 8).to(torch.bfloat16), make_rollout(2, 1)]
    batches.append(make_rollout(40, 20, ends=0.9))  # where `next` is no longer shared
    with RolloutStorage(tmp_path) as storage:
        for number, batch in enumerate(batches):
            storage.save(batch, number)
        for number, batch in enumerate(batches):
            same(storage.load(number), batch)


def test_loading_waits_for_a_save_under_way_and_takes_parts(tmp_path, make_rollout):
    batch = make_rollout(64, 32)
    with RolloutStorage(tmp_path) as storage:
        storage.save(batch, 5)
        part = storage.load(5, keys=["action"], envs=slice(10, 20), steps=slice(-4, None))
    assert torch.equal(part["action"], batch["action"][10:20, -4:])


def test_an_iteration_is_not_replaced_by_accident(tmp_path, make_rollout, same):
    first, second = make_rollout(seed=1), make_rollout(seed=2)
    with RolloutStorage(tmp_path) as storage:
        storage.save(first, 5)
        with pytest.raises(FileExistsError, match="iteration 5 is saved already; overwrite=True"):
            storage.save(second, 5)
        same(storage.load(5), first)
        storage.save(second, 5, overwrite=True)
        storage.flush()
        same(storage.load(5), second)


def test_the_oldest_go_by_count_and_by_bytes(tmp_path, make_rollout):
    batch = make_rollout(32, 16)
    with RolloutStorage(tmp_path / "a", keep_last=2) as storage:
        for number in range(5):
            storage.save(batch, number)
        storage.flush()
        assert storage.iterations() == [3, 4]
    size = storage.path(4).stat().st_size
    with RolloutStorage(tmp_path / "b", max_bytes=3 * size + 200) as storage:
        for number in range(6):
            storage.save(batch, number)
        storage.flush()
        assert storage.iterations() == [3, 4, 5]
    with RolloutStorage(tmp_path / "c", max_bytes=1) as storage:
        storage.save(batch, 0)
        storage.save(batch, 1)
        storage.flush()
        assert storage.iterations() == [1]


def test_a_run_resumed_from_an_older_checkpoint_keeps_what_it_saves(tmp_path, make_rollout):
    with RolloutStorage(tmp_path, keep_last=2) as storage:
        for number in (100, 200, 300):
            storage.save(make_rollout(), number)
    with RolloutStorage(tmp_path, keep_last=2) as storage:
        storage.save(make_rollout(), 150)
    assert storage.iterations() == [150, 300]


def test_metadata_is_that_of_the_call_and_what_json_cannot_hold_is_refused_there(tmp_path, make_rollout):
    metadata = {"step": 1}
    with RolloutStorage(tmp_path) as storage:
        storage.save(make_rollout(64, 32), 0)
        storage.save(make_rollout(), 1, metadata=metadata)
        metadata["step"] = 999
        with pytest.raises(TypeError, match="not JSON serializable"):
            storage.save(make_rollout(), 2, metadata={"weights": torch.zeros(2)})
        assert storage.open(1).metadata == {"step": 1}
        assert storage.iterations() == [0, 1]


def test_of_two_threads_that_save_one_iteration_one_is_told(tmp_path, make_rollout):
    import threading

    outcomes: list[object] = []

    def save(batch) -> None:
        try:
            outcomes.append(storage.save(batch, 7))
        except FileExistsError as error:
            outcomes.append(error)

    with RolloutStorage(tmp_path, max_queue_size=1) as storage:
        storage.save(make_rollout(256, 64), 1)
        threads = [threading.Thread(target=save, args=(make_rollout(seed=seed),)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(isinstance(outcome, FileExistsError) for outcome in outcomes) == 3


def test_files_that_are_not_rollouts_are_left_alone(tmp_path, make_rollout):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "rollout_12.slip").write_text("not one of ours: too few digits")
    (tmp_path / "rollout_0000005.slip").write_text("not one of ours: a zero too many")
    with RolloutStorage(tmp_path, keep_last=1) as storage:
        storage.save(make_rollout(), 1)
        storage.save(make_rollout(), 2)
        storage.flush()
        assert storage.iterations() == [2]
    names = ["notes.txt", "rollout_0000005.slip", "rollout_000002.slip", "rollout_12.slip"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_cannot_be_deleted_is_logged_and_the_save_is_good(tmp_path, make_rollout, caplog):
    (tmp_path / "rollout_000001.slip").mkdir()
    with RolloutStorage(tmp_path, keep_last=1) as storage:
        storage.save(make_rollout(), 2)
    assert storage.load(2).batch_size == (6, 8)
    assert "cannot be deleted" in caplog.text


def test_what_is_not_a_rollout_fails_at_the_call_and_leaves_the_storage_usable(tmp_path, make_rollout, same):
    batch = make_rollout()
    with RolloutStorage(tmp_path) as storage:
        with pytest.raises(RolloutError):
            storage.save(batch.transpose(0, 1), 1)
        with pytest.raises(ValueError, match="iteration is -1"):
            storage.save(batch, -1)
        storage.save(batch, 1)
        same(storage.load(1), batch)


def test_an_absent_iteration_is_said_to_be_so_with_those_there_are(tmp_path, make_rollout):
    with RolloutStorage(tmp_path) as storage:
        with pytest.raises(FileNotFoundError, match="there is none"):
            storage.load(7)
        storage.save(make_rollout(), 1)
        storage.flush()
        with pytest.raises(FileNotFoundError, match="no rollout of iteration 7: there are 1, 1 to 1"):
            storage.load(7)


def test_a_file_deleted_under_our_feet_is_left_out_and_logged(tmp_path, make_rollout, caplog):
    with RolloutStorage(tmp_path) as storage:
        for number in range(3):
            storage.save(make_rollout(), number)
        seen = []
        for number, _ in storage:
            seen.append(number)
            storage.path(1).unlink(missing_ok=True)
    assert seen == [0, 2]
    assert "skipped the rollout of iteration 1, which was deleted" in caplog.text


def test_a_damaged_file_is_named(tmp_path, make_rollout):
    with RolloutStorage(tmp_path) as storage:
        path = storage.save(make_rollout(), 3)
        storage.flush()
        content = bytearray(path.read_bytes())
        content[60] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match="rollout_000003"):
            storage.load(3)


def test_a_failure_in_the_background_reaches_the_next_call(tmp_path, make_rollout):
    folder = tmp_path / "rollouts"
    storage = RolloutStorage(folder)
    folder.rmdir()
    folder.write_text("in the way")
    storage.save(make_rollout(), 1)
    with pytest.raises(BackgroundError, match="rollout_000001"):
        storage.flush()
    folder.unlink()
    folder.mkdir()
    storage.save(make_rollout(), 2)
    storage.close()
    assert storage.iterations() == [2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_what_is_queued(tmp_path, number):
    script = textwrap.dedent(
        f"""
        import os, signal, time, torch
        from tensordict import TensorDict
        from slipstream import RolloutStorage
        signal.signal(signal.SIGINT, signal.default_int_handler)
        storage = RolloutStorage({str(tmp_path)!r}, max_queue_size=4)
        batch = TensorDict({{"x": torch.rand(64, 64, 256)}}, batch_size=[64, 64])
        for number in range(4):
            storage.save(batch, number)
        os.kill(os.getpid(), {int(number)})
        time.sleep(30)
        """
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=120, capture_output=True)
    storage = RolloutStorage(tmp_path)
    assert storage.iterations() == [0, 1, 2, 3]
    assert storage.load(3).batch_size == (64, 64)
