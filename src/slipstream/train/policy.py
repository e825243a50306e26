"""A trained policy, from wherever it is: a run, one of its checkpoints, or a file of the original NavRL."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.load import load_checkpoint
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.native import NativeFile
from slipstream.checkpoint.resume.compare import compare_states
from slipstream.errors import ConfigurationError, CorruptFileError, StateMismatchError
from slipstream.nav.frame import velocity_from_unit
from slipstream.rl.network import NavRLPolicy
from slipstream.store.local import open_regular
from slipstream.text import list_first
from slipstream.train.settings import TrainSettings, compose_settings, override_settings, settings_from

_LISTED = 4


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy and what is known of it.

    Attributes:
        policy: Ready to act, on its settings' device.
        settings: Of its training; NavRL's for a file that does not say. Overrides are applied.
        trained: Of its training, without overrides; None for a file that does not say.
        path: The file it comes from.
        run: The folder of its run, if it is of one.
        metrics: What was saved with it.
    """

    policy: NavRLPolicy
    settings: TrainSettings
    trained: TrainSettings | None
    path: Path
    run: Path | None
    metrics: Mapping[str, Any]

    def about(self) -> dict[str, Any]:
        """Return what an evaluation says about the policy: its file, and how long it was trained."""
        return {
            "checkpoint": str(self.path.resolve()),
            "iteration": self.metrics.get("iteration"),
            "env_frames": self.metrics.get("env_frames"),
        }


def load_policy(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedPolicy:
    """Load a policy; nothing in the file is executed.

    Args:
        path: A run's folder (its newest checkpoint that is sound), a native checkpoint, or a ``.pt`` of the original.
        overrides: Settings in place of the run's; for a ``.pt``, in place of NavRL's.

    Raises:
        FileNotFoundError: If there is no such file, or no checkpoint in the folder.
        ConfigurationError: If it holds no policy that the network takes, if a weight is NaN or infinite, or if the
            settings make no sense.
        CorruptFileError: If it is damaged.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        path = _newest(path)
    metrics = _metrics_of(path)
    state = _find_policy(load_checkpoint(path), path)
    trained = None
    if isinstance(metrics.get("config"), dict):
        trained = settings_from(metrics["config"], str(path))
        settings = override_settings(trained, overrides)
    else:
        settings = compose_settings(overrides)
    policy = NavRLPolicy(action_map=velocity_from_unit)
    problems = compare_states(policy.state_dict(), state, "policy")
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise StateMismatchError(
            f"{path} is not a checkpoint of NavRL's network: {'; '.join(problems[:_LISTED])}{more}"
        )
    _require_finite(state, path)
    policy.load_state_dict(state)
    run = path.parent.parent if path.parent.name == "checkpoints" else None
    return LoadedPolicy(policy.to(settings.torch_device()), settings, trained, path, run, metrics)


def _require_finite(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Refuse weights that are no numbers: such a policy would hover, which looks like a result."""
    broken = []
    for name, tensor in state.items():
        if not bool(tensor.isfinite().all()):
            broken.append(name)
    if broken:
        raise ConfigurationError(f"{path} contains NaN or infinity in {list_first(broken)}, expected numbers")


def _newest(folder: Path) -> Path:
    inner = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not any(inner.glob("checkpoint_iter_*.slip")):
        raise ConfigurationError(f"{folder} holds no checkpoint, expected the folder of a run or of its checkpoints")
    with CheckpointManager(inner, keep_last=None) as manager:
        return manager.path(manager.restore().step)


def _metrics_of(path: Path) -> Mapping[str, Any]:
    """Return the metrics that a native checkpoint was saved with; nothing for other files."""
    with open_regular(path) as file:
        if not file.read(8):
            raise CorruptFileError(f"{path} is empty")
    try:
        with NativeFile(path) as native:
            metadata = native.metadata
    except CorruptFileError:
        return {}  # a .pt, or damaged, which loading it will say
    metrics = metadata.get("metrics") if isinstance(metadata, dict) else None
    return metrics if isinstance(metrics, dict) else {}


def _find_policy(state: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """Return the part of a checkpoint that is the policy: of a run of ours, of any dict with one, or all of it."""
    for keys in (("ppo", "policy"), ("policy",), ("model",), ("state_dict",), ()):
        found = state
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping) and any(str(key).startswith("feature_extractor.") for key in found):
            return found
    raise ConfigurationError(f"{path} holds no policy: nothing in it is called feature_extractor")
