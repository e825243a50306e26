"""Pack the state of a small training run into one file, read a part of it, damage it, and see the damage found."""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from slipstream import Container, CorruptFileError, write_container


def train_a_moment() -> dict[str, np.ndarray]:
    """Return weights and Adam state of a network after a few steps."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ELU(), torch.nn.Linear(1024, 512))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(30):
        inputs = torch.randn(64, 512)
        loss = (network(inputs) - inputs.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {}
    for name, parameter in network.named_parameters():
        state[f"network/{name}"] = parameter.detach().numpy()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer/{name}/{moment}"] = optimizer.state[parameter][moment].numpy()
    return state


def main() -> None:
    """Run the tour."""
    print("training a small network for a moment ...")
    state = train_a_moment()
    raw = sum(array.nbytes for array in state.values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.slip"

        start = time.perf_counter()
        with write_container(path, kind="example") as writer:
            for name, array in state.items():
                writer.add(name, array)
            writer.set("step", 30)
        size = path.stat().st_size
        print(f"packed {raw:,} bytes into {size:,} ({size / raw:.3f} of raw), durable after", end=" ")
        print(f"{time.perf_counter() - start:.3f} s")

        with Container(path) as container:
            same = all((container.read(name) == array).all() for name, array in state.items())
            rows = container.read("network/0.weight", slice(10, 12))
            print(f"read back {len(state)} arrays, bit for bit: {same}; two rows alone: {rows.shape}")
            chunk = container.entries["network/0.weight"].chunks[0]

        damaged = bytearray(path.read_bytes())
        damaged[chunk.offset + chunk.length // 2] ^= 1
        path.write_bytes(damaged)
        print("flipped one bit in the middle of the weights ...")
        try:
            with Container(path) as container:
                container.read("network/0.weight")
        except CorruptFileError as error:
            print(f"found: {error}")


if __name__ == "__main__":
    main()
