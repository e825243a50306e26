"""What older checkpoints lose, and what they keep."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

from slipstream import ConfigurationError, Thin, load_checkpoint
from slipstream.checkpoint.native import NativeFile, encode_metadata, write_native
from slipstream.checkpoint.thinning import thin_file


def thinned(path: Any, state: Any, **options: Any) -> tuple[Any, tuple[str, ...]]:
    """Save a state, thin it, and return what is left, and what the file says about it."""
    write_native(path, state, encode_metadata({"step": 3}), sequence=7)
    thin_file(path, Thin(**options))
    with NativeFile(path) as file:
        assert file.header.sequence == 7
        assert file.metadata == {"step": 3}
        return file.load(), file.header.thinned


def adam() -> torch.optim.Adam:
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    return optimizer


def test_optimizers_are_found_by_their_shape_wherever_they_are(tmp_path):
    state = {
        "policy": {"optimizer_gain": torch.ones(3), "weight": torch.ones(5)},
        "actor_optim": adam().state_dict(),
        "agents": [{"critic": torch.ones(2), "opt": adam().state_dict()}, (1, adam().state_dict())],
        "step": 5,
    }
    left, said = thinned(tmp_path / "c.slip", state)
    assert list(left) == ["policy", "agents", "step"]
    assert list(left["policy"]) == ["optimizer_gain", "weight"]
    assert list(left["agents"][0]) == ["critic"]
    assert left["agents"][1] == (1,)
    assert said == ("without actor_optim", "without agents/0/opt", "without agents/1/1")


def test_named_branches_are_dropped_on_request(tmp_path):
    state = {"policy": {"weight": torch.ones(5), "replay": torch.ones(9)}, "optimizer": adam().state_dict()}
    left, said = thinned(tmp_path / "c.slip", state, drop=("*/replay", "absent"))
    assert list(left["policy"]) == ["weight"]
    assert "optimizer" in left
    assert said == ("without */replay",)


def test_large_floats_are_converted_and_everything_else_stays(tmp_path):
    model = torch.nn.Linear(64, 64)
    weights: Any = model.state_dict()
    weights["tied"] = weights["weight"]
    state: dict[str, Any] = {
        "model": weights,
        "parameter": torch.nn.Parameter(torch.randn(2000)),
        "list": [torch.randn(40, 40), torch.randn(3)],
        "counter": torch.tensor(16_777_217.0, dtype=torch.float64),
        "integers": torch.arange(5000),
        "strided": torch.randn(50, 60).t(),
        "tail": torch.randn(4000)[2000:],
    }
    left, said = thinned(tmp_path / "c.slip", state, dtype=torch.bfloat16)
    assert type(left["model"]) is OrderedDict
    assert vars(left["model"])["_metadata"] == weights._metadata
    assert left["model"]["weight"].dtype == torch.bfloat16
    assert left["model"]["bias"].dtype == torch.float32
    # Still the same memory.
    left["model"]["weight"][0, 0] = 9.0
    assert left["model"]["tied"][0, 0] == 9.0
    assert isinstance(left["parameter"], torch.nn.Parameter)
    assert left["parameter"].requires_grad
    assert [tensor.dtype for tensor in left["list"]] == [torch.bfloat16, torch.float32]
    assert left["counter"] == 16_777_217.0
    assert torch.equal(left["integers"], state["integers"])
    assert torch.equal(left["strided"], state["strided"].bfloat16())
    assert left["strided"].stride() == state["strided"].stride()
    assert torch.equal(left["tail"], state["tail"].bfloat16())
    assert said == ("6 tensors as bfloat16",)


def test_overlapping_views_stay_overlapping(tmp_path):
    base = torch.randn(5000)
    left, _ = thinned(tmp_path / "c.slip", {"whole": base, "part": base[1001:4001]}, dtype=torch.float16)
    assert torch.equal(left["whole"], base.half())
    assert torch.equal(left["part"], base[1001:4001].half())
    left["whole"].zero_()
    assert not left["part"].any()


def test_numbers_that_would_overflow_stay_as_they_are(tmp_path):
    large = torch.full((2000,), 1e30)
    infinite = torch.full((2000,), float("inf"))
    left, said = thinned(tmp_path / "c.slip", {"large": large, "infinite": infinite}, dtype=torch.float16)
    assert torch.equal(left["large"], large)
    assert left["infinite"].dtype == torch.float16
    assert left["infinite"].isinf().all()
    assert said == ("1 tensor as float16",)


def test_a_checkpoint_with_nothing_to_remove_is_marked_so_that_it_is_not_tried_again(tmp_path):
    left, said = thinned(tmp_path / "c.slip", {"x": torch.ones(3)})
    assert torch.equal(left["x"], torch.ones(3))
    assert said == ("nothing to remove",)


@pytest.mark.parametrize(
    "options",
    [
        {"keep_full": 0},
        {"keep_full": -1},
        {"drop": "optimizer"},
        {"drop": (3,)},
        {"drop": 3},
        {"dtype": torch.int8},
        {"dtype": torch.float8_e4m3fn},
        {"dtype": torch.float8_e8m0fnu},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigurationError, match="expected"):
        Thin(**options)


def test_a_damaged_file_is_not_replaced(tmp_path):
    path = tmp_path / "c.slip"
    write_native(path, {"x": torch.randn(3000)})
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        thin_file(path, Thin())
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(path)


def test_items_of_a_list_are_dropped_by_their_original_positions(tmp_path):
    parts = [adam().state_dict(), adam().state_dict(), torch.ones(3), adam().state_dict(), "x"]
    left, said = thinned(tmp_path / "c.slip", {"parts": parts})
    assert torch.equal(left["parts"][0], torch.ones(3))
    assert left["parts"][1:] == ["x"]
    assert said == ("without parts/0", "without parts/1", "without parts/3")


def test_branches_with_the_same_printed_name_are_both_dropped(tmp_path):
    state = {
        "a/b": adam().state_dict(),
        "a": {"b": adam().state_dict()},
        0: adam().state_dict(),
        "0": adam().state_dict(),
    }
    left, said = thinned(tmp_path / "c.slip", state)
    assert left == {"a": {}}
    assert len(said) == 4
    assert load_checkpoint(tmp_path / "c.slip") == {"a": {}}
