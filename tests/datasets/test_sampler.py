"""Batches that are read ahead are those that would have been read anyway."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from slipstream import AsyncSampler, ConfigurationError, DatasetError, MultimodalReplayBuffer


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
    """Counts up; fails at a number if told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.count, self.fail_at = 0, fail_at

    def sample(self, batch_size: int) -> int:
        self.count += 1
        if self.count == self.fail_at:
            raise OSError(5, "the disk is on fire")
        return self.count


def test_no_more_than_the_queue_holds_is_read_ahead():
    numbers = Numbers()
    with AsyncSampler(numbers, 1, queue_size=3) as sampler:
        while numbers.count < 3:
            time.sleep(0.001)
        time.sleep(0.05)
        assert numbers.count == 3
        assert [sampler.get_batch() for _ in range(8)] == list(range(1, 9))


def test_an_error_comes_after_the_batches_before_it_and_stays():
    with AsyncSampler(Numbers(fail_at=3), 1) as sampler:
        assert [sampler.get_batch(), sampler.get_batch()] == [1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is on fire"):
                sampler.get_batch()


def test_a_buffer_that_is_closed_is_an_error_for_whoever_asks(buffers):
    with AsyncSampler(buffers[0], 2, queue_size=1) as sampler:
        sampler.get_batch()
        buffers[0].close()
        with pytest.raises(DatasetError, match="closed"):
            for _ in range(5):
                sampler.get_batch()


def test_after_stop_there_are_no_batches_and_no_thread():
    before = threading.active_count()
    sampler = AsyncSampler(Numbers(), 1)
    sampler.stop()
    sampler.stop()
    assert threading.active_count() == before
    with pytest.raises(DatasetError, match="the sampler was stopped"):
        sampler.get_batch()


def test_waiting_ends_when_another_thread_stops_it():
    class Slow(Numbers):
        def sample(self, batch_size):
            time.sleep(0.3)
            return super().sample(batch_size)

    sampler = AsyncSampler(Slow(), 1)
    threading.Timer(0.05, sampler.stop).start()
    with pytest.raises(DatasetError, match="the sampler was stopped"):
        sampler.get_batch()


def test_a_batch_that_does_not_come_in_time_is_an_error():
    class Never(Numbers):
        def sample(self, batch_size):
            time.sleep(0.5)
            return 1

    with AsyncSampler(Never(), 1) as sampler, pytest.raises(TimeoutError, match="no batch within 0.01 s"):
        sampler.get_batch(timeout_s=0.01)


def test_a_sampler_that_is_dropped_ends_its_thread():
    before = threading.active_count()
    sampler = AsyncSampler(Numbers(), 1)
    sampler.get_batch()
    del sampler
    gc.collect()
    assert threading.active_count() == before


def test_it_can_be_iterated_over():
    with AsyncSampler(Numbers(), 1) as sampler:
        assert [batch for batch, _ in zip(sampler, range(3), strict=False)] == [1, 2, 3]


def test_in_a_forked_child_it_says_so_instead_of_waiting_for_ever():
    with AsyncSampler(Numbers(), 1) as sampler:
        sampler.get_batch()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sampler.get_batch()
            except DatasetError as error:
                code = 0 if "belongs to the parent process" in str(error) else 2
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
    with pytest.raises(ConfigurationError, match="is 0, expected a whole number from 1 up"):
        AsyncSampler(Numbers(), **options)


def test_a_sampler_that_is_dropped_by_a_thread_its_batch_waits_for_does_not_hang():
    script = (
        "import gc, threading, time\n"
        "from slipstream import AsyncSampler\n"
        "class Buffer:\n"
        "    def sample(self, count):\n"
        "        time.sleep(0.2)\n"
        "        thread = threading.Thread(target=gc.collect)\n"
        "        thread.start(); thread.join()\n"
        "        return count\n"
        "gc.disable()\n"
        "sampler = AsyncSampler(Buffer(), 2, queue_size=1)\n"
        "thread = sampler._thread\n"
        "sampler.itself = sampler\n"
        "sampler.get_batch()\n"
        "del sampler\n"
        "thread.join()\n"
        "print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "ended\n"
