"""`TorchRLCheckpointHook`: checkpoints of a TorchRL ``Trainer``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from slipstream.text import install_hint

try:
    from torchrl.trainers import Trainer, TrainerHookBase
except ImportError as error:
    raise ImportError(
        f"TorchRLCheckpointHook needs torchrl, which is not installed: {install_hint('adapters')}, or torchrl by itself"
    ) from error

from slipstream.adapters.manager import LazyManager
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.state import TrainingState
from slipstream.checks import require_count


class TorchRLCheckpointHook(TrainerHookBase):  # type: ignore[misc, unused-ignore]
    """Save a trainer in the background every `interval` frames, and once more when training ends.

    Saves ``trainer.state_dict()``: loss module, optimizer, collector, counters, and every registered module, including
    replay buffers. The step of a checkpoint is ``trainer.collected_frames``. To resume, register the same hooks on a
    new trainer, then call ``trainer.load_state_dict(manager.restore().state)``. Register this hook after those that
    change the state in ``post_steps``, such as updates of target networks, so that checkpoints contain their changes.

    ``trainer.state_dict()`` does not contain the global random number generators.
    ``state=TrainingState(trainer=trainer)`` adds them; load such a checkpoint with ``load_state_dict`` of that object.

    A failed save is raised by the next one, or at the end of ``trainer.train()``. An exception in ``trainer.train()``
    skips the last save, but queued ones are still written.

    Args:
        checkpoints: A manager, or the folder for one with default settings.
        interval: Minimum number of frames between two saves.
        state: What to save instead of ``trainer.state_dict()``.

    Raises:
        ImportError: If TorchRL is not installed. Raised when the class is imported.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager | str | os.PathLike[str],
        interval: int,
        *,
        state: TrainingState | None = None,
    ) -> None:
        self.interval = require_count("interval", interval)
        self._manager = LazyManager(checkpoints)
        self._state = state
        self._trainer: Trainer | None = None
        self._last_saved = 0

    def register(self, trainer: Trainer, name: str = "slipstream_checkpoint") -> None:
        """Let a trainer call this hook after the optimization steps of each batch, and when training ends.

        Args:
            trainer: The trainer to save.
            name: The name of the hook in the trainer's state.
        """
        trainer.register_module(name, self)
        self._trainer = trainer
        # The hook may have served another trainer before.
        self._last_saved = int(trainer.collected_frames)
        trainer.register_op("post_steps", self)
        # Older versions have no such stage. There, only reaching the last frame counts as the end.
        with contextlib.suppress(RuntimeError):
            trainer.register_op("shutdown", self.close)

    def __call__(self) -> None:
        """Save if at least `interval` frames were collected since the last save; returns when the state is copied.

        Raises:
            BackgroundError: If an earlier save failed.
            RuntimeError: If the hook is not registered.
        """
        trainer = self._registered_trainer()
        if trainer.collected_frames - self._last_saved >= self.interval:
            self._save(trainer)
        if trainer.collected_frames >= trainer.total_frames:
            self.close()

    def close(self) -> None:
        """Save if frames were collected since the last save, and block until every save is durable.

        Raises:
            BackgroundError: If a save failed.
            RuntimeError: If the hook is not registered.
        """
        trainer = self._registered_trainer()
        if trainer.collected_frames > self._last_saved:
            self._save(trainer)
        self._manager.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of frames at the last save."""
        return {"last": self._last_saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the number of frames at the last save."""
        self._last_saved = int(state_dict["last"])

    def _registered_trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the hook is not registered: call its register(trainer) first")
        return self._trainer

    def _save(self, trainer: Trainer) -> None:
        source: Any = trainer
        if self._state is not None:
            source = self._state
        previous = self._last_saved
        # Set before the state is taken, because this number is part of it.
        self._last_saved = int(trainer.collected_frames)
        try:
            self._manager.open().save(self._last_saved, source.state_dict())
        except BaseException:
            # Nothing was saved, so that `close` tries again.
            self._last_saved = previous
            raise
