"""Orders without Ray: the same rollouts from any process, and answers that cannot be trusted."""

import io

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import RewardSum, SerialEnv, TransformedEnv

from slipstream import (
    CorruptFileError,
    FormatVersionError,
    Order,
    OrderError,
    SerialCollector,
    StateMismatchError,
    pack_rollout,
    pack_state,
    run_order,
    unpack_answer,
)
from slipstream.codecs import Raw
from slipstream.collect.answers import pack_answer, pack_failure
from slipstream.collect.serial import has_state
from slipstream.store.writer import ContainerWriter
from tests.collect.ray_environments import NUM_STEPS, PendulumPolicy, Policy, digest, make_pendulum, make_walk


def walk(shard: int = 0) -> SerialCollector:
    return SerialCollector(make_walk(shard), Policy(), NUM_STEPS)


def test_another_process_continues_from_a_state_with_the_same_bits():
    straight = walk()
    other = walk()
    state = None
    for index in range(6):
        order = Order(0, index, index)
        expected = unpack_answer(run_order(order, straight))
        # Every second one is collected by somebody who was not there before.
        continued = unpack_answer(run_order(order, walk() if index % 2 else other, state=state))
        assert digest([continued.rollout]) == digest([expected.rollout])
        assert continued.state == expected.state
        state = continued.state


def test_what_a_process_did_before_does_not_change_a_rollout():
    answer = run_order(Order(3, 0, 0), walk(3))
    torch.rand(17)
    np.random.random(5)
    assert digest([unpack_answer(run_order(Order(3, 0, 0), walk(3))).rollout]) == digest(
        [unpack_answer(answer).rollout]
    )


def test_the_seed_of_the_run_the_shard_and_the_index_decide_what_is_drawn():
    found = {digest([unpack_answer(run_order(Order(0, 0, 0), walk(), seed=seed)).rollout]) for seed in range(4)}
    assert len(found) == 4


def test_a_process_that_is_elsewhere_asks_for_the_state():
    with pytest.raises(
        OrderError, match="rollout 2 of shard 0 needs the state before it, because this process is at 0"
    ):
        run_order(Order(0, 2, 2), walk())


def test_the_state_of_another_environment_is_refused():
    with pytest.raises(StateMismatchError):
        run_order(Order(0, 1, 1), walk(), state=pack_state({"something": 1}))


def test_an_environment_without_a_state_begins_new_episodes_when_it_is_elsewhere():
    policy = PendulumPolicy()
    here = SerialCollector(make_pendulum(0), policy, NUM_STEPS)
    first = unpack_answer(run_order(Order(0, 0, 0), here))
    second = unpack_answer(run_order(Order(0, 1, 1), here))
    assert first.state is None
    # It continues where it was.
    assert torch.equal(second.rollout["observation"][:, 0], first.rollout["next", "observation"][:, -1])
    elsewhere = SerialCollector(make_pendulum(0), policy, NUM_STEPS)
    redone = unpack_answer(run_order(Order(0, 1, 1), elsewhere))
    starts = redone.rollout["observation"][:, 0]
    assert not torch.equal(starts, second.rollout["observation"][:, 0])
    # Not those that it began with: they would be trained on twice.
    assert not torch.equal(starts, first.rollout["observation"][:, 0])


def test_the_state_of_a_transformed_environment_has_that_of_its_base():
    def transformed() -> SerialCollector:
        return SerialCollector(TransformedEnv(make_walk(0), RewardSum()), Policy(), NUM_STEPS)

    straight = transformed()
    first = unpack_answer(run_order(Order(0, 0, 0), straight))
    expected = unpack_answer(run_order(Order(0, 1, 1), straight))
    continued = unpack_answer(run_order(Order(0, 1, 1), transformed(), state=first.state))
    assert digest([continued.rollout]) == digest([expected.rollout])


def test_only_environments_that_define_a_state_have_one():
    assert has_state(make_walk(0))
    assert has_state(TransformedEnv(make_walk(0), RewardSum()))
    assert not has_state(make_pendulum(0))
    assert not has_state(TransformedEnv(make_pendulum(0), RewardSum()))
    assert not has_state(SerialEnv(2, lambda: make_walk(0)))


def small_answer(shard: int = 1) -> bytes:
    batch = TensorDict({"observation": torch.arange(24.0).reshape(2, 4, 3)}, [2, 4])
    return pack_answer(Order(shard, 2, 3), pack_rollout(batch), pack_state({"position": torch.arange(5.0)}))


def test_every_truncated_answer_is_refused():
    answer = small_answer()
    for length in range(len(answer)):
        with pytest.raises(CorruptFileError, match="packed answer"):
            unpack_answer(answer[:length])


def test_no_flipped_bit_goes_unnoticed():
    answer = small_answer()
    expected = unpack_answer(answer)
    for position in range(0, len(answer), 7):
        damaged = bytearray(answer)
        damaged[position] ^= 1 << (position % 8)
        try:
            found = unpack_answer(bytes(damaged))
        except (CorruptFileError, FormatVersionError):
            continue
        # The byte is one that nothing depends on.
        assert (found.order, found.state) == (expected.order, expected.state)
        assert digest([found.rollout]) == digest([expected.rollout])


def container(kind: str, values: dict[str, object], **arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    writer = ContainerWriter(file, kind, 1 << 20, 1, verify=False)
    for name, array in arrays.items():
        writer.add(name, array, Raw())
    for name, value in values.items():
        writer.set(name, value)
    writer.finish()
    return file.getvalue()


BYTES = np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("forged", "problem"),
    [
        (b"", "packed answer"),
        (b"not a container at all" * 10, "packed answer"),
        (container("rollout", {"order": [0, 0, 0]}), "expected an answer"),
        (container("answer", {}), "which order"),
        (container("answer", {"order": [0, 0]}), "which order"),
        (container("answer", {"order": "000"}), "which order"),
        (container("answer", {"order": [0, -1, 0]}), "the number -1"),
        (container("answer", {"order": [0, True, 0]}), "the number True"),
        (container("answer", {"order": [0, 10**30, 0]}), "the number 1000"),
        (container("answer", {"order": [0, 0, 0]}), "has no rollout"),
        (container("answer", {"order": [0, 0, 0]}, rollout=np.zeros(8, np.int64)), "has no rollout"),
        (container("answer", {"order": [0, 0, 0]}, rollout=np.zeros((2, 4), np.uint8)), "has no rollout"),
        (container("answer", {"order": [0, 0, 0]}, rollout=BYTES), "packed answer"),
    ],
)
def test_forged_answers_are_refused_in_one_sentence(forged, problem):
    with pytest.raises((CorruptFileError, FormatVersionError), match=problem) as caught:
        unpack_answer(forged)
    assert "\n" not in str(caught.value)


def test_a_state_that_is_none_is_found_while_the_rollout_can_still_be_collected_again():
    rollout = pack_rollout(TensorDict({"observation": torch.zeros(2, 4, 3)}, [2, 4]))
    with pytest.raises(CorruptFileError):
        unpack_answer(pack_answer(Order(0, 0, 0), rollout, b"no state"))


def test_an_answer_to_another_order_is_refused():
    with pytest.raises(CorruptFileError, match="answers rollout 2 of shard 1, expected rollout 2 of shard 0"):
        unpack_answer(small_answer(1), Order(0, 2, 3))


def test_rollouts_and_states_that_are_larger_than_allowed_are_refused():
    zeros = TensorDict({"observation": torch.zeros(64, 64, 64)}, [64, 64])
    packed = pack_rollout(zeros)
    with pytest.raises(CorruptFileError, match="100000"):
        unpack_answer(pack_answer(Order(0, 0, 0), packed, None), max_bytes=100_000)
    small = pack_rollout(zeros[:1, :2])
    state = pack_state({"zeros": torch.zeros(1 << 20)})
    with pytest.raises(CorruptFileError, match="100000"):
        unpack_answer(pack_answer(Order(0, 0, 0), small, state), max_bytes=100_000)


def test_an_exception_travels_as_text_with_its_order():
    class OddError(Exception):
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("this code must not run",))

    try:
        raise OddError("first line\nsecond line")
    except OddError as error:
        answer = pack_failure(Order(5, 6, 7), error)
    with pytest.raises(OrderError, match="^rollout 6 of shard 5 failed: OddError: first line second line") as caught:
        unpack_answer(answer)
    assert "raise OddError" in "".join(caught.value.__notes__)
