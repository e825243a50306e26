"""What tests of snapshots and of guards share."""

import threading
from collections.abc import Iterator

import pytest

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
