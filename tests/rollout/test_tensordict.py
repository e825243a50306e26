"""`CompressedTensorDict` is a TensorDict: every operation gives what it gives on the plain batch, bit for bit."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.objectives.value import GAE

from slipstream import CompressedTensorDict

LIDAR = ("agents", "observation", "lidar")
STATE = ("agents", "observation", "state")


def packed_all(batch, **options):
    """Pack every key, small ones too, in small groups, so that every path through the code is taken."""
    return CompressedTensorDict(batch, compress_keys=list(batch.keys(True, True)), group_envs=4, **options)


def assert_same(found, expected):
    """Compare results of any kind: TensorDicts, tensors, tuples of them, and plain values."""
    if is_tensor_collection(expected):
        assert is_tensor_collection(found)
        assert set(found.keys(True)) == set(expected.keys(True))
        assert list(found.keys(True, True)) == list(expected.keys(True, True))
        assert found.batch_size == expected.batch_size
        assert found.names == expected.names
        assert found.device == expected.device
        for key in expected.keys(True):
            assert_same(found.get(key), expected.get(key))
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(bits(found), bits(expected))
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected, equal_nan=expected.dtype.kind == "f")
    else:
        assert found == expected


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def double(tensor):
    return tensor + tensor


def zero_locked(td):
    """Write to a locked TensorDict that was read before: its list of tensors must not be an outdated one."""
    with td.lock_():
        td.mul(1)
        td.zero_()


def shorten(td):
    """Make time an axis of the tensors instead of the batch."""
    td.exclude("agents", "next", inplace=True)
    td.batch_size = [13]


def extra(td, fill=7.0):
    return torch.full((*td.batch_size, 2), fill)


def other(td):
    """Return a plain TensorDict with other values for two keys."""
    action = torch.full(td["action"].shape, 3.0)
    return TensorDict({"action": action, "next": {"reward": td["next", "reward"] + 1}}, td.batch_size)


READS = {
    "index int": lambda td: td[3],
    "index negative": lambda td: td[-1],
    "index numpy int": lambda td: td[np.int64(2)],
    "index two ints": lambda td: td[0, 3],
    "index tensor number": lambda td: td[torch.tensor(2)],
    "index tensor numbers": lambda td: td[torch.tensor(2), 3],
    "index slice": lambda td: td[2:9:3],
    "index slices": lambda td: td[1:6, 2:5],
    "index int then slice": lambda td: td[3, 2:6],
    "index slice then int": lambda td: td[:, 4],
    "index twice": lambda td: td[2:8][1:3, 3],
    "index none": lambda td: td[None],
    "index none inside": lambda td: td[:, None, 2],
    "index ellipsis": lambda td: td[..., 1],
    "index all": lambda td: td[:],
    "index empty slice": lambda td: td[3:3],
    "index tensor": lambda td: td[torch.tensor([5, 5, 0, 12])],
    "index mask": lambda td: td[torch.arange(13) % 2 == 0],
    "index whole mask": lambda td: td[td["next", "done"].squeeze(-1)],
    "index empty mask": lambda td: td[torch.zeros(13, 8, dtype=torch.bool)],
    "index list": lambda td: td[[1, 4]],
    "index range": lambda td: td[range(2, 5)],
    "index numpy": lambda td: td[np.array([2, 0])],
    "index pairs": lambda td: td[torch.tensor([1, 2]), torch.tensor([7, 0])],
    "index tensor then slice": lambda td: td[torch.tensor([1, 2]), 2:4],
    "index slice then tensor": lambda td: td[:, torch.tensor([1, 2])],
    "index matrix": lambda td: td[torch.tensor([[1, 2], [3, 4]])],
    "index view by tensor": lambda td: td[2:9].transpose(0, 1)[torch.tensor([1, 3])],
    "key": lambda td: td["action"],
    "nested key": lambda td: td[LIDAR],
    "nested view": lambda td: td["next"],
    "nested view index": lambda td: td["next"][2, 3],
    "index nested": lambda td: td[2]["next", "agents"],
    "get": lambda td: td.get("action"),
    "get missing": lambda td: td.get("nothing", None),
    "get default": lambda td: td.get(("next", "nothing"), 5),
    "get at": lambda td: td.get_at("action", 3),
    "get at tensor": lambda td: td.get_at("action", torch.tensor([3, 1])),
    "keys": lambda td: list(td.keys()),
    "keys nested": lambda td: list(td.keys(True)),
    "keys leaves": lambda td: list(td.keys(True, True)),
    "keys flat leaves": lambda td: list(td.keys(False, True)),
    "keys sorted": lambda td: list(td.keys(True, True, sort=True)),
    "items": lambda td: dict(td.items()),
    "items nested": lambda td: dict(td.items(True)),
    "items leaves": lambda td: dict(td.items(True, True)),
    "values": lambda td: list(td.values()),
    "values leaves": lambda td: list(td.values(True, True)),
    "contains": lambda td: ["action" in td, "x" in td, LIDAR in td, ("next", "x") in td.keys(True)],
    "len": len,
    "iterate": list,
    "numel": lambda td: [td.numel(), td.ndim, td.dim(), td.shape, td.size(0)],
    "entry class": lambda td: [td.entry_class("action"), td.is_empty()],
    "select": lambda td: td.select("action", ("next", "reward")),
    "select nested": lambda td: td.select("agents"),
    "select lenient": lambda td: td.select("action", "nothing", strict=False),
    "select in place": lambda td: td.select("action", ("next", "reward"), inplace=True),
    "exclude": lambda td: td.exclude("next", ("agents", "observation", "lidar")),
    "exclude in place": lambda td: td.exclude("next", inplace=True),
    "clone": lambda td: td.clone(),
    "clone shallow": lambda td: td.clone(False),
    "copy": lambda td: td.copy(),
    "deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "empty": lambda td: td.empty(),
    "empty recursive": lambda td: td.empty(recurse=True),
    "to_tensordict": lambda td: td.to_tensordict(),
    "to_dict": lambda td: td.to_dict(),
    "flatten": lambda td: td.flatten(0, 1),
    "reshape": lambda td: td.reshape(-1),
    "reshape 3": lambda td: td.reshape(13, 2, 4),
    "reshape tuple": lambda td: td.reshape((8, 13)),
    "reshape of transposed": lambda td: td.transpose(0, 1).reshape(-1),
    "view": lambda td: td.view(-1),
    "view of part": lambda td: td[2:6].view(-1),
    "view dtype": lambda td: td.select("action").view(torch.int32),
    "unflatten": lambda td: td.unflatten(1, (2, 4)),
    "transpose": lambda td: td.transpose(0, 1),
    "permute": lambda td: td.permute(1, 0),
    "unsqueeze": lambda td: td.unsqueeze(1),
    "squeeze": lambda td: td[2:3].squeeze(0),
    "expand": lambda td: td[0].expand(5, 8),
    "unbind": lambda td: td.unbind(0),
    "unbind time": lambda td: td.unbind(1),
    "split": lambda td: td.split(5),
    "split time": lambda td: td.split([2, 6], 1),
    "chunk": lambda td: td.chunk(3),
    "tensor_split": lambda td: td.tensor_split(4),
    "gather": lambda td: td.gather(0, torch.tensor([[0] * 8, [3] * 8])),
    "masked select": lambda td: td.masked_select(torch.arange(104).reshape(13, 8) % 3 == 0),
    "repeat": lambda td: td.repeat(2, 1),
    "repeat_interleave": lambda td: td.repeat_interleave(2, dim=0),
    "apply": lambda td: td.apply(double),
    "named_apply": lambda td: td.named_apply(lambda name, value: value * len(name)),
    "apply batch size": lambda td: td.apply(lambda value: value[0], batch_size=[8]),
    "arithmetic": lambda td: td.select("action") * 2 + 1,
    "abs": lambda td: td.select("action", "agents").abs(),
    "sum": lambda td: td.select("action").sum(dim=0),
    "equal": lambda td: (td == td).all(),
    "where": lambda td: td.where(torch.arange(13)[:, None].expand(13, 8) > 4, td),
    "masked_fill": lambda td: td.select("action").masked_fill(torch.ones(13, 8, dtype=torch.bool), 2.0),
    "stack": lambda td: torch.stack([td[:3], td[3:6]]),
    "stack of views": lambda td: torch.stack([td[:, 0], td[:, 1]], 1),
    "lazy stack": lambda td: LazyStackedTensorDict.lazy_stack([td[0], td[1]]).get("action"),
    "cat": lambda td: torch.cat([td[:3], td[10:]]),
    "cat flat": lambda td: torch.cat([td.reshape(-1), td[0]]),
    "to device": lambda td: td.to("cpu"),
    "to device keyword": lambda td: td.to(device="cpu"),
    "to dtype": lambda td: td.select("action").to(torch.float64),
    "double": lambda td: td.select("action").double(),
    "contiguous": lambda td: td.contiguous(),
    "detach": lambda td: td.detach(),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "unflatten_keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "split_keys": lambda td: td.split_keys(["action"]),
    "numpy": lambda td: td.select("action").numpy()["action"],
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "pickle view": lambda td: pickle.loads(pickle.dumps(td[2:5, 1])),
    "names": lambda td: td.names,
    "bytes": lambda td: td.select("action").bytes() > 0,
    "state_dict": lambda td: td.state_dict()["action"],
}

WRITES = {
    "set": lambda td: td.set("advantage", extra(td)),
    "set nested": lambda td: td.set(("next", "value"), extra(td)),
    "set new node": lambda td: td.set(("losses", "value"), extra(td)),
    "set tensordict": lambda td: td.set("sub", TensorDict({"x": extra(td)}, td.batch_size)),
    "set replaces": lambda td: td.set("action", extra(td)),
    "set item": lambda td: td.__setitem__("action", extra(td)),
    "set in place": lambda td: td.set("action", torch.ones(13, 8, 3), inplace=True),
    "set_": lambda td: td.set_("action", torch.ones(13, 8, 3)),
    "set_ nested": lambda td: td.set_(LIDAR, torch.ones(13, 8, 1, 12)),
    "set_at_": lambda td: td.set_at_("action", torch.ones(8, 3), 3),
    "set_at_ nested": lambda td: td.set_at_(STATE, torch.ones(2, 3), (torch.tensor([1, 5]), torch.tensor([0, 7]))),
    "set_non_tensor": lambda td: td.set_non_tensor("note", "text"),
    "update": lambda td: td.update(other(td)),
    "update dict": lambda td: td.update({"action": extra(td), "new": extra(td)}),
    "update in place": lambda td: td.update(other(td), inplace=True),
    "update_": lambda td: td.update_(other(td)),
    "update_at_": lambda td: td.update_at_(other(td)[2], 2),
    "zero_": lambda td: td.zero_(),
    "fill_": lambda td: td.fill_("action", 4.0),
    "apply_": lambda td: td.select("action", "agents").apply_(lambda value: value.mul_(2)),
    "apply in place": lambda td: td.select("agents").apply(double, inplace=True),
    "mul_": lambda td: td.select("action", "agents").mul_(3),
    "copy_": lambda td: td.select("action").copy_(other(td).select("action")),
    "masked_fill_": lambda td: td.select("action").masked_fill_(torch.arange(104).reshape(13, 8) % 2 == 0, 1.0),
    "add in place": lambda td: td.select("action").__iadd__(1.0),
    "del_": lambda td: td.del_("action"),
    "del nested": lambda td: td.del_(("next", "reward")),
    "del item": lambda td: td.__delitem__("action"),
    "pop": lambda td: td.pop("action"),
    "rename_key_": lambda td: td.rename_key_("action", "act"),
    "rename nested": lambda td: td.rename_key_(("next", "reward"), ("next", "r")),
    "flatten keys in place": lambda td: td.flatten_keys(".", inplace=True),
    "index assignment": lambda td: td.__setitem__(2, td[5].clone()),
    "slice assignment": lambda td: td.__setitem__(slice(0, 4), td[4:8].clone()),
    "mask assignment": lambda td: td.__setitem__(torch.arange(13) > 9, td[:3].clone()),
    "pair assignment": lambda td: td.__setitem__((0, 3), td[5, 5].clone()),
    "write through a slice": lambda td: td[:, 0].set_("action", torch.ones(13, 3)),
    "zero a slice": lambda td: td[2:5].zero_(),
    "zero a step": lambda td: td[0, 3].zero_(),
    "write through a reshaped view": lambda td: td.reshape(-1)[5:9].zero_(),
    "write through a transposed view": lambda td: td.transpose(0, 1)[3].set_("action", torch.ones(13, 3)),
    "write through unbind": lambda td: td.unbind(1)[2].fill_("action", 9.0),
    "write through split": lambda td: td.split(4)[1].zero_(),
    "write through select": lambda td: td.select("action").zero_(),
    "write through a nested view": lambda td: td["next"].set_("reward", torch.ones(13, 8, 1)),
    "write through a view of a nested view": lambda td: td["next"][1:3].zero_(),
    "write through a nested view of a view": lambda td: td[1:3]["next", "agents"].zero_(),
    "new key through a nested view": lambda td: td["next"].set("value", extra(td)),
    "new key through a selected nested view": lambda td: td.select("next")["next"].set("value", extra(td)),
    "write through a shallow copy": lambda td: td.copy().zero_(),
    "write through detach": lambda td: td.detach().zero_(),
    "write through data": lambda td: td.data.zero_(),
    "write through another dtype": lambda td: td.select("action").view(torch.int32)[0].zero_(),
    "write through the same device": lambda td: td.to("cpu")[3].zero_(),
    "write to a clone": lambda td: td.clone().zero_(),
    "write to a copy by tensor": lambda td: td[torch.tensor([1, 2])].zero_(),
    "write to a copied reshape": lambda td: td.transpose(0, 1).reshape(-1).zero_(),
    "locked write": zero_locked,
    "stack out": lambda td: torch.stack(td.clone().unbind(0)[::-1], 0, out=td),
    "cat out": lambda td: torch.cat([td[6:].clone(), td[:6].clone()], 0, out=td),
    "requires_grad_": lambda td: td.select("action").requires_grad_(False),
    "batch size": shorten,
    "axis names": lambda td: setattr(td, "names", ["env", "time"]),
    "rename axes": lambda td: td.refine_names("env", "time"),
}


@pytest.mark.parametrize("pack", [CompressedTensorDict, packed_all])
@pytest.mark.parametrize("name", READS)
def test_every_operation_gives_what_it_gives_on_the_plain_batch(make_rollout, pack, name):
    batch = make_rollout(13, 8).contiguous()
    packed = pack(batch)
    assert isinstance(packed, TensorDictBase)
    assert_same(READS[name](packed), READS[name](batch))


@pytest.mark.parametrize("pack", [CompressedTensorDict, packed_all])
@pytest.mark.parametrize("name", WRITES)
def test_every_write_reaches_the_rollout_and_its_views_or_not_at_all_as_in_the_plain_batch(make_rollout, pack, name):
    batch = make_rollout(13, 8).contiguous()
    packed = pack(batch)
    views = [packed[1:7], batch[1:7]]
    assert_same(*views)
    WRITES[name](packed)
    WRITES[name](batch)
    assert_same(packed, batch)
    assert_same(*views)
    assert_same(packed[1:3], batch[1:3])
    assert_same(packed[torch.tensor([0, 2])], batch[torch.tensor([0, 2])])


def test_views_share_what_is_packed_and_clones_stay_packed(make_rollout):
    packed = packed_all(make_rollout(16, 8), cache_bytes=0)
    views = [packed[2:5], packed.reshape(-1), packed.select("next"), packed.clone(), packed["next"], packed.to("meta")]
    assert packed.get_stats()["cache_misses"] == 0
    for view in views:
        assert isinstance(view, CompressedTensorDict)
        assert view.nbytes == packed.nbytes


def test_only_the_environments_that_an_index_touches_are_decoded(make_rollout):
    packed = packed_all(make_rollout(16, 8), cache_bytes=0).select("action")
    for index in (3, (0, 3), slice(4, 8), torch.tensor([12, 13]), (slice(8, 12), 2)):
        before = packed.get_stats()["cache_misses"]
        _ = packed[index]["action"]
        assert packed.get_stats()["cache_misses"] == before + 1


def test_a_write_unpacks_only_the_keys_that_it_writes_to(make_rollout):
    packed = packed_all(make_rollout(16, 8))
    size = packed.nbytes
    packed[3].set_("action", torch.ones(8, 3))
    assert packed.nbytes == size + 16 * 8 * 3 * 4
    packed[:, 2].set_("action", torch.ones(16, 3))
    assert packed.nbytes == size + 16 * 8 * 3 * 4


def test_axes_inside_a_nested_tensordict_can_be_indexed_and_written_to():
    values = torch.arange(8 * 16 * 3 * 2.0).reshape(8, 16, 3, 2)
    batch = TensorDict({"agents": TensorDict({"x": values}, [8, 16, 3])}, [8, 16], names=["env", "time"])
    packed = CompressedTensorDict(batch, ["agents"], group_envs=2)
    for index in ((slice(None), 3, 1), (..., 2), (torch.tensor([1, 7]), 2, 0), (2, torch.tensor([3, 3]))):
        assert_same(packed["agents"][index], batch["agents"][index])
    packed["agents"][..., 1].zero_()
    batch["agents"][..., 1].zero_()
    assert_same(packed, batch)
    assert_same(packed.reshape(-1)["agents"].unbind(1), batch.reshape(-1)["agents"].unbind(1))


def test_a_module_reads_from_it_and_writes_to_it(make_rollout):
    batch = make_rollout(13, 8)
    torch.manual_seed(0)
    module = TensorDictSequential(
        TensorDictModule(torch.nn.Linear(3, 4), in_keys=[STATE], out_keys=["hidden"]),
        TensorDictModule(torch.nn.Linear(4, 1), in_keys=["hidden"], out_keys=[("agents", "value")]),
    )
    for view in (slice(None), slice(3, 9), (2, slice(None)), (0, 3)):
        found = module(packed_all(batch)[view])
        assert isinstance(found, CompressedTensorDict)
        assert_same(found, module(batch.clone()[view]))


@pytest.mark.parametrize("shifted", [False, True])
def test_gae_of_torchrl_gives_the_same_advantages(make_rollout, shifted):
    batch = make_rollout(13, 8, ends=0.0).contiguous()
    batch["next", "terminated"] = batch["next", "done"].clone()
    torch.manual_seed(0)
    value = TensorDictModule(torch.nn.Linear(3, 1), in_keys=[STATE], out_keys=["state_value"])
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value, shifted=shifted)
    packed = packed_all(batch)
    gae(packed)
    gae(batch)
    assert "advantage" in packed
    assert_same(packed, batch)


class Rollouts(torch.utils.data.Dataset[TensorDictBase]):
    """Returns packed rollouts, and steps of one."""

    def __init__(self, packed):
        self.packed = packed

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return self.packed[4 * number : 4 * number + 4]


def first(parts):
    return parts[0]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_read_and_return_it(make_rollout, context):
    batch = make_rollout(16, 8)
    dataset = Rollouts(packed_all(batch))
    loader = torch.utils.data.DataLoader(dataset, num_workers=1, collate_fn=first, multiprocessing_context=context)
    for number, found in enumerate(loader):
        assert isinstance(found, CompressedTensorDict)
        assert_same(found, batch[4 * number : 4 * number + 4])


def test_a_pickle_keeps_what_was_written_and_which_views_share_memory(make_rollout):
    batch = make_rollout(8, 8).contiguous()
    packed = packed_all(batch)
    view = packed[2:4]
    twin, twin_view = pickle.loads(pickle.dumps((packed, view)))
    twin_view.zero_()
    batch[2:4].zero_()
    assert_same(twin, batch)
    assert not bool((packed[2:4]["action"] == 0).all())
    assert_same(pickle.loads(pickle.dumps(twin[1:5, 2:3])), batch[1:5, 2:3])


def test_threads_read_while_another_writes(make_rollout):
    batch = make_rollout(32, 8)
    packed = packed_all(batch, cache_bytes=2000)
    wrong = []

    def read(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            index = torch.randint(0, 256, (40,), generator=generator)
            if not torch.equal(packed.reshape(-1)[index]["action"], batch.reshape(-1)["action"][index]):
                wrong.append(seed)

    def write():
        for env in range(32):
            packed[env].set_(("next", "reward"), torch.full((8, 1), float(env)))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)] + [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(packed["next", "reward"], torch.arange(32.0)[:, None, None].expand(32, 8, 1))


def test_the_text_of_it_decodes_nothing(make_rollout):
    packed = packed_all(make_rollout(16, 8), cache_bytes=0)
    assert "agents/observation/lidar: float32[16, 8, 1, 12]" in repr(packed)
    assert ("next", "reward") in packed
    assert packed.get_stats()["cache_misses"] == 0


def test_minibatches_of_a_view_are_those_of_its_steps(make_rollout):
    batch = make_rollout(20, 8)
    batch["number"] = torch.arange(160).reshape(20, 8)
    packed = packed_all(batch)
    for view in (packed[3:11], packed[:, 2:6], packed.reshape(-1)):
        seen = torch.cat([some["number"] for some in view.minibatches(4)])
        assert torch.equal(seen.sort().values, view["number"].flatten())


OUTER_WRITES = {
    "zero_": lambda td: td.zero_(),
    "mul_": lambda td: td.mul_(0.0),
    "apply_": lambda td: td.apply_(lambda value: value.zero_()),
    "update_": lambda td: td.update_(td.clone().zero_()),
    "copy_": lambda td: td.copy_(td.clone().zero_()),
    "assignment": lambda td: td.__setitem__(0, td.clone()[0].zero_()),
    "zero a view": lambda td: td[0].zero_(),
    "multiply a view": lambda td: td[0].mul_(0.0),
}


@pytest.mark.parametrize("name", OUTER_WRITES)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_write_to_a_tensordict_that_contains_it_reaches_it(make_rollout, name, stacked):
    packed = packed_all(make_rollout(8, 8).select("action", STATE))
    outer = TensorDict({"rollout": packed}, [8, 8])
    if stacked:
        outer = LazyStackedTensorDict.lazy_stack([packed])
    OUTER_WRITES[name](outer)
    assert not packed["action"][0].any()
    assert not packed[STATE][0].any()


def test_reading_operations_leave_it_packed(make_rollout):
    packed = packed_all(make_rollout(13, 8))
    size = packed.nbytes
    for name, operation in READS.items():
        if "in place" not in name:
            operation(packed)
            assert packed.nbytes == size, name


def test_contiguous_is_a_view_of_what_is_contiguous_already(make_rollout):
    batch = make_rollout(8, 6)
    packed = CompressedTensorDict(batch, compress_keys=list(batch.keys()))
    packed.contiguous().zero_()
    assert not packed["action"].any()
    # Torch has to copy this one, so it is not a view of a TensorDict either.
    packed = CompressedTensorDict(batch, compress_keys=list(batch.keys()))
    moved = packed.transpose(0, 1).contiguous()
    moved.zero_()
    assert torch.equal(packed["action"], batch["action"])


def test_compiled_functions_read_it_without_tracing_the_codecs(make_rollout):
    batch = make_rollout(8, 6)
    packed = CompressedTensorDict(batch, compress_keys=list(batch.keys()))

    @torch.compile(backend="eager")
    def total(steps):
        return steps["action"].sum() + steps[2:5]["next", "reward"].sum()

    assert torch.equal(total(packed), batch["action"].sum() + batch[2:5]["next", "reward"].sum())
