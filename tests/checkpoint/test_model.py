"""Names of checkpoints and sizes of models."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream import ConfigurationError, format_checkpoint_name, get_model_size, print_model_info


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("runs/a", 1000, "reward", 123.454), "runs/a/checkpoint_iter_1000_reward_123.45.pt"),
        (("runs/a", 5), "runs/a/checkpoint_iter_5.pt"),
        (("runs/a", 5, "reward"), "runs/a/checkpoint_iter_5.pt"),
        ((".", 5, "eval/success", -1), "checkpoint_iter_5_eval_success_-1.00.pt"),
        ((".", np.int64(5), "成功率", np.float32(0.5)), "checkpoint_iter_5_成功率_0.50.pt"),
        ((".", 5, "loss", torch.tensor(0.25)), "checkpoint_iter_5_loss_0.25.pt"),
        ((".", 5, "loss", float("nan")), "checkpoint_iter_5_loss_nan.pt"),
        ((".", 5, "loss", 1e300), "checkpoint_iter_5_loss_1.00e+300.pt"),
    ],
)
def test_a_checkpoint_name_says_iteration_and_metric(arguments, name):
    assert format_checkpoint_name(*arguments) == name


@pytest.mark.parametrize("metric", ["../../etc/x", "a\\b", "a\0b", "a\nb", "", ":*?", "~", "m" * 1000, "é" * 1000])
def test_any_name_of_a_metric_gives_a_file_in_the_folder(metric, tmp_path):
    path = Path(format_checkpoint_name(tmp_path, 5, metric, 1.0))
    path.write_bytes(b"content")
    assert list(tmp_path.iterdir()) == [path]
    # The saver may append a suffix.
    path.with_name(f"{path.name}.lz4.partial").write_bytes(b"content")


@pytest.mark.parametrize("iteration", [5.0, True, -1, "5"])
def test_an_iteration_is_a_whole_number(iteration):
    with pytest.raises(ConfigurationError, match="iteration is .*, expected a whole number of at least 0"):
        format_checkpoint_name("runs", iteration)


def test_a_model_size_counts_true_dtypes_buffers_and_shared_weights_once():
    model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 100, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(1 << 18, dtype=torch.float64))
    model.half()
    size = get_model_size(model)
    assert (size["total_params"], size["trainable_params"]) == (10_000, 10_000)
    assert size["size_mb"] == (10_000 * 2 + (1 << 18) * 2) / 2**20
    model[0].requires_grad_(False)
    assert get_model_size(model)["trainable_params"] == 0


def test_a_model_on_the_meta_device_has_the_size_that_it_would_have():
    def model(device: str) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 10)).to(
            device
        )

    assert get_model_size(model("meta")) == get_model_size(model("cpu"))


def test_memory_that_tensors_share_counts_once():
    flat = torch.zeros(1000)
    model = torch.nn.Module()
    model.register_buffer("flat", flat)
    model.register_buffer("head", flat[:300])
    model.register_buffer("tail", flat[200:].view(2, 400))
    model.register_buffer("same", flat.view(torch.int32))
    model.register_buffer("repeated", torch.zeros(1).expand(500))
    assert get_model_size(model)["size_mb"] == (4000 + 4) / 2**20


def test_a_lazy_module_counts_nothing_until_it_has_a_shape():
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(4, 1, bias=False))
    assert get_model_size(model) == {"total_params": 4, "trainable_params": 4, "size_mb": (4 * 4 + 8) / 2**20}
    model(torch.zeros(2, 3))
    assert get_model_size(model)["total_params"] == 16 + 8 + 4


def test_an_empty_model_has_no_size():
    assert get_model_size(torch.nn.ReLU()) == {"total_params": 0, "trainable_params": 0, "size_mb": 0}


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        (torch.sparse_coo, 3 * (2 * 8 + 4)),
        (torch.sparse_csr, 5 * 8 + 3 * 8 + 3 * 4),
        (torch.sparse_csc, 5 * 8 + 3 * 8 + 3 * 4),
    ],
)
def test_a_sparse_tensor_takes_the_memory_of_its_indices_and_values(layout, nbytes):
    model = torch.nn.Module()
    with torch.sparse.check_sparse_tensor_invariants(), warnings.catch_warnings():
        # Torch warns that support for some layouts is in beta.
        warnings.simplefilter("ignore")
        model.register_buffer("table", torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0])).to_sparse(layout=layout))
    assert get_model_size(model)["size_mb"] == nbytes / 2**20


def test_a_quantized_tensor_takes_one_byte_per_element():
    model = torch.nn.Module()
    with warnings.catch_warnings():
        # Torch is going to remove quantized tensors.
        warnings.simplefilter("ignore")
        model.register_buffer("table", torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8))
    assert get_model_size(model)["size_mb"] == 64 / 2**20


def test_of_a_sharded_parameter_only_the_local_part_takes_memory():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(16, 2), mesh, [Shard(0)]))
        size = get_model_size(model)
    finally:
        torch.distributed.destroy_process_group()
    assert size["total_params"] == 32
    assert size["size_mb"] == 8 * 4 / 2**20


@pytest.mark.parametrize("name", ["Policy [a]", ":smile:", "[bold]x[/bold]", "long " * 50])
def test_model_info_is_one_line(name, capsys):
    print_model_info(torch.nn.Linear(10, 10), name)
    assert capsys.readouterr().out == f"{name}: 110 parameters, 110 trainable, 0.00 MB\n"
