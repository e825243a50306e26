"""The ledger: each rollout counts once, in order, whatever is lost, repeated, or forgotten by a killed learner."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream import ConfigurationError, Order, OrderError, OrderLedger, StateMismatchError
from slipstream.dist import shard_seed


def fulfil(ledger: OrderLedger) -> list[Order]:
    """Let everything that is ordered arrive."""
    orders = ledger.orders()
    for order in orders:
        assert ledger.accept(order, state=state_after(order))
    return orders


def state_after(order: Order) -> bytes:
    return f"{order.shard} after {order.index}".encode()


def test_a_synchronous_ledger_orders_one_rollout_of_each_shard_with_the_weights_of_its_round():
    ledger = OrderLedger(3)
    for index in range(4):
        assert fulfil(ledger) == [Order(shard, index, index) for shard in range(3)]
        assert ledger.is_complete
        ledger.advance()
    assert ledger.num_rounds == 4


def test_a_stale_ledger_orders_rounds_ahead_with_older_weights():
    ledger = OrderLedger([4, 7], staleness=2)
    assert ledger.orders() == [Order(shard, index, 0) for index in range(3) for shard in (4, 7)]
    fulfil(ledger)
    ledger.advance()
    assert ledger.orders() == [Order(4, 3, 1), Order(7, 3, 1)]


def test_nothing_is_ordered_after_the_last_round():
    ledger = OrderLedger(1, staleness=3, total_rounds=2)
    assert ledger.orders() == [Order(0, 0, 0), Order(0, 1, 0)]


def test_a_rollout_that_arrives_twice_counts_once():
    ledger = OrderLedger(1)
    [order] = ledger.orders()
    assert ledger.accept(order, state=b"first")
    assert not ledger.accept(order, state=b"second")
    ledger.advance()
    assert not ledger.accept(order, state=b"third")
    assert ledger.state(ledger.orders()[0]) == b"first"
    assert ledger.duplicates == 2


@pytest.mark.parametrize(
    "order",
    [Order(2, 0, 0), Order(0, 1, 1), Order(0, 0, 1), Order(-1, 0, 0), Order(0, 5, 5)],
    ids=["another shard", "a later round", "other weights", "a negative shard", "far ahead"],
)
def test_a_rollout_that_was_not_ordered_is_refused(order):
    ledger = OrderLedger(2)
    with pytest.raises(OrderError, match=f"rollout {order.index} of shard {order.shard}"):
        ledger.accept(order)
    assert len(ledger.orders()) == 2


def test_a_later_rollout_of_a_shard_cannot_arrive_before_an_earlier_one():
    ledger = OrderLedger(1, staleness=1)
    _, second = ledger.orders()
    assert not ledger.has_state(second)
    with pytest.raises(OrderError, match="has not arrived"):
        ledger.state(second)
    with pytest.raises(OrderError, match="expected rollout 0 first"):
        ledger.accept(second)


def test_a_round_that_is_not_complete_cannot_be_taken():
    ledger = OrderLedger(2)
    ledger.accept(Order(0, 0, 0))
    with pytest.raises(OrderError, match="rollout 0 of shard 1 has not arrived"):
        ledger.advance()


def test_an_order_that_is_lost_too_often_is_named_with_the_last_reason():
    ledger = OrderLedger(2, max_restarts=2)
    [first, second] = ledger.orders()
    ledger.lose(first, "a")
    ledger.lose(second, "b")
    ledger.lose(first, "c")
    assert ledger.redone == 3
    assert ledger.orders() == [first, second]
    with pytest.raises(
        OrderError, match="rollout 0 of shard 0 was lost 3 times, expected at most max_restarts=2; .* d$"
    ):
        ledger.lose(first, "d")


def test_losses_are_counted_for_each_rollout():
    ledger = OrderLedger(1, max_restarts=1)
    for _ in range(5):
        [order] = ledger.orders()
        ledger.lose(order, "the node left")
        ledger.accept(order)
        ledger.advance()
    assert ledger.redone == 5


@pytest.mark.parametrize(
    "arguments",
    [{"shards": 0}, {"shards": []}, {"shards": [1, 1]}, {"shards": [-1]}, {"shards": 1, "staleness": -1}],
)
def test_invalid_arguments_are_refused(arguments):
    with pytest.raises(ConfigurationError):
        OrderLedger(**arguments)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"num_rounds": "x", "states": {}},
        {"num_rounds": -1, "states": {"0": None, "1": None}},
        {"num_rounds": 0, "states": None},
        {"num_rounds": 0, "states": {"7": None}},
    ],
)
def test_the_state_of_something_else_is_refused_and_changes_nothing(state):
    ledger = OrderLedger(2)
    with pytest.raises(StateMismatchError):
        ledger.load_state_dict(state)
    assert len(fulfil(ledger)) == 2


def test_seeds_differ_between_shards_rollouts_and_runs_and_from_those_of_environments():
    seeds = {Order(shard, index, 0).seed(run) for shard in range(4) for index in range(8) for run in range(2)}
    environments = {shard_seed(run, shard) for shard in range(4) for run in range(2)}
    assert len(seeds) == 64
    assert not seeds & environments
    assert Order(1, 2, 0).seed(3) == Order(1, 2, 9).seed(3)


class LedgerMachine(RuleBasedStateMachine):
    """Compare a ledger with plain counters, while orders are lost, repeated and resumed from older checkpoints."""

    saved = Bundle("saved")

    @initialize(num_shards=st.integers(1, 3), staleness=st.integers(0, 2))
    def begin(self, num_shards: int, staleness: int) -> None:
        self.staleness = staleness
        self.ledger = OrderLedger(num_shards, staleness=staleness, max_restarts=10**6)
        self.arrived = dict.fromkeys(range(num_shards), 0)
        self.trained: list[list[Order]] = []

    def next_of(self, shard: int) -> Order:
        index = self.arrived[shard]
        return Order(shard, index, max(0, index - self.staleness))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        orders = [order for order in self.ledger.orders() if order == self.next_of(order.shard)]
        if not orders:
            return
        order = data.draw(st.sampled_from(orders))
        assert self.ledger.accept(order, state=state_after(order))
        self.arrived[order.shard] += 1

    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(sorted(self.arrived)))
        if not self.arrived[shard]:
            return
        index = data.draw(st.integers(0, self.arrived[shard] - 1))
        assert not self.ledger.accept(Order(shard, index, max(0, index - self.staleness)), state=b"other")

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        orders = self.ledger.orders()
        if orders:
            self.ledger.lose(data.draw(st.sampled_from(orders)), "killed")

    @rule()
    def train(self) -> None:
        if self.ledger.is_complete:
            self.trained.append(self.ledger.orders_of(self.ledger.num_rounds))
            self.ledger.advance()

    @rule(target=saved)
    def save(self) -> tuple[dict[str, object], list[list[Order]]]:
        return self.ledger.state_dict(), list(self.trained)

    @rule(saved=saved, other=st.booleans())
    def resume(self, saved: tuple[dict[str, object], list[list[Order]]], other: bool) -> None:
        state, trained = saved
        if other:
            self.ledger = OrderLedger(len(self.arrived), staleness=self.staleness, max_restarts=10**6)
        self.ledger.load_state_dict(state)
        self.arrived = dict.fromkeys(self.arrived, len(trained))
        # The history that survives is that of the checkpoint.
        self.trained = list(trained)

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def each_rollout_was_trained_on_once(self) -> None:
        assert self.ledger.num_rounds == len(self.trained)
        for index, orders in enumerate(self.trained):
            version = max(0, index - self.staleness)
            assert orders == [Order(shard, index, version) for shard in sorted(self.arrived)]

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def what_has_not_arrived_is_ordered_from_the_state_before_it(self) -> None:
        last = self.ledger.num_rounds + self.staleness
        expected = {(shard, index) for shard in self.arrived for index in range(self.arrived[shard], last + 1)}
        assert {(order.shard, order.index) for order in self.ledger.orders()} == expected
        for order in self.ledger.orders():
            if order == self.next_of(order.shard):
                before = None if not order.index else state_after(Order(order.shard, order.index - 1, 0))
                assert self.ledger.state(order) == before


TestLedger = LedgerMachine.TestCase


def test_the_state_of_a_ledger_is_a_copy():
    ledger = OrderLedger(1)
    ledger.accept(Order(0, 0, 0), state=b"abc")
    ledger.advance()
    state = ledger.state_dict()
    state["states"]["0"][:] = np.frombuffer(b"xyz", np.uint8)
    assert ledger.state(Order(0, 1, 1)) == b"abc"
