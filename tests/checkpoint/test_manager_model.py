"""`CheckpointManager` against a plain-Python model: whatever users do to a folder, what was kept is never lost.

The model knows only which saves were reported durable, and which files exist. It never looks at names or steps to
decide what a file contains: every save has a number that its state repeats.
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream import CheckpointManager, CorruptFileError, FormatVersionError, Thin, load_checkpoint
from slipstream.checkpoint.reader import NativeReader

FROZEN = torch.linspace(0, 1, 3000)
OPTIONS: dict[str, Any] = {"keep_last": 3, "keep_best": ("reward", "max")}


def state(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "frozen": FROZEN,
        "weight": torch.linspace(-1, 1, 2000) + number * 1e-6,
        "optimizer": {"state": {0: torch.full((3,), float(number))}, "param_groups": []},
    }


def number_in(found: dict[str, Any]) -> int:
    """Return which save a state is from, after comparing every bit of it."""
    number: int = found["number"]
    expected = state(number)
    assert torch.equal(found["frozen"], FROZEN)
    assert torch.equal(found["weight"], expected["weight"])
    if "optimizer" in found:
        assert torch.equal(found["optimizer"]["state"][0], expected["optimizer"]["state"][0])
    return number


def is_managed(name: str) -> bool:
    return name.startswith("checkpoint_iter_")


def die_at(call: int) -> None:
    """Make this process kill itself at some call of the functions that change the disk."""
    left = [call]

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return wrapper

    os.fsync = counted(os.fsync)
    for name in ("replace", "rename", "unlink", "mkdir"):
        setattr(Path, name, counted(getattr(Path, name)))


def save_and_die(folder: Path, options: dict[str, Any], number: int, step: int, reward: float, call: int) -> None:
    with CheckpointManager(folder, **options) as manager:
        # A delta needs a save before it in the same process.
        manager.save(step, state(number), {"reward": reward}).result()
        die_at(call)
        manager.save(step + 1, state(number + 1), {"reward": reward}).result()
    os._exit(0)


class ManagedFolder(RuleBasedStateMachine):
    """Saves, and everything that people do to files in between."""

    options: ClassVar[dict[str, Any]] = OPTIONS

    @initialize()
    def open_folder(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-model-"))
        self.manager = CheckpointManager(self.folder, **self.options)
        self.num_saves = 0
        self.rewards: dict[int, float] = {}
        # What must be restorable: the number of the save for every file, by name.
        self.files: dict[str, int] = {}
        self.num_copies = 0
        # Files that exist but cannot be read: flipped, or stored against one that is gone.
        self.damaged: dict[str, int] = {}
        self.steps_of: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()
            shutil.rmtree(self.folder)

    # ---- what the model expects

    def expected_after_retention(self) -> set[int]:
        """Return the saves that must be readable: the newest, the best, and what the user renamed.

        Damaged files count as kept, because retention does not read the content of all files at every save.
        """
        kept = {number for name, number in self.files.items() if not is_managed(name)}
        intact = {number for name, number in self.files.items() if is_managed(name)}
        managed = intact | {number for name, number in self.damaged.items() if is_managed(name)}
        kept |= set(sorted(managed)[-self.options["keep_last"] :]) & intact
        if managed:
            best = max(managed, key=lambda number: (self.rewards[number], number))
            kept |= {best} & intact
        return kept

    def look(self) -> dict[str, int]:
        """Return which save each readable file contains."""
        found = {}
        for path in self.folder.glob("*.slip"):
            try:
                found[path.name] = number_in(load_checkpoint(path))
            except (CorruptFileError, FormatVersionError, OSError):
                continue
        return found

    def lose(self, name: str) -> None:
        """Note that a file is gone or damaged, and everything that cannot be read without it."""
        before = self.files
        after = self.look()
        for lost, number in before.items():
            # Only what was stored against the file may go with it.
            assert lost == name or lost in after or name in self.needed_by[lost], (lost, number)
        self.files = {kept: number for kept, number in before.items() if kept in after}
        self.damaged |= {lost: number for lost, number in before.items() if lost not in after}
        self.damaged = {lost: number for lost, number in self.damaged.items() if (self.folder / lost).exists()}

    def note_dependencies(self) -> None:
        """Remember which files each file needs."""
        self.needed_by: dict[str, set[str]] = {}
        for name in self.files:
            with NativeReader(self.folder / name) as reader:
                self.needed_by[name] = {file.container.path.name for file in reader.lineage()}

    # ---- what users do

    def put(self, name: str, number: int) -> None:
        """Note that a save replaces a file; one of another step, which a user renamed, gets another name first."""
        if name in self.files and self.steps_of[self.files[name]] != self.steps_of[number]:
            self.files[f"{name} renamed by the manager"] = self.files[name]
        self.files[name] = number
        self.damaged.pop(name, None)

    def take_over(self) -> None:
        """Check that what must be readable is, and take over which files there are."""
        expected = self.expected_after_retention()
        found = self.look()
        assert expected <= set(found.values()), (expected, found)
        self.files = found
        self.damaged = {name: number for name, number in self.damaged.items() if (self.folder / name).exists()}

    @rule(step=st.integers(0, 6), reward=st.integers(0, 5), other=st.booleans())
    def save(self, step: int, reward: int, other: bool) -> None:
        number = self.num_saves
        self.num_saves += 1
        self.rewards[number] = reward
        self.steps_of[number] = step
        self.put(f"checkpoint_iter_{step}.slip", number)
        if other:
            with CheckpointManager(self.folder, **self.options) as manager:
                manager.save(step, state(number), {"reward": reward}).result()
        else:
            self.manager.save(step, state(number), {"reward": reward}).result()
        self.take_over()
        assert self.manager.latest() == step

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        self.note_dependencies()
        (self.folder / name).unlink()
        self.lose(name)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def flip_a_byte(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        self.note_dependencies()
        path = self.folder / name
        content = bytearray(path.read_bytes())
        # As a share of the file: its size may differ by a byte when the same example is run again.
        position = len(content) * data.draw(st.integers(0, 999)) // 1000
        content[position] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        self.lose(name)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        self.num_copies += 1
        target = f"copy {self.num_copies}.slip"
        shutil.copy(self.folder / name, self.folder / target)
        self.files[target] = self.files[name]

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        self.num_copies += 1
        target = data.draw(
            st.sampled_from([f"moved {self.num_copies}.slip", f"checkpoint_iter_{self.num_copies}0.slip"])
        )
        (self.folder / name).rename(self.folder / target)
        self.files[target] = self.files.pop(name)

    @rule()
    def prune(self) -> None:
        self.manager.prune()
        self.take_over()

    @rule()
    def reopen(self) -> None:
        self.manager.close()
        self.manager = CheckpointManager(self.folder, **self.options)

    @rule(step=st.integers(0, 6), reward=st.integers(0, 5), call=st.integers(0, 12))
    def killed(self, step: int, reward: int, call: int) -> None:
        number = self.num_saves
        self.num_saves += 2
        before = dict(self.files)
        for offset in (0, 1):
            self.rewards[number + offset] = reward
            self.steps_of[number + offset] = step + offset
        process = multiprocessing.get_context("fork").Process(
            target=save_and_die, args=(self.folder, self.options, number, step, reward, call)
        )
        process.start()
        process.join()
        found = self.look()
        durable = set(found.values())
        # The first save was reported durable. The second may be there or not.
        assert number in durable
        expected = []
        self.files = before
        for new in (number, number + 1):
            self.put(f"checkpoint_iter_{self.steps_of[new]}.slip", new)
            kept = self.expected_after_retention()
            self.files = {name: saved for name, saved in self.files.items() if saved in kept}
            expected.append(kept)
        # With the second one, its retention may have been carried out, in part or not at all.
        assert expected[0] <= durable or (number + 1 in durable and expected[1] <= durable)
        self.files = found

    # ---- what always holds

    @invariant()
    def the_newest_is_restored(self) -> None:
        if not self.files:
            return
        restored = self.manager.restore()
        assert number_in(restored.state) == max(self.files.values())
        assert restored.step == self.steps_of[max(self.files.values())]
        assert restored.metrics == {"reward": self.rewards[max(self.files.values())]}


class DifferentialFolder(ManagedFolder):
    """The same with checkpoints that are stored against each other."""

    options: ClassVar = {**OPTIONS, "differential": True}


class ThinnedFolder(ManagedFolder):
    """The same with older checkpoints that lose their optimizers."""

    options: ClassVar = {**OPTIONS, "differential": True, "thin": Thin(keep_full=2)}


def quick(machine: type[ManagedFolder]) -> type[Any]:
    """Return the tests of a machine, short enough for every run."""
    test = machine.TestCase
    test.settings = settings(
        max_examples=12, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return test


TestManagedFolder = quick(ManagedFolder)
TestDifferentialFolder = quick(DifferentialFolder)
TestThinnedFolder = quick(ThinnedFolder)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("machine", [ManagedFolder, DifferentialFolder, ThinnedFolder])
def test_long_histories(machine):
    test: Any = type("Long", (machine.TestCase,), {})
    test.settings = settings(
        max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    test("runTest").runTest()
