"""Names of checkpoints and sizes of models."""

import pytest
import torch

from slipstream import format_checkpoint_name, get_model_size, print_model_info


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("runs/a", 1000, "reward", 123.454), "runs/a/checkpoint_iter_1000_reward_123.45.pt"),
        (("runs/a", 5), "runs/a/checkpoint_iter_5.pt"),
        (("runs/a", 5, "reward"), "runs/a/checkpoint_iter_5.pt"),
        ((".", 5, "eval/success", -1), "checkpoint_iter_5_eval_success_-1.00.pt"),
    ],
)
def test_a_checkpoint_name_says_iteration_and_metric(arguments, name):
    assert format_checkpoint_name(*arguments) == name


def test_a_model_size_counts_true_dtypes_buffers_and_shared_weights_once():
    model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 100, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(1 << 18, dtype=torch.float64))
    model.half()
    size = get_model_size(model)
    assert (size["total_params"], size["trainable_params"]) == (10_000, 10_000)
    assert size["size_mb"] == (10_000 * 2 + (1 << 18) * 2) / 2**20
    model[0].weight.requires_grad_(False)
    assert get_model_size(model)["trainable_params"] == 0


def test_model_info_is_one_line(capsys):
    print_model_info(torch.nn.Linear(10, 10), "Policy [a]")
    assert capsys.readouterr().out == "Policy [a]: 110 parameters, 110 trainable, 0.00 MB\n"
