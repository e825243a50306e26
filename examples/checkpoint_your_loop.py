"""Checkpoints in a custom loop, saved in the background and resumed exactly.

Trains a small network in one go, and in two: the second loop knows nothing but the folder that the first one left. Both
must end with the same weights, bit for bit. To run it: python examples/checkpoint_your_loop.py [--steps 400]
"""

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from slipstream import CheckpointManager, TrainingState


class Training(NamedTuple):
    """What a loop is made of, and `state`, which holds all of it."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    counters: dict[str, int]
    state: TrainingState


def make() -> Training:
    """Create everything from scratch, as a program does when it starts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    counters = {"step": 0}
    state = TrainingState(model=model, optimizer=optimizer, schedule=schedule, counters=counters)
    return Training(model, optimizer, schedule, counters, state)


def train(folder: Path, until: int, save_every: int) -> Training:
    """Resume from the newest checkpoint in the folder, if any, and train until the given step."""
    loop = make()
    with CheckpointManager(folder, keep_last=3, keep_best=("loss", "min"), max_queue_size=8) as manager:
        manager.guard(loop.optimizer)  # its step waits for a copy in progress, and for nothing else
        if manager.latest() is not None:
            restored = manager.restore()  # the newest that is sound
            loop.state.load_state_dict(restored.state)
            print(f"  resumed after step {restored.step}, where the loss was {restored.metrics['loss']:.4f}")
        while loop.counters["step"] < until:
            inputs = torch.randn(128, 64)
            loss = (loop.model(inputs) - inputs[:, :8].sin()).square().mean()
            loop.optimizer.zero_grad()
            loss.backward()
            loop.optimizer.step()
            loop.schedule.step()
            loop.counters["step"] += 1
            if loop.counters["step"] % save_every == 0:  # returns at once: copied and written while training continues
                manager.save(loop.counters["step"], loop.state.state_dict(), {"loss": loss.item()})
        manager.flush()
        print(f"  saved {manager.saver.get_stats()['save_count']:.0f} times; on disk: {manager.steps()}")
    return loop


def main() -> None:
    """Train in one go, and in two, and compare."""
    parser = argparse.ArgumentParser(description="Checkpoints in a custom training loop.")
    parser.add_argument("--steps", type=int, default=400)
    steps: int = parser.parse_args().steps
    torch.set_num_threads(1)  # the network is small
    with tempfile.TemporaryDirectory() as folder:
        print("in one go:")
        whole = train(Path(folder) / "whole", steps, steps // 8)
        print("in two:")
        train(Path(folder) / "halves", steps // 2, steps // 8)
        halves = train(Path(folder) / "halves", steps, steps // 8)
    pairs = zip(whole.model.parameters(), halves.model.parameters(), strict=True)
    print("the same weights, bit for bit:", all(torch.equal(first, second) for first, second in pairs))


if __name__ == "__main__":
    main()
