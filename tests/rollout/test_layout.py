"""The description of a rollout, and what it refuses to believe."""

import json

import pytest

from slipstream import CorruptFileError, FormatVersionError
from slipstream.rollout.layout import Field, Layout, Node
from slipstream.schema.dtypes import DTYPES

OBSERVATION = ("agents", "observation")
LAYOUT = Layout(
    batch_size=(2, 3),
    time_dim=1,
    names=(None, "time"),
    fields=(
        Field(OBSERVATION, DTYPES["float32"], (4,), "agents/observation", extra=1),
        Field(("half",), DTYPES["bfloat16"], (), "half"),
        Field(("next", *OBSERVATION), DTYPES["float32"], (4,), "agents/observation", 1, "exceptions", "rows", extra=1),
    ),
    nodes=(
        Node(("agents",), (2, 3, 1), 0),
        Node(("next",), (2, 3), 2),
        Node(("next", "agents"), (2, 3), 2),
    ),
)


def changed(**changes):
    return {**json.loads(json.dumps(LAYOUT.to_json())), **changes}


def field(**changes):
    return {"key": ["x"], "dtype": "float32", "shape": [3], "array": "x", **changes}


def test_a_layout_comes_back_from_json():
    assert Layout.from_json(changed()) == LAYOUT


def test_sizes_count_every_tensor_and_integers_carry_what_numpy_lacks():
    assert LAYOUT.num_envs == 2
    assert LAYOUT.num_steps == 3
    assert LAYOUT.raw_bytes == 6 * (4 * 4 + 2 + 4 * 4)
    assert LAYOUT.shape_of(LAYOUT.fields[0]) == (2, 3, 4)


def test_keys_select_tensors_and_everything_below_them():
    assert LAYOUT.select(None) == list(LAYOUT.fields)
    assert LAYOUT.select("half") == [LAYOUT.fields[1]]
    assert LAYOUT.select(["next", ("agents",), ("next", "agents")]) == [LAYOUT.fields[2], LAYOUT.fields[0]]
    with pytest.raises(KeyError, match="nothing under 'agents/lidar'; it has agents/observation, half"):
        LAYOUT.select([("agents", "lidar")])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch_size": [-1, 3]}, "is not a list of sizes"),
        ({"batch_size": [2**70, 3]}, "is not a list of sizes"),
        ({"batch_size": [True, 3]}, "is not a list of sizes"),
        ({"batch_size": "23"}, "'23' is not a list"),
        ({"time_dim": 7}, "time is axis 7"),
        ({"time_dim": -1}, "is not a list of sizes"),
        ({"time_dim": "one"}, "is not a list of sizes"),
        ({"names": None}, "None is not a list"),
        ({"names": "ab"}, "'ab' is not a list"),
        ({"names": ["a"]}, "1 axis names for 2 axes"),
        ({"names": ["a", "a"]}, "two axes have the same name"),
        ({"names": ["a", 1]}, "axis name 1 is not a string"),
        ({"fields": {}}, "is not a list"),
        ({"fields": [7]}, "field 7 is not an object"),
        ({"fields": [{}]}, "'key' is missing"),
        ({"fields": [field(key=[])]}, r"\[\] is not a key"),
        ({"fields": [field(key="x")]}, "'x' is not a list"),
        ({"fields": [field(key=["x", 1])]}, "is not a key"),
        ({"fields": [field(key=["a"] * 65)]}, "has 65 parts, expected 1 to 64"),
        ({"fields": [field(dtype="load")]}, "unknown dtype 'load'"),
        ({"fields": [field(dtype="hub")]}, "unknown dtype 'hub'"),
        ({"fields": [field(dtype=7)]}, "unknown dtype '7'"),
        ({"fields": [field(shape=None)]}, "None is not a list"),
        ({"fields": [field(array=None)]}, "None is not a string"),
        ({"fields": [field(lead=1)]}, "has lead 1 and extra 0"),
        ({"fields": [field(lead=2, extra=2)]}, "has lead 2 and extra 2"),
        ({"fields": [field(lead=1, extra=1)]}, "'mask' is missing"),
        ({"fields": [field(), field()]}, "key 'x' occurs twice"),
        ({"fields": [field(), field(key=["x", "y"])]}, "'x/y' lies below the tensor 'x'"),
        ({"fields": [field(), field(key=["y"])]}, "two tensors are stored in the array 'x'"),
        ({"nodes": [["a"]]}, "does not consist of key, batch size and position"),
        ({"nodes": [7]}, "7 is not a list"),
        ({"nodes": [[[], [2, 3], 0]]}, "is not a key"),
        ({"nodes": [["next", [2, 3], 0]]}, "'next' is not a list"),
        ({"nodes": [[["half"], [2, 3], 0]]}, "key 'half' occurs twice"),
        ({"nodes": [[["half", "below"], [2, 3], 0]]}, "'half/below' lies below the tensor 'half'"),
        ({"nodes": [[["other"], [3, 3], 0]]}, r"\[3, 3\] of 'other' does not begin with \[2, 3\]"),
        ({"nodes": [[["other"], [2, 3], 99]]}, "'other' is at position 99 of 3"),
        ({"nodes": [[["agents"], [2, 3], 1]]}, "'agents' comes after its members"),
        ({"nodes": [[["a"] * 3000, [2, 3], 0]]}, "has 3000 parts"),
    ],
    ids=str,
)
def test_an_invalid_layout_is_damage(change, reason):
    with pytest.raises(CorruptFileError, match=rf"invalid rollout layout \(.*{reason}.*damaged"):
        Layout.from_json(changed(**change))


@pytest.mark.parametrize("document", [None, [], "rollout", {}, {"version": True}, {"version": "1"}])
def test_what_is_no_layout_at_all_is_damage(document):
    with pytest.raises(CorruptFileError, match="has no rollout layout"):
        Layout.from_json(document)


def test_a_layout_of_another_version_is_not_read():
    with pytest.raises(FormatVersionError, match="layout version 2, this release reads version 1"):
        Layout.from_json({"version": 2})
