"""The LiDAR's convolutions with its narrow axis folded into channels: the same function, in less time.

A convolution over 36 x 4 with few channels keeps a CPU busy with edges. Its four columns of pitch become channels of a
convolution over azimuth alone, whose weights are the original ones, each at every place it acts on, and zeros
elsewhere. They are rebuilt in each forward pass, so gradients reach the original ones.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def placement(width: int, conv: nn.Conv2d) -> torch.Tensor:
    """Return where the taps of a kernel lie: 1 at ``[tap, out, in]`` if output `out` sees input `in` through `tap`.

    Args:
        width: Of the input, along the axis that is folded: the last.
        conv: The convolution.
    """
    taps, stride, padding = conv.kernel_size[1], conv.stride[1], int(conv.padding[1])
    outputs = (width + 2 * padding - taps) // stride + 1
    tap = torch.arange(taps).view(-1, 1, 1)
    out = torch.arange(outputs).view(1, -1, 1)
    return (out * stride + tap - padding == torch.arange(width)).float()


def folded_convolution(values: torch.Tensor, conv: nn.Conv2d, places: torch.Tensor) -> torch.Tensor:
    """Apply a convolution of ``[batch, channels, length, width]`` to ``[batch, channels * width, length]``.

    Args:
        values: With the last axis folded into channels, which it varies fastest in.
        conv: The convolution.
        places: Its `placement`.

    Returns:
        The result, folded likewise.
    """
    _, outputs, width = places.shape
    weight = torch.einsum("oilt,tab->oaibl", conv.weight, places)
    weight = weight.reshape(conv.out_channels * outputs, conv.in_channels * width, conv.kernel_size[0])
    bias = None if conv.bias is None else conv.bias.repeat_interleave(outputs)
    return functional.conv1d(values, weight, bias, stride=conv.stride[0], padding=int(conv.padding[0]))


def fold(values: torch.Tensor) -> torch.Tensor:
    """Turn ``[batch, channels, length, width]`` into ``[batch, channels * width, length]``."""
    return values.transpose(2, 3).flatten(1, 2)


def folded_linear(values: torch.Tensor, linear: nn.Linear, channels: int) -> torch.Tensor:
    """Apply a linear layer that expects ``channels * length * width`` to what is folded.

    Its weights are put in order, not the values: they are fewer.

    Args:
        values: ``[batch, channels * width, length]``.
        linear: The layer.
        channels: How many channels there were before folding.
    """
    length, width = values.shape[2], values.shape[1] // channels
    weight = linear.weight.view(-1, channels, length, width).transpose(2, 3).reshape(linear.weight.shape)
    return functional.linear(values.flatten(1), weight, linear.bias)
