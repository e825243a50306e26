"""Value normalisation, against numbers kept in plain Python."""

import math

import torch

from slipstream.rl import ValueNorm


def reference(batches: list[torch.Tensor], beta: float) -> tuple[float, float]:
    """Return mean and deviation by the definition: every batch weighs beta times less than the one after it."""
    weights = [beta ** (len(batches) - 1 - number) for number in range(len(batches))]
    means = [math.fsum(batch.double().flatten().tolist()) / batch.numel() for batch in batches]
    squares = [math.fsum(batch.double().square().flatten().tolist()) / batch.numel() for batch in batches]
    mean = math.fsum(w * m for w, m in zip(weights, means, strict=True)) / math.fsum(weights)
    square = math.fsum(w * s for w, s in zip(weights, squares, strict=True)) / math.fsum(weights)
    return mean, math.sqrt(max(square - mean**2, 1e-2))


def test_statistics_are_those_of_the_definition():
    torch.manual_seed(0)
    norm = ValueNorm(1, beta=0.9)
    batches = [torch.randn(40, 3, 1) * (number + 1) + 5 * number for number in range(12)]
    for count, batch in enumerate(batches, 1):
        norm.update(batch)
        mean, deviation = norm.statistics()
        expected = reference(batches[:count], 0.9)
        torch.testing.assert_close(mean, torch.tensor([expected[0]]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(deviation, torch.tensor([expected[1]]), rtol=1e-3, atol=1e-4)


def test_one_update_is_enough_to_be_unbiased():
    norm = ValueNorm(1)
    norm.update(torch.tensor([[90.0], [110.0]]))
    torch.testing.assert_close(norm.normalize(torch.tensor([90.0, 100.0, 110.0])), torch.tensor([-1.0, 0.0, 1.0]))


def test_denormalising_undoes_normalising():
    norm = ValueNorm(1)
    norm.update(torch.randn(100, 1) * 30 + 400)
    values = torch.tensor([[380.0], [455.0]])
    torch.testing.assert_close(norm.denormalize(norm.normalize(values)), values)


def test_before_the_first_update_it_divides_by_the_least_deviation():
    norm = ValueNorm(1)
    torch.testing.assert_close(norm.denormalize(torch.tensor([2.0])), torch.tensor([0.2]))


def test_statistics_are_float32_and_take_no_gradient():
    norm = ValueNorm(1)
    norm.update(torch.ones(3, 1, dtype=torch.float64, requires_grad=True))
    assert {name: tuple(tensor.shape) for name, tensor in norm.state_dict().items()} == {
        "running_mean": (1,),
        "running_mean_sq": (1,),
        "debiasing_term": (),
    }
    assert all(tensor.dtype == torch.float32 and not tensor.requires_grad for tensor in norm.state_dict().values())
