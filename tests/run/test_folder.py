"""The folder of a run: who may write it, what a resumed run deletes, and where ``last`` points."""

import json
import subprocess
import sys

import pytest

from slipstream import ConfigurationError
from slipstream.run.folder import RunFolder, find_run, follow_link
from slipstream.run.metrics import read_rows

CONFIG = "seed: 7\n"
GAMMA = {"algo.gamma": {"from": 0.97, "to": 0.95}}
FRAMES = {"max_frame_num": {"from": 768, "to": 900}}


def begin(path):
    folder = RunFolder(path)
    folder.claim()
    folder.begin(CONFIG, 0)
    folder.release()
    return folder


def test_claiming_a_folder_writes_no_settings_and_an_unused_folder_is_removed(tmp_path):
    folder = RunFolder(tmp_path / "runs/x")
    folder.claim()
    assert [path.name for path in folder.path.iterdir()] == [".lock"]
    folder.release()
    assert not folder.path.exists()


def test_a_folder_that_existed_before_is_never_removed(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/notes.txt").write_text("mine")
    folder = RunFolder(tmp_path / "x")
    folder.claim()
    folder.release()
    assert (tmp_path / "x/notes.txt").read_text() == "mine"


def test_a_process_that_loses_the_race_for_a_new_folder_leaves_the_winners_run_alone(tmp_path, monkeypatch):
    # The winner creates and locks the folder after the loser found that it does not exist.
    winner = RunFolder(tmp_path / "x")
    loser = RunFolder(tmp_path / "x")
    make_folder = "slipstream.run.folder.make_folder"

    def overtaken(path):
        monkeypatch.undo()
        winner.claim()
        winner.begin(CONFIG, 0)

    monkeypatch.setattr(make_folder, overtaken)
    with pytest.raises(ConfigurationError, match="another process trains there"):
        loser.claim()
    loser.release()
    assert winner.require_config().read_text() == CONFIG
    winner.release()


def test_a_lock_of_another_process_is_respected_until_it_ends(tmp_path):
    script = f"""
from slipstream.run.folder import RunFolder
folder = RunFolder({str(tmp_path / "x")!r})
folder.claim()
print("claimed", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "claimed\n"
        folder = RunFolder(tmp_path / "x")
        with pytest.raises(ConfigurationError, match=f"another process trains there .*process {process.pid}"):
            folder.claim()
        folder.release()
        assert folder.path.exists()
        process.kill()
    folder.claim()
    folder.release()


def test_last_points_to_the_run_even_if_the_run_was_named_by_that_link(tmp_path):
    begin(tmp_path / "x")
    assert (tmp_path / "last").readlink().name == "x"
    begin(tmp_path / "last")
    assert (tmp_path / "last").resolve() == tmp_path / "x"
    assert RunFolder(follow_link(tmp_path / "last")).path == tmp_path / "x"


def test_last_is_repaired_if_it_points_to_itself_and_left_alone_if_it_is_a_folder(tmp_path, monkeypatch):
    (tmp_path / "last").symlink_to("last")
    begin(tmp_path / "x")
    assert (tmp_path / "last").resolve() == tmp_path / "x"
    (tmp_path / "copies/last").mkdir(parents=True)
    begin(tmp_path / "copies/last")
    assert not (tmp_path / "copies/last").is_symlink()
    monkeypatch.chdir(tmp_path / "x")
    begin(".")
    assert not (tmp_path / "x/last").is_symlink()


def test_evaluations_and_metrics_of_later_iterations_are_deleted(tmp_path):
    folder = begin(tmp_path / "x")
    folder.evaluations.mkdir()
    names = ["iter_000003.json", "iter_000003_unseen.slip", "iter_000006.json", "iter_000006_unseen.slip", "final.json"]
    for name in names:
        (folder.evaluations / name).touch()
    folder.metrics.write_text('{"iteration": 3}\n{"iteration": 4}\n')
    folder.forget_after(3)
    assert sorted(path.name for path in folder.evaluations.iterdir()) == ["final.json", *names[:2]]
    assert read_rows(folder.metrics) == [{"iteration": 3}]


def test_the_final_evaluation_of_an_iteration_that_is_repeated_is_deleted_with_its_flights(tmp_path):
    folder = begin(tmp_path / "x")
    folder.evaluations.mkdir()
    results = [{"flights": "final_through.slip"}, {"flights": None}, {"flights": "../config.yaml"}]
    final = folder.evaluations / "final.json"
    final.write_text(json.dumps({"iteration": 6, "results": results}))
    for name in ("final_through.slip", "final_approach.json", "evaluation.json"):
        (folder.evaluations / name).touch()
    folder.forget_after(6)
    assert final.exists()
    folder.forget_after(5)
    assert sorted(path.name for path in folder.evaluations.iterdir()) == ["evaluation.json", "final_approach.json"]
    assert folder.config.exists()


def test_changes_are_recorded_once_and_again_from_an_earlier_checkpoint(tmp_path):
    folder = begin(tmp_path / "x")
    assert not folder.changes.exists()
    first = {"iteration": 3, "changes": GAMMA}
    second = {"iteration": 5, "changes": FRAMES}
    for _ in range(2):
        folder.begin(CONFIG, 3, GAMMA)
    folder.begin(CONFIG, 5, FRAMES)
    assert read_rows(folder.changes) == [first, second]
    # The checkpoints of iterations 3 to 5 are lost, so what changed there applies from iteration 2 on.
    folder.begin(CONFIG, 2, GAMMA)
    assert read_rows(folder.changes) == [{**first, "iteration": 2}]


def test_a_run_is_not_found_under_a_name_that_is_taken_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "noon")
    (tmp_path / "noon").mkdir()
    assert find_run(tmp_path, None).path == tmp_path / "noon-2"
