"""Clone a behaviour from three cameras and joints, recorded to a file and read from it while training.

A gripper should go where a bright target is, which only the cameras see. On two cores it takes less than a minute. The
small network is for a CPU; on a GPU take `slipstream.ImageJointEncoder`, with image_size=224, in its place.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from slipstream import SequenceDataset, SequenceStream, ingest

CAMERAS, SIZE, STEPS = ("left", "right", "global"), 48, 10


def record(path: Path, num_episodes: int) -> None:
    """Write episodes of an expert that moves towards a target, as three cameras see it."""
    rng, pixel = np.random.default_rng(0), np.arange(96)
    with h5py.File(path, "w") as file:
        for number in range(num_episodes):
            target, gripper = rng.uniform(-1, 1, 3), rng.uniform(-1, 1, 3)
            group = file.create_group(f"episode_{number}")
            for name, axes in zip(CAMERAS, ([1, 0], [2, 1], [2, 0]), strict=True):  # each camera sees two axes
                spot = np.outer(*(np.exp(-((pixel - 48 - 36 * at) ** 2) / 60) for at in target[axes]))
                images = (rng.integers(0, 30, (STEPS + 1, 96, 96, 3)) + 200 * spot[..., None]).astype(np.uint8)
                group.create_dataset(f"observations/{name}_image", data=images, chunks=(1, 96, 96, 3), compression=1)
            joints, actions = np.zeros((STEPS + 1, 16)), np.zeros((STEPS, 3))
            for step in range(STEPS):
                joints[step, :3], actions[step] = gripper, 0.2 * (target - gripper)
                joints[step + 1, :3] = gripper = gripper + actions[step] + rng.normal(0, 0.05, 3)
            group["observations/joint"], group["actions"] = joints, actions


class Policy(torch.nn.Module):
    """A small network per camera, and one for all of them and the joints."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(torch.nn.Conv2d(3, 8, 5, 4), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, 2)) for _ in CAMERAS]
        self.eyes = torch.nn.ModuleList(torch.nn.Sequential(*eye, torch.nn.Flatten()) for eye in layers)
        self.body = torch.nn.Sequential(torch.nn.Linear(3 * 400 + 16, 128), torch.nn.ReLU(), torch.nn.Linear(128, 3))

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the actions for a batch of windows."""
        pictures = [batch["images"][name][:, 0].float() / 255 for name in CAMERAS]
        seen = [eye(picture).relu() for eye, picture in zip(self.eyes, pictures, strict=True)]
        return self.body(torch.cat([*seen, batch["joint"][:, 0]], -1))


def main() -> None:
    """Record, ingest, train, and say what was learnt."""
    torch.set_num_threads(1)  # the network is small
    tiny = "--tiny" in sys.argv  # a moment instead of a minute
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        record(path := Path(folder) / "demos.hdf5", 60 if tiny else 300)
        print(f"recorded {path.stat().st_size / 1e6:.0f} MB; ingested {ingest(path, SIZE).num_frames} frames")
        train, held = SequenceDataset(path, image_size=SIZE).split(0.1)
        scale = torch.from_numpy(train.statistics["action"].std)  # of the training part alone
        policy, start = Policy(), time.perf_counter()
        optimizer = torch.optim.Adam(policy.parameters())
        stream, unseen = SequenceStream(train, batch_size=64), held[range(len(held))]
        for epoch in range(4 if tiny else 10):
            for batch in stream:
                optimizer.zero_grad()
                ((policy(batch) - batch["action"][:, 0]) / scale).square().mean().backward()
                optimizer.step()
            left = ((policy(unseen) - unseen["action"][:, 0]) / scale).square().mean()
            print(f"epoch {epoch}: {left:.3f} of the variance is left unexplained, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
