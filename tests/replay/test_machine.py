"""A state machine: whatever is done to a `PackedEpisodeStorage`, it holds what a `LazyTensorStorage` holds."""

import hashlib
import itertools
import os
import pickle
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter

from slipstream import CorruptFileError, EpisodeSliceSampler, OutOfRangeError, PackedEpisodeStorage, ReplayError
from tests.replay.worlds import NO_STEP, Order, World

Key = tuple[str, ...]

SEEDS = st.integers(0, 2**16)
SHARES = st.floats(0, 1, exclude_max=True)
LATE_KEYS: list[Key] = [("value",), ("next", "target"), ("aux", "deep", "image")]
CHANGED_KEYS: list[Key] = [
    ("observation", "vector"),
    ("observation", "brain"),
    ("next", "observation", "vector"),
    ("next", "observation", "half"),
    ("next", "reward"),
    ("next", "done"),
    ("bytes",),
    ("mask",),
    ("large",),
    ("number",),
]


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor. Not with torch, whose threads are missing in a forked child."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().tobytes()


def leaves(steps: TensorDict) -> dict[Key, torch.Tensor]:
    """Return the tensors of steps by nested key."""
    found = {}
    for key, tensor in steps.items(True, True):
        found[key if isinstance(key, tuple) else (key,)] = tensor
    return found


def assert_equal(expected: dict[Key, torch.Tensor], found: dict[Key, torch.Tensor]) -> None:
    """Compare tensors by key: shapes, dtypes and bits."""
    assert set(expected) == set(found)
    for key, tensor in expected.items():
        other = found[key]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), key
        assert bits(tensor) == bits(other), key


class StorageMachine(RuleBasedStateMachine):
    """A buffer on each storage, and what is known of the order of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.num_folders = itertools.count()
        self.num_checks = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(
        ndim=st.sampled_from([1, 2]),
        num_streams=st.integers(1, 3),
        max_size=st.integers(1, 90),
        kind=st.sampled_from(["vectors", "images", "stacks", "scaled"]),
        with_ids=st.booleans(),
        pack_images=st.booleans(),
        cache_bytes=st.sampled_from([0, 300, 1 << 20]),
        seed=SEEDS,
    )
    def start(
        self,
        ndim: int,
        num_streams: int,
        max_size: int,
        kind: str,
        with_ids: bool,
        pack_images: bool,
        cache_bytes: int,
        seed: int,
    ) -> None:
        """Make both buffers."""
        self.ndim = ndim
        self.num_streams = 1 if ndim == 1 else num_streams
        self.max_size = max_size
        self.options: dict[str, Any] = {"pack_images": pack_images, "cache_bytes": cache_bytes}
        self.world = World(kind, self.num_streams, with_ids, seed)
        self.theirs = self.buffer(LazyTensorStorage(max_size, ndim=ndim))
        self.ours = self.packed_buffer()
        self.forget()

    def buffer(self, storage: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=storage, writer=RoundRobinWriter(), batch_size=7)

    def packed_buffer(self) -> ReplayBuffer:
        return self.buffer(PackedEpisodeStorage(self.max_size, ndim=self.ndim, **self.options))

    def forget(self) -> None:
        self.num_times = -(-self.max_size // self.num_streams)
        self.order = Order(self.num_times, self.num_streams)
        self.cursor = 0
        # TorchRL's storage takes only the keys of the first batch, so later ones are kept here.
        self.late: dict[Key, torch.Tensor] = {}
        # The folder that the buffer was saved into, which later saves only add to.
        self.home: Path | None = None

    # What is expected

    @property
    def used_times(self) -> int:
        return -(-len(self.theirs.storage) // self.num_streams)

    @property
    def is_filled(self) -> bool:
        return bool(self.order.slots())

    def index_of(self, slots: list[tuple[int, int]]) -> Any:
        """Return what storages are indexed with."""
        times = torch.tensor([time for time, _ in slots], dtype=torch.int64)
        if self.ndim == 1:
            return times
        return times, torch.tensor([stream for _, stream in slots], dtype=torch.int64)

    def expected(self, slots: list[tuple[int, int]]) -> dict[Key, torch.Tensor]:
        """Return the tensors of some steps."""
        index = self.index_of(slots)
        found = leaves(self.theirs.storage.get(index))
        for key, values in self.late.items():
            found[key] = values[index]
        return found

    def grid(self, key: Key) -> list[list[Any]]:
        """Return a flag of all slots ``[times][streams]``."""
        values = self.theirs.storage.get(slice(None))[key]
        rows = values.reshape(self.used_times, self.num_streams).tolist()
        return rows + [[0] * self.num_streams] * (self.num_times - self.used_times)

    def some_slots(self, shares: list[float]) -> list[tuple[int, int]]:
        slots = self.order.slots()
        return [slots[int(share * len(slots))] for share in shares]

    # Writing

    def written(self, steps: TensorDict, late: dict[Key, torch.Tensor]) -> None:
        """Note that new steps ``[streams, time]`` were written at the cursor."""
        count = steps.shape[1]
        times = [(self.cursor + number) % self.num_times for number in range(count)]
        self.cursor = (self.cursor + count) % self.num_times
        self.order.write(times)
        for key, values in late.items():
            if key not in self.late:
                self.late[key] = torch.zeros(self.time_first((self.num_times,), values.shape[2:]), dtype=values.dtype)
        for key, kept in self.late.items():
            new = late.get(key)
            for place, time in enumerate(times):
                kept[time] = 0 if new is None else new[:, place].reshape(kept[time].shape)

    def time_first(self, times: tuple[int, ...], shape: torch.Size) -> tuple[int, ...]:
        if self.ndim == 1:
            return (*times, *shape)
        return (*times, self.num_streams, *shape)

    def late_values(self, names: list[Key], count: int) -> dict[Key, torch.Tensor]:
        values = {}
        for key in names:
            if key[-1] == "image":
                values[key] = torch.randint(0, 5, (self.num_streams, count, 36, 30), dtype=torch.uint8)
            else:
                values[key] = torch.randn(self.num_streams, count, 2)
        return values

    @rule(
        share=st.floats(0, 2.3),
        is_short=st.booleans(),
        end_chance=st.sampled_from([0.0, 0.1, 0.5]),
        break_chance=st.sampled_from([0.0, 0.2, 1.0]),
        late=st.lists(st.sampled_from(LATE_KEYS), max_size=1),
    )
    def extend(self, share: float, is_short: bool, end_chance: float, break_chance: float, late: list[Key]) -> None:
        """Write steps: few, many, or more than there is room for."""
        count = max(1, int(share * (5 if is_short else self.num_times)))
        steps = self.world.batch(count, end_chance, break_chance)
        is_first = not self.ours.storage.initialized
        values = {} if is_first else self.late_values(late, count)
        whole = steps.copy()
        for key, tensor in values.items():
            whole[key] = tensor
        # Of a batch with the same slot twice it is undefined which step TorchRL's storage keeps.
        for part in steps.split(self.num_times, 1):
            self.theirs.extend(part if self.ndim == 2 else part[0])
        index = self.ours.extend(whole if self.ndim == 2 else whole[0])
        assert len(index) == count * (self.num_streams if self.ndim == 2 else 1)
        self.written(steps, values)

    @precondition(lambda self: self.ndim == 1)
    @rule(count=st.integers(1, 20))
    def add(self, count: int) -> None:
        """Write steps one by one."""
        steps = self.world.batch(count, 0.1, 0.1)
        for step in steps[0].unbind(0):
            assert self.theirs.add(step) == self.ours.add(step)
        self.written(steps, {})

    @precondition(lambda self: self.is_filled)
    @rule(shares=st.lists(SHARES, min_size=1, max_size=40))
    def overwrite(self, shares: list[float]) -> None:
        """Put other steps in the place of some, which does not make them newer; the last one for a slot counts."""
        self.replace(self.some_slots(shares))

    @precondition(lambda self: self.is_filled)
    @rule(share=st.floats(0.5, 1), times=st.integers(1, 4), seed=SEEDS)
    def overwrite_most(self, share: float, times: int, seed: int) -> None:
        """Put other steps in the place of most, so that few steps of old segments are left."""
        draw = random.Random(seed)
        for _ in range(times):
            slots = self.order.slots()
            self.replace(draw.sample(slots, max(1, int(share * len(slots)))))

    def replace(self, slots: list[tuple[int, int]]) -> None:
        steps = self.world.batch(len(slots), 0.2, 0.2)[0]
        self.ours.storage[self.index_of(slots)] = steps
        # With the same slot twice it is undefined which step TorchRL's storage keeps.
        last = {slot: place for place, slot in enumerate(slots)}
        self.theirs.storage[self.index_of(list(last))] = steps[list(last.values())]

    @precondition(lambda self: self.order.holes(self.used_times))
    @rule(share=SHARES)
    def fill_hole(self, share: float) -> None:
        """Put a step where one was lost."""
        holes = self.order.holes(self.used_times)
        slot = holes[int(share * len(holes))]
        steps = self.world.batch(1, 0.2, 0.2)[0]
        for key, values in self.late.items():
            steps[key] = values[self.index_of([slot])]
        index = self.index_of([slot])
        self.theirs.storage[index] = steps.exclude(*self.late)
        self.ours.storage[index] = steps
        self.order.fill(*slot)

    @precondition(lambda self: self.is_filled)
    @rule(
        key=st.sampled_from(CHANGED_KEYS), start=SHARES, stop=SHARES, how=st.sampled_from(["set_", "set_at_", "write"])
    )
    def change_key(self, key: Key, start: float, stop: float, how: str) -> None:
        """Change one tensor of all steps, or of some."""
        times = slice(int(start * self.used_times), int(stop * self.used_times) + 1)
        if how == "set_":
            times = slice(0, self.used_times)
        old = self.theirs.storage.get(times)[key]
        new = torch.randint(0, 2, old.shape).to(old.dtype)
        self.theirs.storage.get(slice(None))[key][times] = new
        if how == "write":
            self.ours.storage.write(key, new, times)
        elif how == "set_":
            self.ours.storage[:].set_(key, new)
        else:
            self.ours.storage[:].set_at_(key, new, times)

    @precondition(lambda self: self.is_filled)
    @rule(key=st.sampled_from(LATE_KEYS[:2]), start=SHARES)
    def write_late_key(self, key: Key, start: float) -> None:
        """Write a tensor that steps may not have had so far."""
        times = slice(int(start * self.used_times), self.used_times)
        value = torch.randn(self.time_first((times.stop - times.start,), torch.Size([2])))
        kept = self.late.setdefault(key, torch.zeros(self.time_first((self.num_times,), torch.Size([2]))))
        kept[times] = value
        self.ours.storage.write(key, value, times)

    @rule()
    def empty(self) -> None:
        """Forget everything."""
        self.theirs.empty()
        self.ours.empty()
        self.theirs = self.buffer(LazyTensorStorage(self.max_size, ndim=self.ndim))
        self.forget()

    # Reading

    @invariant()
    def everything_is_equal(self) -> None:
        """All steps are there, bit for bit."""
        if not hasattr(self, "ours"):
            return
        storage = self.ours.storage
        assert len(storage) == len(self.theirs.storage)
        if not self.is_filled:
            return
        slots = self.order.slots()
        assert_equal(self.expected(slots), leaves(storage.get(self.index_of(slots))))
        # Segments of which little is left are packed again, so what was overwritten does not pile up.
        assert storage.get_stats()["num_frames"] <= 12 * self.used_times * self.num_streams + 64

    @precondition(lambda self: self.is_filled)
    @rule(shares=st.lists(SHARES, min_size=1, max_size=30), is_lazy=st.booleans())
    def read(self, shares: list[float], is_lazy: bool) -> None:
        """Read some steps, in any order and some of them twice."""
        slots = self.some_slots(shares)
        index = self.index_of(slots)
        rows = self.ours.storage[index] if is_lazy else self.ours.storage.get(index)
        assert_equal(self.expected(slots), leaves(rows))

    @precondition(lambda self: self.is_filled)
    @rule(start=SHARES, stop=SHARES, step=st.integers(1, 3))
    def read_slice(self, start: float, stop: float, step: int) -> None:
        """Read a slice: lost steps are zeros."""
        times = slice(int(start * self.used_times), int(stop * self.used_times) + 1, step)
        found = leaves(self.ours.storage[times])
        # The clone of a TensorDict turns -0.0 into 0.0.
        expected = {key: values.clone() for key, values in leaves(self.theirs.storage.get(times)).items()}
        for key, values in self.late.items():
            expected[key] = values[times].clone()
        numbers = range(self.used_times)[times]
        for time, stream in self.order.holes(self.used_times):
            if time not in numbers:
                continue
            place: Any = numbers.index(time)
            if self.ndim == 2:
                place = (place, stream)
            for key, values in found.items():
                # Flags of lost steps are still known: they are not packed.
                expected[key][place] = values[place]
        assert_equal(expected, found)

    @precondition(lambda self: self.is_filled)
    @rule(seed=SEEDS)
    def sample(self, seed: int) -> None:
        """Sampled steps are those of their indices; lost ones are never sampled."""
        self.ours.set_rng(torch.Generator().manual_seed(seed))
        batch, info = self.ours.sample(return_info=True)
        index = info["index"]
        if self.ndim == 1:
            slots = [(time, 0) for time in torch.as_tensor(index).tolist()]
        else:
            slots = list(zip(index[0].tolist(), index[1].tolist(), strict=True))
        assert set(slots) <= set(self.order.slots())
        assert_equal(self.expected(slots), leaves(batch))

    @precondition(lambda self: self.order.holes(self.used_times))
    @rule(share=SHARES)
    def read_hole(self, share: float) -> None:
        """Naming a lost step is an error."""
        holes = self.order.holes(self.used_times)
        with pytest.raises(OutOfRangeError, match="lost with a damaged file"):
            self.ours.storage.get(self.index_of([holes[int(share * len(holes))]]))

    @invariant()
    def slices_are_those_of_episodes(self) -> None:
        """All slices that there are can be drawn, and no others."""
        if not hasattr(self, "ours") or not self.is_filled:
            return
        self.num_checks += 1
        # Short ones more often: those that are too long tell less.
        length = (1, 2, 3, 2, 7, 4)[self.num_checks % 6]
        ends = self.grid(("next", "done"))
        ids = [[0] * self.num_streams] * self.num_times
        if self.world.with_ids:
            ids = self.grid(("collector", "traj_ids"))
        possible = self.order.starts(length, ends, ids)
        sampler = EpisodeSliceSampler(slice_len=length)
        sampler._rng = torch.Generator().manual_seed(self.num_checks)
        if not possible:
            with pytest.raises(ReplayError, match="no episode in the storage has"):
                sampler.sample(self.ours.storage, length)
            return
        # A start is missed with a chance of exp(-40).
        index, _ = sampler.sample(self.ours.storage, 40 * len(possible) * length)
        times = index[0].reshape(-1, length)
        streams = torch.zeros_like(times)
        if self.ndim == 2:
            streams = index[1].reshape(-1, length)
        assert bool((times == (times[:, :1] + torch.arange(length)) % self.num_times).all())
        assert bool((streams == streams[:, :1]).all())
        assert set(zip(times[:, 0].tolist(), streams[:, 0].tolist(), strict=True)) == possible

    # Keeping

    @rule(how=st.sampled_from(["folder", "state", "pickle"]), is_home=st.booleans())
    def copy(self, how: str, is_home: bool) -> None:
        """Continue with a copy."""
        if how == "pickle":
            self.ours = pickle.loads(pickle.dumps(self.ours))
            return
        twin = self.packed_buffer()
        if how == "state":
            twin.load_state_dict(self.ours.state_dict())
        else:
            folder = self.save(is_home)
            twin.loads(folder)
            assert twin.storage.checkpointer.lost == []
        self.ours = twin

    def save(self, is_home: bool) -> Path:
        """Save into a new folder, or into the one that was saved into before."""
        folder = self.home
        if folder is None or not is_home:
            folder = self.folder / str(next(self.num_folders))
        self.ours.dumps(folder)
        self.home = folder
        return folder

    @precondition(lambda self: self.is_filled)
    @rule(which=SHARES, place=SHARES, how=st.sampled_from(["flip", "cut off", "delete"]), is_home=st.booleans())
    def damage(self, which: float, place: float, how: str, is_home: bool) -> None:
        """Continue with what is left of a damaged folder: holes instead of lost steps, the others equal."""
        folder = self.save(is_home)
        parts = sorted((folder / "storage").glob("rows-*"))
        if not parts:
            return
        part = parts[int(which * len(parts))]
        content = bytearray(part.read_bytes())
        if how == "flip":
            content[int(place * len(content))] ^= 1 << int(place * 8)
            part.write_bytes(content)
        elif how == "cut off":
            part.write_bytes(content[: int(place * len(content))])
        else:
            part.unlink()
        twin = self.packed_buffer()
        try:
            twin.loads(folder)
        except CorruptFileError as error:
            assert "every step in the folder is lost" in str(error)
            return
        finally:
            # The storage that wrote it thinks that all of it is there.
            self.home = None
        self.ours = twin
        known = set(self.order.slots())
        lost_times = set(twin.storage.checkpointer.lost)
        for time, stream in known:
            if twin.storage.runs[time, stream] == NO_STEP:
                assert time in lost_times
                self.order.lose(time, stream)
        assert self.is_filled

    @precondition(lambda self: self.is_filled)
    @rule()
    def damaged_head(self) -> None:
        """Without its head a folder of steps is an error, and nothing has changed."""
        folder = self.save(False)
        self.home = None
        head = folder / "storage" / "head.slip"
        head.write_bytes(head.read_bytes()[:-9])
        with pytest.raises(CorruptFileError):
            self.ours.storage.loads(folder / "storage")

    @precondition(lambda self: self.is_filled)
    @rule()
    def fork(self) -> None:
        """A forked child reads the same."""
        slots = self.order.slots()
        index = self.index_of(slots)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writer, digest(leaves(self.ours.storage.get(index))))
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        assert found == digest(self.expected(slots))


def digest(tensors: dict[Key, torch.Tensor]) -> bytes:
    """Return a hash of tensors by key."""
    found = hashlib.sha256()
    for key in sorted(tensors):
        found.update(repr((key, tensors[key].dtype, tensors[key].shape)).encode())
        found.update(bits(tensors[key]))
    return found.digest()


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def test_a_packed_storage_holds_what_a_lazy_tensor_storage_holds() -> None:
    limits = settings(max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=QUIET)
    run_state_machine_as_test(StorageMachine, settings=limits)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_packed_storage_holds_what_a_lazy_tensor_storage_holds_for_long() -> None:
    limits = settings(max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=QUIET)
    run_state_machine_as_test(StorageMachine, settings=limits)
