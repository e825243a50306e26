"""What checkpoints take on disk: a whole run with retention, and one file packed by us and by others."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import zstandard
from numpy.typing import NDArray

from bench.saving.training import THREADS, Training, flat, raw_bytes
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.native import write_native

KEPT = 5
WHOLE = "slipstream CheckpointManager"
DIFFERENTIAL = "slipstream CheckpointManager(differential=True)"
TORCH_SAVE = "torch.save, five newest kept"

# Arrays up to this size, such as step counters, are not worth packing.
_SMALL_BYTES = 128


class Keeper(Protocol):
    """Something that keeps the five newest checkpoints in a folder."""

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save, and return when old checkpoints are deleted."""

    def close(self) -> None:
        """Release everything."""


class OurKeeper:
    """`CheckpointManager`."""

    def __init__(self, folder: Path, *, differential: bool) -> None:
        self._manager = CheckpointManager(folder, keep_last=KEPT, differential=differential)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save, and wait until old checkpoints are deleted."""
        self._manager.save(step, state)
        self._manager.flush()

    def close(self) -> None:
        """Stop the manager."""
        self._manager.close()


class TorchKeeper:
    """`torch.save`, and deleting the oldest file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._paths: list[Path] = []

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save, then delete."""
        path = self._folder / f"{step}.pt"
        torch.save(state, path)
        self._paths.append(path)
        if len(self._paths) > KEPT:
            self._paths.pop(0).unlink()

    def close(self) -> None:
        """Do nothing."""


class OrbaxKeeper:
    """Orbax's `CheckpointManager`."""

    def __init__(self, folder: Path) -> None:
        self._library: Any = importlib.import_module("orbax.checkpoint")
        options = self._library.CheckpointManagerOptions(max_to_keep=KEPT)
        self._manager = self._library.CheckpointManager(folder, options=options)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save, and wait until old checkpoints are deleted."""
        arrays = {key: tensor.numpy() for key, tensor in flat(state).items()}
        self._manager.save(step, args=self._library.args.StandardSave(arrays))
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Stop its threads."""
        self._manager.close()


KEEPERS: dict[str, Callable[[Path], Keeper]] = {
    WHOLE: lambda folder: OurKeeper(folder, differential=False),
    DIFFERENTIAL: lambda folder: OurKeeper(folder, differential=True),
    TORCH_SAVE: TorchKeeper,
    "Orbax CheckpointManager(max_to_keep=5)": OrbaxKeeper,
}


def disk_usage(folder: Path) -> int:
    """Return what ``du`` does: the blocks of all files, hidden ones as well, each inode once."""
    blocks: dict[int, int] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


class DiskRun:
    """Saves of one training with every keeper.

    Args:
        title: What the table calls it.
        training: What to save.
        distance: Optimizer steps between two saves.
        num_saves: How many saves.

    Attributes:
        raw_bytes: Size of one state.
        final_bytes: By keeper, what its folder takes after the last save.
        most_bytes: By keeper, the most that it ever took after a save.
        left_out: Why keepers are not measured.
    """

    def __init__(self, title: str, training: Training, distance: int, num_saves: int) -> None:
        self.title = title
        self.num_saves = num_saves
        self.raw_bytes = 0
        self.final_bytes: dict[str, int] = {}
        self.most_bytes: dict[str, int] = {}
        self.left_out: list[str] = []
        self._training = training
        self._distance = distance

    def measure(self, folder: Path) -> None:
        """Train and save."""
        print(f"disk: {self.title}", file=sys.stderr)
        folder.mkdir()
        # Adam's moments exist after the first step.
        self._training.step()
        self.raw_bytes = raw_bytes(self._training.state())
        keepers: dict[str, Keeper] = {}
        for name, make in KEEPERS.items():
            try:
                keepers[name] = make(folder / str(len(keepers)))
            except Exception as error:  # noqa: BLE001 - whatever a peer fails with
                self.left_out.append(f"{name} is left out: {error}")
        for number in range(self.num_saves):
            for _ in range(self._distance):
                self._training.step()
            for place, (name, keeper) in enumerate(keepers.items()):
                keeper.save(number, self._training.state())
                taken = disk_usage(folder / str(place))
                self.final_bytes[name] = taken
                self.most_bytes[name] = max(taken, self.most_bytes.get(name, 0))
        for keeper in keepers.values():
            keeper.close()
        shutil.rmtree(folder)

    def exceeds(self) -> bool:
        """Return whether one of ours ever took more than torch.save's five files."""
        limit = self.most_bytes[TORCH_SAVE]
        return max(self.most_bytes[WHOLE], self.most_bytes[DIFFERENTIAL]) > limit


def run_disk(widths: tuple[int, ...], far: int, num_saves: int, folder: Path) -> list[DiskRun]:
    """Measure saves one optimizer step and `far` steps apart, of a network that learns and of one that half learns."""
    num_frozen = (len(widths) - 1) // 2
    runs = []
    for title, frozen in (("", 0), (", half of the layers frozen", num_frozen)):
        near_run = DiskRun(f"1 step apart{title}", Training(widths, num_frozen=frozen), 1, num_saves)
        far_run = DiskRun(f"{far} steps apart{title}", Training(widths, num_frozen=frozen), far, num_saves)
        runs += [near_run, far_run]
    for number, run in enumerate(runs):
        run.measure(folder / f"disk-{number}")
    return runs


def disk_table(runs: list[DiskRun]) -> str:
    """Return a Markdown table of disk usage."""
    titles = [run.title for run in runs]
    lines = [
        f"**Disk** (MB: `du` of the folder after {runs[0].num_saves} saves, of which {KEPT} are kept; hidden files "
        "included)",
        "",
        f"| kept by | {' | '.join(titles)} |",
        "|---|" + "---:|" * len(runs),
    ]
    for name in runs[0].final_bytes:
        sizes = [f"{run.final_bytes[name] / 1e6:.1f}" for run in runs]
        lines.append(f"| {name} | {' | '.join(sizes)} |")
    raw = [f"{KEPT * run.raw_bytes / 1e6:.1f}" for run in runs]
    lines.append(f"| five states in memory | {' | '.join(raw)} |")
    lines += [f"\n{reason}" for reason in runs[0].left_out]
    return "\n".join(lines) + "\n"


Packer = Callable[[NDArray[Any]], int]


def zstd() -> Packer:
    """Return a function that packs with zstd and returns the size."""
    compressor = zstandard.ZstdCompressor(level=3)
    return lambda array: len(compressor.compress(array.data))


def pcodec() -> Packer:
    """Return a function that packs with pcodec at its default level and returns the size."""
    library: Any = importlib.import_module("pcodec")
    standalone: Any = importlib.import_module("pcodec.standalone")
    return lambda array: len(standalone.simple_compress(array, library.ChunkConfig()))


def zipnn() -> Packer:
    """Return a function that packs with ZipNN and returns the size."""
    library = importlib.import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype="float32", threads=THREADS)
    return lambda array: len(library.compress(array.tobytes()))


def sizes_table(state: Mapping[str, Any], folder: Path) -> str:
    """Pack one full checkpoint with us and with peers, tensor by tensor, and return a Markdown table."""
    arrays = [tensor.detach().numpy().reshape(-1) for tensor in flat(state).values()]
    raw = sum(array.nbytes for array in arrays)
    large = [array for array in arrays if array.nbytes > _SMALL_BYTES]
    small_bytes = raw - sum(array.nbytes for array in large)
    ours = write_native(folder / "full.slip", state).stored_bytes
    peers: list[tuple[str, int]] = []
    left_out = []
    for title, maker in (("ZipNN", zipnn), ("pcodec", pcodec), ("zstd-3", zstd)):
        print(f"packing with {title}", file=sys.stderr)
        try:
            packed_bytes = maker()
            peers.append((title, small_bytes + sum(map(packed_bytes, large))))
        except Exception as error:  # noqa: BLE001 - whatever a peer fails with
            left_out.append(f"{title} is left out: {error}")
    peers.sort(key=lambda row: row[1])
    lines = [
        f"**One full checkpoint** ({raw / 1e6:.1f} MB raw; peers: the sum over all tensors)",
        "",
        "| packed with | MB | of raw |",
        "|---|---:|---:|",
    ]
    for title, stored in [("slipstream native, the whole file", ours), *peers]:
        lines.append(f"| {title} | {stored / 1e6:.1f} | {stored / raw:.4f} |")
    lines += [f"\n{reason}" for reason in left_out]
    return "\n".join(lines) + "\n"
