"""What the adapters share: a base class found when it is needed, and a folder of checkpoints opened when it is."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any, ClassVar, Self

from slipstream.checkpoint.manager import CheckpointManager
from slipstream.text import install_hint


class Adapter:
    """A class that also becomes a subclass of another library's, but not before the first instance is made.

    Subclasses are written as if they had that base: ``super()`` reaches it, and ``isinstance`` says so.
    """

    package: ClassVar[str]
    """What to ``pip install``."""
    bases: ClassVar[tuple[str, ...]]
    """Where the base class is, as ``module:name``; several if it goes by several names."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make an instance of this class and of the library's.

        Raises:
            ImportError: If the library is not installed; says what to install.
        """
        kind: Any = cls
        instance: Self = super().__new__(_joined(kind, _find_bases(kind)))
        return instance

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the class that can be imported; unpickling finds the library again."""
        importable = next(kind for kind in type(self).__mro__ if "joined" not in vars(kind))
        return _make, (importable,), self.__dict__.copy()


def _make(cls: type[Adapter]) -> Adapter:
    return cls.__new__(cls)


def _find_bases(cls: type[Adapter]) -> tuple[type, ...]:
    """Return the base under each name that the program already uses, else under the first that can be imported."""
    used = [base for base in cls.bases if base.partition(".")[0] in sys.modules]
    found: list[type] = []
    failure: ImportError | None = None
    for base in used or cls.bases:
        module, _, name = base.partition(":")
        try:
            found.append(getattr(importlib.import_module(module), name))
        except ImportError as error:
            failure = failure or error
        if found and not used:
            break
    if not found:
        raise ImportError(
            f"{cls.__name__} needs {cls.package}, which is not installed: {install_hint('adapters')}, or {cls.package} "
            "by itself"
        ) from failure
    return tuple(found)


@functools.cache
def _joined(cls: Any, bases: tuple[type, ...]) -> Any:
    if issubclass(cls, bases):
        return cls
    names = {"joined": True, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(bases[0])(cls.__name__, (cls, *bases), names)


class Checkpoints:
    """A manager that was given, or one of our own for a folder, open from the first save until the run ends.

    Args:
        given: The manager, which stays open and whose policies apply; or a folder.
    """

    def __init__(self, given: CheckpointManager | str | os.PathLike[str]) -> None:
        self._given = given
        self._manager = given if isinstance(given, CheckpointManager) else None

    def open(self) -> CheckpointManager:
        """Return the manager."""
        if self._manager is None:
            self._manager = CheckpointManager(self._given)  # type: ignore[arg-type]
        return self._manager

    def finish(self) -> None:
        """Block until every save is durable, and close the manager if it is ours; it may be opened again.

        Raises:
            BackgroundError: If a save failed unheard.
        """
        if self._manager is self._given and self._manager is not None:
            self._manager.flush()
        elif self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close(None)
