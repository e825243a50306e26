"""The arrays of a rollout, packed in memory in groups of environments, and a bounded cache of decoded groups. No torch.

Reading some steps decodes the groups of their environments and copies the steps from there. Whole environments are
copied as slices, scattered steps by fancy indexing, which takes about twice as long per step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.codecs import Codec
from slipstream.memory import scratch, scratch_scope
from slipstream.rollout.files import codec_for
from slipstream.rollout.groups import GroupCache, PackedArray
from slipstream.rollout.layout import Field, Key, Layout, Rollout, as_key
from slipstream.threads import parallel_each
from slipstream.trajectory import copy_next, exception_numbers, gather_next, gather_steps

# Size of a group of the largest array: reading a single step decodes that much. Groups of half the size take a quarter
# longer to pack, and a fifth longer to unpack, because codecs have a cost per call.
_GROUP_BYTES = 1 << 20
# An array that does not shrink below this share stays raw: decoding it would cost more than its memory.
_WORTHWHILE = 0.9
# Arrays below this share of the batch stay raw.
_SMALL = 1 / 32

Codecs = dict[str, Codec | None]
"""How the arrays of an earlier batch were packed, by name; None for arrays that were not worth packing."""


@dataclass(frozen=True)
class PackedArrays:
    """The arrays of a rollout, which all views of a compressed rollout share. Nothing in it changes but the cache.

    Attributes:
        layout: Which arrays hold which tensors.
        group: Number of environments that are packed together.
        packed: The packed arrays by name.
        raw: The other arrays by name.
        exceptions: For each mask of exceptions, the row of the exception of every step, or -1.
        cache: Groups that were decoded last.
    """

    layout: Layout
    group: int
    packed: dict[str, PackedArray]
    raw: dict[str, NDArray[Any]]
    exceptions: dict[str, NDArray[np.int32]]
    cache: GroupCache

    @classmethod
    def pack(
        cls,
        rollout: Rollout,
        level: int,
        *,
        compress_keys: Sequence[str | Key] | None,
        cache_bytes: int | None,
        group_envs: int | None,
        verify: bool,
        codecs: Codecs | None = None,
    ) -> PackedArrays:
        """Pack the arrays of a rollout; the arguments are those of `CompressedTensorDict`.

        Args:
            rollout: The arrays. Those that stay raw are kept and not copied.
            level: zstd level.
            compress_keys: Keys to pack; None packs what is worth it.
            cache_bytes: Size of the cache; None means 1/16 of the batch.
            group_envs: Number of environments in a group; None chooses it by size.
            verify: Whether to decode everything once and compare.
            codecs: Decisions made for an earlier, similar batch. Decisions made here are added.
        """
        layout = rollout.layout
        if codecs is None:
            codecs = {}
        if cache_bytes is None:
            cache_bytes = layout.raw_bytes // 16
        group = group_envs
        if group is None:
            group = _choose_group(rollout)
        chosen = _choose_arrays(layout, compress_keys)
        packed: dict[str, PackedArray] = {}
        raw: dict[str, NDArray[Any]] = {}
        for name, array in rollout.arrays.items():
            is_small = compress_keys is None and array.nbytes < _SMALL * layout.raw_bytes
            if name in chosen and not is_small and name not in codecs:
                codecs[name] = codec_for(rollout, name, level)
            codec = codecs.get(name)
            if name not in chosen or is_small or codec is None:
                raw[name] = array
                continue
            candidate = PackedArray.of(name, array, codec, group, verify=verify)
            if compress_keys is None and candidate.nbytes > _WORTHWHILE * array.nbytes:
                codecs[name] = None
                raw[name] = array
            else:
                packed[name] = candidate
        # Minibatches look exceptions up by step, so keep row numbers instead of masks.
        exceptions: dict[str, NDArray[np.int32]] = {}
        for field in layout.fields:
            if field.mask is not None and field.mask not in exceptions:
                exceptions[field.mask] = exception_numbers(raw.pop(field.mask))
        return cls(layout, group, packed, raw, exceptions, GroupCache(cache_bytes))

    @property
    def nbytes(self) -> int:
        """Size of packed and raw arrays, without the cache."""
        total = 0
        for packed in self.packed.values():
            total += packed.nbytes
        for array in self.raw.values():
            total += array.nbytes
        return total

    @property
    def window(self) -> int:
        """How many groups of environments to mix in minibatches, so that each is decoded about once."""
        num_bytes = 0
        for packed in self.packed.values():
            num_bytes += packed.group_bytes
        num_cached = self.cache.max_bytes // max(1, num_bytes)
        # Fewer would hardly mix environments.
        return max(2, num_cached, -(-4 // self.group))

    def read(self, fields: Sequence[Field], steps: NDArray[np.intp] | slice) -> list[NDArray[Any]]:
        """Read steps of some fields into new memory. Thread-safe.

        At most one group is decoded per thread at a time, besides what is in the cache.

        Args:
            fields: The fields. Those that share an array decode it once.
            steps: Numbers of steps, ``environment * num_steps + time``; or consecutive environments, whole.

        Returns:
            Arrays ``[step, ...]``, one for each field.
        """
        if isinstance(steps, slice):
            return self._read_envs(fields, steps)
        return self._read_steps(fields, steps)

    def _read_steps(self, fields: Sequence[Field], numbers: NDArray[np.intp]) -> list[NDArray[Any]]:
        """Read scattered steps."""
        outs = [np.empty((len(numbers), *field.shape), field.dtype.carrier) for field in fields]
        targets = _by_array(fields, outs)

        def fill(job: tuple[str, _Pick]) -> None:
            name, pick = job
            whole = self._whole(name, pick)
            for field, out in targets[name]:
                if field.mask is None or field.rows is None:
                    out[pick.position] = gather_steps(whole, pick.env, pick.step)
                    continue
                breaks = self.exceptions[field.mask][pick.envs]
                out[pick.position] = gather_next(whole, breaks, self.raw[field.rows], pick.env, pick.step)

        everything = _Pick.all(numbers, self.layout)
        jobs: list[tuple[str, _Pick]] = []
        picks = _picks(everything, self.group)
        for name in targets:
            if name in self.packed:
                jobs += zip(itertools.repeat(name), picks, strict=False)
            else:
                # Raw arrays need no groups: gather all steps at once.
                fill((name, everything))
        parallel_each(fill, jobs)
        return outs

    def _read_envs(self, fields: Sequence[Field], envs: slice) -> list[NDArray[Any]]:
        """Read consecutive environments; slices copy twice as fast as the indices of every step."""
        num_envs = envs.stop - envs.start
        num_steps = self.layout.num_steps
        outs = [np.empty((num_envs, num_steps, *field.shape), field.dtype.carrier) for field in fields]
        targets = _by_array(fields, outs)

        def copy(name: str, whole: NDArray[Any], first: int) -> None:
            """Copy environments, which begin with the number `first`, to all fields that show them."""
            last = first + len(whole)
            for field, out in targets[name]:
                target = out[first - envs.start : last - envs.start]
                if field.mask is None or field.rows is None:
                    target[:] = whole[:, :num_steps]
                    continue
                copy_next(whole, self.exceptions[field.mask][first:last], self.raw[field.rows], target)

        def fill(job: tuple[str, int]) -> None:
            name, number = job
            start = number * self.group
            first = max(envs.start, start)
            last = min(envs.stop, start + self.group)
            with scratch_scope():
                whole = self._decode(name, number, keep=keep)
                copy(name, whole[first - start : last - start], first)

        numbers = range(envs.start // self.group, -(-envs.stop // self.group))
        if not num_envs:
            numbers = range(0)
        jobs: list[tuple[str, int]] = []
        num_bytes = 0
        for name in targets:
            if name in self.packed:
                jobs += zip(itertools.repeat(name), numbers, strict=False)
                num_bytes += len(numbers) * self.packed[name].group_bytes
            else:
                copy(name, self.raw[name][envs], envs.start)
        # Groups that do not all fit would only evict each other.
        keep = num_bytes <= self.cache.max_bytes
        parallel_each(fill, jobs)
        flat = []
        for field, out in zip(fields, outs, strict=True):
            flat.append(out.reshape(num_envs * num_steps, *field.shape))
        return flat

    def _whole(self, name: str, pick: _Pick) -> NDArray[Any]:
        """Return the environments of an array that a pick refers to."""
        if name in self.raw:
            return self.raw[name]
        return self.cache.get(name, self.packed[name], pick.group)

    def _decode(self, name: str, number: int, *, keep: bool) -> NDArray[Any]:
        """Return a group of a packed array; unless it is to be kept in the cache, in memory of this scratch scope."""
        packed = self.packed[name]
        if keep:
            return self.cache.get(name, packed, number)
        found = self.cache.find(name, number)
        if found is not None:
            return found
        shape = packed.shape_of(number)
        memory = scratch("group", math.prod(shape), packed.dtype).reshape(shape)
        return packed.decode(number, memory)


@dataclass(frozen=True)
class _Pick:
    """Scattered steps: where they are in the environments of a group, and where they go."""

    group: int
    envs: slice
    env: NDArray[np.intp]
    step: NDArray[np.intp]
    position: NDArray[np.intp] | slice

    @classmethod
    def all(cls, numbers: NDArray[np.intp], layout: Layout) -> _Pick:
        """Return the steps of these numbers, of all environments."""
        env, step = np.divmod(numbers, max(1, layout.num_steps))
        return cls(0, slice(0, layout.num_envs), env, step, slice(None))


def _picks(everything: _Pick, group: int) -> list[_Pick]:
    """Sort steps by the group of environments they are in."""
    number, inside = np.divmod(everything.env, group)
    order = np.argsort(number, kind="stable")
    # Where the group changes, the next pick begins.
    borders = np.flatnonzero(np.diff(number[order])) + 1
    picks = []
    if not order.size:
        return []
    for position in np.split(order, borders):
        group_number = int(number[position[0]])
        envs = slice(group_number * group, (group_number + 1) * group)
        picks.append(_Pick(group_number, envs, inside[position], everything.step[position], position))
    return picks


def _by_array(fields: Sequence[Field], outs: Sequence[NDArray[Any]]) -> dict[str, list[tuple[Field, NDArray[Any]]]]:
    """Return fields and their memory by array: an observation and its `next` are filled from one decoded group."""
    targets: dict[str, list[tuple[Field, NDArray[Any]]]] = {}
    for field, out in zip(fields, outs, strict=True):
        targets.setdefault(field.array, []).append((field, out))
    return targets


def _choose_group(rollout: Rollout) -> int:
    """Return how many environments to pack together."""
    largest = 1
    for array in rollout.arrays.values():
        largest = max(largest, array[:1].nbytes)
    return max(1, min(rollout.layout.num_envs, _GROUP_BYTES // largest))


def _choose_arrays(layout: Layout, compress_keys: Sequence[str | Key] | None) -> set[str]:
    """Return the arrays to pack: those of the given keys, with or without their ``next``; all fields by default."""
    if compress_keys is None:
        return {field.array for field in layout.fields}
    if isinstance(compress_keys, str):
        compress_keys = [compress_keys]
    chosen: set[str] = set()
    for key in compress_keys:
        path = as_key(key)
        found: set[str] = set()
        for field in layout.fields:
            if path in (field.key[: len(path)], field.key[1 : len(path) + 1]):
                found.add(field.array)
        if not found:
            known = ", ".join(field.name for field in layout.fields[:8])
            raise KeyError(f"compress_keys has {'/'.join(path)!r}, which the batch has not; it has {known}")
        chosen.update(found)
    return chosen
