"""Saves a state to an object store and reads it again, with Slipstream or with torch's distributed checkpoints (DCP).

``bench/objects.py`` starts it, writes one command to its standard input at a time, and reads the answer as JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import torch

NUM_LAYERS = 8
KEY = "policy"


class Contender(Protocol):
    """How a state is saved and read."""

    def save(self, number: int) -> dict[str, float]:
        """Save the state; returns seconds until the call returned and until it was committed."""

    def read_key(self, number: int) -> Any:
        """Return the tensors below one key, in a new object each time."""

    def read_all(self, number: int) -> Any:
        """Return the whole state."""


def make_state(megabytes: int) -> dict[str, Any]:
    """Return trained-looking weights: an encoder of that size, and a policy that is a fiftieth of it."""
    generator = torch.Generator().manual_seed(0)
    size = megabytes * 250_000 // NUM_LAYERS
    encoder = {f"layer{number}": torch.randn(size, generator=generator) for number in range(NUM_LAYERS)}
    policy = {f"layer{number}": torch.randn(size // 50, generator=generator) for number in range(NUM_LAYERS)}
    return {"encoder": encoder, "policy": policy}


def change(state: dict[str, Any]) -> None:
    """Change every tensor, as an optimizer does."""
    for branch in state.values():
        for tensor in branch.values():
            tensor.add_(1e-3)


class Slipstream:
    """A folder and a URL."""

    def __init__(self, url: str, state: dict[str, Any], *, compress: bool) -> None:
        from slipstream import CheckpointManager  # noqa: PLC0415 - the other contender does without

        self.url = url
        self.state = state
        self.folder = tempfile.mkdtemp()
        self.manager = CheckpointManager(self.folder, keep_last=2, compress=compress, checkpoint_url=url)

    def save(self, number: int) -> dict[str, float]:
        """Save the state, and wait until its commit is in the store."""
        start = time.perf_counter()
        handle = self.manager.save(number, self.state)
        called = time.perf_counter()
        handle.result()
        if not self.manager.wait_uploaded(600):
            raise RuntimeError("the store is not available")
        return {"call_s": called - start, "commit_s": time.perf_counter() - start}

    def read_key(self, number: int) -> Any:
        """Return the policy."""
        from slipstream import load_checkpoint  # noqa: PLC0415

        return load_checkpoint(f"{self.url}/checkpoint_iter_{number}.slip", keys=KEY)[KEY]

    def read_all(self, number: int) -> Any:
        """Return the state."""
        from slipstream import load_checkpoint  # noqa: PLC0415

        return load_checkpoint(f"{self.url}/checkpoint_iter_{number}.slip")

    def close(self) -> None:
        """Delete what is on local disk."""
        self.manager.close()
        shutil.rmtree(self.folder)


def import_dcp() -> tuple[Any, Any]:
    """Return torch's distributed checkpoints, and their reader and writer for fsspec."""
    package = "torch.distributed.checkpoint"
    return importlib.import_module(package), importlib.import_module(f"{package}._fsspec_filesystem")


class Dcp:
    """torch.distributed.checkpoint with its reader and writer for fsspec."""

    def __init__(self, url: str, state: dict[str, Any], *, is_async: bool) -> None:
        self.url = url
        self.state = state
        self.is_async = is_async
        self.options = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}

    def save(self, number: int) -> dict[str, float]:
        """Save the state, and wait until its metadata is in the store."""
        dcp, fsspec = import_dcp()
        start = time.perf_counter()
        writer = fsspec.FsspecWriter(f"{self.url}/{number}", **self.options)
        if self.is_async:
            future = dcp.async_save(self.state, storage_writer=writer)
            called = time.perf_counter()
            future.result()
        else:
            dcp.save(self.state, storage_writer=writer)
            called = time.perf_counter()
        return {"call_s": called - start, "commit_s": time.perf_counter() - start}

    def read_key(self, number: int) -> Any:
        """Return the policy."""
        return self._read(number, {KEY: self.state[KEY]})[KEY]

    def read_all(self, number: int) -> Any:
        """Return the state."""
        return self._read(number, self.state)

    def _read(self, number: int, like: dict[str, Any]) -> dict[str, Any]:
        dcp, fsspec = import_dcp()
        target = {}
        for name, branch in like.items():
            target[name] = {key: torch.empty_like(tensor) for key, tensor in branch.items()}
        dcp.load(target, storage_reader=fsspec.FsspecReader(f"{self.url}/{number}", **self.options))
        return target

    def close(self) -> None:
        """Do nothing: there is nothing on local disk."""


def connect(kind: str, url: str, state: dict[str, Any]) -> Any:
    """Return a contender by its name."""
    if kind == "dcp":
        return Dcp(url, state, is_async=False)
    if kind == "dcp-async":
        return Dcp(url, state, is_async=True)
    return Slipstream(url, state, compress=kind == "slipstream")


def same(found: Any, expected: Any) -> bool:
    """Compare two branches bit for bit."""
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def main() -> None:
    """Answer commands until there are no more."""
    kind, url, megabytes = sys.argv[1:4]
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    state = make_state(int(megabytes))
    contender = connect(kind, url, state)
    number = 0
    for line in sys.stdin:
        answer: dict[str, float] = {}
        if line.strip() == "save":
            change(state)
            number += 1
            answer = contender.save(number)
        elif line.strip() == "key":
            start = time.perf_counter()
            found = contender.read_key(number)
            answer = {"seconds": time.perf_counter() - start}
            if not same(found, state[KEY]):
                raise RuntimeError(f"{kind} returned something else than it saved")
        elif line.strip() == "all":
            start = time.perf_counter()
            found = contender.read_all(number)
            answer = {"seconds": time.perf_counter() - start}
            if not all(same(found[name], branch) for name, branch in state.items()):
                raise RuntimeError(f"{kind} returned something else than it saved")
        print(json.dumps(answer), flush=True)
    contender.close()


if __name__ == "__main__":
    # Packages that only this needs come first.
    for folder in filter(None, os.environ.get("BENCH_PACKAGES", "").split(":")):
        sys.path.insert(0, str(Path(folder)))
    main()
