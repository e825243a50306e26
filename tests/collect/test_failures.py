"""Attempts to break `PipelinedDataCollector`: each works or raises one clear sentence, and nothing hangs."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import CompressedDataCollector, PipelinedDataCollector
from slipstream.collect.policy import hook_randomness
from slipstream.collect.randomness import PrivateRandomness
from slipstream.errors import BackgroundError, ConfigurationError, StateMismatchError
from tests.collect.test_pipelined import PATIENCE_S, Numbers, Uniform, collecting_threads, make_base, uniform_policy


class Gate:
    """A base that stops in the middle of its second batch until a test opens the gate."""

    def __init__(self) -> None:
        self.has_stopped = threading.Event()
        self.is_open = threading.Event()
        self.is_collecting = False
        self.shutdowns: list[bool] = []

    def __iter__(self):
        for step in range(6):
            self.is_collecting = True
            if step == 1:
                self.has_stopped.set()
                assert self.is_open.wait(PATIENCE_S)
            self.is_collecting = False
            yield {"x": torch.tensor(step)}

    def shutdown(self) -> None:
        self.shutdowns.append(self.is_collecting)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports this package; it ends by itself, or the test fails."""
    code = textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300)


# Two names of one argument, and devices.


def test_the_base_has_two_names():
    batches: list[Any] = [{"x": torch.tensor(3)}]
    for name in ("base_collector", "collector"):
        options: dict[str, Any] = {name: batches}
        collector = PipelinedDataCollector(**options, prefetch_count=1)
        assert collector.base_collector is batches
        assert [int(batch["x"]) for batch in collector] == [3]
    with pytest.raises(ConfigurationError, match=r"base_collector or collector .*, got both"):
        PipelinedDataCollector(batches, collector=batches)
    with pytest.raises(ConfigurationError, match=r"base_collector or collector .*, got neither"):
        PipelinedDataCollector()


def test_a_device_is_found_or_refused_by_the_constructor():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    collector = PipelinedDataCollector([{"x": torch.tensor(3)}], "auto", 1)
    assert collector.device == torch.device(expected)
    assert [batch["x"].device.type for batch in collector] == [expected]
    for device in ("cuda:99", "abacus"):
        with pytest.raises(ConfigurationError, match=f"device '{device}' is not available: "):
            PipelinedDataCollector([], device)


# Policies.


def test_a_policy_that_cannot_be_copied_is_refused_and_the_base_stays_as_it_is():
    policy = uniform_policy()
    policy.lock = threading.Lock()
    base = make_base(policy)
    with pytest.raises(ConfigurationError, match=r"TensorDictModule cannot be copied.*cannot pickle '_thread.lock'"):
        PipelinedDataCollector(base, "cpu", 1)
    assert base.policy is policy
    del policy.lock
    assert len(list(PipelinedDataCollector(base, "cpu", 1))) == 6


def test_a_base_that_is_pipelined_already_would_never_get_new_weights_and_is_refused():
    base = Numbers()
    trained = base.policy
    PipelinedDataCollector(base, "cpu", 1)
    with pytest.raises(ConfigurationError, match="belongs to another PipelinedDataCollector"):
        PipelinedDataCollector(base, "cpu", 1)
    trained.weight.data.fill_(3)
    with PipelinedDataCollector(base, "cpu", 1, policy=trained) as collector:
        assert float(next(collector)["weight"]) == 3


def test_a_collector_of_torchrl_can_be_pipelined_again_because_it_remembers_the_trained_policy():
    policy = uniform_policy()
    base = make_base(policy)
    PipelinedDataCollector(base, "cpu", 1)
    policy.module.weight.data.fill_(3)
    with PipelinedDataCollector(base, "cpu", 1) as collector:
        assert float(next(collector)["action"].unique()) == 3


def test_a_hook_of_the_user_that_raises_leaves_the_random_numbers_of_the_thread_alone():
    def refuse(*_: Any) -> None:
        raise ArithmeticError("not now")

    base = Numbers()
    base.policy.register_forward_pre_hook(refuse)
    hook_randomness(base, PrivateRandomness(0))
    with pytest.raises(ArithmeticError):
        base.policy(torch.zeros(1))
    before = torch.get_rng_state()
    torch.rand(1)
    assert not torch.equal(before, torch.get_rng_state())


# Pauses.


def test_pauses_can_be_nested_and_collection_resumes_after_the_last():
    base = Gate()
    with PipelinedDataCollector(base, "cpu", 1) as collector:
        next(collector)
        base.is_open.set()
        with collector.paused():
            with collector.paused():
                pass
            for _ in range(2):
                assert not base.is_collecting
            with pytest.raises(RuntimeError, match="production is paused and no result is ready"):
                for _ in range(3):
                    next(collector)
        seen = [int(batch["x"]) for batch in collector]
        assert seen[-1] == 5


def test_an_exception_inside_a_pause_ends_the_pause():
    base = Gate()
    base.is_open.set()
    with PipelinedDataCollector(base, "cpu", 1) as collector:
        next(collector)
        with pytest.raises(ArithmeticError), collector.paused():
            raise ArithmeticError
        assert [int(batch["x"]) for batch in collector] == [1, 2, 3, 4, 5]


def test_shutdown_inside_a_pause():
    base = Gate()
    base.is_open.set()
    collector = PipelinedDataCollector(base, "cpu", 2)
    next(collector)
    with collector.paused():
        collector.shutdown()
    assert base.shutdowns == [False]
    assert collecting_threads() == []
    with collector.paused(), pytest.raises(RuntimeError, match="shut down"):
        next(collector)


def test_the_state_can_be_saved_and_loaded_inside_a_pause():
    collector = PipelinedDataCollector(Numbers(), "cpu", 2)
    next(collector)
    with collector.paused():
        state = collector.state_dict()
    expected = [int(next(collector)["position"]) for _ in range(4)]
    with collector.paused():
        collector.load_state_dict(state)
    assert [int(next(collector)["position"]) for _ in range(4)] == expected
    collector.shutdown()


def test_a_state_of_another_policy_is_refused_and_changes_nothing():
    class Other(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Uniform(7)

    with PipelinedDataCollector(Other(), "cpu", 1) as other, PipelinedDataCollector(Numbers(), "cpu", 1) as collector:
        for _ in range(5):
            next(other)
        seen = [int(next(collector)["position"])]
        with pytest.raises(StateMismatchError, match=r"the shape of 'weight' is \(7,\), expected \(4,\)"):
            collector.load_state_dict(other.state_dict())
        seen += [int(next(collector)["position"]) for _ in range(3)]
        assert seen == [1, 2, 3, 4]


def test_a_base_that_pauses_its_own_collector_raises_instead_of_waiting_for_itself():
    def generate():
        with collectors[0].paused():
            yield {"x": torch.zeros(1)}

    collectors: list[Any] = [PipelinedDataCollector(generate(), "cpu", 1)]
    with pytest.raises(BackgroundError, match="produce cannot wait for the prefetcher that calls it"):
        next(collectors[0])
    collectors.clear()


# The end.


@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_shutdown_while_another_thread_waits_for_a_batch(prefetch_count):
    base = Gate()
    collector = PipelinedDataCollector(base, "cpu", prefetch_count)
    next(collector)
    assert base.has_stopped.wait(PATIENCE_S)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            next(collector)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    closing = threading.Thread(target=collector.shutdown)
    closing.start()
    # The consumer need not wait for the batch in progress, but the base is not shut down before that is done.
    waiting.join()
    assert "the collector is shut down" in str(errors[0])
    assert base.shutdowns == []
    base.is_open.set()
    closing.join()
    assert base.shutdowns == [False]
    assert collecting_threads() == []


def test_garbage_collection_in_the_middle_of_a_batch_waits_for_it():
    base = Gate()
    collector = PipelinedDataCollector(base, "cpu", 1)
    next(collector)
    assert base.has_stopped.wait(PATIENCE_S)
    opener = threading.Thread(target=base.is_open.set)
    gone = weakref.ref(collector)
    opener.start()
    del collector
    gc.collect()
    opener.join()
    assert gone() is None
    assert collecting_threads() == []
    assert not base.is_collecting


def test_a_failed_base_can_be_shut_down_or_loaded_again():
    class Fragile(Numbers):
        def __iter__(self):
            for batch in super().__iter__():
                if self.position == 4:
                    raise ArithmeticError("the drone left the map")
                yield batch

    collector = PipelinedDataCollector(Fragile(), "cpu", 1)
    state = collector.state_dict()
    for _ in range(2):
        positions = []
        with pytest.raises(BackgroundError, match="batch 3 could not be collected: ArithmeticError: the drone"):
            for batch in collector:
                positions.append(int(batch["position"]))
        assert positions == [1, 2, 3]
        collector.load_state_dict(state)
    collector.shutdown()


def test_a_base_may_end_before_the_first_batch():
    for prefetch_count in (0, 1, 3):
        collector = PipelinedDataCollector([], "cpu", prefetch_count)
        assert collector.next() is None
        assert list(collector) == []
        collector.shutdown()


def test_a_base_that_raises_stop_iteration_or_exits_in_the_thread():
    class Exits:
        def __iter__(self):
            yield {"x": torch.zeros(1)}
            sys.exit("the simulator has exited")

    collector = PipelinedDataCollector(Exits(), "cpu", 1)
    next(collector)
    with pytest.raises(BackgroundError, match="SystemExit: the simulator has exited"):
        next(collector)
    collector.shutdown()


def test_ctrl_c_while_waiting_raises_at_once_and_loses_no_batch():
    run = run_script("""
        import os, signal, threading
        import torch
        from slipstream import PipelinedDataCollector

        signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
        opened = threading.Event()

        def generate():
            for step in range(4):
                if step == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                    opened.wait()
                yield {"x": torch.tensor(step)}

        collector = PipelinedDataCollector(generate(), "cpu", 1)
        seen = []
        try:
            while True:
                seen.append(int(next(collector)["x"]))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        opened.set()
        seen += [int(batch["x"]) for batch in collector]
        collector.shutdown()
        print(seen[-2:], len(set(seen)) == len(seen))
    """)
    assert (run.returncode, run.stdout, run.stderr) == (0, "interrupted\n[2, 3] True\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("prefetch_count", [1, 3])
def test_a_child_forked_during_collection_says_so_and_the_parent_continues(prefetch_count):
    run = run_script(f"""
        import os, threading, warnings
        import torch
        from slipstream import PipelinedDataCollector

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        started, opened = threading.Event(), threading.Event()

        def generate():
            for step in range(6):
                if step == 1:
                    started.set()
                    opened.wait()
                yield {{"x": torch.tensor(step)}}

        collector = PipelinedDataCollector(generate(), "cpu", {prefetch_count})
        next(collector)
        started.wait()
        child = os.fork()
        if child == 0:
            try:
                next(collector)
            except RuntimeError as error:
                print("child:", error, flush=True)
            collector.shutdown()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        opened.set()
        print([int(batch["x"]) for batch in collector])
    """)
    child = "child: a result was in progress when the process was forked: create a new object in the child process"
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{child}\n7\n[1, 2, 3, 4, 5]\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_child_forked_between_batches_continues_with_a_thread_of_its_own():
    run = run_script("""
        import os, warnings
        import torch
        from slipstream import PipelinedDataCollector

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        collector = PipelinedDataCollector([{"x": torch.tensor(step)} for step in range(6)], "cpu", 1)
        next(collector)
        with collector.paused():
            child = os.fork()
        print([int(batch["x"]) for batch in collector], flush=True)
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["0", "[1, 2, 3, 4, 5]", "[1, 2, 3, 4, 5]"]


def test_weights_of_a_policy_on_the_meta_device_are_refused_with_one_sentence():
    base = Numbers()
    base.policy = Uniform().to("meta")
    with pytest.raises((ConfigurationError, BackgroundError), match="meta"), torch.no_grad():
        next(PipelinedDataCollector(base, "cpu", 1))


def test_a_policy_without_weights_collects():
    base = Numbers(length=3)
    base.policy = nn.Identity()  # type: ignore[assignment]
    base.policy.weight = torch.zeros(4)  # type: ignore[assignment]
    assert len(list(PipelinedDataCollector(base, "cpu", 2))) == 3


def test_a_wrapper_whose_policy_cannot_be_replaced_is_refused():
    """Otherwise it would collect with the policy that is trained, while it is trained."""
    policy = uniform_policy()
    base = make_base(policy)
    with pytest.raises(ConfigurationError, match=r"CompressedDataCollector\(PipelinedDataCollector"):
        PipelinedDataCollector(CompressedDataCollector(base), prefetch_count=1)
    base.shutdown()
