"""Where numbers go."""

import json
import math
import subprocess
import sys

import pytest

from slipstream.run.folder import RunFolder
from slipstream.run.metrics import MetricsWriter, forget_after, read_rows
from slipstream.text import install_hint
from slipstream.train.loggers import TensorBoardLogger, make_loggers
from tests.train.conftest import small


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    logger = MetricsWriter(tmp_path / "metrics.jsonl")
    logger.log({"actor_loss": 0.5, "ratio": math.inf}, 3)
    assert read_rows(tmp_path / "metrics.jsonl") == [{"iteration": 3, "actor_loss": 0.5, "ratio": None}]
    logger.close()
    logger.close()


def test_lines_of_later_iterations_and_what_was_cut_off_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"iteration": number, "x": number / 3}) for number in range(1, 6)]
    path.write_text("\n".join([*rows[:3], "garbage", '"a string"', *rows[3:]]) + '\n{"iteration": 6, "x')
    forget_after(path, 3)
    assert [row["iteration"] for row in read_rows(path)] == [1, 2, 3]
    forget_after(tmp_path / "missing.jsonl", 3)
    assert not (tmp_path / "missing.jsonl").exists()


def test_tensorboard_reads_what_was_logged_and_not_what_a_resumed_run_overtook(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoardLogger(tmp_path / "tb", 1)
    for iteration in (1, 2, 3, 4):
        first.log({"train/stats.return": 10.0 * iteration}, iteration)
    first.close()
    resumed = TensorBoardLogger(tmp_path / "tb", 3)
    resumed.log({"train/stats.return": 99.0}, 3)
    resumed.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/stats.return")] == [
        (1, 10.0), (2, 20.0), (3, 99.0),
    ]  # fmt: skip


def test_tensorboard_does_not_show_what_a_run_logged_before_it_died_without_a_checkpoint(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for value in (10.0, 20.0):
        logger = TensorBoardLogger(tmp_path / "tb", 1)
        for iteration in (1, 2):
            logger.log({"train/stats.return": value}, iteration)
        logger.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/stats.return")] == [(1, 20.0), (2, 20.0)]


def test_weights_and_biases_is_offline_unless_asked(tmp_path):
    pytest.importorskip("wandb")
    script = f"""
import dataclasses
from pathlib import Path
from slipstream.train.settings import compose_settings

from slipstream.train.loggers import WandbLogger
settings = compose_settings(["preset=quick"])
assert settings.wandb.mode == "offline"
logger = WandbLogger(settings.wandb, dataclasses.asdict(settings), Path({str(tmp_path)!r}), "x")
logger.log({{"actor_loss": 1.0}}, 1)
logger.close()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb")), done


def test_a_library_that_is_missing_is_said_and_done_without(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    settings = small("wandb=offline", "tensorboard=true")
    (logger,) = make_loggers(settings, {}, RunFolder(tmp_path), 1)
    logger.close()
    assert f"TensorBoard is not installed, so nothing is written for it: {install_hint('train')}" in caplog.text
    assert f"Biases is not installed, so nothing is logged there: {install_hint('train')}" in caplog.text
