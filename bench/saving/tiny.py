"""Twenty thousand tiny tensors: what a save costs per tensor instead of per byte."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from bench.saving.contenders import Contender, Native, NativeRaw, NativeUnguarded, TorchSave
from bench.saving.training import Training
from bench.saving.turns import Alone, discard, save_and_load, save_to

COUNT = 20_000
KINDS: tuple[type[Contender], ...] = (Native, NativeRaw, NativeUnguarded, TorchSave)

_ELEMENTS = 8


class TinyTraining(Training):
    """A state of many tiny parameters, which nothing trains."""

    def __init__(self) -> None:
        super().__init__((1, 1))
        parameters = [torch.nn.Parameter(torch.randn(_ELEMENTS)) for _ in range(COUNT)]
        self.optimizer = torch.optim.Adam(parameters)
        # Made once: how long `state_dict` takes is not what is measured.
        self._state = {"model": torch.nn.ParameterList(parameters).state_dict()}

    def state(self) -> dict[str, Any]:
        """Return the parameters."""
        return self._state


def measure_tiny(folder: Path, rounds: int) -> dict[str, list[Alone]]:
    """Save and load in turns; returns what each contender took, by the name of its class."""
    print(f"{COUNT} tiny tensors", file=sys.stderr)
    training = TinyTraining()
    contenders = [kind(training, folder) for kind in KINDS]
    measured: dict[str, list[Alone]] = {kind.__name__: [] for kind in KINDS}
    order = random.Random(0)
    # The first round is a warm-up.
    for number in range(rounds + 1):
        order.shuffle(contenders)
        for contender in contenders:
            # Not measured: loads return free memory to the system, and a program that saves regularly has such memory.
            discard(save_to(contender, folder / "tiny"))
            alone, path = save_and_load(contender, folder / "tiny")
            discard(path)
            if number:
                measured[type(contender).__name__].append(alone)
    for contender in contenders:
        contender.close()
    return measured
