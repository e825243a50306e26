"""The memory behind tensors: each piece once, and tensors that see it as before."""

import itertools
import operator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from slipstream.errors import CorruptFileError, UnsupportedStateError
from slipstream.schema.dtypes import DTYPES
from slipstream.schema.flatten import check_storable, flatten
from slipstream.schema.structure import contiguous_strides
from slipstream.schema.unflatten import unflatten
from slipstream.tensors import TORCH, Regions, dtype_info, tensor_of


def copy_of(regions: Regions) -> Regions:
    return regions.copy_into(np.full(regions.buffer_bytes, 255, np.uint8))


def words(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor as bytes."""
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if not dense.numel():
        return b""
    return bytes(dense.reshape(-1).view(torch.uint8).numpy())


def assert_equal(copies: list[torch.Tensor], originals: list[torch.Tensor]) -> None:
    for copy, original in zip(copies, originals, strict=True):
        assert (copy.dtype, copy.shape) == (original.dtype, original.shape)
        assert words(copy) == words(original)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_the_table_has_every_dtype_of_torch_with_its_size_and_kind():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(dtype).removeprefix("torch.") for dtype in dtypes} <= set(DTYPES)
    for dtype in dtypes:
        info = dtype_info(dtype)
        assert TORCH.dtype(info.name) is dtype
        assert (info.itemsize, info.is_float, info.is_complex) == (
            dtype.itemsize,
            dtype.is_floating_point,
            dtype.is_complex,
        )
    assert [name for name, info in DTYPES.items() if info.is_hidden_float] == ["bfloat16"]


def test_numpy_carries_the_dtypes_that_it_has_as_themselves():
    for dtype in (torch.bool, torch.int16, torch.uint32, torch.float16, torch.float64, torch.complex64):
        assert dtype_info(dtype).carrier == torch.zeros(1, dtype=dtype).numpy().dtype


@given(st.lists(st.integers(0, 5), max_size=5))
@settings(deadline=None)
def test_dense_strides_are_those_of_torch(shape):
    assert contiguous_strides(shape) == torch.empty(shape, device="meta").stride()


# A storage of 96 elements, and views of it: dtype, first element, number of elements, step.
VIEWS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([None, torch.uint8, torch.int16, torch.float64]),
        st.integers(0, 95),
        st.integers(0, 96),
        st.integers(1, 4),
        st.sampled_from(["flat", "transposed", "expanded"]),
    ),
    max_size=9,
)


def view(base: torch.Tensor, dtype: Any, start: int, count: int, step: int, form: str) -> torch.Tensor:
    tensor = base
    if dtype is not None:
        tensor = base.view(dtype)
    tensor = tensor[start : start + count : step]
    if form == "transposed" and tensor.numel() and tensor.numel() % 2 == 0:
        tensor = tensor.unflatten(0, (2, -1)).t()
    if form == "expanded":
        tensor = tensor.expand(3, *tensor.shape)
    return tensor


@given(VIEWS)
@settings(max_examples=200, deadline=None)
def test_any_views_of_shared_storages_come_back_equal_and_tied_as_they_were(choices):
    bases = [torch.arange(96.0), torch.arange(96).to(torch.int32), torch.arange(96.0).double()]
    tensors = [view(bases[number], *choice) for number, *choice in choices]
    regions = Regions.of(tensors)
    copies = copy_of(regions).tensors()
    assert_equal(copies, tensors)
    assert regions.nbytes <= sum(base.nbytes for base in bases)
    # Tensors that share elements still do, and the same ones.
    for (one, copy), (other, other_copy) in itertools.combinations(zip(tensors, copies, strict=True), 2):
        if overlap(one, other):
            assert share_memory(copy, other_copy)
            assert copy.data_ptr() - other_copy.data_ptr() == one.data_ptr() - other.data_ptr()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have a byte in common. Two columns of a table have none, though they interlock."""
    return not bytes_of(one).isdisjoint(bytes_of(other))


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of all bytes of all elements."""
    found: set[int] = set()
    for index in itertools.product(*map(range, tensor.shape)):
        start = tensor.data_ptr() + tensor.itemsize * sum(map(operator.mul, index, tensor.stride()))
        found.update(range(start, start + tensor.itemsize))
    return found


def test_tied_tensors_are_one_region_and_stay_tied():
    weight = torch.randn(20, 30)
    regions = Regions.of([weight, weight, weight.t(), weight[3]])
    assert len(regions.pieces) == 1
    assert regions.nbytes == weight.nbytes
    copies = copy_of(regions).tensors()
    copies[0][3, 4] = 99
    assert [float(value) for value in (copies[1][3, 4], copies[2][4, 3], copies[3][4])] == [99, 99, 99]
    assert weight[3, 4] != 99


def test_a_small_view_of_a_large_storage_stays_small():
    large = torch.arange(10_000.0).reshape(100, 100)
    (alone,) = copy_of(Regions.of([large[:, 7]])).tensors()
    assert (alone.untyped_storage().nbytes(), alone.stride()) == (400, (1,))


def test_an_expanded_tensor_is_stored_as_small_as_its_memory():
    expanded = torch.arange(5.0).expand(1000, 5)
    regions = Regions.of([expanded])
    assert regions.nbytes == 20
    (copy,) = copy_of(regions).tensors()
    assert (copy.stride(), copy.shape) == ((0, 1), (1000, 5))


def test_regions_keep_the_memory_that_tensors_had():
    tensor = torch.ones(5)
    regions = Regions.of([tensor])
    tensor.data = torch.zeros(5)
    assert torch.equal(copy_of(regions).tensors()[0], torch.ones(5))


def test_every_piece_is_reported_once_it_is_copied():
    tensors = [torch.full((3,), 1.0), torch.full((4,), 2.0)]
    regions = Regions.of(tensors)
    buffer = np.zeros(regions.buffer_bytes, np.uint8)
    seen: list[int] = []

    def look(number: int) -> None:
        seen.append(number)
        assert np.count_nonzero(buffer.view(np.float32)) == sum(regions.pieces[one].nbytes // 4 for one in seen)

    regions.copy_into(buffer, on_copied=look)
    assert seen == [0, 1]


def test_strides_survive():
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 7).t(),
        torch.zeros(0, 5),
        torch.zeros(3, 0, 4),
        torch.tensor(7),
    ]
    copies = copy_of(Regions.of(tensors)).tensors()
    assert_equal(copies, tensors)
    assert [copy.stride() for copy in copies] == [tensor.stride() for tensor in tensors]


def test_lazy_conjugation_and_negation_are_resolved():
    values = torch.randn(9, dtype=torch.complex64)
    tensors = [values.conj(), values.conj().imag, values]
    assert_equal(copy_of(Regions.of(tensors)).tensors(), tensors)


def test_views_of_several_dtypes_share_a_region_that_each_can_count_in():
    base = torch.arange(64, dtype=torch.uint8)
    tensors = [base[9:40], base[24:40].view(torch.float64), base[4:28].view(torch.int32)]
    regions = Regions.of(tensors)
    assert [str(piece.dtype) for piece in regions.pieces] == ["torch.uint8"]
    copies = copy_of(regions).tensors()
    assert_equal(copies, tensors)
    assert all(share_memory(copies[0], copy) for copy in copies)


def test_storages_that_lie_over_one_another_do_not_break_ties():
    memory = np.arange(100, dtype=np.float32)
    whole = torch.from_numpy(memory)
    inner = torch.from_numpy(memory[10:20])
    copies = copy_of(Regions.of([whole[:50], inner, whole[30:]])).tensors()
    assert share_memory(copies[0], copies[2])
    assert_equal(copies, [whole[:50], inner, whole[30:]])


def test_every_piece_of_a_copy_is_a_separate_storage_for_torch_save():
    copies = copy_of(Regions.of([torch.ones(3), torch.ones(5)])).tensors()
    assert [copy.untyped_storage().nbytes() for copy in copies] == [12, 20]


def test_joined_regions_put_every_tensor_where_it_was():
    tensors = [torch.ones(2), torch.zeros(0), torch.arange(3), torch.arange(4)]
    parts = [([3, 1], Regions.of([tensors[3], tensors[1]])), ([0, 2], Regions.of([tensors[0], tensors[2]]))]
    assert_equal(Regions.join(parts, 4).tensors(), tensors)


def test_a_tensor_of_an_array_shares_its_memory():
    array = np.arange(6, dtype="<u2")
    tensor = tensor_of(array, "bfloat16", (2, 3))
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (2, 3))
    array[0] = 0x3F80
    assert tensor[0, 0] == 1.0
    assert tensor_of(np.empty(0, "<f4"), "float32", (0, 3)).shape == (0, 3)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.eye(3).to_sparse(), "has layout torch.sparse_coo"),
        (torch.empty(3, device="meta"), "is a meta tensor without data"),
        (torch.zeros(3).as_subclass(Marked), r"is a .*Marked"),
        (torch.zeros([1] * 65), "has 65 axes, at most 64 can be stored"),
    ],
    ids=["sparse", "meta", "subclass", "axes"],
)
def test_tensors_that_are_no_strided_memory_are_refused_by_name(tensor, problem):
    with pytest.raises(UnsupportedStateError, match=f"a/b {problem}"):
        check_storable(tensor, ("a", "b"))
    with pytest.raises(UnsupportedStateError, match=f"a/0 (is|has).*{problem.split()[-1]}"):
        flatten({"a": [tensor]})
    assert flatten({"a": [tensor]}, opaque=True).objects[0] is tensor


def test_a_tensor_whose_memory_was_freed_is_refused_and_stays_as_it_is():
    """Sharded training resizes the storage of weights that are not in use."""
    for left in (0, 400):
        tensor = torch.ones(1000)
        tensor.untyped_storage().resize_(left)
        with pytest.raises(UnsupportedStateError, match=rf"shape \[1000\] needs 4000 bytes, .* resized to {left}"):
            Regions.of([torch.ones(3), tensor])
        assert tensor.untyped_storage().nbytes() == left


@pytest.mark.parametrize("name", ["int4", "uint1", "bits8", "float8_e5m2"])
def test_a_tensor_with_holes_of_a_dtype_that_torch_cannot_copy_comes_back(name):
    dtype = TORCH.dtype(name)
    content = torch.arange(100, dtype=torch.uint8)
    (copy,) = copy_of(Regions.of([content.view(dtype)[::2]])).tensors()
    assert copy.dtype == dtype
    assert torch.equal(copy.view(torch.uint8), content[::2])


def test_a_device_that_torch_cannot_count_is_refused():
    # Torch keeps eight bits of the index: this device calls itself cuda:-128.
    with pytest.raises(UnsupportedStateError, match="x is a torch.device"):
        flatten({"x": torch.device("cuda:128")})


def test_torch_values_come_back_as_themselves():
    state = {
        "dtypes": [torch.bfloat16, torch.uint32, torch.qint8],
        "devices": {torch.device("cuda:1"): torch.device("cpu"), "meta": torch.device("meta")},
        "size": torch.Size([2, 3]),
        "td": TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.zeros(2)}}, [2]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    tree = flatten(state)
    back = unflatten(tree.structure, tree.leaves, torch=TORCH)
    assert back["dtypes"] == state["dtypes"]
    assert back["devices"] == state["devices"]
    assert type(back["size"]) is torch.Size
    assert back["td"].batch_size == torch.Size([2])
    assert back["td"]["b", "c"].shape == (2,)
    assert tree.structure["parameter"] == {
        "$": "tensor",
        "dtype": "float32",
        "shape": [2],
        "parameter": True,
        "requires_grad": True,
    }


@pytest.mark.parametrize(
    "node",
    [
        {"$": "torch.device", "v": "moon"},
        {"$": "TensorDict", "v": {"a": 3}, "batch_size": [2, 2]},
        {"$": "TensorDict", "v": {"a": [1, 2]}, "batch_size": [5]},
    ],
)
def test_values_that_torch_refuses_are_damage_to_the_file(node):
    with pytest.raises(CorruptFileError, match="'x' is not a valid"):
        unflatten({"x": node}, [], torch=TORCH)


def test_columns_of_a_table_are_stored_without_the_table():
    table = torch.arange(200_000.0).reshape(2000, 100)
    columns = [table[:, 0], table[:, 99], table[:, 3:5]]
    regions = Regions.of(columns)
    assert regions.nbytes == sum(column.nbytes for column in columns)
    assert all(map(torch.equal, regions.tensors(), columns))


def test_columns_that_share_an_element_stay_tied():
    table = torch.arange(200_000.0).reshape(2000, 100)
    one, other = Regions.of([table[:, 3:5], table[:, 4:6]]).tensors()
    one[7, 1] = -1.0
    assert other[7, 0] == -1.0
