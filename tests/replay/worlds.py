"""Steps of several environments in the order of time, with every kind of tensor, and a model of who follows whom."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

NO_STEP = -1
SPECIAL = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])


class World:
    """Environments that run side by side. What a step leads to is mostly where the next one starts.

    Args:
        kind: Which observations there are: ``"vectors"``, ``"images"``, ``"stacks"``, ``"scaled"`` (floats).
        num_streams: How many environments.
        with_ids: Whether steps have the id of their episode.
        seed: What everything is drawn from.
    """

    def __init__(self, kind: str, num_streams: int, with_ids: bool, seed: int) -> None:
        self.kind = kind
        self.num_streams = num_streams
        self.with_ids = with_ids
        self._draw = torch.Generator().manual_seed(seed)
        self._number = 0
        self._episode = torch.zeros(num_streams, dtype=torch.int64)
        self._now = self._observe(num_streams)

    def _observe(self, count: int) -> dict[str, torch.Tensor]:
        """Return what environments show after a reset."""
        vector = torch.randn(count, 3, generator=self._draw)
        is_special = torch.rand(count, 3, generator=self._draw) < 0.1
        which = torch.randint(0, len(SPECIAL), (count, 3), generator=self._draw)
        seen = {"vector": torch.where(is_special, SPECIAL[which], vector)}
        seen["half"] = vector[:, :2].half()
        seen["brain"] = vector[:, :2].bfloat16()
        if self.kind == "images":
            seen["pixels"] = self._pixels(count, 2)
        elif self.kind != "vectors":
            seen["pixels"] = self._pixels(count, 3)
        return seen

    def _pixels(self, count: int, planes: int) -> torch.Tensor:
        return torch.randint(0, 7, (count, planes, 24, 24), generator=self._draw, dtype=torch.uint8)

    def _move_on(self) -> dict[str, torch.Tensor]:
        """Return what environments show one step later."""
        seen = self._observe(self.num_streams)
        if self.kind in ("stacks", "scaled"):
            seen["pixels"] = torch.cat([self._now["pixels"][:, 1:], seen["pixels"][:, -1:]], 1)
        return seen

    def batch(self, num_steps: int, end_chance: float, break_chance: float) -> TensorDict:
        """Return steps ``[streams, time]``.

        Args:
            num_steps: How many in each environment.
            end_chance: How often an episode ends.
            break_chance: How often a step starts elsewhere than where the one before led to.
        """
        steps = [self._step(end_chance, break_chance) for _ in range(num_steps)]
        return torch.stack(steps, 1)

    def _step(self, end_chance: float, break_chance: float) -> TensorDict:
        streams = self.num_streams
        now = self._now
        after = self._move_on()
        done = torch.rand(streams, 1, generator=self._draw) < end_chance
        numbers = self._number + torch.arange(streams)
        self._number += streams
        content: dict[str, Any] = {"observation": self._shown(now), "number": numbers}
        content["bytes"] = torch.randint(0, 256, (streams, 5), generator=self._draw, dtype=torch.uint8)
        content["mask"] = torch.rand(streams, 4, generator=self._draw) < 0.5
        content["large"] = numbers[:, None] * 2**40 - 1
        content["next"] = {
            "observation": self._shown(after),
            "reward": torch.randn(streams, 1, generator=self._draw),
            "done": done,
        }
        if self.with_ids:
            content["collector"] = {"traj_ids": self._episode.clone()}
        starts = done[:, 0] | (torch.rand(streams, generator=self._draw) < break_chance)
        fresh = self._observe(streams)
        self._now = {}
        for name, values in after.items():
            wide = starts.reshape(streams, *[1] * (values.ndim - 1))
            self._now[name] = torch.where(wide, fresh[name], values)
        self._episode += done[:, 0]
        return TensorDict(content, batch_size=[streams])

    def _shown(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return observations as the environment writes them."""
        if self.kind != "scaled":
            return dict(seen)
        pixels = seen["pixels"].float() / 255
        # Now and then there are numbers that no byte stands for.
        is_odd = torch.rand(len(pixels), generator=self._draw) < 0.05
        pixels[is_odd, -1, -1, -1] = SPECIAL[int(torch.randint(0, len(SPECIAL), (), generator=self._draw))]
        return {**seen, "pixels": pixels}


class Order:
    """Which steps of a ring ``[times, streams]`` follow each other, told from what was written where.

    Every step that is written gets a number. A step follows another one if it was written right after it, into the next
    slot, and both are still there.
    """

    def __init__(self, num_times: int, num_streams: int) -> None:
        self.shape = (num_times, num_streams)
        self.written = [[NO_STEP] * num_streams for _ in range(num_times)]
        self.before = [[NO_STEP] * num_streams for _ in range(num_times)]
        self._count = 0
        self._newest = NO_STEP

    def write(self, times: Sequence[int]) -> None:
        """Note new steps of all streams, one after another."""
        for time in times:
            previous = (time - 1) % self.shape[0]
            for stream in range(self.shape[1]):
                before = NO_STEP
                if self._newest == previous:
                    before = self.written[previous][stream]
                self.before[time][stream] = before
                self.written[time][stream] = self._count
                self._count += 1
            self._newest = time

    def fill(self, time: int, stream: int) -> None:
        """Note a step in a slot that had lost its own; it follows nothing, and nothing follows it."""
        self.written[time][stream] = self._count
        self.before[time][stream] = NO_STEP
        self._count += 1

    def lose(self, time: int, stream: int) -> None:
        """Note that a step is lost."""
        self.written[time][stream] = NO_STEP
        self.before[time][stream] = NO_STEP

    def slots(self) -> list[tuple[int, int]]:
        """Return the slots that have a step."""
        return [(t, s) for t in range(self.shape[0]) for s in range(self.shape[1]) if self.written[t][s] != NO_STEP]

    def holes(self, num_times: int) -> list[tuple[int, int]]:
        """Return the slots among the first ones along time whose steps are lost."""
        return [(t, s) for t in range(num_times) for s in range(self.shape[1]) if self.written[t][s] == NO_STEP]

    def starts(self, length: int, ends: Any, ids: Any) -> set[tuple[int, int]]:
        """Return the slots at which a slice may start.

        Args:
            length: How many steps the slice has.
            ends: ``[times][streams]``: whether an episode ends with the step.
            ids: The id of its episode.
        """
        found = set()
        for time, stream in self.slots():
            here = time
            for _ in range(length - 1):
                after = (here + 1) % self.shape[0]
                is_next = self.before[after][stream] == self.written[here][stream] != NO_STEP
                if not is_next or ends[here][stream] or ids[here][stream] != ids[after][stream]:
                    break
                here = after
            else:
                found.add((time, stream))
        return found
