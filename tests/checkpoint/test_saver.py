"""The saver: formats, queue, failures, signals and sudden death."""

import io
import logging
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import lz4.frame
import pytest
import torch

from slipstream import (
    AsyncCheckpointSaver,
    BackgroundError,
    CorruptFileError,
    DiskFullError,
    JobSkippedError,
    QueueFullError,
    WriteError,
    load_checkpoint,
)
from slipstream.checkpoint.load import find_format
from slipstream.checkpoint.native import NativeFile
from slipstream.checkpoint.portable.format import PortableFormat

STATE: dict[str, Any] = {"weight": torch.arange(6.0).reshape(2, 3), "step": 7}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold up every write until the event is set."""
    event = threading.Event()

    write = PortableFormat.write

    def wait_then_write(*arguments: Any) -> Any:
        assert event.wait(30)
        return write(*arguments)

    monkeypatch.setattr(PortableFormat, "write", wait_then_write)
    return event


def test_a_compressed_checkpoint_is_lz4_frames_around_what_torch_save_writes(tmp_path):
    with AsyncCheckpointSaver() as saver:
        result = saver.save_async(STATE, tmp_path / "model.pt").result()
    assert result.path == tmp_path / "model.pt.lz4"
    with lz4.frame.open(result.path) as file:
        content = torch.load(io.BytesIO(file.read()), weights_only=True)
    assert torch.equal(content["weight"], STATE["weight"])
    assert result.stored_bytes == result.path.stat().st_size


@pytest.mark.skipif(shutil.which("lz4") is None, reason="the lz4 command is not installed")
def test_the_lz4_command_and_torch_load_read_it_without_us(tmp_path):
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"large": torch.randn(3_000_000)}, tmp_path / "model.pt")
    subprocess.run(["lz4", "-dq", tmp_path / "model.pt.lz4", tmp_path / "plain.pt"], check=True)
    assert torch.load(tmp_path / "plain.pt", weights_only=True)["large"].shape == (3_000_000,)


@pytest.mark.parametrize("compress", [True, False])
def test_a_native_checkpoint_is_packed_or_not_as_asked_and_checked_either_way(tmp_path, compress):
    state = {"weight": torch.randn(100_000, generator=torch.Generator().manual_seed(0))}
    with AsyncCheckpointSaver() as saver:
        path = saver.save_async(state, tmp_path / "c.slip", format="native", compress=compress).result().path
    assert torch.equal(load_checkpoint(path)["weight"], state["weight"])
    assert (path.stat().st_size < 0.9 * 400_000) == compress
    content = bytearray(path.read_bytes())
    content[200_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError):
        load_checkpoint(path)


def test_an_uncompressed_checkpoint_is_what_torch_load_reads(tmp_path):
    with AsyncCheckpointSaver() as saver:
        saver.save_async(STATE, tmp_path / "model.pt", compress=False)
    assert torch.load(tmp_path / "model.pt", weights_only=True)["step"] == 7


@pytest.mark.parametrize(
    ("options", "name", "kind"),
    [
        ({}, "c.lz4", "lz4"),
        ({"compress": False}, "c", "pt"),
        ({"format": "native"}, "c", "native"),
    ],
)
def test_every_format_is_found_by_content_whatever_the_name(tmp_path, options, name, kind):
    with AsyncCheckpointSaver() as saver:
        saver.save_async(STATE, tmp_path / "c", **options)
    assert find_format(tmp_path / name) == kind
    (tmp_path / name).rename(tmp_path / "renamed.bin")
    back = load_checkpoint(tmp_path / "renamed.bin")
    assert torch.equal(back["weight"], STATE["weight"])


def test_a_checkpoint_is_found_under_its_name_with_lz4_added(tmp_path):
    with AsyncCheckpointSaver() as saver:
        saver.save_async(STATE, tmp_path / "model.pt")
    assert load_checkpoint(tmp_path / "model.pt")["step"] == 7
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "other.pt")


@pytest.mark.parametrize("format", ["pt", "native"])
def test_metadata_is_saved_along(tmp_path, format):
    with AsyncCheckpointSaver() as saver:
        path = saver.save_async(STATE, tmp_path / "c", metadata={"reward": 1.5}, format=format).result().path
    back = load_checkpoint(path)
    assert (back["metadata"] == {"reward": 1.5}) if format == "pt" else ("metadata" not in back)


def test_metadata_that_would_hide_a_key_is_refused(tmp_path):
    with AsyncCheckpointSaver() as saver, pytest.raises(ValueError, match="without a key 'metadata'"):
        saver.save_async({"metadata": 1}, tmp_path / "c", metadata={})


@pytest.mark.parametrize("options", [{"compression_level": 99}, {"max_queue_size": 0}, {"policy": "hope"}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        AsyncCheckpointSaver(**options)


def test_statistics_count_saves_bytes_and_times(tmp_path):
    with AsyncCheckpointSaver() as saver:
        for number in range(3):
            saver.save_async({"zeros": torch.zeros(100_000)}, tmp_path / f"{number}")
        saver.flush()
        stats = saver.get_stats()
    assert (stats["save_count"], stats["queue_size"], stats["failed_count"]) == (3, 0, 0)
    assert stats["total_saved_bytes"] > 1_200_000
    assert stats["compression_ratio"] == stats["total_saved_bytes"] / stats["total_compressed_bytes"] > 50


def test_a_full_queue_warns_and_waits(tmp_path, gate, caplog):
    saver = AsyncCheckpointSaver(max_queue_size=1)
    saver.save_async(STATE, tmp_path / "0")
    threading.Timer(0.05, gate.set).start()
    saver.save_async(STATE, tmp_path / "1")
    saver.shutdown()
    assert "Save queue is full, checkpoint may be delayed" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_queue_may_skip_or_raise(tmp_path, gate):
    saver = AsyncCheckpointSaver(max_queue_size=2, policy="skip_oldest")
    handles = [saver.save_async(STATE, tmp_path / f"{number}") for number in range(4)]
    gate.set()
    saver.shutdown()
    skipped = [isinstance(handle.exception(), JobSkippedError) for handle in handles]
    assert skipped.count(True) >= 1
    assert not skipped[-1]
    assert saver.get_stats()["skipped_count"] == skipped.count(True)

    gate.clear()
    saver = AsyncCheckpointSaver(max_queue_size=1, policy="raise")
    saver.save_async(STATE, tmp_path / "x")
    with pytest.raises(QueueFullError):
        saver.save_async(STATE, tmp_path / "y")
    gate.set()
    saver.shutdown()


def test_no_more_snapshots_are_in_memory_than_the_queue_holds(tmp_path, gate):
    saver = AsyncCheckpointSaver(max_queue_size=2)
    taken = 0
    take = saver._pool.take

    def count(shape: Any) -> Any:
        nonlocal taken
        taken += 1
        return take(shape)

    saver._pool.take = count  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: [saver.save_async(STATE, tmp_path / f"{n}") for n in range(4)])
    thread.start()
    time.sleep(0.3)
    assert taken == 2
    gate.set()
    thread.join()
    saver.shutdown()


def test_a_failure_reaches_the_handle_the_next_call_and_shutdown(tmp_path):
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "model.pt"
    saver = AsyncCheckpointSaver()
    with pytest.raises(WriteError, match=f"cannot write {target}"):
        saver.save_async(STATE, target).result(30)
    saver.save_async(STATE, target)
    with pytest.raises(BackgroundError, match="cannot write"):
        saver.flush()
    failed = saver.save_async(STATE, target)
    while not failed.done():
        time.sleep(0.001)
    time.sleep(0.05)
    with pytest.raises(BackgroundError, match="cannot write"):
        saver.save_async(STATE, tmp_path / "fine")
    saver.save_async(STATE, tmp_path / "fine").wait()
    saver.save_async(STATE, target)
    with pytest.raises(BackgroundError):
        saver.shutdown()
    assert saver.get_stats()["failed_count"] == 4


@pytest.mark.parametrize("format", ["pt", "native"])
def test_a_full_disk_fails_the_save_keeps_the_old_file_and_training_goes_on(tmp_path, format):
    path = tmp_path / "c"
    state = {"noise": torch.randn(200_000)}
    with AsyncCheckpointSaver() as saver:
        saver.save_async(STATE, path, compress=False, format=format).wait()
        old = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(DiskFullError):
                saver.save_async(state, path, compress=False, format=format).wait(30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == old
        saver.save_async(state, path, compress=False, format=format).wait()
    assert torch.equal(load_checkpoint(path)["noise"], state["noise"])
    assert [item.name for item in tmp_path.iterdir()] == ["c"]


def test_a_disk_that_looks_full_is_tried_anyway(tmp_path, monkeypatch):
    """How much a state shrinks, and what a quota allows, only the write itself can tell."""
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 10, 10, 1, 10, 10, 10, 0, 255)))
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"x": torch.zeros(100_000)}, tmp_path / "c").result()


@pytest.mark.parametrize("path", ["", b"c.pt", ".", "..", "runs/", "runs/..", "/"])
def test_a_path_that_is_no_path_is_refused_at_the_call(tmp_path, monkeypatch, path):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    with AsyncCheckpointSaver() as saver, pytest.raises(ValueError, match="expected the name of a file"):
        saver.save_async(STATE, path)


@pytest.mark.parametrize("compress", [True, False])
def test_a_folder_as_path_fails_the_save(tmp_path, compress):
    (tmp_path / "model").mkdir()
    with AsyncCheckpointSaver() as saver, pytest.raises(WriteError, match=r"cannot write .*model: Is a directory"):
        saver.save_async(STATE, tmp_path / "model", compress=compress).result()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("format", ["pt", "native"])
def test_path_and_metadata_are_captured_at_the_call(tmp_path, monkeypatch, format):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    metadata: dict[str, Any] = {"reward": 1.0, "notes": ["a"]}
    with AsyncCheckpointSaver() as saver:
        handle = saver.save_async(STATE, "c", compress=False, metadata=metadata, format=format)
        metadata["notes"].append("b")
        os.chdir("elsewhere")
        assert handle.result().path == tmp_path / "c"
    if format == "native":
        with NativeFile(tmp_path / "c") as file:
            assert file.metadata == {"reward": 1.0, "notes": ["a"]}
    else:
        assert load_checkpoint(tmp_path / "c")["metadata"] == {"reward": 1.0, "notes": ["a"]}


def test_a_save_inside_mutating_is_the_state_at_the_call(tmp_path):
    average = torch.nn.Linear(1100, 1100)
    expected = average.weight.detach().clone()
    with AsyncCheckpointSaver() as saver:
        saver.guard(average)
        with saver.mutating(), torch.no_grad():
            saved = saver.save_async(average.state_dict(), tmp_path / "average.pt", compress=False)
            average.weight.zero_()
        assert torch.equal(load_checkpoint(saved.result().path)["weight"], expected)


def test_memory_of_snapshots_is_freed_at_shutdown(tmp_path):
    state = {"x": torch.zeros(1_000_000)}
    tracemalloc.start()
    try:
        saver = AsyncCheckpointSaver()
        for number in range(3):
            saver.save_async(state, tmp_path / f"{number}", format="native").result()
        kept_bytes, _ = tracemalloc.get_traced_memory()
        saver.shutdown()
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One buffer is kept for the next snapshot, and none afterwards.
    assert 4_000_000 < kept_bytes < 9_000_000
    assert left_bytes < 1_000_000


def test_two_savers_in_two_processes_may_write_the_same_file(tmp_path):
    script = """
        import sys, torch
        from slipstream import AsyncCheckpointSaver, load_checkpoint
        mark = float(sys.argv[2])
        with AsyncCheckpointSaver() as saver:
            for _ in range(40):
                saver.save_async({"x": torch.full((50_000,), mark)}, sys.argv[1], format="native").wait()
                values = load_checkpoint(sys.argv[1])["x"].unique()
                assert len(values) == 1, values
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "c")]
    processes = [subprocess.Popen([*command, mark]) for mark in "12"]
    assert [process.wait(200) for process in processes] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


LOOP = """
import os, signal, sys, time, torch
from slipstream import AsyncCheckpointSaver

def main(folder, ending):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.Adam(model.parameters())
    saver = AsyncCheckpointSaver(max_queue_size=5)
    saver.guard(optimizer)
    for step in range(5):
        model(torch.randn(4, 400)).sum().backward()
        optimizer.step()
        saver.save_async({"model": model.state_dict(), "step": step}, f"{folder}/{step}", format="native")
    print("queued", flush=True)
    exec(ending)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
        ("raise RuntimeError('diverged')", 1),
    ],
)
def test_nothing_queued_is_lost_when_the_process_ends(tmp_path, ending, code):
    result = subprocess.run(
        [sys.executable, "-c", LOOP, tmp_path, ending], capture_output=True, check=False, timeout=120
    )
    assert result.returncode == code
    assert [load_checkpoint(tmp_path / f"{step}")["step"] for step in range(5)] == list(range(5))


def test_sigterm_from_outside_during_a_save_loses_nothing(tmp_path):
    # Short sleeps: Python does not wake from one for a signal that came just before it.
    ending = "while True: time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", LOOP, tmp_path, ending], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"queued\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    assert [load_checkpoint(tmp_path / f"{step}")["step"] for step in range(5)] == list(range(5))


def test_an_unheard_failure_is_logged_when_the_process_ends(tmp_path):
    (tmp_path / "file").write_text("")
    script = f"""
        import torch
        from slipstream import AsyncCheckpointSaver
        AsyncCheckpointSaver().save_async({{"x": torch.ones(3)}}, "{tmp_path}/file/c")
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert f"cannot write {tmp_path}/file/c" in result.stderr


class Malice:
    """Pickles into a command that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("compress", [True, False])
def test_a_malicious_pickle_is_refused_with_a_sentence_and_not_run(tmp_path, compress):
    path = tmp_path / "evil.pt"
    torch.save({"model": Malice(tmp_path / "mark")}, path)
    if compress:
        packed = tmp_path / "evil.pt.lz4"
        packed.write_bytes(lz4.frame.compress(path.read_bytes(), store_size=True))
        path.unlink()
    with pytest.raises(CorruptFileError, match="only running code from the file could load, which is refused"):
        load_checkpoint(path)
    assert not (tmp_path / "mark").exists()


def test_a_bare_malicious_pickle_is_refused_too(tmp_path):
    path = tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps(Malice(tmp_path / "mark"), protocol=2))
    with pytest.raises(CorruptFileError, match="evil.pt"):
        load_checkpoint(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(("options", "name"), [({}, "c.lz4"), ({"compress": False}, "c")])
def test_a_portable_file_with_a_flipped_bit_never_loads_as_other_weights(tmp_path, options, name):
    weights = torch.arange(300.0)
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"w": weights}, tmp_path / "c", **options)
    original = (tmp_path / name).read_bytes()
    for position in range(0, 8 * len(original), 13):
        damaged = bytearray(original)
        damaged[position // 8] ^= 1 << position % 8
        (tmp_path / name).write_bytes(damaged)
        try:
            back = load_checkpoint(tmp_path / name)
        except (CorruptFileError, KeyError):
            continue
        assert torch.equal(back["w"], weights)


def test_a_portable_file_cut_anywhere_is_refused(tmp_path):
    with AsyncCheckpointSaver() as saver:
        saver.save_async(STATE, tmp_path / "c")
    original = (tmp_path / "c.lz4").read_bytes()
    for length in range(0, len(original), 7):
        (tmp_path / "c.lz4").write_bytes(original[:length])
        with pytest.raises(CorruptFileError):
            load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("content", [b"", b"hello world, this is text", bytes(100), b"\x80\x02garbage"])
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, content):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(CorruptFileError, match=f"^{tmp_path / 'c'}: "):
        load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("options", [{"format": "native"}, {"compress": False}])
def test_only_what_is_asked_for_is_loaded(tmp_path, options):
    state = {
        "policy": {"actor.weight": torch.ones(50, 50), "critic.weight": torch.zeros(50)},
        "optimizer": {0: {"m": torch.ones(9)}},
    }
    with AsyncCheckpointSaver() as saver:
        saver.save_async(state, tmp_path / "c", **options)
    assert set(load_checkpoint(tmp_path / "c", keys=["policy"])) == {"policy"}
    part = load_checkpoint(tmp_path / "c", keys=["policy/actor.*"])
    assert set(part) == {"policy"}
    assert set(part["policy"]) == {"actor.weight"}
    assert load_checkpoint(tmp_path / "c", keys=["optimizer/0/m"])["optimizer"][0]["m"].sum() == 9
    with pytest.raises(KeyError, match="no key 'polcy'"):
        load_checkpoint(tmp_path / "c", keys=["polcy"])


def test_a_verbose_saver_logs_a_line_per_save(tmp_path, caplog):
    with caplog.at_level(logging.INFO), AsyncCheckpointSaver(verbose=True) as saver:
        saver.save_async(STATE, tmp_path / "c")
    assert f"saved {tmp_path / 'c'}.lz4" in caplog.text


def test_a_saver_that_was_shut_down_guards_nothing_any_more():
    saver = AsyncCheckpointSaver()
    saver.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        saver.guard(torch.nn.Linear(2, 2))
