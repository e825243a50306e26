"""One run in any number of processes: the same bits, and an orderly end whatever happens to any of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slipstream.run.folder import RunFolder
from slipstream.run.metrics import read_rows
from tests.dist.ranks import run_ranks
from tests.dist.test_group import PREAMBLE
from tests.train.ranks import HANG_S, KILLED, LIMITED, SHARDED, assert_same, content, ending, finish, start, train

PACKED = ("gpu_memory_limited=true", "use_pipelined_collector=true", "compress_lidar=true", "eval_interval=0")
ENDLESS = ("max_frame_num=1e9", "save_interval=1000", "rollout_save_interval=3", "eval_interval=0")
TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What a run computes in one process."""
    folder = tmp_path_factory.mktemp("straight")
    train(folder, 1, *SHARDED, "name=x")
    return content(folder / "runs/x")


def wait_for(path: Path, processes: list[subprocess.Popen[str]]) -> None:
    while not path.exists():
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def in_one_line(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=HANG_S)
    return " ".join((output + errors).split())


@pytest.mark.parametrize("world", [2, 4])
def test_a_run_is_the_same_bits_in_one_two_and_four_processes(world, straight, tmp_path):
    printed = train(tmp_path, world, *SHARDED, "name=x")
    assert_same(straight, content(tmp_path / "runs/x"))
    assert f"4 shards in {world} processes" in printed[0]
    assert printed[1:] == [""] * (world - 1)


def test_rollouts_collected_ahead_and_packed_are_the_same_bits_in_two_processes(tmp_path):
    for world in (1, 2):
        train(tmp_path, world, *SHARDED, *PACKED, f"name=w{world}")
    assert_same(content(tmp_path / "runs/w1"), content(tmp_path / "runs/w2"))


def test_a_run_that_loses_processes_resumes_with_other_numbers_of_them_as_if_nothing_had_happened(straight, tmp_path):
    # Two shards of eight steps in each process: in the middle of the fourth rollout.
    killed = KILLED.format(step=2 * 8 * 3 + 5, condition=True)
    results = finish(start(tmp_path, 2, *SHARDED, "name=x", scripts={1: killed}))
    assert [code for code, _ in results] == [2, -signal.SIGKILL]
    assert "slipstream: rank 1 exited; resume with: slipstream train resume=runs/x" in results[0][1]
    # In the fifth rollout, the second one of these four processes.
    killed = KILLED.format(step=8 + 5, condition=True)
    results = finish(start(tmp_path, 4, "resume=runs/x", scripts={2: killed}))
    assert [code for code, _ in results] == [2, 2, -signal.SIGKILL, 2]
    assert "resuming runs/x from iteration 3" in results[0][1]
    assert "slipstream: rank 3: rank 2 exited; resume with" in results[3][1]
    printed = train(tmp_path, 1, "resume=runs/x", "devices=1")
    assert "resuming runs/x from iteration 4" in printed[0]
    assert_same(straight, content(tmp_path / "runs/x"))


def test_a_signal_to_one_process_stops_all_after_the_same_iteration_with_one_checkpoint(tmp_path):
    processes = start(tmp_path, 2, *SHARDED, *ENDLESS, "name=x", "--json")
    with ending(processes):
        wait_for(tmp_path / "runs/x/rollouts/rollout_000003.slip", processes)
        processes[1].send_signal(signal.SIGTERM)
        output, errors = processes[0].communicate(timeout=HANG_S)
        [(code, other)] = finish(processes[1:])
    assert (processes[0].returncode, code) == (143, 143), errors
    assert other == "rank 1: SIGTERM: finishing this iteration; send it 2 more times to stop immediately"
    done = read_rows(tmp_path / "runs/x/metrics.jsonl")[-1]["iteration"]
    expected = {"run": "runs/x", "stopped": "SIGTERM", "iterations": done, "env_frames": 16 * 8 * done}
    assert json.loads(output) == expected
    names = [path.name for path in (tmp_path / "runs/x/checkpoints").glob("checkpoint*.slip")]
    assert names == [f"checkpoint_iter_{done}.slip"]


# Gets SIGTERM while it evaluates.
INTERRUPTED = """
import os, signal
from slipstream.cli import main
from slipstream.train import trainer
run_jobs = trainer.run_jobs

def fly(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return run_jobs(*arguments, **options)

trainer.run_jobs = fly
main()
"""


def test_a_signal_after_the_last_update_stops_before_the_evaluation_at_the_end(tmp_path):
    arguments = (*SHARDED, "max_frame_num=128", "eval_interval=1", "name=x")
    results = finish(start(tmp_path, 2, *arguments, scripts={0: INTERRUPTED}))
    assert [code for code, _ in results] == [143, 143], results
    assert "Stopped after 1 of 1 iterations." in results[0][1]
    assert results[1][1] == ""
    assert (tmp_path / "runs/x/checkpoints/checkpoint_iter_1.slip").exists()


def test_ctrl_c_in_the_terminal_stops_all_processes_and_saves(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "slipstream", "train", *SHARDED, *ENDLESS, "name=x", "devices=2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    with ending([process]):
        wait_for(tmp_path / "runs/x/rollouts/rollout_000003.slip", [process])
        os.killpg(process.pid, signal.SIGINT)
        text = in_one_line(process)
    assert process.returncode != 0
    assert "To resume: slipstream train resume=runs/x" in text
    done = read_rows(tmp_path / "runs/x/metrics.jsonl")[-1]["iteration"]
    assert (tmp_path / f"runs/x/checkpoints/checkpoint_iter_{done}.slip").exists()


def test_torchrun_restarts_a_job_that_lost_a_process_and_the_run_goes_on(straight, tmp_path):
    condition = 'os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(step=2 * 8 * 3 + 5, condition=condition))
    command = [*TORCHRUN, "--max-restarts=1", str(script), "train", *SHARDED, "--no-evaluate"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    [run] = [path for path in (tmp_path / "runs").iterdir() if path.name != "last"]
    assert run.name.startswith("job-")
    assert f"resuming runs/{run.name} from iteration 3" in " ".join(done.stdout.split())
    assert_same(straight, content(run))


def test_a_full_disk_ends_all_processes_with_an_error_that_names_the_file(tmp_path):
    # Enough for the settings and metrics, but not for a checkpoint.
    scripts = {0: LIMITED.format(size=100_000)}
    results = finish(start(tmp_path, 2, *SHARDED, "rollout_save_interval=0", "name=x", scripts=scripts))
    assert [code for code, _ in results] == [2, 2], results
    assert "checkpoint_iter_1.slip" in results[0][1]
    assert results[1][1] == ""


# The first process is busy, and says so before every step of its work.
BUSY = """
from slipstream.train import ranks
ranks._BEAT_S = -1.0
all = ranks.Ranks(ShardGroup(2))
def work(beat):
    for step in range(5):
        beat(step, 5)
    return rank
def fail(beat):
    beat()
    raise ValueError("bad")
print(all.first_while_others_wait(work))
try:
    all.first_while_others_wait(fail)
except ValueError as error:
    print(error)
print(all.first(lambda: "in step"))
"""


def test_other_processes_wait_while_the_first_one_is_busy(tmp_path):
    assert run_ranks(PREAMBLE + BUSY, 2, tmp_path) == ["0\nbad\nin step\n"] * 2


def test_what_is_wrong_with_a_command_is_said_once_and_nothing_is_written(tmp_path):
    results = finish(start(tmp_path, 2, *SHARDED, "dist.shards=0"))
    assert [code for code, _ in results] == [2, 2]
    expected = (
        "slipstream: dist.shards is 0, expected 2, 4, 8 or 16 for 2 processes: set dist.shards=2, or more to allow"
    )
    assert results[0][1].startswith(expected)
    assert results[1][1] == ""
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_in_use_ends_all_processes_with_one_sentence(tmp_path):
    folder = RunFolder(tmp_path / "runs/x")
    folder.claim()
    try:
        results = finish(start(tmp_path, 2, *SHARDED, "name=x"))
    finally:
        folder.release()
    assert [code for code, _ in results] == [2, 2]
    assert "slipstream: runs/x is in use: another process trains there" in results[0][1]
    assert results[1][1] == ""


def test_a_folder_that_the_first_process_cannot_create_ends_all_with_one_sentence(tmp_path):
    (tmp_path / "runs/x").mkdir(parents=True)
    # For instance, a link to a disk that is not there.
    (tmp_path / "runs/x/rollouts").symlink_to(tmp_path / "missing/rollouts")
    results = finish(start(tmp_path, 2, *SHARDED, "name=x"))
    assert [code for code, _ in results] == [2, 2]
    assert "slipstream: runs/x/rollouts" in results[0][1]
    assert results[1][1] == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_shards_are_trained_on_gpus(tmp_path):
    train(tmp_path, min(2, torch.cuda.device_count()), *SHARDED, "name=x", "device=cuda")
    assert len(read_rows(tmp_path / "runs/x/metrics.jsonl")) == 6
