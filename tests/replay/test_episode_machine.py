"""A state machine: whatever is done to an `EpisodeStore`, it holds what a list of episodes holds."""

import itertools
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from slipstream import CorruptFileError, EpisodeStore, FormatVersionError, ReplayError
from tests.replay.samples import assert_same, episode

SHARES = st.floats(0, 1, exclude_max=True)
STREAMS = st.integers(0, 3)
LONG = 300
FRAMES = ("position", "camera")


class Unfinished:
    """An episode of which some rows were appended."""

    def __init__(self, number: int, with_images: bool) -> None:
        self.whole = episode(LONG, number, image=with_images)
        self.length = 0

    def rows(self, count: int) -> dict[str, Any]:
        """Return the next rows."""
        return {name: values[self.length : self.length + count] for name, values in self.whole.items()}

    def last(self) -> dict[str, Any]:
        """Return the frame that ends it here."""
        return {name: values[self.length] for name, values in self.whole.items() if name in FRAMES}

    def finished(self) -> dict[str, Any]:
        """Return it as an episode that ends here."""
        return {name: values[: self.length + (name in FRAMES)] for name, values in self.whole.items()}


class StoreMachine(RuleBasedStateMachine):
    """A store, and the episodes that it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.num_folders = itertools.count()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(
        with_images=st.booleans(),
        max_frames=st.sampled_from([None, 150, 400]),
        max_bytes=st.sampled_from([None, 60_000]),
        cache_bytes=st.sampled_from([0, 1 << 20]),
        are_known=st.booleans(),
    )
    def start(
        self,
        with_images: bool,
        max_frames: int | None,
        max_bytes: int | None,
        cache_bytes: int,
        are_known: bool,
    ) -> None:
        """Make the store."""
        frames = [name for name in FRAMES if name == "position" or with_images] if are_known else None
        self.with_images = with_images
        self.max_frames = max_frames
        self.max_bytes = max_bytes
        self.options: dict[str, Any] = {
            "max_frames": max_frames,
            "max_bytes": max_bytes,
            "cache_bytes": cache_bytes,
            "frames": frames,
        }
        self.store = EpisodeStore(seed=0, **self.options)
        self.finished: list[dict[str, Any]] = []
        self.open: dict[int, Unfinished] = {}
        self.home: Path | None = None
        self.numbers = itertools.count(1)
        if not are_known:
            self.add(7)

    def evicted(self) -> None:
        """Forget the episodes that the store had to evict, and check that it had to."""
        if self.max_bytes is not None:
            while len(self.finished) > self.store.num_episodes:
                self.finished.pop(0)
            assert self.store.nbytes <= self.max_bytes
        while self.max_frames is not None and self.num_frames > self.max_frames and self.finished:
            assert self.max_bytes is None
            self.finished.pop(0)

    @property
    def num_frames(self) -> int:
        finished = sum(len(one["position"]) for one in self.finished)
        return finished + sum(one.length for one in self.open.values())

    # Writing

    @rule(steps=st.integers(1, 90))
    def add(self, steps: int) -> None:
        """Add a whole episode."""
        one = episode(steps, next(self.numbers), image=self.with_images)
        before = self.store.num_frames
        try:
            self.store.add(one)
        except ReplayError as error:
            assert "does not fit max_" in str(error)
            assert self.store.num_frames == before
            return
        self.finished.append(one)
        self.evicted()

    @rule(stream=STREAMS, count=st.integers(1, 140))
    def append(self, stream: int, count: int) -> None:
        """Add rows to an unfinished episode."""
        one = self.open.get(stream) or Unfinished(next(self.numbers), self.with_images)
        if one.length + count >= LONG:
            return
        before = self.store.num_frames
        try:
            self.store.append(one.rows(count), stream)
        except ReplayError as error:
            assert "do not fit max_" in str(error)
            assert self.store.num_frames == before
            return
        self.open[stream] = one
        one.length += count
        self.evicted()

    @precondition(lambda self: self.open)
    @rule(share=SHARES)
    def finish(self, share: float) -> None:
        """End an unfinished episode."""
        stream = list(self.open)[int(share * len(self.open))]
        try:
            self.store.finish(self.open[stream].last(), stream)
        except ReplayError as error:
            assert "does not fit max_" in str(error)
            return
        self.finished.append(self.open.pop(stream).finished())
        self.evicted()

    @precondition(lambda self: self.open)
    @rule(share=SHARES)
    def discard(self, share: float) -> None:
        """Forget an unfinished episode."""
        stream = list(self.open)[int(share * len(self.open))]
        assert self.store.discard(stream) == self.open.pop(stream).length

    @rule()
    def clear(self) -> None:
        """Forget everything."""
        self.store.clear()
        self.finished = []
        self.open = {}
        assert self.store.nbytes == 0

    # Reading

    @invariant()
    def everything_is_equal(self) -> None:
        """All steps are there with their next frames, those of unfinished episodes last."""
        if not hasattr(self, "store"):
            return
        assert self.store.num_episodes == len(self.finished)
        assert self.store.num_frames == self.num_frames
        parts = self.finished + [self.up_to_now(one) for one in self.open.values() if one.length > 1]
        assert len(self.store) == sum(len(one["action"]) for one in parts)
        if not parts:
            return
        expected = {name: np.concatenate([one[name][: len(one["action"])] for one in parts]) for name in parts[0]}
        for name in set(FRAMES) & set(expected):
            expected[f"next_{name}"] = np.concatenate([one[name][1:] for one in parts])
        found = self.store.get(np.arange(len(self.store)))
        # Until an episode has ended, all arrays are taken for those of frames.
        assert_same(expected, {name: values for name, values in found.items() if name in expected})

    def up_to_now(self, one: Unfinished) -> dict[str, Any]:
        """Return an unfinished episode as one that ended a step ago."""
        return {name: values[: one.length - (name not in FRAMES)] for name, values in one.whole.items()}

    @precondition(lambda self: self.finished)
    @rule(length=st.integers(1, 20))
    def slices(self, length: int) -> None:
        """Slices are parts of episodes."""
        if max(len(one["action"]) for one in self.finished) < length:
            with pytest.raises(ReplayError, match="no episode has"):
                self.store.sample_slices(3, length)
            return
        whole = {int(one["position"][0, 0]): one for one in self.finished}
        drawn = self.store.sample_slices(20, length)
        for number in range(20):
            first = int(drawn["position"][number, 0, 0])
            one = whole[max(start for start in whole if start <= first)]
            place = first - int(one["position"][0, 0])
            for name, values in drawn.items():
                stop = place + length + (name in FRAMES)
                assert np.array_equal(values[number], one[name][place:stop]), name

    @precondition(lambda self: self.finished)
    @rule(share=SHARES)
    def one_episode(self, share: float) -> None:
        """An episode comes back whole."""
        place = int(share * len(self.finished))
        assert_same(self.store.episode(place), self.finished[place])

    # Keeping

    @rule(how=st.sampled_from(["folder", "state", "pickle"]), is_home=st.booleans())
    def copy(self, how: str, is_home: bool) -> None:
        """Continue with a copy, which draws the same."""
        twin = EpisodeStore(**self.options)
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(self.store))
        elif how == "state":
            twin.load_state_dict(self.store.state_dict())
        else:
            assert twin.restore(self.save(is_home)).lost == ()
        if len(self.store):
            assert_same(self.store.sample(5), twin.sample(5))
        # What happens to the original does not reach the copy.
        has_room = self.max_frames is None and self.max_bytes is None
        for stream, one in self.open.items():
            if has_room and one.length < LONG:
                self.store.append(one.rows(1), stream)
        self.store = twin

    def save(self, is_home: bool) -> Path:
        folder = self.home
        if folder is None or not is_home:
            folder = self.folder / str(next(self.num_folders))
        self.store.save(folder)
        self.home = folder
        return folder

    @precondition(lambda self: self.finished)
    @rule(which=SHARES, place=SHARES, how=st.sampled_from(["flip", "cut off", "delete"]), is_home=st.booleans())
    def damage(self, which: float, place: float, how: str, is_home: bool) -> None:
        """Continue with what is left of a damaged folder."""
        folder = self.save(is_home)
        self.home = None
        files = sorted(folder.glob("*.slip"))
        file = files[int(which * len(files))]
        content = bytearray(file.read_bytes())
        if how == "flip":
            content[int(place * len(content))] ^= 1 << int(place * 8)
            file.write_bytes(content)
        elif how == "cut off":
            file.write_bytes(content[: int(place * len(content))])
        else:
            file.unlink()
        twin = EpisodeStore(seed=0, **self.options)
        try:
            twin.restore(folder)
        except (CorruptFileError, FileNotFoundError):
            return
        except FormatVersionError:
            # The flip hit the version of the head, which then looks like that of another release.
            assert how == "flip"
            return
        self.store = twin
        left = {int(twin.episode(position)["position"][0, 0]) for position in range(twin.num_episodes)}
        known = [one for one in self.finished if int(one["position"][0, 0]) in left]
        assert len(known) == twin.num_episodes
        self.finished = known
        # Unfinished episodes are in the head and in the parts: each is whole, or lost.
        still_open = {}
        for stream, one in self.open.items():
            rows = twin.discard(stream)
            assert rows in (0, one.length)
            if rows:
                twin.append({name: values[: one.length] for name, values in one.whole.items()}, stream)
                still_open[stream] = one
        self.open = still_open


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def test_a_store_holds_what_a_list_of_episodes_holds() -> None:
    limits = settings(max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=QUIET)
    run_state_machine_as_test(StoreMachine, settings=limits)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_store_holds_what_a_list_of_episodes_holds_for_long() -> None:
    limits = settings(max_examples=600, stateful_step_count=50, deadline=None, suppress_health_check=QUIET)
    run_state_machine_as_test(StoreMachine, settings=limits)
