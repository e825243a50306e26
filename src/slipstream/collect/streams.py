"""Order between the CUDA streams of two threads; nothing at all where there is no CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


def find_cuda(devices: Iterable[torch.device | str | None]) -> torch.device | None:
    """Return the first of these devices that is a CUDA device, with its index, or None."""
    for device in devices:
        if device is not None and torch.device(device).type == "cuda":
            index = torch.device(device).index
            return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return None


class Fence:
    """A point in the work of the stream that is current when the fence is made.

    Args:
        device: The CUDA device whose stream it is; None makes a fence that stops nobody.
    """

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._event = None if device is None else torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Let the stream that is current now go on only after that point; does not block the thread."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """As `wait`; besides, the memory of `tensors` is not given to others before this stream is done with it."""
        self.wait()
        if self._device is not None:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)


@contextlib.contextmanager
def side_stream(device: torch.device | None) -> Iterator[None]:
    """Run this thread's CUDA work on a stream of its own while the block lasts."""
    if device is None:
        yield
    else:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            yield
