"""The parts of a snapshot: tensors that are copied together, at once, on another thread, or on a CUDA stream.

`slipstream.checkpoint.snapshot` describes what is guaranteed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.checkpoint.guard import Covered, version_of
from slipstream.memory import Pool
from slipstream.tensors import Regions

# Guarded tensors are copied during the call, where nothing can tear, if they take less than the first limit and
# are no more than the second. Measured on two cores (us; "barrier": including a barrier that follows at once):
#                          during the call | later: call   with barrier
#     1 tensor,    1 MiB               161 |        118            319
#     1 tensor,    4 MiB               436 |        171            682
#    32 tensors,   4 MiB               674 |        276            980
#   100 tensors,   4 MiB              1293 |        556           1942
#     1 tensor,   16 MiB              2087 |        234           2343
# The call alone is always shorter with a thread, but the total never is. These limits keep the call below 1 ms.
_MIN_DEFERRED_BYTES = 4 << 20
_MAX_IMMEDIATE_TENSORS = 64
_HOST = torch.device("cpu")


class Promises:
    """What tells whether guarded tensors changed: torch's version counters, as they were at the call.

    Counts the changes of the tensors in a state, and of the guarded tensors in the same storages. Usually these are the
    same counters, but ``x.data`` has another one than ``x``.

    Args:
        covered: The guarded tensors.
        aliases: Tensors that share memory and counters with those of the state.
        addresses: The addresses of their storages.
    """

    def __init__(self, covered: Covered, aliases: list[torch.Tensor], addresses: list[int]) -> None:
        self.broken: set[int] = set()
        self._covered = covered
        self._aliases = aliases
        self._addresses = addresses
        self._versions = list(map(version_of, aliases))
        # Once per storage: thousands of tensors may share one.
        storages = list(dict.fromkeys(addresses))
        self._storage_versions = dict(zip(storages, map(covered.version, storages), strict=True))

    def by_storage(self) -> dict[int, list[int]]:
        """Return the numbers of the tensors in each storage, by its address."""
        numbers: dict[int, list[int]] = {}
        for number, address in enumerate(self._addresses):
            numbers.setdefault(address, []).append(number)
        return numbers

    def changed_in(self, address: int, numbers: Sequence[int]) -> list[int]:
        """Return which tensors of a storage have changed since the call, as far as finished operations tell."""
        if self._covered.version(address) != self._storage_versions[address]:
            return list(numbers)
        changed = []
        for number in numbers:
            if version_of(self._aliases[number]) != self._versions[number]:
                changed.append(number)  # noqa: PERF401 - a loop is easier to read
        return changed

    def changed(self) -> list[int]:
        """Return the numbers of all tensors that have changed since the call."""
        changed: list[int] = []
        for address, numbers in self.by_storage().items():
            changed += self.changed_in(address, numbers)
        return changed

    def guarded(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        """Return the guarded tensors that share storages with some tensors of the state."""
        found: list[torch.Tensor] = []
        for address in {self._addresses[number] for number in numbers}:
            found += self._covered.tensors(address)
        return found


@dataclass(eq=False)
class Part:
    """Some tensors of a snapshot, and the copy of their memory.

    Attributes:
        positions: Their positions among all tensors of the state.
        tensors: The tensors, or aliases that keep the memory of the call. Empty once it is copied.
        promises: For guarded tensors.
        buffer: The memory of the copy.
        regions: The copy.
    """

    positions: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    promises: Promises | None = None
    buffer: NDArray[np.uint8] | None = None
    regions: Regions | None = None

    def copy(self, pool: Pool) -> None:
        """Copy the memory on this thread, and compare the counters of each storage right after it was copied."""
        source = Regions.of(self.tensors)
        on_copied = None
        if self.promises is not None:
            on_copied = _comparison(source, self.promises)
        self.buffer = pool.take(source.buffer_bytes)
        self.regions = source.copy_into(self.buffer, on_copied=on_copied)

    def copied(self) -> Regions:
        """Return the copy."""
        if self.regions is None:
            raise RuntimeError("the memory of this snapshot was released, so it cannot be read; retain it before that")
        return self.regions


def _comparison(source: Regions, promises: Promises) -> Callable[[int], None]:
    """Return a function that compares the counters of a storage after its last piece was copied."""
    due: dict[int, tuple[int, list[int]]] = {}
    for address, numbers in promises.by_storage().items():
        last_piece = max(source.views[number].region for number in numbers)
        due[last_piece] = (address, numbers)

    def compare(piece: int) -> None:
        if piece in due:
            promises.broken.update(promises.changed_in(*due[piece]))

    return compare


@dataclass(eq=False)
class StreamCopy:
    """A copy of a part that runs on a CUDA stream.

    Attributes:
        device: The device of its tensors.
        part: Its tensors.
        event: Occurs when the copy is complete.
        has_passed: Whether a barrier has made a stream wait for the copy, so that the tensors may change.
    """

    device: torch.device
    part: Part
    event: Any
    has_passed: bool = False

    @classmethod
    def start(cls, device: torch.device, part: Part, pool: Pool) -> StreamCopy:
        """Queue the copy on a separate stream, after the work that is queued on the current stream."""
        # This may queue work on the current stream (gathering a strided tensor), so it comes before `wait_stream`.
        source = Regions.of(part.tensors)
        part.buffer = pool.take(source.buffer_bytes)
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        part.regions = source.copy_into(part.buffer, stream)
        # A thread that waits for a blocking event sleeps instead of spinning.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return cls(device, part, event)

    def block_current_stream(self) -> None:
        """Make what is queued on the current stream from now on wait for the copy. Does not block this thread."""
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def pass_barrier(self) -> None:
        """Let the tensors change on the current stream, after the copy."""
        self.compare()
        self.has_passed = True
        self.block_current_stream()

    def compare(self) -> None:
        """Mark the tensors that changed before a barrier was passed."""
        promises = self.part.promises
        if promises is None:
            return
        changed = promises.changed()
        # Look at this after the counters: a barrier that was passed in the meantime has allowed the changes.
        if not self.has_passed:
            promises.broken.update(changed)


@dataclass
class DeviceParts:
    """The tensors of a state on one device: those to copy during the call, and those to copy later."""

    now: Part = field(default_factory=Part)
    later: Part = field(default_factory=Part)


def split_tensors(tensors: Sequence[torch.Tensor], covered: Covered) -> dict[torch.device, DeviceParts]:
    """Decide which tensors are copied during the call and which later, and capture the memory of the latter.

    Args:
        tensors: The tensors of a state.
        covered: The guarded tensors.

    Returns:
        The parts for every device.
    """
    addresses = _find_deferrable(tensors, covered)
    on_host = DeviceParts()
    parts = {_HOST: on_host}
    for position, tensor in enumerate(tensors):
        on_device = on_host
        # Comparing devices takes longer than this, and most tensors are on the host.
        if not tensor.is_cpu:
            on_device = parts.setdefault(tensor.device, DeviceParts())
        if position in addresses:
            on_device.later.positions.append(position)
            # The alias keeps its memory if the tensor is given other memory: `x.data = y`.
            on_device.later.tensors.append(tensor.detach())
        else:
            on_device.now.positions.append(position)
            on_device.now.tensors.append(tensor)
    for on_device in parts.values():
        part = on_device.later
        if part.tensors:
            part.promises = Promises(covered, part.tensors, [addresses[position] for position in part.positions])
    return parts


def _find_deferrable(tensors: Sequence[torch.Tensor], covered: Covered) -> dict[int, int]:
    """Return the positions of the tensors to copy later, with the addresses of their storages.

    Tensors that share a storage stay together, and if some of its memory in the state is not guarded, none is deferred.
    """
    found: dict[int, int] = {}
    unguarded: set[int] = set()
    nbytes = 0
    guarded = covered.first
    if not guarded:
        return found
    for position, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # Copies from other devices block, so they are not deferred.
        if address in guarded and (tensor.is_cpu or tensor.is_cuda):
            found[position] = address
            nbytes += tensor.nbytes
            # Almost always one guarded tensor fills its storage.
            if guarded[address].nbytes < storage.nbytes() and not covered.contains(tensor, address):
                unguarded.add(address)
    if nbytes < _MIN_DEFERRED_BYTES and len(found) <= _MAX_IMMEDIATE_TENSORS:
        return {}
    if unguarded:
        for position in list(found):
            if found[position] in unguarded:
                del found[position]
    return found
