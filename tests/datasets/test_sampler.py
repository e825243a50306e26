"""Batches that are read ahead are those that would have been read anyway."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from slipstream import AsyncSampler, ConfigurationError, DatasetError, MultimodalReplayBuffer

PATIENCE_S = 60.0  # for what happens soon, on any machine


@pytest.fixture
def buffers(file_a):
    made = []
    for _ in range(2):
        buffer = MultimodalReplayBuffer(7, image_size=16, seed=5)
        buffer.load_from_hdf5(file_a)
        made.append(buffer)
    yield made
    for buffer in made:
        buffer.close()


def test_batches_come_in_the_order_the_buffer_would_give_them(buffers):
    ahead, plain = buffers
    with AsyncSampler(ahead, 6) as sampler:
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(sampler.get_batch(), plain.sample(6), strict=True))


class Numbers:
    """Counts up, and raises at `fail_at`."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.count = 0
        self.fail_at = fail_at
        self.counted = threading.Condition()

    def wait_for(self, count: int) -> None:
        """Block until this many batches were drawn."""
        with self.counted:
            assert self.counted.wait_for(lambda: self.count >= count, PATIENCE_S)

    def sample(self, batch_size: int) -> int:
        with self.counted:
            self.count += 1
            self.counted.notify_all()
        if self.count == self.fail_at:
            raise OSError(5, "the disk is on fire")
        return self.count


class Blocked(Numbers):
    """Numbers that are drawn only after `may_draw` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()
        self.may_draw = threading.Event()

    def sample(self, batch_size: int) -> int:
        self.began.set()
        assert self.may_draw.wait(PATIENCE_S)
        return super().sample(batch_size)


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slipstream-sampler"]


def test_no_more_than_the_queue_holds_is_read_ahead():
    numbers = Numbers()
    with AsyncSampler(numbers, 1, queue_size=3) as sampler:
        for taken in range(8):
            numbers.wait_for(taken + 3)
            # Drawing one more would have raised the count at once, as soon as anything else happens on that thread.
            assert numbers.count == taken + 3
            assert sampler.get_batch() == taken + 1


def test_an_error_comes_after_the_batches_before_it_and_stays():
    with AsyncSampler(Numbers(fail_at=3), 1) as sampler:
        assert [sampler.get_batch(), sampler.get_batch()] == [1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is on fire"):
                sampler.get_batch()


def test_a_buffer_that_is_closed_is_an_error_for_the_consumer(buffers):
    with AsyncSampler(buffers[0], 2, queue_size=1) as sampler:
        sampler.get_batch()
        buffers[0].close()
        with pytest.raises(DatasetError, match="closed"):
            for _ in range(5):
                sampler.get_batch()


def test_after_stop_there_are_no_batches_and_no_thread():
    sampler = AsyncSampler(Numbers(), 1)
    sampler.stop()
    sampler.stop()
    assert sampling_threads() == []
    with pytest.raises(DatasetError, match="the sampler was stopped"):
        sampler.get_batch()


def test_it_says_whether_it_is_running_and_what_it_draws_from():
    numbers = Numbers(fail_at=2)
    with AsyncSampler(numbers, 1) as sampler:
        assert sampler.buffer is numbers
        numbers.wait_for(2)
        assert sampler.get_batch() == 1
        with pytest.raises(OSError, match="the disk is on fire"):
            sampler.get_batch()
        assert not sampler.running
    endless = AsyncSampler(Numbers(), 1)
    assert endless.running
    endless.get_batch()
    assert endless.running
    endless.stop()
    assert not endless.running


def test_stop_waits_for_the_batch_in_progress_and_a_waiting_consumer_does_not():
    buffer = Blocked()
    sampler = AsyncSampler(buffer, 1)
    assert buffer.began.wait(PATIENCE_S)
    stopping = threading.Thread(target=sampler.stop)
    stopping.start()
    with pytest.raises(DatasetError, match="the sampler was stopped"):
        sampler.get_batch()
    assert stopping.is_alive()
    buffer.may_draw.set()
    stopping.join()
    assert sampling_threads() == []


def test_a_batch_that_does_not_come_in_time_is_an_error_and_comes_later():
    buffer = Blocked()
    with AsyncSampler(buffer, 1) as sampler:
        for _ in range(10):
            with pytest.raises(TimeoutError, match="no result within 0.01 s"):
                sampler.get_batch(timeout_s=0.01)
        buffer.may_draw.set()
        assert sampler.get_batch() == 1


def test_garbage_collection_of_a_sampler_ends_its_thread():
    sampler = AsyncSampler(Numbers(), 1)
    sampler.get_batch()
    (thread,) = sampling_threads()
    del sampler
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_more_consumers_than_places_in_the_queue_get_every_batch_once():
    taken = []

    def consume():
        for _ in range(20):
            taken.append(sampler.get_batch())

    with AsyncSampler(Numbers(), 1, queue_size=1) as sampler:
        consumers = [threading.Thread(target=consume) for _ in range(8)]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join()
    assert sorted(taken) == list(range(1, 161))


def test_it_can_be_iterated_over():
    with AsyncSampler(Numbers(), 1) as sampler:
        assert [batch for batch, _ in zip(sampler, range(3), strict=False)] == [1, 2, 3]


def test_a_forked_child_gets_an_error_instead_of_waiting_forever():
    with AsyncSampler(Numbers(), 1) as sampler:
        sampler.get_batch()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sampler.get_batch()
            except DatasetError as error:
                code = 0 if "belongs to the parent process" in str(error) and not sampler.running else 2
            finally:
                sampler.stop()
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert sampler.get_batch() == 2


def test_a_program_may_end_without_stopping_it(file_a):
    script = (
        "import sys; from slipstream import AsyncSampler, MultimodalReplayBuffer\n"
        "b = MultimodalReplayBuffer(7, image_size=16); b.load_from_hdf5(sys.argv[1])\n"
        "s = AsyncSampler(b, 4); s.get_batch(); print('bye')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, file_a], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 2, "queue_size": 0}])
def test_sizes_below_one_are_refused(options):
    with pytest.raises(ConfigurationError, match="is 0, expected a whole number of at least 1"):
        AsyncSampler(Numbers(), **options)


def test_garbage_collection_by_a_thread_that_the_batch_waits_for_does_not_hang():
    script = """
import gc, threading
from slipstream import AsyncSampler

dropped = threading.Event()

class Buffer:
    num_batches = 0

    def sample(self, count):
        self.num_batches += 1
        if self.num_batches > 1:
            dropped.wait()
            collecting = threading.Thread(target=gc.collect)
            collecting.start()
            collecting.join()
        return count

gc.disable()
sampler = AsyncSampler(Buffer(), 2, queue_size=1)
sampler.itself = sampler
sampler.get_batch()
(thread,) = [thread for thread in threading.enumerate() if thread.name == "slipstream-sampler"]
del sampler
dropped.set()
thread.join()
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "ended\n"


def test_interrupts_of_get_batch_lose_no_batch():
    script = """
import os, signal, subprocess, sys
from slipstream import AsyncSampler

class Numbers:
    last = 0

    def sample(self, batch_size):
        self.last += 1
        return self.last

is_armed = False
num_interrupts = 0

def interrupt(*_):
    global num_interrupts
    if is_armed:
        num_interrupts += 1
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
sampler = AsyncSampler(Numbers(), 1, queue_size=2)
storm = f"import os\\nwhile True: os.kill({os.getpid()}, 2)"
shooting = subprocess.Popen([sys.executable, "-c", storm])
taken = []
while num_interrupts < 2000:
    batch = None
    try:
        is_armed = True
        batch = sampler.get_batch()
        is_armed = False
    except KeyboardInterrupt:
        is_armed = False
    if batch is not None:
        taken.append(batch)
shooting.kill()
shooting.wait()
assert taken == list(range(1, len(taken) + 1))
sampler.stop()
print("all there")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    # An interrupt inside a finalizer of the standard library is printed and has no other effect.
    assert done.stdout == "all there\n", done.stderr
