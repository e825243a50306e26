"""Selecting keys: by name, by pattern, by exact path; whatever matches nothing is reported."""

import enum
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from slipstream.errors import ConfigurationError, MissingEntryError
from slipstream.schema.flatten import Tree, flatten
from slipstream.schema.nodes import name_of
from slipstream.schema.structure import drop_keys, select_keys
from slipstream.schema.unflatten import unflatten
from slipstream.schema.walk import all_keys
from slipstream.tensors import TORCH

STATE = {
    "policy": OrderedDict([("actor.weight", np.ones(2)), ("critic.weight", np.zeros(3))]),
    "optimizer": {"state": {0: {"step": np.array(1)}, 1: {"step": np.array(2)}}, "lr": 0.1},
    "pair": (np.array([5]), {"optimizer": 6}),
    "lists": [np.array([7]), {"keep": 8}],
}
ODD = {
    "a": "first letter",
    "abc": "word",
    "abd": "other word",
    "layers[0]": "brackets",
    "layers0": "no brackets",
    "w*": "star",
    "what?": "question",
    "x/y": "slash in a name",
    "x": {"y": "two levels"},
    1: "int",
    2.5: "float",
    math.nan: "NaN",
    (1, 2.0): "tuple",
    None: "none",
    b"x": "bytes",
}


def chosen(state: Any, keys: Any) -> Any:
    """Return the part of a state that is under some keys."""
    tree = flatten(state).select_keys(keys)
    return unflatten(tree.structure, tree.leaves, torch=TORCH)


def leaf_names(tree: Tree) -> list[str]:
    return [name_of(key) for key, _ in tree.nodes]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("policy", ["policy/actor.weight", "policy/critic.weight"]),
        (["policy"], ["policy/actor.weight", "policy/critic.weight"]),
        ({"policy/actor*"}, ["policy/actor.weight"]),
        (["optimizer/state/1"], ["optimizer/state/1/step"]),
        ([("optimizer", "state", 1)], ["optimizer/state/1/step"]),
        (["pair/0", "lists/0"], ["pair/0", "lists/0"]),
        (["*/step"], ["optimizer/state/0/step", "optimizer/state/1/step"]),
        (["policy", "policy/actor.weight", "policy/c*"], ["policy/actor.weight", "policy/critic.weight"]),
        (("policy/?????.weight", ("pair",)), ["policy/actor.weight", "pair/0"]),
    ],
    ids=str,
)
def test_selecting_keeps_the_branches_that_match_with_everything_below_them(keys, names):
    tree = flatten(STATE).select_keys(keys)
    assert leaf_names(tree) == names
    whole = {name_of(key): value for key, value in flatten(STATE).values()}
    for name, leaf in zip(names, tree.leaves, strict=True):
        assert leaf is whole[name]


def test_containers_keep_their_types():
    selected = chosen(STATE, ["policy/actor*", "pair/1", "optimizer/state/1"])
    assert type(selected["policy"]) is OrderedDict
    assert selected["pair"] == ({"optimizer": 6},)
    assert list(selected["optimizer"]["state"]) == [1]


def test_a_tensordict_keeps_its_names_and_device():
    value = TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}, [2], names=["time"], device="cpu")
    selected = chosen({"td": value, "x": 1}, "td/a")["td"]
    assert list(selected.keys()) == ["a"]
    assert selected.names == ["time"]
    assert selected.device == torch.device("cpu")


def test_a_string_is_one_key_and_not_its_letters():
    assert chosen(ODD, "abc") == {"abc": "word"}
    with pytest.raises(MissingEntryError, match="the state has no key 'ab'"):
        chosen(ODD, "ab")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers[0]", "brackets"),
        ("w*", "star"),
        ("what?", "question"),
        (("x/y",), "slash in a name"),
        (("x", "y"), {"y": "two levels"}),
        ((1,), "int"),
        ((2.5,), "float"),
        ((math.nan,), "NaN"),
        (((1, 2.0),), "tuple"),
        ((None,), "none"),
        ((b"x",), "bytes"),
        ("2.5", "float"),
        ("(1, 2.0)", "tuple"),
    ],
    ids=str,
)
def test_any_key_can_be_selected_by_its_name_or_its_path(key, value):
    selected = chosen(ODD, [key])
    assert list(selected.values()) == [value]


class Color(enum.Enum):
    RED = 1


WEIGHT = torch.ones(2)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("b", {"b": 3}),
        ("Color.RED", {Color.RED: [1, 2]}),
        ([(Color.RED, 1)], {Color.RED: [2]}),
        ([((Color.RED, 0), "x")], {(Color.RED, 0): {"x": 4}}),
        ([(WEIGHT,)], {WEIGHT: 5}),
        ("*x", {(Color.RED, 0): {"x": 4}}),
    ],
    ids=str,
)
def test_keys_may_be_objects_in_the_same_process(keys, expected):
    state = {"b": 3, Color.RED: [1, 2], (Color.RED, 0): {"x": 4}, WEIGHT: 5}
    tree = flatten(state, opaque=True).select_keys(keys)
    assert unflatten(tree.structure, tree.leaves, tree.objects) == expected
    with pytest.raises(MissingEntryError, match="top-level keys are 'b', 'Color.RED', "):
        flatten(state, opaque=True).select_keys("absent")


def test_a_null_and_an_empty_container_can_be_selected():
    state: Any = {"none": None, "empty": {}, "list": [], "other": 1}
    assert chosen(state, ["none", "empty", ("list",)]) == {"none": None, "empty": {}, "list": []}


def test_a_name_that_several_keys_have_selects_all_of_them():
    assert chosen(ODD, "x/y") == {"x/y": "slash in a name", "x": {"y": "two levels"}}
    assert chosen({1: "int", "1": "text"}, "1") == {1: "int", "1": "text"}
    assert chosen({1: "int", "1": "text"}, [("1",)]) == {"1": "text"}


def test_a_pattern_has_only_stars_and_question_marks():
    assert chosen(ODD, "ab?") == {"abc": "word", "abd": "other word"}
    assert chosen(ODD, "layers[0*") == {"layers[0]": "brackets"}
    with pytest.raises(MissingEntryError, match=r"no key 'ab\[cd\]'"):
        chosen(ODD, "ab[cd]")


@pytest.mark.parametrize("path", [(1.0,), (True,), ("1",), (1, 2.0), ((1, 2),), ((1.0, 2.0),), ("x", "y", 0), ()])
def test_a_path_matches_keys_of_the_same_value_and_type_only(path):
    with pytest.raises(MissingEntryError, match="the state has no key"):
        chosen(ODD, [path])


def test_every_key_that_matches_nothing_is_named_with_similar_ones():
    with pytest.raises(KeyError) as caught:
        chosen(STATE, ["policy", "optimiser/lr", ("policy", "actor.weights"), "zzz*"])
    assert str(caught.value) == (
        "the state has no key 'optimiser/lr' (similar: 'optimizer/lr', 'optimizer', 'optimizer/state'), "
        "('policy', 'actor.weights') (similar: 'policy/actor.weight', 'policy/critic.weight'), 'zzz*'; "
        "its top-level keys are 'policy', 'optimizer', 'pair', 'lists'"
    )


@pytest.mark.parametrize("state", [{}, [], 5, np.ones(2)])
def test_a_state_without_keys_says_so(state):
    with pytest.raises(MissingEntryError, match="the state has no keys, so nothing matches 'policy'"):
        chosen(state, "policy")


def test_a_wide_state_lists_only_some_of_its_keys():
    with pytest.raises(MissingEntryError, match="'k0', .*'k9' and 90 more$"):
        chosen({f"k{number}": number for number in range(100)}, "zzzz")


@pytest.mark.parametrize(
    ("keys", "error", "problem"),
    [
        (3, TypeError, "keys is 3, expected a string or a collection"),
        (["policy", 3], TypeError, r"keys contains 3, expected strings and tuples; write it as the tuple \(3,\)"),
        (b"policy", TypeError, "keys contains 112"),
        ([("policy", [])], TypeError, "unhashable"),
    ],
)
def test_keys_that_cannot_mean_anything_are_refused(keys, error, problem):
    for function in (select_keys, drop_keys):
        with pytest.raises(error, match=problem):
            function(flatten(STATE).structure, keys)


def test_dropping_leaves_out_the_branches_that_match_wherever_they_are():
    tree = flatten(STATE)
    structure = drop_keys(tree.structure, ["optimizer*", "*/optimizer", "policy/critic*", ("lists", 1), "absent"])
    back = unflatten(structure, ["a", "b", "c"])
    assert back == {"policy": {"actor.weight": "a"}, "pair": ("b", {}), "lists": ["c"]}
    assert len(tree.leaves) == 6


def test_dropping_a_string_drops_one_key_and_not_its_letters():
    state = {"a": 1, "b": 2, "ab": 3}
    assert unflatten(drop_keys(flatten(state).structure, "ab"), []) == {"a": 1, "b": 2}


@pytest.mark.parametrize("keys", [[], (), set()])
def test_selecting_nothing_is_a_mistake_but_dropping_nothing_is_not(keys):
    structure = flatten(STATE).structure
    with pytest.raises(ConfigurationError, match="keys is empty, expected at least one key; pass None for everything"):
        select_keys(structure, keys)
    assert drop_keys(structure, keys) == structure


def test_dropping_what_is_absent_changes_nothing():
    structure = flatten(STATE).structure
    assert drop_keys(structure, ["absent", ("x", 1), "nothing*"]) == structure


KEYS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from([0.0, 1.0, 0.5]) | st.text("a/*?[0", max_size=3)
)
KEYS |= st.tuples(KEYS)
STATES = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)


def value_at(state: Any, path: Any) -> Any:
    for part in path:
        state = state[part]
    return state


@given(STATES, st.data())
@settings(max_examples=200, deadline=None)
def test_every_path_of_a_state_selects_exactly_its_branch(state, data):
    structure = flatten(state).structure
    paths = list(all_keys(structure))
    if not paths:
        return
    path = data.draw(st.sampled_from(paths))
    selected = unflatten(select_keys(structure, [path]), [])
    # Nothing else is left, so the only way through the selection is the path. Lists keep one item.
    for _ in path:
        assert len(selected) == 1
        (selected,) = selected if isinstance(selected, list) else selected.values()
    assert selected == value_at(state, path)
    # The rest is what is left if the branch is dropped.
    num_dropped = sum(1 for key in paths if key[: len(path)] == path)
    assert sum(1 for _ in all_keys(drop_keys(structure, [path]))) == len(paths) - num_dropped
    # Its name finds it too, and possibly others of the same name.
    select_keys(structure, name_of(path))
