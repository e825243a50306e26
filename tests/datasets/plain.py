"""Compare what was loaded with what plain h5py reads: the same numbers, in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from slipstream import Fields
from slipstream.datasets.describe import describe
from slipstream.datasets.description import Description
from slipstream.datasets.recordings import load


def matrix(data: h5py.Dataset) -> Any:
    return np.asarray(data[()]).reshape(data.shape[0], -1).astype(np.float32)


def check_against_h5py(path: Path, fields: Fields | None = None) -> Description:
    """Load a file, and compare all of its numbers with those that h5py reads."""
    found = describe(path, fields)
    part = load([path], fields, cameras=())
    roles = found.roles
    step = 0
    episode = 0
    with h5py.File(path, "r") as file:
        for stretch in found.stretches:
            group = file[stretch.group]
            actions = matrix(group[roles.action])
            joints = [matrix(group[name]) for name in roles.joint]
            observed = np.concatenate(joints, axis=1) if joints else np.zeros((len(actions) + 1, 0), np.float32)
            first = step
            for length in stretch.lengths.tolist():
                np.testing.assert_array_equal(part.action[step : step + length], actions[step - first :][:length])
                # Observations of each episode begin after those of the episodes before it.
                offset = step - first + (episode if stretch.final == "own" and len(stretch.lengths) > 1 else 0)
                mine = part.joint[step + episode : step + episode + length]
                np.testing.assert_array_equal(mine, observed[offset : offset + length])
                if stretch.final == "next" and joints:
                    after = np.concatenate([matrix(group[name]) for name in roles.next_joint], axis=1)
                    np.testing.assert_array_equal(part.joint[step + episode + length], after[offset + length - 1])
                elif stretch.final == "own":
                    np.testing.assert_array_equal(part.joint[step + episode + length], observed[offset + length])
                step += length
                episode += 1
            for path_of, values in ((roles.reward, part.reward), (roles.terminal, part.terminal)):
                if path_of is not None:
                    expected = matrix(group[path_of]).reshape(-1)
                    np.testing.assert_array_equal(values[first:step].astype(np.float32), expected)
            assert len(actions) == step - first
    assert step == found.num_steps == part.num_steps
    part.close()
    return found
