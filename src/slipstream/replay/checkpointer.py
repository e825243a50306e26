"""How TorchRL's ``dumps`` and ``loads`` reach the folder of a packed storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase


class PackedCheckpointer(StorageCheckpointerBase):  # type: ignore[misc, unused-ignore]
    """Saves a packed storage into a folder, incrementally, and restores it.

    Saving again into the same folder writes only the frames that are new, and an index. A crash at any point leaves
    what was saved before. Restoring a damaged folder keeps what is sound: `lost` says which slots along time were lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[int] = []
        """The slots along time that the last `loads` found damaged."""

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Write what is new; blocks until it is durable.

        Raises:
            WriteError: If the folder cannot be written; what was saved before is untouched.
        """
        from slipstream.replay.storage_state import save_storage  # noqa: PLC0415 - it imports the storage

        save_storage(storage, Path(path))

    def loads(self, storage: Any, path: str | Path) -> None:
        """Restore a storage, in the place of what it holds.

        Raises:
            FileNotFoundError: If nothing was saved there.
            CorruptFileError: If the head is damaged, or nothing is sound.
            StateMismatchError: If it is of a storage of another size.
        """
        from slipstream.replay.storage_state import load_storage  # noqa: PLC0415

        self.lost = load_storage(storage, Path(path))
