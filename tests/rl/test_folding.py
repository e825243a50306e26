"""Folded convolutions: the same function and the same gradients."""

import pytest
import torch
from torch import nn

from slipstream.rl.folding import fold, folded_convolution, folded_linear, placement


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_folded_convolution_is_the_convolution(stride, channels):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 5, (5, 3), stride=stride, padding=(2, 1)).double()
    values = torch.randn(7, channels, 36, 4, dtype=torch.float64)
    places = placement(4, conv).double()
    torch.testing.assert_close(folded_convolution(fold(values), conv, places), fold(conv(values)))


def test_a_folded_linear_layer_is_the_layer_on_what_is_not_folded():
    torch.manual_seed(0)
    linear = nn.Linear(16 * 9 * 2, 4)
    values = torch.randn(3, 16, 9, 2)
    torch.testing.assert_close(folded_linear(fold(values), linear, 16), linear(values.flatten(1)))


def test_a_tap_beyond_the_edge_is_nowhere():
    places = placement(4, nn.Conv2d(1, 1, (5, 3), padding=(2, 1)))
    assert places.shape == (3, 4, 4)
    assert places.sum(-1)[0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert torch.equal(places[1], torch.eye(4))
