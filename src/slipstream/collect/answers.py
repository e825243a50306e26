"""Run an order, and the bytes in which the rollout and the state after it travel together.

An answer is a container with the packed rollout, the packed state, and the order. It contains no pickle. It may come
from an untrusted machine, so `unpack_answer` checks all sizes and contents.
"""

from __future__ import annotations

import io
import platform
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.checkpoint.buffers import pack_state, unpack_state
from slipstream.checks import require_count
from slipstream.codecs import Codec, Raw
from slipstream.collect.orders import Order
from slipstream.collect.randomness import seed_global
from slipstream.collect.serial import SerialCollector, has_state
from slipstream.errors import CorruptFileError, OrderError, naming
from slipstream.memory import machine_bytes
from slipstream.rollout.buffers import pack_rollout, unpack_rollout
from slipstream.store.base import Buffer
from slipstream.store.container import Container
from slipstream.store.writer import DEFAULT_CHUNK_BYTES, ContainerWriter

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_KIND = "answer"
_NAME = "packed answer"
_MAX_TEXT = 20_000  # of a traceback
_MAX_NUMBER = 2**62


@dataclass(frozen=True)
class Answer:
    """What came back for an order.

    Attributes:
        order: The order.
        rollout: The rollout.
        state: The packed state after it, for the ledger; None if the environment has no state that can be loaded.
    """

    order: Order
    rollout: TensorDictBase
    state: bytes | None


def run_order(
    order: Order,
    collector: SerialCollector,
    *,
    state: Buffer | None = None,
    seed: int = 0,
    codecs: dict[str, Codec] | None = None,
    threads: int | None = None,
) -> bytes:
    """Collect the rollout of an order; returns it packed, together with the state after it, for `unpack_answer`.

    Without a state, the collector continues where it is. If it is elsewhere, or if the environment has no state that
    can be loaded (it does not define ``state_dict``), then it begins new episodes.

    Seeds the global random generators of Python, NumPy and torch, so that the rollout is the same in every process. A
    process should run one order at a time.

    Args:
        order: The order.
        collector: Collects the rollouts of the order's shard, with the weights that the order asks for.
        state: What `OrderLedger.state` returned.
        seed: Seed of the run.
        codecs: How earlier rollouts of this stream were packed; see `pack_rollout`.
        threads: Number of threads that pack; one per core by default.

    Raises:
        OrderError: If the collector is elsewhere, and its environment could be set to the right state.
        CorruptFileError: If the state is damaged.
        StateMismatchError: If it belongs to another environment.
    """
    from torchrl.envs.utils import ExplorationType, set_exploration_type  # noqa: PLC0415 - not to read answers

    is_stateful = has_state(collector.env)
    if state is not None:
        collector.load_state_dict(unpack_state(state))
    elif collector.num_rollouts != order.index:
        if is_stateful:
            raise OrderError(f"{order} needs the state before it, because this process is at {collector.num_rollouts}")
        # The same episodes must not be repeated.
        collector.set_seed(order.seed(seed))
        collector.num_rollouts = order.index
    seed_global(order.seed(seed))
    with set_exploration_type(ExplorationType.RANDOM):
        rollout = collector.collect()
    after = None
    if is_stateful:
        after = pack_state(collector.state_dict(), threads=threads)
    return pack_answer(order, pack_rollout(rollout, codecs=codecs, threads=threads), after)


def pack_answer(order: Order, rollout: Buffer, state: Buffer | None) -> bytes:
    """Return the bytes of an answer.

    Args:
        order: What was ordered.
        rollout: What `pack_rollout` returned.
        state: What `pack_state` returned; None if there is no state.
    """
    parts = {"rollout": rollout}
    if state is not None:
        parts["state"] = state
    return _pack(order, parts, {})


def pack_failure(order: Order, error: BaseException) -> bytes:
    """Return the bytes of an answer that says why there is no rollout.

    The exception travels as text: reading a foreign object would run its code.
    """
    text = f"On {platform.node()}:\n" + "".join(traceback.format_exception(error))
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return _pack(order, {}, {"error": reason[:_MAX_TEXT], "traceback": text[-_MAX_TEXT:]})


def unpack_answer(buffer: Buffer, expected: Order | None = None, *, max_bytes: int | None = None) -> Answer:
    """Unpack the answer to an order.

    Safe for bytes from an untrusted source; see `unpack_rollout`.

    Args:
        buffer: What `run_order` returned.
        expected: The order that it has to answer.
        max_bytes: Refuse rollouts and states that are larger than this when unpacked; by default the memory of this
            machine.

    Raises:
        OrderError: If the answer is that the environment or the policy failed; names the order and the exception.
        CorruptFileError: If it is damaged, truncated, too large, no answer, or the answer to another order.
        FormatVersionError: If a newer release packed it.
    """
    limit = machine_bytes()
    if max_bytes is not None:
        limit = require_count("max_bytes", max_bytes)
    with Container(_NAME, buffer=buffer, max_entry_bytes=limit) as container, naming(_NAME):
        order = _read_order(container)
        if expected is not None and order != expected:
            raise CorruptFileError(f"answers {order}, expected {expected}")
        values = container.values
        if "error" not in values:
            rollout = unpack_rollout(_read_bytes(container, "rollout"), max_bytes=limit)
            state = None
            if "state" in container.entries:
                state = _read_bytes(container, "state")
                # Damage has to be found while the rollout can still be collected again.
                unpack_state(state, max_bytes=limit)
            return Answer(order, rollout, state)
    # Not above, because it is not an error of these bytes.
    failure = OrderError(f"{order} failed: {values['error']}")
    failure.add_note(str(values.get("traceback", "")))
    raise failure


def _pack(order: Order, parts: dict[str, Buffer], values: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    writer = ContainerWriter(file, _KIND, DEFAULT_CHUNK_BYTES, threads=1, verify=False)
    for name, part in parts.items():
        # They are packed and have checksums already.
        writer.add(name, np.frombuffer(part, np.uint8), Raw())
    writer.set("order", [order.shard, order.index, order.version])
    for name, value in values.items():
        writer.set(name, value)
    writer.finish()
    return file.getvalue()


def _read_order(container: Container) -> Order:
    if container.kind != _KIND:
        raise CorruptFileError(f"is a container of kind {container.kind[:40]!r}, expected an answer")
    numbers: Any = container.values.get("order")
    if not isinstance(numbers, list) or len(numbers) != 3:
        raise CorruptFileError("does not say which order it answers")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
            raise CorruptFileError(f"answers an order with the number {str(number)[:40]}")
    return Order(*numbers)


def _read_bytes(container: Container, name: str) -> bytes:
    entry = container.entries.get(name)
    if entry is None or entry.dtype != np.uint8 or len(entry.shape) != 1 or not isinstance(entry.codec, Raw):
        raise CorruptFileError(f"has no {name}")
    return container.read(name).tobytes()
