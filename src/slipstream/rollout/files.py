"""A rollout in a file: a container of named arrays, written and read without torch.

`RolloutFile` reads arrays by key, environment and time. `slipstream.rollout.batch` turns them into TensorDicts.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.checks import require_count
from slipstream.codecs import Codec, Planes, Timewise
from slipstream.errors import CorruptFileError, RolloutError, naming
from slipstream.rollout.layout import Field, Key, Layout, Rollout
from slipstream.rollout.reading import read_fields
from slipstream.store.container import Container
from slipstream.store.index import Entry
from slipstream.store.writer import DEFAULT_CHUNK_BYTES, ContainerWriter, write_container

KIND = "rollout"
EXTRA = "extra:"
"""What the names of arrays begin with that are stored beside a rollout, and are no part of it."""

SUFFIX = ".slip"
MAX_LEVEL = 12


def zstd_level(compression_level: int) -> int:
    """Return the zstd level for a compression level on the scale that LZ4 users know, 0 to 12.

    All levels up to 9 use zstd level 1, which keeps up with a training loop: on rollouts, higher levels gain little.
    """
    require_count("compression_level", compression_level, 0, MAX_LEVEL)
    if compression_level <= 9:
        return 1
    return 3 * (compression_level - 9) + 3


def codec_for(rollout: Rollout, name: str, level: int) -> Codec:
    """Return the codec for an array of a rollout.

    Trying every codec on every array makes files 0.1 % smaller and takes a third longer.
    """
    array = rollout.arrays[name]
    # NumPy cannot tell that the integers which carry bfloat16 are floats; None means that the dtype tells.
    is_float = None
    has_time_axis = array.ndim >= 2
    for field in rollout.layout.fields:
        if field.dtype.is_hidden_float and name in (field.array, field.rows):
            is_float = True
        if name == field.rows:
            has_time_axis = False
    if not has_time_axis:
        return Planes(level, is_float)
    return Timewise(level, is_float).settle(array)


def add_extra(rollout: Rollout, extra: Mapping[str, NDArray[Any]] | None) -> None:
    """Add copies of arrays that are stored beside a rollout, such as what its environments had in common.

    Raises:
        RolloutError: If a tensor of the rollout is stored under the same name.
    """
    for name, array in (extra or {}).items():
        stored = f"{EXTRA}{name}"
        if stored in rollout.arrays:
            raise RolloutError(f"the extra array {name!r} cannot be stored: the batch has a key {stored!r}; rename it")
        rollout.arrays[stored] = np.array(array)


def write_rollout(
    rollout: Rollout,
    path: str | os.PathLike[str],
    level: int,
    values: Mapping[str, Any],
    threads: int | None = None,
    *,
    codecs: dict[str, Codec] | None = None,
    verify: bool = True,
) -> Path:
    """Write a rollout to a file, atomically and durably.

    Args:
        rollout: The arrays to write, and their layout.
        path: The file to create or replace.
        level: zstd level.
        values: JSON values to store with it.
        threads: Number of threads that encode; one per core by default.
        codecs: The codecs of an earlier, similar rollout by array name. Codecs chosen here are added to it.
        verify: Whether to decode every chunk and compare it before it is written.
    """
    with write_container(path, kind=KIND, threads=threads, verify=verify) as writer:
        _add_rollout(writer, rollout, level, values, codecs)
    return Path(path)


def encode_rollout(
    rollout: Rollout,
    level: int,
    values: Mapping[str, Any],
    threads: int | None = None,
    *,
    codecs: dict[str, Codec] | None = None,
) -> bytes:
    """Return the bytes of the file that `write_rollout` writes, for the same arguments. Every chunk is verified."""
    file = io.BytesIO()
    writer = ContainerWriter(file, KIND, DEFAULT_CHUNK_BYTES, threads, verify=True)
    _add_rollout(writer, rollout, level, values, codecs)
    writer.finish()
    return file.getvalue()


def _add_rollout(
    writer: ContainerWriter,
    rollout: Rollout,
    level: int,
    values: Mapping[str, Any],
    codecs: dict[str, Codec] | None,
) -> None:
    """Add arrays, layout and JSON values to a container."""
    if codecs is None:
        codecs = {}
    for name, array in rollout.arrays.items():
        if name not in codecs:
            codecs[name] = codec_for(rollout, name, level)
        writer.add(name, array, codecs[name])
    writer.set("rollout", rollout.layout.to_json())
    for name, value in values.items():
        writer.set(name, value)


class RolloutFile:
    """Reads a rollout as NumPy arrays. Opening reads the index only.

    Thread-safe. The layout, metadata and entries stay available after `close`.

    Args:
        path: The file; or an open container, such as one in memory, which `close` closes.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptFileError: If it is damaged, or not a rollout.
        FormatVersionError: If a newer release wrote it.
    """

    def __init__(self, path: str | os.PathLike[str] | Container) -> None:
        if not isinstance(path, Container):
            path = Container(path)
        self.container = path
        self.path = self.container.path
        try:
            self.layout = read_layout(self.container)
        except BaseException:
            self.container.close()
            raise

    @property
    def metadata(self) -> Any:
        """The JSON value that was saved with the rollout."""
        return self.container.values.get("metadata")

    @property
    def stored_bytes(self) -> int:
        """Size of the file."""
        return self.container.file_bytes

    def num_exceptions(self, field: Field) -> int:
        """Return in how many steps a field differs from the following step; 0 if it is not stored that way."""
        if field.rows is None:
            return 0
        return self.container.entries[field.rows].shape[0]

    def read(
        self, keys: Sequence[str | Key] | None = None, *, envs: slice | None = None, steps: slice | None = None
    ) -> dict[Key, NDArray[Any]]:
        """Read tensors as arrays ``[environment, step, ...]`` in new memory. Every chunk read is verified.

        Several axes of environments become one. Dtypes that NumPy lacks come as unsigned integers of the same size;
        the layout's fields name the torch dtype.

        Args:
            keys: Only these nested keys, and everything below them.
            envs: Only these environments. Reads only the chunks that hold them.
            steps: Only these steps.

        Returns:
            The arrays by nested key.

        Raises:
            CorruptFileError: If a chunk is damaged.
            KeyError: If the rollout has nothing under one of `keys`.
        """
        with naming(self.path):
            return read_fields(self.layout, self.container, keys, envs, steps)

    @property
    def extra(self) -> list[str]:
        """Names of the arrays that were stored beside the rollout."""
        names = self.container.entries
        return [name.removeprefix(EXTRA) for name in names if name.startswith(EXTRA)]

    def read_extra(self, name: str) -> NDArray[Any]:
        """Read an array that was stored beside the rollout, with its own dtype and shape.

        Raises:
            CorruptFileError: If a chunk is damaged.
            KeyError: If there is no array of that name.
        """
        if name not in self.extra:
            raise KeyError(f"{self.path} has no extra array {name!r}")
        return self.container.read(f"{EXTRA}{name}")

    def close(self) -> None:
        """Close the file. Idempotent; `read` raises afterwards."""
        self.container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_layout(container: Container) -> Layout:
    """Return the layout of the rollout in a container, after checking that it fits the container's arrays.

    Raises:
        CorruptFileError: If there is no rollout in it, or the layout does not fit.
        FormatVersionError: If a newer release wrote it.
    """
    with naming(container.path):
        if container.kind != KIND:
            raise CorruptFileError(f"is a container of kind {container.kind!r}, expected a rollout")
        layout = Layout.from_json(container.values.get("rollout"))
        entries = container.entries
        for field in layout.fields:
            _check_entries(layout, field, entries)
    return layout


def _check_entries(layout: Layout, field: Field, entries: Mapping[str, Entry]) -> None:
    """Raise `CorruptFileError` unless the arrays of a field are what the layout says, before any is decoded."""
    for name in field.arrays:
        if name not in entries:
            raise CorruptFileError(f"the array {name!r} of {field.name} is missing")
    dtype = field.dtype.carrier
    _check_entry(field, entries[field.array], dtype, (layout.num_envs, layout.num_steps + field.extra, *field.shape))
    if field.mask is not None and field.rows is not None:
        num_breakable = max(0, layout.num_steps - 1)
        _check_entry(field, entries[field.mask], np.dtype(np.bool_), (layout.num_envs, num_breakable))
        # Any number of exceptions is possible here; `SharedNext` compares it with the decoded mask.
        num_exceptions = entries[field.rows].shape[:1]
        _check_entry(field, entries[field.rows], dtype, (*num_exceptions, *field.shape))


def _check_entry(field: Field, entry: Entry, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if entry.dtype != dtype or entry.shape != shape:
        raise CorruptFileError(
            f"{field.name} is stored in the array {entry.name!r} of {entry.dtype}{list(entry.shape)}, "
            f"expected {dtype}{list(shape)}"
        )
    # Only a checkpoint has a parent to decode against.
    if entry.codec.needs_reference:
        raise CorruptFileError(f"{field.name} is stored as a difference, which a rollout cannot be")
