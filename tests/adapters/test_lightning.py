"""`LightningCheckpointIO` with real trainers."""

import copy
import logging
import pickle
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import BackgroundError, CorruptFileError, load_checkpoint
from tests.adapters.shared import busy_background, run_script, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from slipstream.adapters import LightningCheckpointIO

SCORES = (3.0, 1.0, 2.0, 5.0, 4.0)


class Model(LightningModule):  # type: ignore[misc, unused-ignore]
    """A linear layer; logs a made-up score per epoch."""

    def __init__(self, settings: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.log("score", SCORES[self.current_epoch])
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class AtEpoch(Callback):  # type: ignore[misc, unused-ignore]
    """Call a function with the trainer at the end of an epoch."""

    def __init__(self, epoch: int, function: Any) -> None:
        self.epoch = epoch
        self.function = function

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.function(trainer)


def make_trainer(folder: Path, plugin: Any, epochs: int, *callbacks: Any, **settings: Any) -> Any:
    """Return a trainer on the CPU; `settings` are those of its ``ModelCheckpoint``."""
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", **settings), *callbacks],
        plugins=[plugin] if plugin else [],
    )


def fit(trainer: Any, model: Any = None, **arguments: Any) -> Any:
    """Train a model for two steps per epoch; returns the model."""
    if model is None:
        model = Model()
    numbers = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3) / 10)
    data = torch.utils.data.DataLoader(numbers, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data, **arguments)
    return model


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestTrainers:
    @pytest.mark.parametrize("compress", [False, True])
    def test_a_resumed_run_equals_one_that_was_not_interrupted(self, tmp_path, compress):
        first = make_trainer(tmp_path, LightningCheckpointIO(compress=compress), 2)
        fit(first)
        path = first.checkpoint_callback.best_model_path
        resumed = make_trainer(tmp_path, LightningCheckpointIO(compress=compress), 4)
        resumed_model = fit(resumed, ckpt_path=path)
        uninterrupted = make_trainer(tmp_path / "other", None, 4)
        uninterrupted_model = fit(uninterrupted)
        assert resumed.global_step == 8
        assert same(resumed_model.state_dict(), uninterrupted_model.state_dict())
        assert same(resumed.optimizers[0].state_dict(), uninterrupted.optimizers[0].state_dict())

    def test_when_fit_returns_every_file_is_where_lightning_expects_it(self, tmp_path):
        model = fit(make_trainer(tmp_path, LightningCheckpointIO(), 3, save_top_k=-1, save_last=True))
        assert names_in(tmp_path) == {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"}
        state = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert same(state["state_dict"], dict(model.state_dict()))

    def test_only_the_newest_file_is_left_if_lightning_keeps_one(self, tmp_path):
        fit(make_trainer(tmp_path, LightningCheckpointIO(), 3))
        assert names_in(tmp_path) == {"epoch=2.ckpt"}

    @pytest.mark.parametrize("compress", [False, True])
    def test_the_best_files_are_left_with_save_top_k(self, tmp_path, compress):
        trainer = make_trainer(tmp_path, LightningCheckpointIO(compress), 5, save_top_k=2, monitor="score")
        fit(trainer)
        suffix = ".ckpt.lz4" if compress else ".ckpt"
        assert names_in(tmp_path) == {f"epoch=1{suffix}", f"epoch=2{suffix}"}
        best = LightningCheckpointIO().load_checkpoint(trainer.checkpoint_callback.best_model_path)
        assert best["epoch"] == 1

    def test_the_same_trainer_fits_again_from_the_last_checkpoint(self, tmp_path):
        trainer = make_trainer(tmp_path, LightningCheckpointIO(), 1, save_last=True)
        model = fit(trainer)
        trainer.fit_loop.max_epochs = 2
        fit(trainer, model, ckpt_path="last")
        assert trainer.global_step == 4
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4

    def test_a_new_trainer_finds_the_last_checkpoint(self, tmp_path):
        fit(make_trainer(tmp_path, LightningCheckpointIO(), 1, save_last=True))
        trainer = make_trainer(tmp_path, LightningCheckpointIO(), 3, save_last=True)
        fit(trainer, ckpt_path="last")
        assert trainer.global_step == 6

    def test_a_link_to_a_compressed_checkpoint_is_followed(self, tmp_path):
        fit(make_trainer(tmp_path, LightningCheckpointIO(compress=True), 2, save_last="link"))
        assert (tmp_path / "last.ckpt").is_symlink()
        assert LightningCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["epoch"] == 1

    def test_hyperparameters_of_any_class_are_saved_and_restored(self, tmp_path):
        settings = SimpleNamespace(width=3, folder=Path("data"))
        fit(make_trainer(tmp_path, LightningCheckpointIO(), 1, save_last=True), Model(settings))
        trainer = make_trainer(tmp_path, LightningCheckpointIO(), 2, save_last=True)
        with pytest.raises(CorruptFileError, match="refused"):
            fit(trainer, Model(settings), ckpt_path="last")
        trainer = make_trainer(tmp_path, LightningCheckpointIO(), 2, save_last=True)
        fit(trainer, Model(settings), ckpt_path="last", weights_only=False)
        assert trainer.global_step == 4
        restored = LightningCheckpointIO().load_checkpoint(tmp_path / "last.ckpt", weights_only=False)
        assert restored["hyper_parameters"]["settings"] == settings

    def test_pytorch_lightning_accepts_the_plugin_too(self, tmp_path):
        pytest.importorskip("pytorch_lightning")
        script = """
import torch
# The plugin is imported first: it must not depend on what the program has imported already.
from slipstream.adapters import LightningCheckpointIO
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "limit_train_batches": 1}
checkpoints = pl.callbacks.ModelCheckpoint("checkpoints", save_last=True)
trainer = pl.Trainer(max_epochs=1, callbacks=[checkpoints], plugins=[LightningCheckpointIO()], **settings)
trainer.fit(BoringModel())
assert isinstance(trainer.strategy.checkpoint_io, LightningCheckpointIO)
assert torch.load("checkpoints/last.ckpt")["global_step"] == 1
"""
        result = run_script(script, tmp_path)
        assert result.returncode == 0, result.stderr

    @pytest.mark.slow
    def test_a_spawned_run_saves_with_its_own_copy_of_the_plugin(self, tmp_path):
        script = """
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from slipstream.adapters import LightningCheckpointIO

if __name__ == "__main__":
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=1, strategy="ddp_spawn", logger=False, enable_progress_bar=False,
        limit_train_batches=1, callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
        plugins=[LightningCheckpointIO()],
    )
    # A save in this process first, so that there is a queue which the new process cannot have.
    trainer.strategy.checkpoint_io.save_checkpoint({"step": 0}, "checkpoints/before.ckpt")
    trainer.fit(BoringModel())
"""
        # A spawned process imports the main module, so there has to be a file.
        (tmp_path / "train.py").write_text(script)
        result = run_script("import runpy; runpy.run_path('train.py', run_name='__main__')", tmp_path)
        assert result.returncode == 0, result.stderr
        assert "last.ckpt" in names_in(tmp_path / "checkpoints")
        assert "before.ckpt" in names_in(tmp_path / "checkpoints")


class TestFailures:
    @staticmethod
    def save_below_a_file(trainer: Any) -> None:
        """Save to a path that cannot exist."""
        blocker = Path(trainer.checkpoint_callback.dirpath).with_name("a file")
        blocker.touch()
        trainer.save_checkpoint(blocker / "x.ckpt")

    @staticmethod
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError("training failed")

    def test_a_failed_save_is_raised_by_a_later_one(self, tmp_path):
        trainer = make_trainer(tmp_path / "checkpoints", LightningCheckpointIO(), 5, AtEpoch(1, self.save_below_a_file))
        with pytest.raises(BackgroundError, match="a file"):
            fit(trainer)

    def test_a_failed_save_at_the_very_end_is_raised_by_fit(self, tmp_path):
        # Epoch 1 is the last one. ModelCheckpoint saves before other callbacks, so nothing is saved after this.
        class AtEnd(Callback):  # type: ignore[misc, unused-ignore]
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                TestFailures.save_below_a_file(trainer)

        trainer = make_trainer(tmp_path / "checkpoints", LightningCheckpointIO(), 2, AtEnd())
        with pytest.raises(BackgroundError, match="a file"):
            fit(trainer)
        assert names_in(tmp_path / "checkpoints") == {"epoch=1.ckpt"}

    def test_after_a_failed_save_the_trainer_can_fit_again(self, tmp_path):
        failing = AtEpoch(1, self.save_below_a_file)
        trainer = make_trainer(tmp_path / "checkpoints", LightningCheckpointIO(), 2, failing, save_last=True)
        with pytest.raises(BackgroundError):
            fit(trainer)
        failing.epoch = -1
        trainer.fit_loop.max_epochs = 4
        fit(trainer, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
        assert trainer.global_step == 8

    def test_an_error_in_training_is_raised_and_what_was_queued_is_written(self, tmp_path):
        trainer = make_trainer(tmp_path, LightningCheckpointIO(), 3, AtEpoch(1, self.fail), save_top_k=-1)
        with pytest.raises(ZeroDivisionError, match="training failed"):
            fit(trainer)
        assert "epoch=0.ckpt" in names_in(tmp_path)

    def test_if_training_and_a_save_fail_both_errors_are_shown(self, tmp_path):
        callbacks = [AtEpoch(1, self.save_below_a_file), AtEpoch(1, self.fail)]
        trainer = make_trainer(tmp_path / "checkpoints", LightningCheckpointIO(), 3, *callbacks)
        with pytest.raises(BackgroundError, match="a file") as caught:
            fit(trainer)
        assert isinstance(caught.value.__context__, ZeroDivisionError)

    def test_ctrl_c_during_fit_loses_no_checkpoint(self, tmp_path):
        script = """
import os, signal
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from slipstream.adapters import LightningCheckpointIO
class Interrupt(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)
checkpoints = ModelCheckpoint("checkpoints", filename="{epoch}", save_top_k=-1)
settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "limit_train_batches": 2}
plugin = LightningCheckpointIO()
Trainer(max_epochs=9, callbacks=[checkpoints, Interrupt()], plugins=[plugin], **settings).fit(BoringModel())
"""
        result = run_script(script, tmp_path)
        assert result.returncode == 1, result.stderr
        assert {"epoch=0.ckpt", "epoch=1.ckpt"} <= names_in(tmp_path / "checkpoints")
        assert torch.load(tmp_path / "checkpoints" / "epoch=1.ckpt", weights_only=True)["epoch"] == 1


class TestThePlugin:
    @pytest.fixture
    def plugin(self):
        plugin = LightningCheckpointIO()
        yield plugin
        plugin.teardown()

    def test_fabric_saves_and_loads(self, tmp_path, plugin):
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        fabric.save(tmp_path / "a.ckpt", {"weight": torch.arange(3.0), "step": 7})
        assert same(fabric.load(tmp_path / "a.ckpt"), {"weight": torch.arange(3.0), "step": 7})

    def test_a_checkpoint_is_the_state_at_the_time_of_the_call(self, tmp_path, plugin):
        weight = torch.zeros(3)
        settings = SimpleNamespace(width=3)
        with busy_background():
            plugin.save_checkpoint({"weight": weight, "settings": settings}, tmp_path / "a.ckpt")
            weight += 1
            settings.width = 4
        loaded = plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
        assert same(loaded, {"weight": torch.zeros(3), "settings": SimpleNamespace(width=3)})

    def test_a_relative_path_is_the_one_at_the_time_of_the_call(self, tmp_path, plugin, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        with busy_background():
            plugin.save_checkpoint({"step": 1}, "a.ckpt")
            monkeypatch.chdir(tmp_path / "elsewhere")
        plugin.teardown()
        assert (tmp_path / "a.ckpt").exists()

    def test_a_relative_path_is_removed_where_it_was_at_the_time_of_the_call(self, tmp_path, plugin, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "old.ckpt").touch()
        (tmp_path / "elsewhere" / "old.ckpt").touch()
        monkeypatch.chdir(tmp_path)
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            plugin.remove_checkpoint("old.ckpt")
            monkeypatch.chdir(tmp_path / "elsewhere")
        plugin.teardown()
        assert names_in(tmp_path) == {"a.ckpt", "elsewhere"}
        assert names_in(tmp_path / "elsewhere") == {"old.ckpt"}

    def test_loading_waits_for_a_queued_save(self, tmp_path, plugin):
        loaded = []

        def load() -> None:
            loaded.append(plugin.load_checkpoint(str(tmp_path / "a.ckpt")))

        thread = threading.Thread(target=load)
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            assert not (tmp_path / "a.ckpt").exists()
            thread.start()
        thread.join()
        assert loaded == [{"step": 1}]

    def test_removing_a_queued_checkpoint_leaves_nothing(self, tmp_path, plugin):
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            plugin.remove_checkpoint(tmp_path / "a.ckpt")
        plugin.teardown()
        assert names_in(tmp_path) == set()

    def test_a_path_that_was_removed_and_saved_again_exists(self, tmp_path, plugin):
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            plugin.remove_checkpoint(tmp_path / "a.ckpt")
            plugin.save_checkpoint({"step": 2}, tmp_path / "a.ckpt")
        assert plugin.load_checkpoint(tmp_path / "a.ckpt") == {"step": 2}

    def test_the_old_checkpoint_stays_until_the_new_one_is_durable(self, tmp_path, plugin):
        plugin.save_checkpoint({"step": 1}, tmp_path / "old.ckpt")
        plugin.teardown()
        with busy_background():
            plugin.save_checkpoint({"step": 2}, tmp_path / "new.ckpt")
            plugin.remove_checkpoint(tmp_path / "old.ckpt")
            assert names_in(tmp_path) == {"old.ckpt"}
        plugin.teardown()
        assert names_in(tmp_path) == {"new.ckpt"}

    def test_the_old_checkpoint_stays_if_the_new_one_fails(self, tmp_path, plugin, caplog):
        plugin.save_checkpoint({"step": 1}, tmp_path / "old.ckpt")
        with busy_background():
            plugin.save_checkpoint({"step": 2}, tmp_path / "old.ckpt" / "not a folder.ckpt")
            plugin.remove_checkpoint(tmp_path / "old.ckpt")
        with caplog.at_level(logging.WARNING), pytest.raises(BackgroundError):
            plugin.teardown()
        assert "old.ckpt is kept, because the save after it failed" in caplog.text
        assert plugin.load_checkpoint(tmp_path / "old.ckpt") == {"step": 1}

    def test_a_sharded_checkpoint_is_a_folder_and_removed_as_a_whole(self, tmp_path, plugin):
        (tmp_path / "sharded.ckpt").mkdir()
        (tmp_path / "sharded.ckpt" / "part").touch()
        plugin.remove_checkpoint(tmp_path / "sharded.ckpt")
        assert names_in(tmp_path) == set()

    def test_objects_are_loaded_only_on_request(self, tmp_path, plugin, monkeypatch):
        plugin.save_checkpoint({"settings": SimpleNamespace(width=3)}, tmp_path / "a.ckpt")
        with pytest.raises(CorruptFileError, match="refused"):
            plugin.load_checkpoint(tmp_path / "a.ckpt")
        with pytest.raises(CorruptFileError, match="refused"):
            plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
        assert plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)["settings"].width == 3

    def test_the_variable_that_changes_the_default_of_torch_changes_ours(self, tmp_path, plugin, monkeypatch):
        plugin.save_checkpoint({"settings": SimpleNamespace(width=3)}, tmp_path / "a.ckpt")
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert plugin.load_checkpoint(tmp_path / "a.ckpt")["settings"].width == 3

    def test_a_flipped_bit_is_noticed(self, tmp_path, plugin):
        plugin.save_checkpoint({"weight": torch.zeros(1000)}, tmp_path / "a.ckpt")
        plugin.teardown()
        content = bytearray((tmp_path / "a.ckpt").read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / "a.ckpt").write_bytes(content)
        with pytest.raises(CorruptFileError):
            plugin.load_checkpoint(tmp_path / "a.ckpt")

    def test_load_checkpoint_reads_compressed_files(self, tmp_path):
        plugin = LightningCheckpointIO(compress=True)
        plugin.save_checkpoint({"weight": torch.zeros(1000)}, tmp_path / "a.ckpt")
        plugin.teardown()
        assert names_in(tmp_path) == {"a.ckpt.lz4"}
        assert same(load_checkpoint(tmp_path / "a.ckpt"), {"weight": torch.zeros(1000)})
        plugin.remove_checkpoint(tmp_path / "a.ckpt")
        assert names_in(tmp_path) == set()

    def test_unsupported_arguments_are_refused_with_a_sentence(self, tmp_path, plugin):
        with pytest.raises(TypeError, match="storage_options is {'a': 1}, expected None"):
            plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})
        with pytest.raises(ValueError, match="path is 's3://bucket/a.ckpt', expected a local file"):
            plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
        with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
            plugin.load_checkpoint(tmp_path / "a.ckpt")
        plugin.remove_checkpoint(tmp_path / "a.ckpt")

    def test_it_is_a_checkpoint_io_under_both_names_of_lightning(self, plugin):
        from lightning.pytorch.plugins.io import CheckpointIO

        other = pytest.importorskip("lightning_fabric.plugins.io.checkpoint_io")
        assert isinstance(plugin, CheckpointIO)
        assert isinstance(plugin, other.CheckpointIO)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
    def test_a_copy_of_a_used_plugin_has_its_settings_and_its_own_queue(self, tmp_path, duplicate):
        plugin = LightningCheckpointIO(compress=True, max_queue_size=7)
        with busy_background():
            plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
            copied = duplicate(plugin)
            # The queue of the copy is empty, so this does not wait for the one above.
            copied.teardown()
            assert names_in(tmp_path) == set()
        copied.save_checkpoint({"step": 2}, tmp_path / "b.ckpt")
        copied.teardown()
        plugin.teardown()
        assert (copied.compress, copied.max_queue_size) == (True, 7)
        assert names_in(tmp_path) == {"a.ckpt.lz4", "b.ckpt.lz4"}
