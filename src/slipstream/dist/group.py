"""`ShardGroup`: a fixed number of shards on any number of processes, with sums that do not depend on that number."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as torch_dist

from slipstream.checks import require_count
from slipstream.dist.threads import on_one_thread_each, share_of_cores
from slipstream.errors import ConfigurationError, RankLostError
from slipstream.text import alternatives

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

_IN_RANK = "in rank "


def shard_seed(seed: int, shard: int) -> int:
    """Return the seed of one shard of a run, the same in every process and on every machine.

    Args:
        seed: Seed of the run.
        shard: Number of the shard.

    Example:
        >>> shard_seed(0, 1) == shard_seed(0, 1) != shard_seed(1, 0)
        True
    """
    # The top bit is dropped, because torch and Hydra take seeds as signed numbers.
    state = np.random.SeedSequence([seed, shard]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


class ShardGroup:
    """The shards of a run, and what its processes have to agree on.

    The number of shards belongs to the run and never changes. The number of processes may: each of ``world`` processes
    computes ``shards / world`` consecutive shards, one thread each, and sums over all shards are added up in an order
    that depends on the number of shards only. So a computation that treats every shard separately, and combines them
    with `sum`, gives the same bits with 1, 2, 4 or more processes. ``all_reduce`` does not: its order depends on the
    number of processes.

    If ``torch.distributed`` is initialized when the group is created, for instance under ``torchrun``, the group spans
    its processes; otherwise it is this process alone. All processes have to call the methods that communicate (`sum`,
    `any`, `gather`, `broadcast`, `together`, `first`) in the same order, from one thread.

    Args:
        shards: How many shards; a power of two that the number of processes divides.
        threads: How many shards this process computes at once; by default as many as its share of the cores allows.

    Attributes:
        shards: The number of shards.
        rank: The number of this process.
        world: How many processes there are.
        local_shards: The shards of this process.
        threads: How many of them are computed at once.

    Raises:
        ConfigurationError: If the number of shards is not a power of two, or the processes do not divide it.

    Example:
        >>> group = ShardGroup(4)
        >>> rows = group.map(lambda shard: torch.full((2,), float(shard)))
        >>> group.sum(rows)
        tensor([6., 6.])
    """

    def __init__(self, shards: int, *, threads: int | None = None) -> None:
        require_count("shards", shards)
        self.rank = 0
        self.world = 1
        if torch_dist.is_available() and torch_dist.is_initialized():
            self.rank = torch_dist.get_rank()
            self.world = torch_dist.get_world_size()
        # Pairs of pairs need a power of two, and so does the exchange between processes.
        if shards & (shards - 1):
            raise ConfigurationError(f"shards is {shards}, expected a power of two")
        if shards % self.world:
            valid = [1 << power for power in range(shards.bit_length())]
            raise ConfigurationError(
                f"{shards} shards cannot be divided among {self.world} processes, expected {alternatives(valid)} "
                "processes"
            )
        self.shards = shards
        per_rank = shards // self.world
        self.local_shards = range(self.rank * per_rank, (self.rank + 1) * per_rank)
        self.threads = min(per_rank, share_of_cores() if threads is None else require_count("threads", threads))

    def map(self, function: Callable[[int], R], *, threads: int | None = None) -> list[R]:
        """Call a function for every shard of this process, and return its results in the order of the shards.

        Up to `threads` shards are computed at once, on a thread each. In each of these, torch uses no other thread, so
        results do not depend on the number of cores.

        Args:
            function: Called with the number of a shard. It should use nothing that other shards change, such as global
                random generators.
            threads: How many shards are computed at once, if it should be fewer than `threads`.

        Raises:
            Exception: The first exception of `function`, in the order of the shards.
        """
        results: dict[int, R] = {}

        def compute(shard: int) -> None:
            results[shard] = function(shard)

        on_one_thread_each(compute, self.local_shards, min(threads or self.threads, self.threads))
        return [results[shard] for shard in self.local_shards]

    def sum(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all shards of all processes; every process gets the same bits.

        Shards are added in pairs, then pairs of pairs, and so on: a balanced tree of which each process owns a subtree.

        Args:
            rows: One tensor for each shard of this process, all of one shape and dtype. They are not changed.

        Raises:
            ConfigurationError: If there are not as many tensors as shards.
            RankLostError: If another process has exited.
        """
        if len(rows) != len(self.local_shards):
            raise ConfigurationError(f"{len(rows)} tensors were given for {len(self.local_shards)} shards")
        total = sum_in_pairs(rows)
        distance = 1
        while distance < self.world:
            # Both partners add the same two numbers, and addition is commutative, so they get the same bits.
            total = total + self._exchange(total, self.rank ^ distance)
            distance *= 2
        return total

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - the only argument
        """Return whether a flag is set in any process.

        Raises:
            RankLostError: If another process has exited.
        """
        # Each process contributes its flag once, as the row of its first shard.
        mine = torch.tensor([int(flag)], dtype=torch.int32, device=self.device)
        zero = torch.zeros_like(mine)
        return bool(self.sum([mine, *[zero] * (len(self.local_shards) - 1)]).item())

    def gather(self, values: Sequence[T]) -> list[T] | None:
        """Return the values of all shards in the first process, and None in the others.

        Args:
            values: One for each shard of this process. They are pickled, so they must come from trusted processes.

        Raises:
            RankLostError: If another process has exited.
        """
        if self.world == 1:
            return list(values)
        parts: list[Any] | None = None
        if self.rank == 0:
            parts = [None] * self.world
        with self._naming_lost_ranks():
            torch_dist.gather_object(list(values), parts)
        if parts is None:
            return None
        gathered: list[T] = []
        for part in parts:
            gathered += part
        return gathered

    def broadcast(self, value: T) -> T:
        """Return the value of the first process in all of them; pickled, except in the first.

        Raises:
            RankLostError: If another process has exited.
        """
        if self.world == 1:
            return value
        box = [value]
        with self._naming_lost_ranks():
            torch_dist.broadcast_object_list(box)
        return box[0]

    def together(self, function: Callable[[], T]) -> T:
        """Call a function in every process, and return its result; if it fails in any of them, all of them fail.

        Args:
            function: What may fail in some processes. It must not communicate.

        Raises:
            Exception: The exception of the first process that has one. In the other processes, it is a copy with the
                note "in rank 0", if that was the first.
            RankLostError: If another process has exited.
        """
        if self.world == 1:
            return function()
        result: T | None = None
        error: Exception | None = None
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001 - raised below, in all processes
            error = raised
        # Exceptions travel instead of results: there are few of them, and they are small.
        errors: list[Exception | None] = [None] * self.world
        with self._naming_lost_ranks():
            torch_dist.all_gather_object(errors, portable(error))
        for rank, found in enumerate(errors):
            if found is None:
                continue
            # The original has a traceback, its copies have none.
            if rank == self.rank and error is not None:
                raise error
            raise from_rank(found, rank)
        return result  # type: ignore[return-value]

    def first(self, function: Callable[[], T]) -> T:
        """Call a function in the first process only, and return its result, or raise its exception, in all of them.

        Args:
            function: What only one process should do, such as reading a checkpoint. It must not communicate.

        Raises:
            Exception: What the function raised; see `together`.
            RankLostError: If another process has exited.
        """

        def call() -> T | None:
            if self.rank > 0:
                return None
            return function()

        return self.broadcast(self.together(call))  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Where tensors have to be for the processes to exchange them."""
        if self.world > 1 and torch_dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _exchange(self, mine: torch.Tensor, partner: int) -> torch.Tensor:
        """Send a tensor to another process and return the one that it sends."""
        mine = mine.contiguous()
        theirs = torch.empty_like(mine)
        with self._naming_lost_ranks(partner):
            # Both directions at once: with nccl, two processes that both send first would wait for each other.
            operations = [
                torch_dist.P2POp(torch_dist.isend, mine, partner),
                torch_dist.P2POp(torch_dist.irecv, theirs, partner),
            ]
            for request in torch_dist.batch_isend_irecv(operations):
                request.wait()
        return theirs

    @contextlib.contextmanager
    def _naming_lost_ranks(self, partner: int | None = None) -> Iterator[None]:
        """Raise `RankLostError` for errors of the network."""
        try:
            yield
        except RuntimeError as error:
            # Torch has no exception for this: gloo raises RuntimeError, nccl a subclass of it.
            who = "another rank"
            if partner is None and self.world == 2:
                partner = 1 - self.rank
            if partner is not None:
                who = f"rank {partner}"
            # Without the place in gloo's source code, and its guesses at the cause.
            reason = re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
            lost = RankLostError(f"{who} exited or cannot be reached by rank {self.rank} ({reason})")
            lost.rank = partner
            raise lost from error


def sum_in_pairs(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, added as a balanced tree: pairs, pairs of pairs, and so on.

    Args:
        rows: As many tensors as a power of two.
    """
    level = list(rows)
    while len(level) > 1:
        level = [level[place] + level[place + 1] for place in range(0, len(level), 2)]
    return level[0]


def portable(error: Exception | None) -> Exception | None:
    """Return an exception that other processes can read: the same, or if need be another one with its message."""
    # Not every exception can be pickled, and some can be pickled but not read.
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made in the same line
    except Exception:  # noqa: BLE001 - any code may run here, and what is wrong with it does not matter
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def from_rank(error: E, rank: int) -> E:
    """Return an exception that another process has raised, with a note that says which one."""
    error.add_note(f"{_IN_RANK}{rank}")
    return error


def is_copied(error: BaseException) -> bool:
    """Return whether an error happened in another process, which reports it."""
    return any(_IN_RANK in note for note in getattr(error, "__notes__", ()))
