"""Copies of objects that are not plain data, such as modules and sparse tensors, for ``torch.save``."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import UnsupportedStateError
from slipstream.schema.flatten import Tree
from slipstream.schema.nodes import name_of
from slipstream.tensors import TORCH


@dataclass(frozen=True)
class PickledObjects:
    """A copy of objects as ``torch.save`` would store them: pickled, with a copy of every storage.

    Not a deep copy: that fails for tensors that are the result of an operation and require gradients, for example, and
    copies what is not stored, such as the gradients of a module.

    Attributes:
        content: The pickled objects. Storages are numbers in it.
        storages: The copies of the storages.
    """

    content: bytes
    storages: Sequence[torch.UntypedStorage]

    @classmethod
    def of(cls, tree: Tree) -> PickledObjects:
        """Copy the objects of a tree, each once.

        Raises:
            UnsupportedStateError: If one of them cannot be pickled. Names its key.
        """
        if not tree.objects:
            return cls(b"", ())
        try:
            return _pickle(tree.objects)
        except MemoryError:
            raise
        # Pickling runs methods of the objects, which may raise anything.
        except Exception as error:
            raise UnsupportedStateError(
                f"{_find_culprit(tree)} cannot be pickled ({type(error).__name__}: {str(error)[:200]}); "
                "save its state_dict() or plain data instead"
            ) from error

    def restore(self) -> list[Any]:
        """Return the objects, in the order of the tree. Their tensors use the copied storages."""
        if not self.content:
            return []
        objects: list[Any] = _Unpickler(io.BytesIO(self.content), self.storages).load()
        return objects


def _pickle(objects: list[Any]) -> PickledObjects:
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(objects)
    return PickledObjects(content.getvalue(), pickler.copies)


def _find_culprit(tree: Tree) -> str:
    """Return the key and the type of the first object that cannot be pickled by itself."""
    for item in tree.objects:
        try:
            _pickle([item])
        except Exception:  # noqa: BLE001 - whatever it is, `of` reports it
            for key, value in tree.values(TORCH):
                if value is item:
                    return f"{name_of(key, 'the state')[:200]} is a {type(item).__qualname__} that"
    return "the state"


class _Pickler(pickle.Pickler):
    """Pickles everything but storages, which it copies."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.copies: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        # Keeps the originals alive, so that none gets the identity of another.
        self._originals: list[torch.UntypedStorage] = []

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype | None] | None:
        """Return the number of a storage and the dtype that it is seen as, or None for other values."""
        # Tensors refer to their storage as a typed one, though every storage is untyped.
        if isinstance(value, torch.storage.TypedStorage):
            return self._copy(value._untyped_storage), value.dtype
        if isinstance(value, torch.UntypedStorage):
            return self._copy(value), None
        return None

    def _copy(self, storage: torch.UntypedStorage) -> int:
        """Copy a storage, unless another tensor has referred to it before. Returns its number."""
        identity = storage._cdata
        if identity not in self._numbers:
            self._numbers[identity] = len(self.copies)
            self._originals.append(storage)
            self.copies.append(storage.clone())  # type: ignore[no-untyped-call]
        return self._numbers[identity]


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote in the same process."""

    def __init__(self, file: io.BytesIO, storages: Sequence[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, identifier: tuple[int, torch.dtype | None]) -> Any:
        """Return the copy of a storage."""
        number, dtype = identifier
        storage = self._storages[number]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
