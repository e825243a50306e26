"""`LightningCheckpointIO`: the checkpoints of a Lightning ``Trainer`` or ``Fabric``, saved in the background."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.text import install_hint

try:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
except ImportError as error:
    # The other distribution of the same library: `pytorch_lightning` brings `lightning_fabric`.
    try:
        from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO  # type: ignore[assignment, unused-ignore]
    except ImportError:
        raise ImportError(
            f"LightningCheckpointIO needs lightning, which is not installed: {install_hint('adapters')}, or lightning "
            "by itself"
        ) from error

from slipstream.checkpoint.formats import find_format
from slipstream.checkpoint.load import newest_file
from slipstream.checkpoint.portable.format import read_portable
from slipstream.checkpoint.saver import AsyncCheckpointSaver, SaveResult
from slipstream.store.handle import Handle

logger = logging.getLogger(__name__)


def keep_on_cpu(storage: Any, _: str) -> Any:
    """Leave a storage on the CPU, where it was read to. This is Lightning's default for ``map_location``."""
    return storage


class LightningCheckpointIO(CheckpointIO):  # type: ignore[misc, unused-ignore]
    """Save Lightning's checkpoints in the background: durable, atomic, and never silently lost.

    The saved state is the one at the time of the call: it is copied before the call returns. Files have the paths that
    Lightning chose, and ``torch.load`` reads them. A checkpoint that Lightning removes stays until the saves queued
    before are durable, so at every moment at least one complete checkpoint exists. The end of ``fit`` waits for every
    save and raises if one failed, also if training itself failed.

    Between a save and the end of ``fit``, a file may not exist yet. ``ModelCheckpoint`` looks for existing files to
    number checkpoints of the same name, so give it a file name that contains the step or the epoch, as the default
    does. Lightning calls `teardown` at the end of ``fit`` only: after ``trainer.save_checkpoint`` outside of ``fit``,
    and at the end of a ``Fabric`` program, call it yourself to wait for the file.

    The plugin can be pickled and deep-copied; a copy has its own queue. It works with both distributions of the
    library, ``lightning`` and ``pytorch_lightning``. Local files only.

    Args:
        compress: Whether to compress files into LZ4 frames. ``.lz4`` is added to their names. Lightning does not know
            about that suffix, so ``ckpt_path="last"`` does not find them; a path and ``"best"`` work, and
            `slipstream.load_checkpoint` reads them.
        max_queue_size: How many saves may be queued or running before the next one blocks.

    Raises:
        ImportError: If Lightning is not installed. Raised when the class is imported.
    """

    def __init__(self, compress: bool = False, max_queue_size: int = 3) -> None:
        self.compress = compress
        self.max_queue_size = max_queue_size
        # Created by the first save, and again after `teardown`: a trainer may fit more than once.
        self._saver: AsyncCheckpointSaver | None = None
        self._latest: Handle[SaveResult] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint in the background; returns when it is copied.

        Args:
            checkpoint: What Lightning wants to save. May contain anything that can be pickled.
            path: The file.
            storage_options: Not supported.

        Raises:
            TypeError: If `storage_options` is not None.
            ValueError: If the path is a URL.
            BackgroundError: If an earlier save failed. This checkpoint is not saved.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, expected None: local files have no options")
        target = _local_path(path)
        if self._saver is None:
            self._saver = AsyncCheckpointSaver(self.max_queue_size)
        # Checkpoints contain hyperparameters and the states of callbacks, which may be objects of any class.
        self._latest = self._saver.save_async(checkpoint, target, compress=self.compress, weights_only=False)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | torch.device | str | dict[str, str] | None = keep_on_cpu,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint that this plugin or Lightning itself saved; waits for queued saves and verifies checksums.

        Args:
            path: The file, or ``<path>.lz4`` if that is newer.
            map_location: As for ``torch.load``; by default, tensors stay on the CPU.
            weights_only: As for ``torch.load``. By default, objects that only code from the file can load are refused.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the path is a URL.
            CorruptFileError: If the file is damaged, or contains objects that are refused.
            BackgroundError: If an earlier save failed.
        """
        if self._saver is not None:
            self._saver.flush()
        # With save_last="link", last.ckpt is a link to a name that may have got the suffix .lz4: resolve it first.
        file = newest_file(Path(os.path.realpath(_local_path(path))))
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", str(path))
        is_compressed = find_format(file) == "lz4"
        state: dict[str, Any] = read_portable(
            file, compressed=is_compressed, device=map_location, weights_only=weights_only
        )
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once the saves queued before are durable. If the last of them fails, the file stays.

        Args:
            path: The file. It may still be queued, or not exist.
        """
        target = _local_path(path)
        if self._latest is None:
            _remove(target)
        else:
            self._latest.add_done_callback(functools.partial(_remove_after, target))

    def teardown(self) -> None:
        """Block until every save is durable. The plugin can be used again afterwards.

        Raises:
            BackgroundError: If a save failed.
        """
        saver = self._saver
        # Before shutdown, which may raise: Lightning then calls teardown again to clean up.
        self._saver = None
        self._latest = None
        if saver is not None:
            saver.shutdown(None)

    def __getstate__(self) -> dict[str, Any]:
        # For deep copies, and for strategies that start processes. The queue stays here, with the files it writes.
        return {**self.__dict__, "_saver": None, "_latest": None}


# The other distribution has its own copy of CheckpointIO, and its trainers check for that one.
with contextlib.suppress(ImportError):
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as OtherCheckpointIO

    OtherCheckpointIO.register(LightningCheckpointIO)


def _local_path(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ValueError(f"path is {os.fspath(path)!r}, expected a local file: URLs are not supported")
    # Now, because files are written and removed later: the program may change its current folder before.
    return Path(path).absolute()


def _compressed_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lz4")


def _remove_after(path: Path, saved: Handle[SaveResult]) -> None:
    """Remove a checkpoint unless the save that replaces it failed. Runs in the background, so it logs its errors."""
    if saved.failed():
        logger.warning("%s is kept, because the save after it failed", path)
        return
    try:
        _remove(path)
    except OSError as failure:
        logger.warning("cannot remove %s: %s", path, failure)


def _remove(path: Path) -> None:
    # Sharded checkpoints, which Lightning writes itself, are folders.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    path.unlink(missing_ok=True)
    _compressed_path(path).unlink(missing_ok=True)
