"""Recorded files in the layouts that people have, with frames that say where they are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

CAMERAS = ("left", "right", "global")


def frame(camera: str, row: int, size: tuple[int, int] = (20, 24)) -> NDArray[np.uint8]:
    """An image of one colour, which tells the camera, the row, and the order of channels."""
    number = CAMERAS.index(camera) if camera in CAMERAS else 3
    colour = np.array([row % 256, 60 * number + row // 256, 200 - number], np.uint8)
    return np.broadcast_to(colour, (*size, 3)).copy()


def frames(camera: str, rows: int, size: tuple[int, int] = (20, 24), start: int = 0) -> NDArray[np.uint8]:
    return np.stack([frame(camera, start + row, size) for row in range(rows)])


def row_of(image: Any) -> int:
    """Which row an image ``[3, height, width]`` is from."""
    pixels = np.asarray(image)
    assert (pixels == pixels[:, :1, :1]).all()
    return int(pixels[0, 0, 0]) + 256 * (int(pixels[1, 0, 0]) % 60)


def camera_of(image: Any) -> str:
    return CAMERAS[200 - int(np.asarray(image)[2, 0, 0])]


def joints(rows: int, width: int = 16, start: int = 0) -> NDArray[np.float64]:
    """Joint positions whose first value is the row."""
    values = np.zeros((rows, width))
    values[:, 0] = start + np.arange(rows)
    values[:, 1:] = np.sin(values[:, :1] + np.arange(1, width))
    return values


def actions(rows: int, width: int = 7, start: int = 0) -> NDArray[np.float64]:
    values = np.zeros((rows, width))
    values[:, 0] = start + np.arange(rows)
    values[:, 1:] = 0.5
    return values


def write_a(
    path: Path,
    steps: int = 30,
    ends: tuple[int, ...] = (),
    *,
    rows: int | None = None,
    prefix: str = "observations/",
    names: dict[str, str] | None = None,
    chw: bool = False,
    size: tuple[int, int] = (20, 24),
    column: bool = False,
    **storage: Any,
) -> Path:
    """Layout A, or B with an empty prefix; `ends` are the steps that are terminal."""
    rows = steps + 1 if rows is None else rows
    with h5py.File(path, "w") as file:
        for camera in CAMERAS:
            images = frames(camera, rows, size)
            images = images.transpose(0, 3, 1, 2) if chw else images
            name = (names or {}).get(camera, f"{camera}_image")
            file.create_dataset(f"{prefix}{name}", data=np.ascontiguousarray(images), **storage)
        file[f"{prefix}joint"] = joints(rows)
        file["actions"] = actions(steps)
        shape = (steps, 1) if column else (steps,)
        file["rewards"] = (np.arange(steps) / 10).reshape(shape)
        file["terminals"] = np.isin(np.arange(steps), ends).reshape(shape)
    return path


def write_robomimic(path: Path, lengths: tuple[int, ...] = (4, 5, 6), *, after: bool = True) -> Path:
    """`data/demo_k`; rows of episode k start at 100 * k."""
    with h5py.File(path, "w") as file:
        for number in reversed(range(len(lengths))):  # written last first: order comes from the numbers
            steps, start = lengths[number], 100 * number
            group = file.create_group(f"data/demo_{number}")
            for name, first in (("obs", 0), ("next_obs", 1)) if after else (("obs", 0),):
                group[f"{name}/agentview_image"] = frames("global", steps, start=start + first)
                group[f"{name}/robot0_eye_in_hand_image"] = frames("left", steps, start=start + first)
                group[f"{name}/robot0_joint_pos"] = joints(steps, 7, start + first)
                group[f"{name}/robot0_gripper_qpos"] = joints(steps, 2, start + first)
            group["actions"] = actions(steps, start=start)
            group["rewards"], group["dones"] = np.zeros(steps), np.arange(steps) == steps - 1
        file["mask/train"] = np.array([b"demo_0"])
    return path


def write_aloha(path: Path, steps: int = 12, *, jpeg: bool = False) -> Path:
    import cv2

    with h5py.File(path, "w") as file:
        file.attrs["sim"] = True
        names = {"cam_high": "global", "cam_left_wrist": "left", "cam_right_wrist": "right", "cam_low": "other"}
        for name, camera in names.items():
            images = frames(camera, steps, (24, 24))
            if jpeg:
                packed = [cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 100])[1] for image in images]
                width = max(map(len, packed))
                images = np.stack([np.pad(one.reshape(-1), (0, width - one.size)) for one in packed])
            file[f"observations/images/{name}"] = images
        file["observations/qpos"], file["observations/qvel"] = joints(steps, 14), joints(steps, 14)
        file["action"] = actions(steps, 14)
    return path


def write_minari(path: Path, lengths: tuple[int, ...] = (3, 4, 5), *, jpeg: bool = False) -> Path:
    import cv2

    with h5py.File(path, "w") as file:
        for number, steps in enumerate(lengths):
            group = file.create_group(f"episode_{number}")
            images = frames("global", steps + 1, (24, 24), 100 * number)
            if jpeg:
                kind = h5py.vlen_dtype(np.uint8)
                packed = [cv2.imencode(".jpg", image[..., ::-1])[1].reshape(-1) for image in images]
                data = group.create_dataset("observations/image", (steps + 1,), kind, chunks=True)
                for row, one in enumerate(packed):
                    data[row] = one
            else:
                group["observations/image"] = images
            group["observations/joint"] = joints(steps + 1, 5, 100 * number)
            group["actions"], group["rewards"] = actions(steps, 3), np.ones(steps)
            group["terminations"] = np.zeros(steps, bool)
            group["truncations"] = np.arange(steps) == steps - 1
            group["infos/note"] = np.zeros(steps + 1)
    return path


def write_d4rl(path: Path, ends: tuple[int, ...] = (9,), timeouts: tuple[int, ...] = (19,), steps: int = 30) -> Path:
    """Flat; the observation after an end is 1000 more, and one break at step 24 has no flag."""
    observations = joints(steps, 4)
    after = joints(steps, 4, start=1)
    for step in (*ends, *timeouts, 24):
        after[step, 0] += 1000
    with h5py.File(path, "w") as file:
        file["observations"], file["next_observations"] = observations, after
        file["actions"], file["rewards"] = actions(steps, 2), np.arange(steps, dtype=np.float32)
        file["terminals"] = np.isin(np.arange(steps), ends)
        file["timeouts"] = np.isin(np.arange(steps), timeouts)
    return path


def write_maniskill(path: Path, lengths: tuple[int, ...] = (4, 3)) -> Path:
    with h5py.File(path, "w") as file:
        for number, steps in enumerate(lengths):
            group = file.create_group(f"traj_{number}")
            group["obs/agent/qpos"] = joints(steps + 1, 9)
            group["obs/sensor_data/base_camera/rgb"] = frames("global", steps + 1)
            group["obs/sensor_data/base_camera/depth"] = np.zeros((steps + 1, 20, 24, 1), np.int16)
            group["actions"], group["success"] = actions(steps, 8), np.zeros(steps, bool)
            group["terminated"], group["truncated"] = np.zeros(steps, bool), np.ones(steps, bool)
    return path


@pytest.fixture
def file_a(tmp_path: Path) -> Path:
    """30 steps in three episodes: two that reach a terminal state, and one that is not over."""
    return write_a(tmp_path / "a.hdf5", ends=(9, 19))
