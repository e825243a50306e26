"""The decision between plans A, B and C: a pure function of what was measured and of what the user said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slipstream.checks import require_count, require_positive
from slipstream.rollout.advice.measure import Measured
from slipstream.text import format_bandwidth, format_bytes, format_percent, format_ratio, format_seconds

Letter = Literal["A", "B", "C"]

MOST_FOR_C = 0.20
"""What share of an iteration plan C may cost: it is for those whose batch would not fit otherwise."""
MOST_FOR_B = 0.01
"""What share of an iteration plan B may cost: it is for keeping what training does not need."""
WORTHWHILE = 1.1
"""How many times smaller a batch must get for packing to be of any use."""


@dataclass(frozen=True)
class Settings:
    """What the user said; see `slipstream.advise`."""

    epochs: int = 4
    minibatches: int = 16
    iteration_s: float | None = None
    step_s: float | None = None
    memory_limit_bytes: int | None = None
    rollout_save_interval: int = 100
    keep_rollouts: bool = False
    bandwidth_bytes_s: float = 125e6
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "rollout_save_interval"):
            require_count(name, getattr(self, name))
        for name in ("iteration_s", "step_s", "memory_limit_bytes", "bandwidth_bytes_s"):
            value = getattr(self, name)
            if value is not None:
                require_positive(name, value)

    @property
    def known_iteration_s(self) -> float | None:
        """How long an iteration takes; if only a step is known, its updates, which leaves the collection out."""
        if self.iteration_s is not None or self.step_s is None:
            return self.iteration_s
        return self.epochs * self.minibatches * self.step_s

    @property
    def on_host(self) -> bool:
        """Whether training is in the memory where plan C keeps what is packed."""
        return self.device.startswith("cpu")


@dataclass(frozen=True)
class Plan:
    """What a plan takes.

    Attributes:
        letter: A, B or C.
        title: What it is.
        time_s: What it adds to an iteration, on average; what the background does is not in it.
        share: The same as a share of an iteration, if it is known how long one takes.
        memory_bytes: What rollouts take in the memory that training is in.
        host_bytes: What they take in the memory of the host, if training is on another device.
        disk_per_1000_bytes: What 1000 saved rollouts take; None if it saves none.
    """

    letter: Letter
    title: str
    time_s: float
    share: float | None
    memory_bytes: int
    host_bytes: int
    disk_per_1000_bytes: int | None


@dataclass(frozen=True)
class Network:
    """What sending a batch to another machine takes, raw and packed.

    Attributes:
        bandwidth_bytes_s: Of the network.
        raw_s: To send it as it is.
        pack_s: To pack it first, with all cores.
        send_s: To send it packed.
        unpack_s: To unpack it there, with all cores, if that machine is like this one.
        packed_wins: Whether the last three together are less than the first.
        break_even_bytes_s: The bandwidth below which they are; None if there is none.
    """

    bandwidth_bytes_s: float
    raw_s: float
    pack_s: float
    send_s: float
    unpack_s: float
    packed_wins: bool
    break_even_bytes_s: float | None

    @property
    def packed_s(self) -> float:
        """All that sending it packed takes."""
        return self.pack_s + self.send_s + self.unpack_s


@dataclass(frozen=True)
class Decision:
    """Which plan, and why.

    Attributes:
        plan: A, B or C.
        headline: What to do, in one sentence.
        tree: Questions and their answers, in the order in which they decide.
        why_not: Why each of the others was not chosen.
    """

    plan: Letter
    headline: str
    tree: tuple[tuple[str, str], ...]
    why_not: dict[Letter, str]


def cost_c_s(measured: Measured, settings: Settings) -> float:
    """Return what plan C adds to an iteration.

    Minibatches of plan C lie closer together and may be read faster than those of plan A. Plan A could have that order
    too, so it is not counted in favour of C.
    """
    return measured.memory_pack_s + settings.epochs * max(0.0, measured.epoch_c_s - measured.epoch_a_s)


def interval_for_b(measured: Measured, iteration_s: float) -> int:
    """Return how many iterations apart saves must be to cost under 1 %, and to be done before the next one."""
    cheap = measured.save_call_s / (MOST_FOR_B * iteration_s)
    done = measured.save_background_s / iteration_s
    return max(1, math.ceil(cheap), math.ceil(done))


def plans(measured: Measured, settings: Settings) -> tuple[Plan, Plan, Plan]:
    """Return what each plan takes."""
    m, host = measured, settings.on_host
    time_b, time_c = m.save_call_s / settings.rollout_save_interval, cost_c_s(m, settings)
    kept = m.memory_packed_bytes + m.memory_cache_bytes
    minibatch = m.raw_bytes // settings.minibatches
    return (
        Plan("A", "no compression in the loop", 0.0, _share(0.0, settings), m.raw_bytes, 0, None),
        Plan(
            "B",
            f"a rollout kept on disk every {settings.rollout_save_interval} iterations",
            time_b,
            _share(time_b, settings),
            m.raw_bytes + m.distinct_bytes if host else m.raw_bytes,
            0 if host else m.distinct_bytes,
            1000 * m.file_bytes,
        ),
        Plan(
            "C",
            "rollouts packed in memory while training",
            time_c,
            _share(time_c, settings),
            kept if host else minibatch,
            0 if host else kept,
            None,
        ),
    )


def network(measured: Measured, settings: Settings) -> Network:
    """Return what sending a batch takes: packed wins if ``raw / bandwidth > pack + packed / bandwidth + unpack``."""
    bandwidth = settings.bandwidth_bytes_s
    pack_s, unpack_s = measured.copy_s + measured.encode_s, measured.load_s
    saved = measured.raw_bytes - measured.file_bytes
    break_even = saved / max(1e-9, pack_s + unpack_s) if saved > 0 else None
    return Network(
        bandwidth,
        measured.raw_bytes / bandwidth,
        pack_s,
        measured.file_bytes / bandwidth,
        unpack_s,
        break_even is not None and bandwidth < break_even,
        break_even,
    )


def decide(measured: Measured, settings: Settings) -> Decision:
    """Choose a plan; the same numbers give the same answer."""
    memory = _memory(measured, settings)
    keep = _keep(measured, settings)
    plan: Letter = "C" if memory.verdict == "pack" else "B" if settings.keep_rollouts else "A"
    why_not: dict[Letter, str] = {}
    if plan != "A":
        why_not["A"] = memory.why_not_a if plan == "C" else "it keeps no rollouts, and you want to keep some."
    if plan != "B":
        why_not["B"] = keep.why_not
    if plan != "C":
        why_not["C"] = memory.why_not_c
    tree = (
        ("Does a batch fit in memory?", memory.answer),
        ("Does it get smaller?", _smaller(measured)),
        ("Do you want to keep rollouts, to look into them or as offline data?", keep.answer),
    )
    return Decision(plan, _headline(plan, memory, keep, settings), tree, why_not)


@dataclass(frozen=True)
class _Memory:
    """The answer about memory: it fits, or has to be packed, or neither helps and the batch has to shrink."""

    verdict: Literal["fits", "pack", "shrink"]
    answer: str
    headline: str = ""
    why_not_a: str = ""
    why_not_c: str = ""


@dataclass(frozen=True)
class _Keep:
    answer: str
    headline: str
    why_not: str


def _memory(m: Measured, s: Settings) -> _Memory:
    a, _, c = plans(m, s)
    raw, packed, cost = format_bytes(a.memory_bytes), format_bytes(c.memory_bytes), format_seconds(c.time_s)
    limit = s.memory_limit_bytes
    per_iteration = f"{cost} per iteration{_of_iteration(c.share)}"
    kept = m.memory_packed_bytes + m.memory_cache_bytes
    pays = m.raw_bytes > WORTHWHILE * kept
    gain = f"it would take {packed} instead of {raw}, for {per_iteration}"
    if limit is None:
        return _Memory(
            "fits",
            f"A batch takes {raw}. No memory limit was given, so it is taken to fit.",
            why_not_c=f"{gain}; there is no need for that while the batch fits."
            if pays
            else _no_gain(m, "keeping it packed, with its cache, saves next to nothing"),
        )
    room = f"{raw} against a limit of {format_bytes(limit)}"
    if a.memory_bytes <= limit:
        return _Memory(
            "fits",
            f"Yes: {room}.",
            why_not_c=f"the batch fits as it is; {gain}."
            if pays
            else _no_gain(m, "keeping it packed, with its cache, saves next to nothing"),
        )
    smaller = _smaller_batch(m, limit)
    if not pays:
        why = _no_gain(m, f"packed and with its cache it still takes {format_bytes(kept)}")
        return _Memory(
            "shrink", f"No: {room}. Packing does not help.", f"Stay with plan A, and {smaller}.", why_not_c=why
        )
    if c.memory_bytes > limit:
        why = f"packed and with its cache it takes {packed}, which is over the limit as well."
        return _Memory(
            "shrink", f"No: {room}; nor packed, {packed}.", f"Stay with plan A, and {smaller}.", why_not_c=why
        )
    if c.share is not None and c.share >= MOST_FOR_C:
        why = f"it would cost {per_iteration}, and more than {format_percent(MOST_FOR_C)} is too much."
        return _Memory(
            "shrink", f"No: {room}; packed it would, {packed}.", f"Stay with plan A, and {smaller}.", why_not_c=why
        )
    worth = "" if c.share is not None else f", if an iteration takes more than {format_seconds(cost_limit(c.time_s))}"
    return _Memory(
        "pack",
        f"No: {room}. Packed and with its cache it takes {packed}, for {per_iteration}.",
        f"Take plan C{worth}: {packed} instead of {raw}, for {per_iteration}.",
        why_not_a=f"the batch takes {room}; to stay with A, {smaller}.",
    )


def cost_limit(time_s: float) -> float:
    """Return how long an iteration must take for a cost of plan C to be worth it."""
    return time_s / MOST_FOR_C


def _smaller_batch(m: Measured, limit: int) -> str:
    fitting = math.floor(m.num_envs * limit / max(1, m.raw_bytes))
    if fitting < 1:
        return f"make the batch smaller: not even one of {m.num_envs} environments fits with {m.num_steps} steps"
    return f"make the batch smaller: {fitting} of {m.num_envs} environments fit"


def _no_gain(m: Measured, what: str) -> str:
    ratio = format_ratio(m.raw_bytes, m.memory_packed_bytes)
    return f"the batch does not get small enough ({ratio} in memory): {what}."


def _smaller(m: Measured) -> str:
    in_file = format_ratio(m.raw_bytes, m.file_bytes)
    sizes = f"{format_bytes(m.raw_bytes)} become {format_bytes(m.file_bytes)} in a file ({in_file})"
    memory = f"{format_bytes(m.memory_packed_bytes)} in memory ({format_ratio(m.raw_bytes, m.memory_packed_bytes)})"
    if m.raw_bytes > WORTHWHILE * m.file_bytes:
        return f"Yes: {sizes} and {memory}."
    return f"No: {sizes} and {memory}. Noise cannot be packed, and compression does not pay here."


def _keep(m: Measured, s: Settings) -> _Keep:
    iteration_s, interval = s.known_iteration_s, s.rollout_save_interval
    disk = f"{format_bytes(1000 * m.file_bytes)} of disk per 1000"
    call = f"a save keeps the loop for {format_seconds(m.save_call_s)}"
    noise = "" if m.raw_bytes > WORTHWHILE * m.file_bytes else ", hardly less than raw"
    if iteration_s is None:
        cost = f"{call}, then {format_seconds(m.save_background_s)} in the background; {disk}{noise}"
        headline = f"Take plan B, every {interval} iterations: {call}; {disk}{noise}."
    else:
        least = interval_for_b(m, iteration_s)
        share = format_percent(m.save_call_s / iteration_s / interval)
        cost = f"{call}, {share} at every {interval} iterations; {disk}{noise}"
        if interval >= least:
            cost += f"; it is under {format_percent(MOST_FOR_B)} at any interval from {least} up"
            headline = f"Take plan B, every {interval} iterations: {share} of the time; {disk}{noise}."
        else:
            limit = format_percent(MOST_FOR_B)
            cost += f"; rather every {least}, to cost under {limit} and be done before the next one"
            headline = f"Take plan B, but every {least} iterations instead of every {interval}: {call}; {disk}{noise}."
    if s.keep_rollouts:
        cost += _copy(m, s)
        return _Keep(f"Yes: B. {_sentence(cost)}.", headline, "it goes along with C, for the rollouts you keep.")
    answer = f"You did not ask for it. If you do: B. {_sentence(cost)}."
    return _Keep(answer, headline, "you did not ask to keep rollouts (keep_rollouts=True, --keep).")


def _copy(m: Measured, s: Settings) -> str:
    """Say what a save takes in memory, if that is more than there may be."""
    b = plans(m, s)[1]
    if s.memory_limit_bytes is None or not m.raw_bytes <= s.memory_limit_bytes < b.memory_bytes:
        return ""
    return f"; until it is written, a copy of {format_bytes(m.distinct_bytes)} takes more than the limit allows"


def _headline(plan: Letter, memory: _Memory, keep: _Keep, settings: Settings) -> str:
    if plan == "C":
        return memory.headline + (" And B along with it, for what you keep." if settings.keep_rollouts else "")
    if plan == "B":
        return keep.headline + (
            f" {memory.headline.replace('Stay with plan A, and', 'And')}" if memory.headline else ""
        )
    return memory.headline or "Stay with plan A: the batch fits, and it costs nothing."


def _share(time_s: float, settings: Settings) -> float | None:
    iteration_s = settings.known_iteration_s
    return None if iteration_s is None else time_s / iteration_s


def _of_iteration(share: float | None) -> str:
    return "" if share is None else f" ({format_percent(share)})"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def say_network(found: Network) -> str:
    """Return a sentence or two about sending a batch."""
    verdict = "packed is faster" if found.packed_wins else "raw is faster"
    text = (
        f"At {format_bandwidth(found.bandwidth_bytes_s)} a batch takes {format_seconds(found.raw_s)} raw, "
        f"{format_seconds(found.packed_s)} packed ({format_seconds(found.pack_s)} to pack, "
        f"{format_seconds(found.send_s)} to send, {format_seconds(found.unpack_s)} to unpack): {verdict}."
    )
    if found.break_even_bytes_s is None:
        return f"{text} Packed it is not smaller, and wins at no bandwidth."
    return f"{text} Packed wins below {format_bandwidth(found.break_even_bytes_s)}."
