"""`TorchRLCheckpointHook`: checkpoints of a TorchRL ``Trainer``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.adapters.base import Adapter, Checkpoints
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.state import TrainingState
from slipstream.checks import require_count

if TYPE_CHECKING:
    from torchrl.trainers import Trainer, TrainerHookBase
else:
    TrainerHookBase = object  # found when the first one is made


class TorchRLCheckpointHook(Adapter, TrainerHookBase):  # type: ignore[misc, unused-ignore]
    """Saves a trainer every so many frames, in the background, and once more when training ends.

    It saves ``trainer.state_dict()``: loss module, optimizer, collector, counters, and every registered module, replay
    buffers included. The step of a checkpoint is ``trainer.collected_frames``. To resume, register the same hooks on a
    new trainer and call ``trainer.load_state_dict(manager.restore().state)``.

    ``trainer.state_dict()`` has no random numbers. ``state=TrainingState(trainer=trainer)`` adds them; it is loaded
    with its own ``load_state_dict``.

    An exception in ``trainer.train()`` skips the last save; what was queued is written all the same.

    Args:
        checkpoints: A manager, or the folder for one with default settings.
        interval: How many frames lie between two saves, at least.
        state: What to save instead of ``trainer.state_dict()``.

    Raises:
        ImportError: If TorchRL is not installed.
    """

    package = "torchrl"
    bases = ("torchrl.trainers:TrainerHookBase",)

    def __init__(
        self,
        checkpoints: CheckpointManager | str | os.PathLike[str],
        interval: int,
        *,
        state: TrainingState | None = None,
    ) -> None:
        self.interval = require_count("interval", interval)
        self._checkpoints = Checkpoints(checkpoints)
        self._state = state
        self._trainer: Trainer | None = None
        self._last = 0

    def register(self, trainer: Trainer, name: str = "slipstream_checkpoint") -> None:
        """Have a trainer call this hook after the optimization steps of each batch, and when it ends.

        Args:
            trainer: The trainer to save.
            name: The name of the hook in the trainer's state.
        """
        self._trainer = trainer
        trainer.register_module(name, self)
        trainer.register_op("post_steps", self)
        with contextlib.suppress(RuntimeError):  # before there was such a stage, only reaching the last frame is an end
            trainer.register_op("shutdown", self.close)

    def __call__(self) -> None:
        """Save, if `interval` frames were collected since the last time; returns when the state is copied.

        Raises:
            BackgroundError: If an earlier save failed.
            RuntimeError: If the hook is not registered.
        """
        frames = self._frames()
        if frames - self._last >= self.interval:
            self._save()
        if self._trainer is not None and frames >= self._trainer.total_frames:
            self.close()

    def close(self) -> None:
        """Save what was collected since the last time, and block until every save is durable.

        Raises:
            BackgroundError: If a save failed.
        """
        if self._frames() > self._last:
            self._save()
        self._checkpoints.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return at how many frames it saved last."""
        return {"last": self._last}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set at how many frames it saved last."""
        self._last = int(state_dict["last"])

    def _frames(self) -> int:
        if self._trainer is None:
            raise RuntimeError("the hook is not registered: call its register(trainer) first")
        return int(self._trainer.collected_frames)

    def _save(self) -> None:
        self._last = self._frames()  # before its own state is taken
        source: Any = self._trainer if self._state is None else self._state
        self._checkpoints.open().save(self._last, source.state_dict())
