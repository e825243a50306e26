"""`LightningCheckpointIO`: the checkpoints of a Lightning ``Trainer`` or ``Fabric``, saved in the background."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.adapters.base import Adapter
from slipstream.checkpoint.load import find_format
from slipstream.checkpoint.portable import read_portable
from slipstream.checkpoint.saver import AsyncCheckpointSaver, SaveResult
from slipstream.store.handle import Handle

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
else:
    CheckpointIO = object  # found when the first one is made

logger = logging.getLogger(__name__)


def _stay(storage: Any, _: str) -> Any:
    """Leave a storage on the CPU, where it was read to; what Lightning does by default."""
    return storage


class LightningCheckpointIO(Adapter, CheckpointIO):  # type: ignore[misc, unused-ignore]
    """Saves Lightning's checkpoints in the background: durable, atomic, and never silently lost.

    What is saved is the state at the moment of the call, copied before it returns. Files are what ``torch.load`` reads,
    at the paths that Lightning gave. A checkpoint that is to be removed stays until those queued before are durable: at
    no moment is there none. The end of ``fit`` waits for every save, and raises if one failed.

    Between a save and the end of ``fit`` a file may not be there yet. ``ModelCheckpoint`` looks for files to number
    those that would have the same name: give it names that differ, as its default ones do.

    Args:
        compress: Whether to put files into LZ4 frames. They get ``.lz4`` added to their names, which only this plugin
            knows: ``ckpt_path="last"`` does not find them, and `slipstream.load_checkpoint` reads them elsewhere.
        max_queue_size: How many saves may be waiting or being written before one has to wait.

    Raises:
        ImportError: If Lightning is not installed.
    """

    package = "lightning"
    bases = (
        "lightning.fabric.plugins.io.checkpoint_io:CheckpointIO",
        "lightning_fabric.plugins.io.checkpoint_io:CheckpointIO",
    )

    def __init__(self, compress: bool = False, max_queue_size: int = 3) -> None:
        self.compress = compress
        self.max_queue_size = max_queue_size
        self._saver: AsyncCheckpointSaver | None = None
        self._latest: Handle[SaveResult] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint in the background; returns when it is copied.

        Args:
            checkpoint: What Lightning wants to save.
            path: The file.
            storage_options: Not supported.

        Raises:
            TypeError: If there are `storage_options`.
            ValueError: If the path is a URL.
            BackgroundError: If an earlier save failed.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, expected None: there is nothing to choose")
        target = _local(path)
        if self._saver is None:
            self._saver = AsyncCheckpointSaver(self.max_queue_size)
        self._latest = self._saver.save_async(checkpoint, target, compress=self.compress)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | torch.device | str | dict[str, str] | None = _stay,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint that this plugin, or Lightning itself, saved; checks its checksums, and waits for saves.

        Args:
            path: The file; if it is absent, ``<path>.lz4`` is tried.
            map_location: As for ``torch.load``; by default tensors stay on the CPU.
            weights_only: As for ``torch.load``, which by default refuses what needs to run code.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the path is a URL.
            CorruptFileError: If the file is damaged, or refused.
            BackgroundError: If a save failed.
        """
        if self._saver is not None:
            self._saver.flush()
        file = Path(os.path.realpath(_local(path)))  # Lightning's "last" may be a link to what got another name
        if not file.exists():
            file = _packed(file)
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "no checkpoint", str(path))
        compressed = find_format(file) == "lz4"
        # None is torch's own default, which the environment may change.
        state: dict[str, Any] = read_portable(
            file,
            compressed=compressed,
            device=map_location,
            weights_only=weights_only,  # type: ignore[arg-type]
        )
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, as soon as those queued before are durable; it stays, with a warning, if they fail.

        Args:
            path: The file, which may still be queued, or absent.
        """
        target = _local(path)

        def remove(saved: Handle[SaveResult]) -> None:
            if saved.failed():
                logger.warning("%s is kept, because the save after it failed", target)
                return
            try:
                _remove(target)
            except OSError as failure:
                logger.warning("cannot remove %s: %s", target, failure)

        if self._latest is None:
            _remove(target)
        else:
            self._latest.add_done_callback(remove)

    def teardown(self) -> None:
        """Block until every save is durable; the plugin may be used again.

        Raises:
            BackgroundError: If a save failed.
        """
        saver, self._saver, self._latest = self._saver, None, None
        if saver is not None:
            saver.shutdown(None)


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ValueError(f"path is {os.fspath(path)!r}, expected a local file")
    return Path(path)


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.lz4")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # a sharded checkpoint of Lightning's own
        return
    path.unlink(missing_ok=True)
    _packed(path).unlink(missing_ok=True)
