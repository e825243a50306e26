"""`slipstream checkpoint` and `slipstream rollout` with URLs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from typer.testing import CliRunner

from slipstream import CheckpointManager, RolloutStorage
from slipstream.cli import app, main
from slipstream.store.urls import open_store


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with two checkpoints and two rollouts."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    found = f"file://{tmp_path}/store/walker"
    with CheckpointManager(found) as manager:
        for step in (100, 200):
            manager.save(step, {"policy": torch.randn(500)}, {"reward": step / 100})
    with RolloutStorage(f"{found}/rollouts") as storage:
        for iteration in (5, 6):
            storage.save(TensorDict({"action": torch.randn(2, 4, 3)}, batch_size=[2, 4]), iteration)
    return found


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", ["checkpoint", "ckpt"])
def test_checkpoints_of_a_url_are_inspected_and_verified(command, url):
    listed = run(command, "inspect", url, "--json")
    assert listed.exit_code == 0
    assert [found["step"] for found in json.loads(listed.output)["checkpoints"]] == [100, 200]
    one = run(command, "inspect", f"{url}/checkpoint_iter_200.slip")
    assert one.exit_code == 0
    assert f"{url}/checkpoint_iter_200.slip: native checkpoint" in one.output
    assert "policy" in one.output
    verified = run(command, "verify", url)
    assert verified.exit_code == 0
    assert f"{url}/checkpoint_iter_100.slip: sound" in verified.output
    assert run(command, "verify", f"{url}/checkpoint_iter_100.slip").exit_code == 0


def test_rollouts_of_a_url_are_inspected_and_verified(url):
    for place in (url, f"{url}/rollouts"):
        assert "rollout_000005.slip" in run("rollout", "inspect", place).output
        verified = run("rollout", "verify", place)
        assert verified.exit_code == 0
        assert "0 of 2 rollouts damaged" in verified.output
    one = run("rollout", "inspect", f"{url}/rollouts/rollout_000006.slip", "--json")
    assert json.loads(one.output)["keys"][0]["key"] == ["action"]


def test_damage_is_found_and_exits_with_1(url):
    for name in ("rollouts/rollout_000005.slip", open_store(url).list("data/")[0].name):
        store = open_store(url)
        content = bytearray(store.get(name))
        content[len(content) // 4] ^= 1
        store.delete(name)
        store.put_new(name, content)
    store.put_new("commits/00000000000000000009.json", b"garbage")
    for group, problems in (("rollout", 1), ("checkpoint", 2)):
        result = run(group, "verify", url, "--json")
        assert result.exit_code == 1
        files = json.loads(result.output)["files"]
        assert sum(bool(file["problems"]) for file in files) == problems


@pytest.mark.parametrize("group", ["checkpoint", "rollout"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("file:///nowhere/run", "file:///nowhere/run: "),
        ("s3://key:very-secret@bucket/run", "the s3:// URL contains a user name or a password"),
    ],
)
def test_a_wrong_url_is_one_line(group, command, given, problem, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["slipstream", group, command, given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    shown = capsys.readouterr().err
    assert problem in shown
    assert "very-secret" not in shown
    assert shown.count("\n") == 1
