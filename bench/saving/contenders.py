"""What saves: our savers, and those of others, behind one small interface."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import lz4.frame
import torch
from numpy.typing import NDArray

from bench.saving.training import Training, empty_like, flat, raw_bytes
from slipstream.checkpoint.load import load_checkpoint
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.saver import AsyncCheckpointSaver

# How fast a usual saver is here, so that saving nothing takes about as long.
_USUAL_BYTES_PER_S = 500e6


class Contender:
    """Something that saves and loads the state of a training.

    Args:
        training: What to save.
        folder: Where to.

    Attributes:
        name: What tables call it.
        is_slow: Whether it takes part in fewer rounds.
        keeps_files: Whether it deletes its checkpoints itself.
        probes_gil: Whether to measure for how long it keeps other Python threads from running.
    """

    name: ClassVar[str]
    is_slow: ClassVar[bool] = False
    keeps_files: ClassVar[bool] = False
    probes_gil: ClassVar[bool] = False

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder
        self.setup()

    def setup(self) -> None:
        """Prepare for saves."""

    def save(self, path: Path) -> None:
        """Save to a path; what this takes, the caller waits for."""
        raise NotImplementedError

    def wait(self, path: Path) -> Path:
        """Block until the checkpoint is complete, and return where it is."""
        return path

    def load(self, path: Path) -> Any:
        """Load a checkpoint."""
        return torch.load(path, weights_only=True)

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Return what has to be held while the state changes."""
        return contextlib.nullcontext()

    def barrier_s(self) -> float:
        """Return how long training has been waiting, so far, before it could change its state."""
        return 0.0

    def close(self) -> None:
        """Release what setup took."""


class Nothing(Contender):
    """Saves nothing: shows how much of what is measured is noise."""

    name = "nothing at all (noise)"
    probes_gil = True

    def save(self, path: Path) -> None:
        """Do nothing."""

    def wait(self, path: Path) -> Path:
        """Take about as long as a save, without doing anything."""
        time.sleep(raw_bytes(self.training.state()) / _USUAL_BYTES_PER_S)
        path.touch()
        return path


class TorchSave(Contender):
    """The usual way."""

    name = "torch.save"

    def save(self, path: Path) -> None:
        """Write, blocking."""
        torch.save(self.training.state(), path)


class TorchSaveLz4(Contender):
    """The same, compressed."""

    name = "torch.save + LZ4-9"
    is_slow = True

    def save(self, path: Path) -> None:
        """Compress and write, blocking."""
        content = io.BytesIO()
        torch.save(self.training.state(), content)
        path.write_bytes(lz4.frame.compress(content.getbuffer(), compression_level=9))

    def load(self, path: Path) -> Any:
        """Decompress, then load."""
        return torch.load(io.BytesIO(lz4.frame.decompress(path.read_bytes())), weights_only=True)


class ThreadSave(Contender):
    """The usual way to save in the background."""

    name = "deep copy + torch.save in a thread"
    probes_gil = True

    def setup(self) -> None:
        """Start the thread."""
        self.executor = ThreadPoolExecutor(1)
        self.future: Future[None]

    def save(self, path: Path) -> None:
        """Copy everything, then write in the background."""
        self.future = self.executor.submit(torch.save, copy.deepcopy(self.training.state()), path)

    def wait(self, path: Path) -> Path:
        """Wait for the thread."""
        self.future.result()
        return path


class DistributedSave(Contender):
    """PyTorch's distributed checkpoints, in a single process."""

    name = "torch.distributed.checkpoint.save"

    def setup(self) -> None:
        """Import."""
        self.library: Any = importlib.import_module("torch.distributed.checkpoint")

    def save(self, path: Path) -> None:
        """Write, blocking."""
        self.library.save(flat(self.training.state()), checkpoint_id=path, no_dist=True)

    def load(self, path: Path) -> Any:
        """Load into new memory."""
        target = empty_like(flat(self.training.state()))
        self.library.load(target, checkpoint_id=path, no_dist=True)
        return target


class DistributedAsyncSave(DistributedSave):
    """The same in the background."""

    name = "torch.distributed.checkpoint.async_save"

    def save(self, path: Path) -> None:
        """Copy everything, then write in the background."""
        self.future = self.library.async_save(flat(self.training.state()), checkpoint_id=path, no_dist=True)

    def wait(self, path: Path) -> Path:
        """Wait for the upload."""
        self.future.result()
        return path


class Safetensors(Contender):
    """Safetensors, with the state as a flat dict."""

    name = "safetensors save_file"

    def setup(self) -> None:
        """Import."""
        self.library: Any = importlib.import_module("safetensors.torch")

    def save(self, path: Path) -> None:
        """Write, blocking."""
        self.library.save_file(flat(self.training.state()), path)

    def load(self, path: Path) -> Any:
        """Load all tensors."""
        return self.library.load_file(path)


class Lightning(Contender):
    """Lightning's plugin for saving in the background."""

    name = "Lightning AsyncCheckpointIO"

    def setup(self) -> None:
        """Import, and wrap the plugin that a Trainer uses by default."""
        inner = importlib.import_module("lightning.fabric.plugins.io.torch_io").TorchCheckpointIO()
        self.plugin: Any = importlib.import_module("lightning.pytorch.plugins.io").AsyncCheckpointIO(inner)

    def save(self, path: Path) -> None:
        """Copy everything, then write in the background."""
        self.plugin.save_checkpoint(self.training.state(), path)

    def wait(self, path: Path) -> Path:
        """Queue behind the save: its only thread writes one file after another, and there is no handle."""
        self.plugin._executor.submit(int).result()
        if self.plugin._error:
            raise self.plugin._error
        return path

    def load(self, path: Path) -> Any:
        """Load as a Trainer would."""
        return self.plugin.load_checkpoint(path, weights_only=True)

    def close(self) -> None:
        """Stop the thread."""
        self.plugin.teardown()


class Torchsnapshot(Contender):
    """Torchsnapshot, in the background."""

    name = "torchsnapshot async_take"
    is_slow = True

    def setup(self) -> None:
        """Import."""
        self.library: Any = importlib.import_module("torchsnapshot")

    def save(self, path: Path) -> None:
        """Stage everything, then write in the background."""
        state = {"state": self.library.StateDict(**flat(self.training.state()))}
        self.pending = self.library.Snapshot.async_take(str(path), state)

    def wait(self, path: Path) -> Path:
        """Wait for the snapshot."""
        self.pending.wait()
        return path

    def load(self, path: Path) -> Any:
        """Load into new memory."""
        target = self.library.StateDict(**empty_like(flat(self.training.state())))
        self.library.Snapshot(str(path)).restore({"state": target})
        return dict(target)


class TorchCheckpointing(Contender):
    """Meta's torch_checkpointing: stages in a thread, writes in a process, and has a lock to step under."""

    name = "torch_checkpointing"

    def setup(self) -> None:
        """Import, and start its manager asynchronous as by default."""
        library: Any = importlib.import_module("torch_checkpointing")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)  # O_DIRECT fails on ext4, unaligned
        self.manager = library.CheckpointManager(library.CheckpointManager.Config(storage_config=buffered))
        self.waited_s = 0.0

    def save(self, path: Path) -> None:
        """Start to stage and write."""
        self.future = self.manager.save(str(path), self.training.state())

    def wait(self, path: Path) -> Path:
        """Wait for its process."""
        self.future.result()
        return path

    def load(self, path: Path) -> Any:
        """Load into new memory."""
        return self.manager.load(str(path), into=empty_like(self.training.state()))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the manager's lock, as its documentation asks for, and measure the wait for it."""
        start = time.perf_counter()
        with self.manager.lock():
            self.waited_s += time.perf_counter() - start
            yield

    def barrier_s(self) -> float:
        """Return what the lock took."""
        return self.waited_s

    def close(self) -> None:
        """Stop its process."""
        self.manager.close()


class Orbax(Contender):
    """Orbax, in the background, on NumPy arrays that see torch's memory."""

    name = "Orbax StandardCheckpointer (async)"

    def setup(self) -> None:
        """Import."""
        library: Any = importlib.import_module("orbax.checkpoint")
        self.checkpointer = library.StandardCheckpointer()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as flat arrays."""
        return {key: tensor.numpy() for key, tensor in flat(self.training.state()).items()}

    def save(self, path: Path) -> None:
        """Copy and write in the background."""
        self.checkpointer.save(path, self.arrays())

    def wait(self, path: Path) -> Path:
        """Wait for its thread."""
        self.checkpointer.wait_until_finished()
        return path

    def load(self, path: Path) -> Any:
        """Load as arrays."""
        return self.checkpointer.restore(path, self.arrays())

    def close(self) -> None:
        """Stop its threads."""
        self.checkpointer.close()


class Native(Contender):
    """Our saver, in our format; the optimizer is guarded, so that the copy overlaps the rollout."""

    name = "slipstream native, guarded"
    probes_gil = True
    guarded: ClassVar[bool] = True
    compress: ClassVar[bool] = True

    def setup(self) -> None:
        """Make the saver."""
        self.saver = AsyncCheckpointSaver()
        if self.guarded:
            self.saver.guard(self.training.optimizer)

    def save(self, path: Path) -> None:
        """Copy and write in the background."""
        self.handle = self.saver.save_async(self.training.state(), path, compress=self.compress, format="native")

    def wait(self, path: Path) -> Path:
        """Wait for the handle."""
        return self.handle.result().path

    def load(self, path: Path) -> Any:
        """Load, comparing checksums."""
        return load_checkpoint(path)

    def barrier_s(self) -> float:
        """Return how long optimizer steps waited for copies."""
        return self.saver.get_stats()["total_barrier_s"]

    def close(self) -> None:
        """Stop the saver."""
        self.saver.shutdown()


class NativeRaw(Native):
    """The same without packing."""

    name = "slipstream native, not packed, guarded"
    compress = False


class NativeUnguarded(Native):
    """The same without a guard: the copy is made during the call."""

    name = "slipstream native, unguarded"
    probes_gil = False
    guarded = False


class Portable(Native):
    """Our saver, writing what torch.load reads after decompression."""

    name = "slipstream pt + LZ4-9, guarded"
    probes_gil = False

    def save(self, path: Path) -> None:
        """Copy and write in the background."""
        self.handle = self.saver.save_async(self.training.state(), path, compress=True, format="pt")


class Managed(Native):
    """Our manager, which looks after a folder of whole files."""

    name = "slipstream CheckpointManager, guarded"
    keeps_files = True
    probes_gil = False
    differential: ClassVar[bool] = False

    def setup(self) -> None:
        """Make the manager."""
        self.manager = CheckpointManager(self.folder / "run", keep_last=2, differential=self.differential)
        self.saver = self.manager.saver
        self.manager.guard(self.training.optimizer)
        self.num_saves = 0

    def save(self, path: Path) -> None:
        """Copy and write in the background, as the next of the run."""
        self.num_saves += 1
        self.handle = self.manager.save(self.num_saves, self.training.state())

    def close(self) -> None:
        """Stop the manager."""
        self.manager.close()


class ManagedDifferential(Managed):
    """Our manager, storing what changed since the checkpoint before."""

    name = "slipstream CheckpointManager(differential=True), guarded"
    differential = True


_KINDS: tuple[type[Contender], ...] = (
    Nothing,
    Native,
    NativeRaw,
    NativeUnguarded,
    Managed,
    ManagedDifferential,
    Portable,
    TorchSave,
    TorchSaveLz4,
    ThreadSave,
    Safetensors,
    DistributedSave,
    DistributedAsyncSave,
    Lightning,
    TorchCheckpointing,
    Torchsnapshot,
    Orbax,
)
CONTENDERS = {kind.__name__: kind for kind in _KINDS}
