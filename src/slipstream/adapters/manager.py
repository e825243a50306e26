"""`LazyManager`: the checkpoint manager behind a callback, passed by the user or opened for a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slipstream.checkpoint.manager import CheckpointManager


class LazyManager:
    """A `CheckpointManager` that the user passed, or one for a folder that is open from the first save to `finish`.

    A manager that was passed stays open, and its retention policy applies. One that is opened here has the default
    settings.

    A deep copy shares the manager that was passed. With a folder it can also be pickled: the copy opens its own
    manager.

    Args:
        checkpoints: The manager, or the folder. A relative folder is resolved now, so later ``os.chdir`` calls do not
            move it.
    """

    def __init__(self, checkpoints: CheckpointManager | str | os.PathLike[str]) -> None:
        self._manager: CheckpointManager | None = None
        self._folder: Path | None = None
        if isinstance(checkpoints, CheckpointManager):
            self._manager = checkpoints
        else:
            self._folder = Path(checkpoints).absolute()

    def open(self) -> CheckpointManager:
        """Return the manager; opens it if needed."""
        if self._manager is None:
            assert self._folder is not None  # noqa: S101 - there is one or the other
            self._manager = CheckpointManager(self._folder)
        return self._manager

    def finish(self) -> None:
        """Block until every save is durable. Closes the manager if it was opened here; the next save opens another.

        Raises:
            BackgroundError: If a save failed and its error was not retrieved.
        """
        if self._manager is None:
            return
        if self._folder is None:
            # Not ours: the user may still save with it.
            self._manager.flush()
            return
        # Forget the manager before closing it. If that raises, the next run opens a new one.
        manager = self._manager
        self._manager = None
        manager.close(timeout=None)

    def __getstate__(self) -> dict[str, Any]:
        if self._folder is None:
            raise TypeError("a CheckpointManager cannot be pickled: pass its folder to the callback instead")
        # An open manager has a queue and threads, which stay in this process.
        return {"_manager": None, "_folder": self._folder}

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyManager:
        if self._folder is not None:
            return LazyManager(self._folder)
        assert self._manager is not None  # noqa: S101 - there is one or the other
        return LazyManager(self._manager)
