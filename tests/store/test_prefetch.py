"""A prefetcher produces every order once, in order; nothing interrupts, loses, leaks or blocks it."""

import _thread
import contextlib
import gc
import itertools
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.store.prefetch import NothingOrderedError, Prefetcher

PATIENCE_S = 60.0  # for what happens soon, on any machine
NAME = "slipstream-prefetch"


class Owner:
    """Something whose lifetime bounds that of a thread."""


class Gate:
    """Produces its requests, but each only after `open` was called; tells when it has begun."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()

    def open(self) -> None:
        self.may_end.set()

    def produce(self, request: Any) -> Any:
        self.began.set()
        assert self.may_end.wait(PATIENCE_S)
        return request


def identity(request: Any) -> Any:
    return request


def producing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def owner():
    yield Owner()
    for thread in producing_threads():
        thread.join(PATIENCE_S)
    assert producing_threads() == []


# Orders and results.


def test_there_is_one_result_per_order_and_in_order(owner):
    prefetcher = Prefetcher(str, owner)
    for number in range(100):
        prefetcher.order(number)
    assert [prefetcher.take() for _ in range(100)] == [str(number) for number in range(100)]
    assert prefetcher.num_ahead == 0
    prefetcher.stop()


def test_nothing_is_produced_that_is_not_ordered(owner):
    produced: list[int] = []
    prefetcher = Prefetcher(produced.append, owner)
    prefetcher.order(1)
    prefetcher.order(2)
    prefetcher.finish()
    prefetcher.stop()
    assert produced == [1, 2]
    assert prefetcher.num_ahead == prefetcher.num_ready == 2


def test_no_thread_runs_before_the_first_order(owner):
    prefetcher = Prefetcher(identity, owner)
    assert producing_threads() == []
    assert prefetcher.stop()
    prefetcher.order(1)
    prefetcher.take()
    assert len(producing_threads()) == 1
    prefetcher.stop()


def test_an_order_wakes_an_idle_thread(owner):
    produced = threading.Semaphore(0)
    prefetcher: Prefetcher[int, None] = Prefetcher(lambda _: produced.release(), owner)
    for number in range(100):
        prefetcher.order(number)
        assert produced.acquire(timeout=PATIENCE_S)
    prefetcher.stop()


def test_taking_what_nobody_ordered_raises_instead_of_waiting_forever(owner):
    prefetcher = Prefetcher(identity, owner)
    with pytest.raises(NothingOrderedError, match="call order"):
        prefetcher.take()


def test_a_result_that_is_late_can_be_taken_later(owner):
    gate = Gate()
    prefetcher = Prefetcher(gate.produce, owner)
    prefetcher.order("late")
    for _ in range(3):
        with pytest.raises(TimeoutError, match="no result within 0.01 s"):
            prefetcher.take(timeout_s=0.01)
    gate.open()
    assert prefetcher.take(timeout_s=1e300) == "late"
    prefetcher.stop()


def test_an_idle_thread_keeps_neither_result_nor_request_alive(owner):
    class Thing:
        pass

    def produce(request: Thing) -> Thing:
        return Thing()

    prefetcher = Prefetcher(produce, owner)
    request = Thing()
    prefetcher.order(request)
    references = [weakref.ref(prefetcher.take()), weakref.ref(request)]
    del request
    # A second order shows that the thread has nothing left to do with the first one.
    prefetcher.order(Thing())
    prefetcher.finish()
    assert [reference() for reference in references] == [None, None]
    prefetcher.stop()


# Errors.


def fail_at_two(request: int) -> int:
    if request == 2:
        raise_deep_inside()
    return request


def raise_deep_inside() -> None:
    raise OSError(5, "the disk is on fire")


def test_an_error_comes_after_the_results_before_it_and_again_on_every_take(owner):
    prefetcher = Prefetcher(fail_at_two, owner)
    for number in range(5):
        prefetcher.order(number)
    assert [prefetcher.take(), prefetcher.take()] == [0, 1]
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is on fire"):
            prefetcher.take()
    assert prefetcher.has_ended


def test_the_traceback_of_an_error_shows_where_it_happened_and_does_not_grow(owner):
    prefetcher = Prefetcher(fail_at_two, owner)
    prefetcher.order(2)
    lengths = set()
    for _ in range(10):
        with pytest.raises(OSError, match="the disk is on fire") as caught:
            prefetcher.take()
        lines = traceback.format_exception(caught.value)
        assert "raise_deep_inside" in "".join(lines)
        lengths.add(len(lines))
    assert len(lengths) == 1


@pytest.mark.parametrize("kind", [StopIteration, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_kind_of_exception_reaches_the_consumer(owner, kind):
    def produce(_: Any) -> None:
        raise kind("of the producer")

    prefetcher = Prefetcher(produce, owner)
    prefetcher.order(None)
    for _ in range(2):
        with pytest.raises(kind, match="of the producer"):
            prefetcher.take()


def test_an_error_with_a_cycle_that_cannot_be_pickled_is_passed_on_as_it_is(owner):
    error = ValueError(threading.Lock())
    error.itself = error  # type: ignore[attr-defined]

    def produce(_: Any) -> None:
        raise error from error

    prefetcher = Prefetcher(produce, owner)
    prefetcher.order(None)
    with pytest.raises(ValueError, match="lock") as caught:
        prefetcher.take()
    assert caught.value is error


def test_abandoning_drops_everything_and_lets_every_take_raise(owner):
    gate = Gate()
    prefetcher = Prefetcher(gate.produce, owner)
    for number in range(3):
        prefetcher.order(number)
    assert gate.began.wait(PATIENCE_S)
    prefetcher.abandon(LookupError("abandoned"))
    prefetcher.order(4)
    gate.open()
    prefetcher.stop()
    for _ in range(2):
        with pytest.raises(LookupError, match="abandoned"):
            prefetcher.take()
    assert (prefetcher.num_ahead, prefetcher.orders, prefetcher.results) == (0, [], [])


# Context.


def test_the_thread_enters_the_context_once_and_leaves_it_at_its_end(owner):
    events: list[Any] = []

    @contextlib.contextmanager
    def context():
        events.append("enter")
        yield
        events.append("leave")

    prefetcher = Prefetcher(events.append, owner, context=context)
    for number in range(3):
        prefetcher.order(number)
    prefetcher.finish()
    prefetcher.stop()
    assert events == ["enter", 0, 1, 2, "leave"]


def test_an_error_of_the_context_reaches_the_consumer(owner):
    class Context:
        def __enter__(self) -> None:
            raise RuntimeError("no device")

        def __exit__(self, *_: object) -> None:
            pass

    prefetcher = Prefetcher(identity, owner, context=Context)
    prefetcher.order(1)
    with pytest.raises(RuntimeError, match="no device"):
        prefetcher.take()


# Pausing.


def test_a_pause_waits_for_the_result_in_progress_and_shows_what_is_left(owner):
    gate = Gate()
    prefetcher = Prefetcher(gate.produce, owner)
    for number in range(3):
        prefetcher.order(number)
    assert gate.began.wait(PATIENCE_S)
    threading.Thread(target=gate.open).start()
    with prefetcher.paused(), prefetcher.paused():
        assert prefetcher.results + prefetcher.orders == [0, 1, 2]
        assert prefetcher.num_ready >= 1
        for _ in range(prefetcher.num_ready):
            prefetcher.take()
        if prefetcher.orders:
            with pytest.raises(RuntimeError, match="production is paused"):
                prefetcher.take()
            with pytest.raises(RuntimeError, match="production is paused"):
                prefetcher.finish()
    prefetcher.finish()
    prefetcher.stop()


def test_nothing_is_produced_in_the_pauses_of_several_threads(owner):
    pauses = deque[int]()
    offences: list[int] = []

    def produce(request: int) -> int:
        offences.extend(pauses)
        return request

    def pause() -> None:
        for _ in range(100):
            with prefetcher.paused():
                pauses.append(1)
                pauses.pop()

    prefetcher = Prefetcher(produce, owner)
    pausing = [threading.Thread(target=pause) for _ in range(3)]
    for thread in pausing:
        thread.start()
    for number in range(300):
        prefetcher.order(number)
        assert prefetcher.take() == number
    for thread in pausing:
        thread.join()
    prefetcher.stop()
    assert offences == []


def test_a_take_waits_through_the_pause_of_another_thread(owner):
    paused = threading.Event()
    resume = threading.Event()

    def pause() -> None:
        with prefetcher.paused():
            paused.set()
            assert resume.wait(PATIENCE_S)

    prefetcher = Prefetcher(identity, owner)
    pausing = threading.Thread(target=pause)
    pausing.start()
    assert paused.wait(PATIENCE_S)
    prefetcher.order(1)
    with pytest.raises(TimeoutError):
        prefetcher.take(timeout_s=0.01)
    resume.set()
    assert prefetcher.take() == 1
    pausing.join()
    prefetcher.stop()


def test_reset_replaces_orders_and_results_and_forgets_an_error(owner):
    prefetcher: Prefetcher[int, Any] = Prefetcher(fail_at_two, owner)
    prefetcher.order(2)
    prefetcher.order(3)
    prefetcher.finish()
    prefetcher.stop()
    prefetcher.reset([20, 30], ["ready"])
    assert prefetcher.num_ahead == 3
    assert [prefetcher.take() for _ in range(3)] == ["ready", 20, 30]
    with pytest.raises(RuntimeError, match="call reset"):
        prefetcher.reset()
    with prefetcher.paused():
        prefetcher.reset([40])
    assert prefetcher.take() == 40
    prefetcher.stop()


# Stopping.


def test_stop_waits_for_the_result_in_progress_only_and_loses_nothing(owner):
    gate = Gate()
    prefetcher = Prefetcher(gate.produce, owner)
    for number in range(5):
        prefetcher.order(number)
    assert gate.began.wait(PATIENCE_S)
    assert not prefetcher.stop(timeout_s=0.01)
    gate.open()
    assert prefetcher.stop()
    assert producing_threads() == []
    assert (prefetcher.results, prefetcher.orders) == ([0], [1, 2, 3, 4])
    assert [prefetcher.take() for _ in range(5)] == list(range(5))
    prefetcher.stop()


def test_a_take_that_waits_while_another_thread_stops_starts_the_thread_again(owner):
    gate = Gate()
    prefetcher = Prefetcher(gate.produce, owner)
    prefetcher.order(0)
    prefetcher.order(1)
    taken: list[int] = []
    taking = threading.Thread(target=lambda: taken.extend([prefetcher.take(), prefetcher.take()]))
    taking.start()
    assert gate.began.wait(PATIENCE_S)
    prefetcher.stop(timeout_s=0.0)
    gate.open()
    taking.join(PATIENCE_S)
    assert taken == [0, 1]
    prefetcher.stop()


def test_produce_may_stop_its_own_thread_and_may_not_wait_for_itself(owner):
    errors: list[BaseException] = []

    def produce(request: int) -> int:
        assert prefetcher.stop()
        for wait in (prefetcher.take, prefetcher.finish, prefetcher.paused().__enter__):
            with pytest.raises(RuntimeError, match="produce cannot wait") as caught:
                wait()
            errors.append(caught.value)
        return request

    prefetcher = Prefetcher(produce, owner)
    for number in range(3):
        prefetcher.order(number)
    assert [prefetcher.take() for _ in range(3)] == [0, 1, 2]
    assert len(errors) == 9
    prefetcher.stop()


def test_garbage_collection_of_the_owner_ends_the_thread_without_waiting():
    gate = Gate()
    owner = Owner()
    prefetcher = Prefetcher(gate.produce, owner)
    prefetcher.order(1)
    assert gate.began.wait(PATIENCE_S)
    (thread,) = producing_threads()
    del owner
    assert thread.is_alive()
    gate.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_garbage_collection_of_the_owner_waits_for_the_result_in_progress_on_request():
    gate = Gate()
    owner = Owner()
    prefetcher = Prefetcher(gate.produce, owner, drop_wait_s=PATIENCE_S)
    prefetcher.order(1)
    assert gate.began.wait(PATIENCE_S)
    threading.Thread(target=gate.open).start()
    del owner
    assert producing_threads() == []
    assert prefetcher.results == [1]


def test_garbage_collection_may_stop_it_in_the_middle_of_any_method(owner):
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            prefetcher.stop()

    prefetcher: Prefetcher[int, list[int]] = Prefetcher(lambda request: [request], owner)
    taken = []
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(200):
            Cycle()
            prefetcher.order(number)
            with prefetcher.paused():
                Cycle()
            taken += prefetcher.take()
    finally:
        gc.set_threshold(*thresholds)
    assert taken == list(range(200))
    gc.collect()
    prefetcher.stop()


# Several consumers.


def test_several_consumers_get_every_result_once_and_in_order(owner):
    prefetcher = Prefetcher(identity, owner)
    taken: list[list[int]] = [[] for _ in range(6)]

    def consume(mine: list[int]) -> None:
        with contextlib.suppress(NothingOrderedError):
            while True:
                mine.append(prefetcher.take())

    for number in range(600):
        prefetcher.order(number)
    consumers = [threading.Thread(target=consume, args=(mine,)) for mine in taken]
    for thread in consumers:
        thread.start()
    for thread in consumers:
        thread.join(PATIENCE_S)
    assert sorted(itertools.chain(*taken)) == list(range(600))
    assert all(mine == sorted(mine) for mine in taken)
    prefetcher.stop()


def test_only_one_thread_produces_however_many_consumers_start_and_stop_it(owner):
    producing = threading.Lock()
    num_taken = deque[int]()

    def produce(request: int) -> int:
        assert producing.acquire(blocking=False), "two threads produce at once"
        producing.release()
        return request

    def use() -> None:
        for _ in range(50):
            prefetcher.order(0)
            with contextlib.suppress(NothingOrderedError):
                num_taken.append(prefetcher.take())
            prefetcher.stop()

    prefetcher = Prefetcher(produce, owner)
    users = [threading.Thread(target=use) for _ in range(6)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join(PATIENCE_S)
    assert len(num_taken) == 300
    assert not prefetcher.has_ended
    prefetcher.stop()


# Without threads.


def refuse_to_start(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def no_threads(monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", refuse_to_start)
    return monkeypatch


def test_without_threads_results_are_produced_where_they_are_taken(owner, no_threads, caplog):
    entered = []

    @contextlib.contextmanager
    def context():
        entered.append(threading.get_ident())
        yield

    prefetcher = Prefetcher(fail_at_two, owner, context=context)
    for number in range(5):
        prefetcher.order(number)
    assert [prefetcher.take(timeout_s=0.0), prefetcher.take()] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is on fire"):
            prefetcher.take()
    prefetcher.finish()
    assert set(entered) == {threading.get_ident()}
    assert caplog.text.count("can't start new thread") == 1
    assert prefetcher.stop()


def test_without_threads_every_order_can_be_finished_paused_and_stopped(owner, no_threads):
    def produce(request: int) -> int:
        assert prefetcher.stop()
        return request

    prefetcher = Prefetcher(produce, owner)
    for number in range(3):
        prefetcher.order(number)
    with prefetcher.paused(), pytest.raises(RuntimeError, match="production is paused"):
        prefetcher.take()
    prefetcher.finish()
    assert prefetcher.results == [0, 1, 2]


def test_without_threads_an_interrupt_goes_to_the_consumer_and_the_order_stays(owner, no_threads):
    interrupts = [KeyboardInterrupt("Ctrl-C"), None]

    def produce(request: int) -> int:
        interrupt = interrupts.pop(0)
        if interrupt is not None:
            raise interrupt
        return request

    prefetcher = Prefetcher(produce, owner)
    prefetcher.order(7)
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        prefetcher.take()
    assert prefetcher.take() == 7


def test_without_threads_several_consumers_take_turns(owner, monkeypatch):
    prefetcher = Prefetcher(identity, owner)
    taken = deque[int]()

    def consume() -> None:
        with contextlib.suppress(NothingOrderedError):
            while True:
                taken.append(prefetcher.take())

    with prefetcher.paused():  # so that ordering starts no thread
        for number in range(100):
            prefetcher.order(number)
    consumers = [threading.Thread(target=consume) for _ in range(4)]
    for thread in consumers:
        monkeypatch.undo()
        thread.start()
        monkeypatch.setattr(_thread, "start_new_thread", refuse_to_start)
    for thread in consumers:
        thread.join(PATIENCE_S)
    assert sorted(taken) == list(range(100))
    prefetcher.stop()


def test_a_thread_is_started_as_soon_as_that_is_possible_again(owner, no_threads):
    prefetcher: Prefetcher[None, int] = Prefetcher(lambda _: threading.get_ident(), owner)
    prefetcher.order(None)
    assert prefetcher.take() == threading.get_ident()
    no_threads.undo()
    prefetcher.order(None)
    assert prefetcher.take() != threading.get_ident()
    prefetcher.stop()


def test_one_thread_is_enough(owner, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    prefetcher: Prefetcher[None, int] = Prefetcher(lambda _: threading.get_ident(), owner)
    prefetcher.order(None)
    assert prefetcher.take() != threading.get_ident()
    assert prefetcher.stop()


# Against a model.


class PrefetcherMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a queue of requests that are not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner()
        self.prefetcher: Prefetcher[Any, Any] = Prefetcher(self.produce, self.owner)
        self.ahead: deque[Any] = deque()
        self.failure: type[BaseException] | None = None
        self.pauses = contextlib.ExitStack()
        self.is_paused = False

    @staticmethod
    def produce(request: Any) -> Any:
        if isinstance(request, type):
            raise request
        return request

    @rule(requests=st.lists(st.integers(), max_size=4))
    def order(self, requests):
        for request in requests:
            self.prefetcher.order(request)
            if self.failure is None:
                self.ahead.append(request)

    @precondition(lambda self: not self.is_paused and self.failure is None)
    @rule(kind=st.sampled_from([ValueError, StopIteration, KeyboardInterrupt]))
    def fail(self, kind):
        self.prefetcher.order(kind)
        self.prefetcher.finish()
        self.failure = kind

    @rule(timeout_s=st.sampled_from([None, PATIENCE_S]))
    def take(self, timeout_s):
        if self.ahead and (not self.is_paused or self.prefetcher.results):
            assert self.prefetcher.take(timeout_s) == self.ahead.popleft()
            return
        expected: type[BaseException] = NothingOrderedError
        if self.failure is not None:
            expected = self.failure
        elif self.is_paused:
            expected = RuntimeError
        with pytest.raises(expected):
            self.prefetcher.take(timeout_s)

    @precondition(lambda self: not self.is_paused)
    @rule()
    def finish(self):
        self.prefetcher.finish()
        assert self.prefetcher.results == list(self.ahead)

    @precondition(lambda self: not self.is_paused)
    @rule(depth=st.integers(1, 2))
    def pause(self, depth):
        for _ in range(depth):
            self.pauses.enter_context(self.prefetcher.paused())
        self.is_paused = True

    @precondition(lambda self: self.is_paused)
    @rule()
    def resume(self):
        self.pauses.close()
        self.is_paused = False

    @rule()
    def stop(self):
        assert self.prefetcher.stop()
        assert producing_threads() == []
        assert self.prefetcher.results + self.prefetcher.orders == list(self.ahead)

    @rule(orders=st.lists(st.integers(), max_size=3), results=st.lists(st.integers(), max_size=3))
    def reset(self, orders, results):
        self.prefetcher.stop()
        self.prefetcher.reset(orders, results)
        self.ahead = deque(results + orders)
        self.failure = None

    @rule()
    def abandon(self):
        self.prefetcher.abandon(LookupError("abandoned"))
        self.ahead.clear()
        self.failure = LookupError

    @invariant()
    def everything_that_is_not_taken_is_there(self):
        assert self.prefetcher.num_ahead == len(self.ahead)
        assert self.prefetcher.has_ended == (self.failure is not None)
        if self.is_paused:
            assert self.prefetcher.results + self.prefetcher.orders == list(self.ahead)

    def teardown(self):
        self.pauses.close()
        self.prefetcher.stop()
        assert producing_threads() == []


TestAgainstAModel = PrefetcherMachine.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# Real processes.

PRELUDE = """
import atexit, os, signal, subprocess, sys, threading, time
from slipstream.store.prefetch import NothingOrderedError, Prefetcher

class Owner:
    pass

def wait_for_child(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

owner = Owner()
"""


def run(script: str, *, may_print_errors: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert may_print_errors or done.stderr == ""
    return done.stdout


def test_a_program_that_ends_waits_for_the_result_in_progress():
    out = run("""
began = threading.Event()
may_end = threading.Event()

def produce(request):
    began.set()
    may_end.wait()
    sum(range(3_000_000))
    os.write(1, b"produced\\n")

prefetcher = Prefetcher(produce, owner)
prefetcher.order(1)
prefetcher.order(2)
began.wait()
atexit.register(may_end.set)  # runs before the hook that waits
""")
    assert out == "produced\n"


def test_results_are_produced_inline_after_the_hook_that_ends_all_threads():
    out = run("""
# Hooks run in reverse order, so this one must be registered before the one of the module.
atexit.unregister(sys.modules[Prefetcher.__module__]._stop_all)

@atexit.register
def late():
    prefetcher.order(5)
    print(prefetcher.take(), threading.active_count(), flush=True)

atexit.register(sys.modules[Prefetcher.__module__]._stop_all)
prefetcher = Prefetcher(str, owner)
prefetcher.order(4)
print(prefetcher.take())
""")
    assert out == "4\n5 1\n"


def test_a_forked_child_continues_with_its_own_thread():
    out = run("""
prefetcher = Prefetcher(str, owner)
for number in range(3):
    prefetcher.order(number)
prefetcher.finish()
child = os.fork()
prefetcher.order(3)
assert [prefetcher.take() for _ in range(4)] == ["0", "1", "2", "3"]
assert prefetcher.stop()
if child == 0:
    os._exit(0)
wait_for_child(child)
print("both")
""")
    assert out == "both\n"


def test_a_child_that_is_forked_while_a_result_is_in_progress_gets_an_error_for_it():
    out = run("""
may_end = threading.Event()
began = threading.Event()

def produce(request):
    if request == 1:
        began.set()
        may_end.wait()
    return request

prefetcher = Prefetcher(produce, owner)
for number in range(3):
    prefetcher.order(number)
began.wait()
child = os.fork()
if child == 0:
    assert prefetcher.take() == 0
    for _ in range(2):
        try:
            prefetcher.take(timeout_s=30)
        except RuntimeError as error:
            assert "in progress when the process was forked" in str(error)
    assert prefetcher.orders == [2]
    assert prefetcher.stop()
    os._exit(0)
may_end.set()
wait_for_child(child)
assert [prefetcher.take() for _ in range(3)] == [0, 1, 2]
print("parent has all")
""")
    assert out == "parent has all\n"


def test_a_process_can_be_forked_in_every_state():
    out = run("""
in_child = os.getpid()
prefetcher = Prefetcher(str, owner)
for number in range(100):
    # The thread may be starting, producing, publishing, waiting or ending.
    prefetcher.order(number)
    if number % 3 == 0:
        prefetcher.stop(timeout_s=0.0)
    child = os.fork()
    if child == 0:
        try:
            taken = prefetcher.take(timeout_s=30)
            assert taken == str(number)
        except RuntimeError as error:
            assert "in progress" in str(error), error
        prefetcher.stop()
        os._exit(0)
    wait_for_child(child)
    assert prefetcher.take() == str(number)
print("all")
""")
    assert out == "all\n"


def test_produce_may_fork_and_the_child_may_leave():
    out = run("""
def produce(request):
    child = os.fork()
    if child == 0:
        assert prefetcher.num_ahead == 1
        assert prefetcher.stop()
        os._exit(0)
    wait_for_child(child)
    return request

prefetcher = Prefetcher(produce, owner)
for number in range(5):
    prefetcher.order(number)
    assert prefetcher.take() == number
print("all")
""")
    assert out == "all\n"


def test_a_child_does_not_inherit_the_pause_of_another_thread():
    out = run("""
paused = threading.Event()
resume = threading.Event()

def pause():
    with prefetcher.paused():
        paused.set()
        resume.wait()

prefetcher = Prefetcher(str, owner)
threading.Thread(target=pause).start()
paused.wait()
child = os.fork()
if child == 0:
    prefetcher.order(1)
    assert prefetcher.take(timeout_s=30) == "1"
    os._exit(0)
wait_for_child(child)
resume.set()
print("child took it")
""")
    assert out == "child took it\n"


STORM = """
is_armed = False
num_interrupts = 0

def interrupt(*_):
    global num_interrupts
    if is_armed:
        num_interrupts += 1
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
shooting = subprocess.Popen([sys.executable, "-c", f"import os\\nwhile True: os.kill({os.getpid()}, 2)"])
prefetcher = Prefetcher(lambda request: request, owner)
taken = []
while num_interrupts < NUM_INTERRUPTS or len(taken) <= 10:
    result = None
    try:
        is_armed = True
        while prefetcher.num_ahead < 3:
            prefetcher.order(len(taken) + prefetcher.num_ahead)
        result = prefetcher.take()
        is_armed = False
    except KeyboardInterrupt:
        is_armed = False
    if result is not None:
        taken.append(result)
    if len(taken) % STOP_EVERY == 0:
        try:
            is_armed = True
            prefetcher.stop()
            is_armed = False
        except KeyboardInterrupt:
            is_armed = False
shooting.kill()
shooting.wait()
assert taken == list(range(len(taken))), taken
assert prefetcher.stop()
# A thread whose stop was interrupted needs a moment to end.
while threading.active_count() > 1:
    time.sleep(0.01)
print("all there")
"""


@pytest.mark.parametrize(("num_interrupts", "stop_every"), [(2_000, 1_000_000), (2_000, 2)])
def test_thousands_of_interrupts_lose_no_result_and_leave_no_lock(num_interrupts, stop_every):
    script = STORM.replace("NUM_INTERRUPTS", str(num_interrupts)).replace("STOP_EVERY", str(stop_every))
    # An interrupt inside a finalizer of the standard library is printed and has no other effect.
    assert run(script, may_print_errors=True) == "all there\n"
