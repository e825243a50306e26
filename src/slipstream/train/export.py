"""Export a policy for a robot: one file that needs neither Slipstream nor, as ONNX, torch."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from slipstream.checks import require_choice
from slipstream.errors import ConfigurationError
from slipstream.nav.frame import velocity_from_unit
from slipstream.rl.network import OBSERVATION_SHAPES, NavRLPolicy
from slipstream.store.local import atomic_write
from slipstream.text import install_hint

Format = Literal["onnx", "torchscript"]

INPUTS = ("lidar", "dynamic_obstacle", "state")
OUTPUT = "velocity"
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torchscript": ".ts"}
TOLERANCE_M_S = 1e-4
# Batch sizes of the comparison: a robot has one observation at a time, a test has many.
_BATCHES = (1, 7, 64)


@dataclass(frozen=True)
class Exported:
    """A file that was written, and the largest difference of its actions from those of the policy."""

    path: Path
    kind: Format
    num_bytes: int
    max_error_m_s: float


class DeployedPolicy(nn.Module):
    """The network to export: ``lidar [n, 1, 36, 4]``, ``dynamic_obstacle [n, 1, 5, 10]``, ``state [n, 8]`` to velocity.

    Velocities are in m/s in goal coordinates, ``[n, 3]``: the mean action, as NavRL deploys it. There is no critic.

    Args:
        policy: The policy whose weights are copied.
    """

    def __init__(self, policy: NavRLPolicy) -> None:
        super().__init__()
        plain = NavRLPolicy(folded=False)
        plain.load_state_dict({name: tensor.cpu() for name, tensor in policy.state_dict().items()})
        self.feature_extractor, self.actor = plain.feature_extractor, plain.actor

    def forward(self, lidar: torch.Tensor, dynamic_obstacle: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return velocities for observations."""
        return velocity_from_unit(self.actor(self.feature_extractor(lidar, dynamic_obstacle, state)).mean)


def output_path(output: Path, kind: Format) -> Path:
    """Return the file to export to: `output` with the suffix of the format, or ``policy`` in it if it is a folder.

    Args:
        output: An existing folder, or a file name with or without the suffix of any format.
        kind: The format.
    """
    if output.is_dir():
        output = output / "policy"
    stem = output.name
    for suffix in SUFFIXES.values():
        stem = stem.removesuffix(suffix)
    return output.with_name(stem + SUFFIXES[kind])


def export_policy(policy: NavRLPolicy, path: Path, kind: Format) -> Exported:
    """Write a policy for deployment. The file appears after its actions have been compared with the policy's.

    Args:
        policy: The policy to export.
        path: The file to create or replace.
        kind: ``onnx``, for any batch size; or ``torchscript``, for ``torch.jit.load``.

    Raises:
        ConfigurationError: If the format is unknown, or the actions differ from those of the policy.
        ImportError: If the format is ONNX and its libraries are not installed.
        WriteError: If the file cannot be written.
    """
    require_choice("kind", kind, get_args(Format))
    deployed = DeployedPolicy(policy).eval()
    with torch.no_grad(), _quietly():
        content = _to_onnx(deployed) if kind == "onnx" else _to_torchscript(deployed)
        run = _onnx_runner(content) if kind == "onnx" else _torchscript_runner(content)
        error = max(_difference(policy, run, batch) for batch in _BATCHES)
    if not error <= TOLERANCE_M_S:
        raise ConfigurationError(
            f"the {kind} form of the policy differs from it by {error:.2g} m/s, expected at most {TOLERANCE_M_S:g}; "
            f"{path} was not written"
        )
    with atomic_write(path) as file:
        file.write(content)
    return Exported(path, kind, len(content), error)


def _observations(batch: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return random observations of a plausible magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(4 * torch.rand(batch, *OBSERVATION_SHAPES[name], generator=generator) for name in INPUTS)


def _difference(policy: NavRLPolicy, run: Any, batch: int) -> float:
    seen = _observations(batch, seed=batch)
    device = next(policy.parameters()).device
    expected = velocity_from_unit(policy.heads(policy.features(*(part.to(device) for part in seen)))[0].mean).cpu()
    return float((run(*seen) - expected).abs().max())


def _to_torchscript(deployed: DeployedPolicy) -> bytes:
    traced = torch.jit.trace(deployed, _observations(2))  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.freeze(traced), buffer)
    return buffer.getvalue()


def _torchscript_runner(content: bytes) -> Any:
    return torch.jit.load(io.BytesIO(content))  # type: ignore[no-untyped-call]


def _to_onnx(deployed: DeployedPolicy) -> bytes:
    try:
        import onnx  # noqa: F401, PLC0415 - an extra, which torch's exporter needs
        import onnxscript  # noqa: F401, PLC0415 - the same
    except ImportError:
        raise ImportError(f"exporting to ONNX needs onnx and onnxscript: {install_hint('export')}") from None
    batch = torch.export.Dim("batch", min=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.onnx"
        torch.onnx.export(
            deployed,
            _observations(2),
            str(file),
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_shapes={name: {0: batch} for name in INPUTS},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        return file.read_bytes()


def _onnx_runner(content: bytes) -> Any:
    """Return a function that runs an ONNX file: with ONNX Runtime, or else with the slow reference evaluator."""
    try:
        import onnxruntime  # noqa: PLC0415 - an extra

        session: Any = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except ImportError:
        import onnx  # noqa: PLC0415 - an extra
        from onnx.reference import ReferenceEvaluator  # noqa: PLC0415

        session = ReferenceEvaluator(onnx.load_from_string(content))

    def run(*seen: torch.Tensor) -> torch.Tensor:
        feed = {name: part.numpy() for name, part in zip(INPUTS, seen, strict=True)}
        return torch.from_numpy(np.asarray(session.run([OUTPUT], feed)[0]))

    return run


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence warnings of the exporters that concern only their developers."""
    names = ("torch.onnx", "onnxscript", "onnx_ir")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for log, _ in before:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in before:
                log.setLevel(level)
