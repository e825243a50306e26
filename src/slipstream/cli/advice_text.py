"""The sentences and table rows in which ``slipstream advise`` explains an `Advice`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.text import format_bandwidth, format_bytes, format_percent, format_ratio, format_seconds

if TYPE_CHECKING:
    from slipstream.rollout.advise import Advice, Plan
    from slipstream.rollout.measure import KeyNumbers

PLAN_COLUMNS = ("plan", "", "time per iteration", "memory", "disk per 1000 rollouts")
KEY_COLUMNS = ("key", "dtype", "shape", "size", "packed", "ratio", "pack", "unpack", "plan C")
# From this load on, in runnable processes per core, measured times are too high.
_BUSY = 0.5


def introduction(advice: Advice) -> list[str]:
    """Return what was measured, and how far to trust it."""
    size = format_bytes(advice.measured.raw_bytes)
    lines = [f"{advice.source}: {list(advice.measured.batch_size)}, {size}; measured on {advice.machine}."]
    iteration_s = advice.settings.known_iteration_s
    if iteration_s is not None:
        origin = " (from metrics.jsonl)" if advice.iteration_from_run else ""
        lines.append(f"An iteration takes {format_seconds(iteration_s)}{origin}.")
    if advice.measured_share < 1:
        share = format_percent(advice.measured_share)
        lines.append(f"Only {share} of the environments were measured; the numbers are scaled up.")
    if advice.load > _BUSY:
        lines.append(f"The machine was busy ({advice.load:.1f} processes per core): the times are upper bounds.")
    return lines


def plan_row(advice: Advice, plan: Plan) -> list[str]:
    """Return a row of the table of plans."""
    titles = {
        "A": "no compression",
        "B": f"a rollout saved to disk every {advice.settings.rollout_save_interval} iterations",
        "C": "rollouts packed in memory while training",
    }
    time = f"{format_seconds(plan.time_s)}{_percent(plan.share)}"
    if not plan.time_s:
        time = "-"
    memory = format_bytes(plan.memory_bytes)
    if plan.host_bytes:
        memory += f" + {format_bytes(plan.host_bytes)} on the host"
    disk = "-"
    if plan.disk_per_1000_bytes is not None:
        disk = format_bytes(plan.disk_per_1000_bytes)
    return [plan.letter, titles[plan.letter], time, memory, disk]


def key_row(key: KeyNumbers) -> list[str]:
    """Return a row of the table of keys."""
    return [
        key.key + " + next" * key.with_next,
        key.dtype,
        "x".join(map(str, key.shape)),
        format_bytes(key.raw_bytes) if key.raw_bytes else "-",
        format_bytes(key.packed_bytes),
        format_ratio(key.raw_bytes, key.packed_bytes) if key.raw_bytes else "-",
        format_seconds(key.encode_cpu_s),
        format_seconds(key.decode_cpu_s),
        "packed" if key.packed_in_c else "raw",
    ]


def speeds(advice: Advice) -> list[str]:
    """Return how fast the batch is packed, saved and read."""
    m = advice.measured
    minibatches = advice.settings.minibatches
    encode_rate = format_bytes(m.raw_bytes / max(1e-9, m.encode_cpu_s))
    decode_rate = format_bytes(m.raw_bytes / max(1e-9, m.decode_cpu_s))
    lines = [
        f"Packing takes {format_seconds(m.encode_s)} ({format_seconds(m.encode_cpu_s)} of CPU time, {encode_rate}/s "
        f"per core); unpacking takes {format_seconds(m.decode_s)} ({format_seconds(m.decode_cpu_s)} of CPU time, "
        f"{decode_rate}/s per core).",
        f"RolloutStorage.save blocks for {format_seconds(m.save_call_s)}, then writes {format_bytes(m.file_bytes)} in "
        f"the background in {format_seconds(m.save_background_s)}.",
        f"Reading an epoch of {minibatches} minibatches takes {format_seconds(m.epoch_a_s)} in plan A and "
        f"{format_seconds(m.epoch_c_s)} in plan C, in the order of CompressedTensorDict.minibatches; if all steps are "
        f"shuffled, plan C takes {format_seconds(m.epoch_c_shuffled_s)}.",
    ]
    step_s = advice.settings.step_s
    if step_s is not None:
        read_a = m.epoch_a_s / minibatches
        read_c = m.epoch_c_s / minibatches
        lines.append(
            f"Reading a minibatch takes {format_seconds(read_a)} in plan A and {format_seconds(read_c)} in plan C: "
            f"{format_percent(read_a / step_s)} and {format_percent(read_c / step_s)} of a training step."
        )
    return lines


def network(advice: Advice) -> str:
    """Return what sending a batch takes."""
    found = advice.network
    verdict = "packed is faster" if found.packed_wins else "raw is faster"
    text = (
        f"At {format_bandwidth(found.bandwidth_bytes_s)}, sending a batch takes {format_seconds(found.raw_s)} raw and "
        f"{format_seconds(found.packed_s)} packed ({format_seconds(found.pack_s)} to pack, "
        f"{format_seconds(found.send_s)} to send, {format_seconds(found.unpack_s)} to unpack): {verdict}."
    )
    if found.break_even_bytes_s is None:
        return f"{text} The packed batch is not smaller, so packing pays at no bandwidth."
    return f"{text} Packing pays below {format_bandwidth(found.break_even_bytes_s)}."


def caveats(advice: Advice) -> list[str]:
    """Return what the numbers do not include."""
    m = advice.measured
    peak = format_bytes(m.raw_bytes + m.distinct_bytes + m.memory_packed_bytes)
    lines = [
        f"While plan C packs, the batch and a copy are in memory too, {peak} in total: it saves memory during the "
        "updates, not during collection."
    ]
    if not advice.settings.on_host:
        lines = [
            f"Plan C saves memory on {advice.settings.device} only if the collector stores batches elsewhere: "
            "storing_device='cpu'."
        ]
    if advice.settings.known_iteration_s is None:
        lines.append(
            "The duration of an iteration is unknown, so costs are not compared with it; set --iteration-seconds. "
            f"Plan C is for iterations longer than {format_seconds(advice.decision.min_iteration_s)}."
        )
    elif advice.settings.iteration_s is None:
        lines.append("The iteration time includes only the updates; with collection, the shares are smaller.")
    return lines


def questions(advice: Advice) -> list[str]:
    """Return the questions that decide, with their answers."""
    m = advice.measured
    raw = format_bytes(m.raw_bytes)
    packs = (
        f"{raw} become {format_bytes(m.file_bytes)} in a file ({format_ratio(m.raw_bytes, m.file_bytes)}) and "
        f"{format_bytes(m.memory_packed_bytes)} in memory ({format_ratio(m.raw_bytes, m.memory_packed_bytes)})."
    )
    smaller = f"Yes: {packs}"
    if not advice.decision.file_is_smaller:
        smaller = f"No: {packs} The data is close to random, so compression does not pay."
    return [
        f"1. Does the batch fit in memory? {_fit(advice)}",
        f"2. Does packing make it smaller? {smaller}",
        f"3. Do you want to keep rollouts, for inspection or as offline data? {_keep(advice)}",
    ]


def reasons(advice: Advice) -> list[str]:
    """Return why the other plans were not chosen."""
    lines = []
    if advice.plan == "B":
        lines.append("Why not A: it keeps no rollouts.")
    if advice.plan == "C":
        lines.append(f"Why not A: the batch takes {_against_limit(advice)}; for plan A, {_shrink(advice)}.")
        if advice.settings.keep_rollouts:
            lines.append("Why not B: use it in addition, for the rollouts you keep.")
    if not advice.settings.keep_rollouts:
        lines.append("Why not B: you did not ask to keep rollouts (--keep).")
    if advice.plan != "C":
        lines.append(f"Why not C: {_why_not_c(advice)}")
    return lines


def headline(advice: Advice) -> str:
    """Return the advice in one line."""
    decision = advice.decision
    if advice.plan == "C":
        text = "Advice: use plan C"
        if decision.costs_too_much is None:
            text += f" if an iteration takes longer than {format_seconds(decision.min_iteration_s)}"
        text += f": {_gain(advice)}."
        if advice.settings.keep_rollouts:
            text += " Use plan B in addition, for the rollouts you keep."
    elif advice.plan == "B":
        text = f"Advice: use plan B, saving every {decision.save_interval} iterations: {_save_cost(advice)}."
        if not decision.fits:
            text += f" Also {_shrink(advice)}."
    elif decision.fits:
        text = "Advice: stay with plan A: the batch fits, and plan A costs nothing."
    else:
        text = f"Advice: stay with plan A and {_shrink(advice)}."
    return text


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f" ({format_percent(share)})"


def _gain(advice: Advice) -> str:
    a, _, c = advice.plans
    return f"{format_bytes(c.memory_bytes)} instead of {format_bytes(a.memory_bytes)}, for {_cost(c)}"


def _cost(plan: Plan) -> str:
    return f"{format_seconds(plan.time_s)} per iteration{_percent(plan.share)}"


def _against_limit(advice: Advice) -> str:
    limit = format_bytes(advice.settings.memory_limit_bytes or 0)
    return f"{format_bytes(advice.measured.raw_bytes)}, the limit is {limit}"


def _shrink(advice: Advice) -> str:
    m = advice.measured
    if not advice.decision.num_envs_that_fit:
        return f"make the batch smaller: not even one of {m.num_envs} environments fits with {m.num_steps} steps"
    return f"make the batch smaller: {advice.decision.num_envs_that_fit} of {m.num_envs} environments fit"


def _fit(advice: Advice) -> str:
    if advice.settings.memory_limit_bytes is None:
        raw = format_bytes(advice.measured.raw_bytes)
        return f"Assumed: it takes {raw}, and no memory limit was given (--memory-limit-gb)."
    if advice.decision.fits:
        return f"Yes: it takes {_against_limit(advice)}."
    packed = format_bytes(advice.plans[2].memory_bytes)
    return f"No: it takes {_against_limit(advice)}. With plan C it would take {packed}."


def _why_not_c(advice: Advice) -> str:
    from slipstream.rollout.advise import MAX_SHARE_C  # noqa: PLC0415 - imports torch

    m = advice.measured
    decision = advice.decision
    c = advice.plans[2]
    if not decision.packing_pays:
        ratio = format_ratio(m.raw_bytes, m.memory_packed_bytes)
        kept = format_bytes(m.memory_packed_bytes + m.memory_cache_bytes)
        return f"the batch is not compressible enough ({ratio} in memory): packed, with a cache, it takes {kept}."
    if decision.fits:
        return f"there is no need, as the batch fits. It would take {_gain(advice)}."
    if not decision.packed_fits:
        return f"it would take {format_bytes(c.memory_bytes)}, which is over the limit too."
    limit = format_percent(MAX_SHARE_C)
    return f"it would cost {_cost(c)}; {limit} or more is too much."


def _save_cost(advice: Advice) -> str:
    """Return what saving at the recommended interval costs."""
    m = advice.measured
    interval = advice.decision.save_interval
    iteration_s = advice.settings.known_iteration_s
    cost = f"a save blocks for {format_seconds(m.save_call_s)}"
    if iteration_s is not None:
        cost += f", {format_percent(m.save_call_s / iteration_s / interval)} of the time"
    cost += f", and 1000 rollouts take {format_bytes(1000 * m.file_bytes)} of disk"
    if not advice.decision.file_is_smaller:
        cost += ", hardly less than raw"
    return cost


def _keep(advice: Advice) -> str:
    from slipstream.rollout.advise import MAX_SHARE_B  # noqa: PLC0415 - imports torch

    settings = advice.settings
    decision = advice.decision
    answer = "Yes: plan B."
    if not settings.keep_rollouts:
        answer = "You did not ask for it (--keep). If you do: plan B."
    answer += f" Every {decision.save_interval} iterations, {_save_cost(advice)}."
    limit = format_percent(MAX_SHARE_B)
    if decision.min_save_interval is None:
        answer += f" Each is written in the background in {format_seconds(advice.measured.save_background_s)}."
    elif decision.min_save_interval > settings.rollout_save_interval:
        answer += (
            f" Every {settings.rollout_save_interval} iterations is too often to cost under {limit} and to finish each "
            "save before the next."
        )
    else:
        answer += f" The cost is under {limit} at any interval of at least {decision.min_save_interval}."
    if settings.keep_rollouts and decision.fits and not decision.save_fits:
        copy = format_bytes(advice.measured.distinct_bytes)
        answer += f" Until a rollout is written, a copy of {copy} exceeds the memory limit."
    return answer
