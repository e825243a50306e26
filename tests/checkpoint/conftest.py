"""What tests of snapshots and of guards share."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed

from slipstream import tensors
from slipstream.tensors import copy_memory


class Gate:
    """Holds up copies on other threads than this one until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self._caller = threading.get_ident()
        monkeypatch.setattr(tensors, "copy_memory", self._copy)

    def open(self) -> None:
        self._is_open.set()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if threading.get_ident() != self._caller:
            assert self._is_open.wait(60)
        copy_memory(target, source, nbytes)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    # A test that failed must not leave a thread behind.
    gate.open()


HAD_PROCESS_GROUP = pytest.StashKey[bool]()


@pytest.fixture
def process_group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    request.config.stash[HAD_PROCESS_GROUP] = True
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def forks_on_another_thread(request: pytest.FixtureRequest) -> None:
    """Skip a test that forks on another thread than the main one, if this process had a process group.

    Python then drops what the main thread refers to. If that is the group, torch waits in its destructor for threads
    that only the parent has.
    """
    if HAD_PROCESS_GROUP in request.config.stash:
        pytest.skip("torch cannot destroy a process group of the parent in a forked child")
