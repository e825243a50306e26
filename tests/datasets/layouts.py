"""Files in the layouts that public recordings have, with random numbers; each function writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
from numpy.typing import NDArray


def numbers(*shape: int, seed: int = 0) -> NDArray[np.float64]:
    """Recognisable numbers: no two rows are the same."""
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def images(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng([seed, *shape]).integers(0, 256, shape, dtype=np.uint8)


def encoded(pictures: NDArray[np.uint8], kind: str = ".jpg") -> list[NDArray[np.uint8]]:
    """Encode images as OpenCV does, which takes blue for the first channel."""
    options = {".jpg": [cv2.IMWRITE_JPEG_QUALITY, 95], ".webp": [cv2.IMWRITE_WEBP_QUALITY, 101]}
    return [cv2.imencode(kind, picture, options.get(kind, []))[1].reshape(-1) for picture in pictures]


def padded(rows: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    width = max(map(len, rows)) + 3
    out = np.zeros((len(rows), width), np.uint8)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out


def write_robomimic_image(path: Path) -> None:
    """Version 0.1 to 0.3: `obs` and `next_obs`, filter keys under `mask`, environment as JSON in an attribute."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = '{"env_name": "Lift"}'
        data.attrs["total"] = 12
        for number, steps in enumerate((5, 7)):
            group = data.create_group(f"demo_{number}")
            group.attrs["num_samples"] = steps
            for where in ("obs", "next_obs"):
                seed = number + 10 * (where == "next_obs")
                for camera in ("agentview_image", "robot0_eye_in_hand_image"):
                    shape = (steps, 12, 12, 3)
                    group.create_dataset(f"{where}/{camera}", data=images(*shape, seed=seed), compression="gzip")
                group[f"{where}/object"] = numbers(steps, 10, seed=seed)
                group[f"{where}/robot0_joint_pos"] = numbers(steps, 7, seed=seed)
                group[f"{where}/robot0_gripper_qpos"] = numbers(steps, 2, seed=seed)
                group[f"{where}/robot0_eef_pos"] = numbers(steps, 3, seed=seed)
            group["actions"], group["states"] = numbers(steps, 7), numbers(steps, 32)
            group["rewards"], group["dones"] = np.zeros(steps), np.arange(steps) == steps - 1
        file["mask/train"], file["mask/valid"] = np.array([b"demo_1"]), np.array([b"demo_0", b"demo_9"])


def write_robosuite(path: Path) -> None:
    """Demonstrations of a person: simulator states and actions, no observations."""
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env"] = "Lift"
        for number in (1, 2):
            group = file.create_group(f"data/demo_{number}")
            group.attrs["model_file"] = "<mujoco/>"
            group["actions"], group["states"] = numbers(6, 7, seed=number), numbers(6, 32, seed=number)


def write_maniskill(path: Path) -> None:
    """Nested observations with one row more than actions, and simulator states as a group."""
    with h5py.File(path, "w") as file:
        for number, steps in enumerate((4, 6)):
            group = file.create_group(f"traj_{number}")
            group["obs/agent/qpos"] = numbers(steps + 1, 9).astype(np.float32)
            group["obs/agent/qvel"] = numbers(steps + 1, 9).astype(np.float32)
            group["obs/extra/tcp_pose"] = numbers(steps + 1, 7).astype(np.float32)
            camera = group.create_group("obs/sensor_data/base_camera")
            camera["rgb"] = images(steps + 1, 16, 16, 3)
            camera["depth"] = np.ones((steps + 1, 16, 16, 1), np.int16)
            camera["segmentation"] = np.ones((steps + 1, 16, 16, 1), np.int16)
            group["obs/sensor_param/base_camera/intrinsic_cv"] = np.ones((steps + 1, 3, 3), np.float32)
            group["env_states/actors/cube"] = numbers(steps + 1, 13)
            group["actions"] = numbers(steps, 8).astype(np.float32)
            group["terminated"], group["truncated"] = np.zeros(steps, bool), np.arange(steps) > 2
            group["success"] = np.zeros(steps, bool)


def write_aloha(path: Path) -> None:
    """A real robot: JPEG rows padded with zeros, and their lengths in `compress_len`."""
    with h5py.File(path, "w") as file:
        file.attrs["sim"], file.attrs["compress"] = False, True
        lengths = []
        for number, camera in enumerate(("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")):
            rows = encoded(images(8, 24, 32, 3, seed=number))
            lengths.append([len(row) for row in rows])
            file[f"observations/images/{camera}"] = padded(rows)
        file["compress_len"] = np.array(lengths)
        file["observations/qpos"], file["observations/qvel"] = numbers(8, 14), numbers(8, 14)
        file["observations/effort"], file["action"], file["base_action"] = numbers(8, 14), numbers(8, 14), numbers(8, 2)


def write_libero(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["problem_info"] = '{"language_instruction": "open the drawer"}'
        for number in range(2):
            group = file.create_group(f"data/demo_{number}")
            for camera in ("agentview_rgb", "eye_in_hand_rgb"):
                group[f"obs/{camera}"] = images(5, 16, 16, 3, seed=number)
            for name, width in (
                ("ee_ori", 3),
                ("ee_pos", 3),
                ("ee_states", 6),
                ("gripper_states", 2),
                ("joint_states", 7),
            ):
                group[f"obs/{name}"] = numbers(5, width, seed=number)
            group["actions"], group["robot_states"], group["states"] = numbers(5, 7), numbers(5, 9), numbers(5, 47)
            group["dones"] = group["rewards"] = (np.arange(5) == 4).astype(np.uint8)


def write_minari(path: Path) -> None:
    """Nested dict and tuple observations; one observation more than actions."""
    with h5py.File(path, "w") as file:
        for number, steps in enumerate((3, 5)):
            group = file.create_group(f"episode_{number}")
            group.attrs["id"], group.attrs["seed"] = number, 7
            observations = group.create_group("observations")
            observations["observation"] = numbers(steps + 1, 4, seed=number)
            observations["desired_goal"] = numbers(steps + 1, 2, seed=number)
            observations["achieved_goal"] = numbers(steps + 1, 2, seed=number).astype(np.float32)
            for index in (0, 2, 10):
                observations[f"parts/_index_{index}"] = np.arange(steps + 1) + index
            group["actions"], group["rewards"] = numbers(steps, 3), np.ones(steps)
            group["terminations"] = np.arange(steps) == steps - 1
            group["truncations"] = np.zeros(steps, bool)
            group["infos/success"] = np.zeros(steps + 1, bool)


def write_d4rl(path: Path) -> None:
    with h5py.File(path, "w") as file:
        stream = numbers(21, 5).astype(np.float32)
        file["observations"], file["next_observations"] = stream[:-1], stream[1:]
        file["actions"], file["rewards"] = numbers(20, 3), numbers(20).astype(np.float32)
        file["terminals"], file["timeouts"] = np.zeros(20, bool), np.arange(20) % 10 == 9
        file["infos/qpos"] = numbers(20, 6)
        file["metadata/algorithm"], file["metadata/iteration"] = np.bytes_(b"SAC"), np.int32(3)
        file["metadata/policy/fc0/weight"] = numbers(64, 5)


def write_robonet(path: Path) -> None:
    """Actions and observations in groups beside each other; videos in one piece."""
    with h5py.File(path, "w") as file:
        video = np.frombuffer(b"\0\0\0\x18ftypmp42" + bytes(3000), np.uint8)
        for camera in range(2):
            file[f"env/cam{camera}_video/frames"] = video
            file[f"env/cam{camera}_video/frames"].attrs["T"] = 10
        file["env/qpos"], file["env/state"] = numbers(10, 7), numbers(10, 5)
        file["policy/actions"] = numbers(9, 4)
        file["misc/traj_ok"], file["file_version"] = True, "0.1"


def write_droid(path: Path) -> None:
    """One trajectory; several kinds of actions to choose from."""
    with h5py.File(path, "w") as file:
        for name, width in (("cartesian_velocity", 6), ("joint_velocity", 7)):
            file[f"action/{name}"] = numbers(9, width)
        file["action/gripper_velocity"] = numbers(9)
        file["observation/robot_state/joint_positions"] = numbers(9, 7)
        file["observation/robot_state/gripper_position"] = numbers(9)
        file["observation/robot_state/cartesian_position"] = numbers(9, 6)
        file["observation/timestamp/control/step_start"] = np.arange(9)


def write_calvin(path: Path) -> None:
    """Everything at the root; simulator state as `scene_obs`."""
    with h5py.File(path, "w") as file:
        file["actions"], file["rel_actions"] = numbers(9, 7), numbers(9, 7)
        file["robot_obs"], file["scene_obs"] = numbers(9, 15), numbers(9, 24)
        file["rgb_static"], file["rgb_gripper"] = images(9, 20, 20, 3), images(9, 12, 12, 3)
        file["depth_static"] = numbers(9, 20, 20).astype(np.float32)


def write_isaaclab(path: Path) -> None:
    """robomimic's names, with groups of states."""
    with h5py.File(path, "w") as file:
        for number in range(2):
            group = file.create_group(f"data/demo_{number}")
            group.attrs["success"] = True
            group["actions"], group["processed_actions"] = numbers(4, 7), numbers(4, 7)
            group["obs/joint_pos"], group["obs/joint_vel"] = numbers(4, 9, seed=number), numbers(4, 9)
            group["states/articulation/robot/joint_position"] = numbers(4, 9)
            group["initial_state/articulation/robot/root_pose"] = numbers(1, 7)


def write_pusht(path: Path) -> None:
    """A group per episode with any name, with the agent's position."""
    with h5py.File(path, "w") as file:
        for number in range(3):
            group = file.create_group(f"train/run{number}")
            group["obs/agent_pos"], group["obs/image"] = numbers(6, 2, seed=number), images(6, 16, 16, 3)
            group["action"] = numbers(6, 2, seed=number)


LAYOUTS: dict[str, dict[str, Any]] = {
    "robomimic": {
        "write": write_robomimic_image, "layout": "robomimic", "action": "actions",
        "groups": ["data/demo_0", "data/demo_1"], "joint": ["obs/robot0_joint_pos", "obs/robot0_gripper_qpos"],
        "cameras": {"global": "obs/agentview_image", "robot0_eye_in_hand": "obs/robot0_eye_in_hand_image"},
        "notes": ["not used: obs/object [5, 10]; select with joint='obs/object'",
                  "not used: states [5, 32] (simulator state); select with joint='states'",
                  "guessed: joint is obs/robot0_joint_pos [5, 7], obs/robot0_gripper_qpos [5, 2]"],
    },
    "robosuite": {
        "write": write_robosuite, "layout": "robomimic", "action": "actions", "groups": ["data/demo_1", "data/demo_2"],
        "joint": [], "cameras": {},
        "notes": ["not used: states [6, 32] (simulator state); select with joint='states'"],
    },
    "ManiSkill": {
        "write": write_maniskill, "layout": "ManiSkill", "action": "actions", "groups": ["traj_0", "traj_1"],
        "joint": ["obs/agent/qpos"], "cameras": {"global": "obs/sensor_data/base_camera/rgb"},
        "notes": ["not used: obs/sensor_data/base_camera/depth: depth, not an image of a camera",
                  "not used: obs/sensor_data/base_camera/segmentation: a mask, not an image of a camera",
                  "not used: obs/extra/tcp_pose [5, 7]; select with joint='obs/extra/tcp_pose'"],
    },
    "ALOHA": {
        "write": write_aloha, "layout": "ALOHA", "action": "action", "groups": [""], "joint": ["observations/qpos"],
        "cameras": {"left": "observations/images/cam_left_wrist", "right": "observations/images/cam_right_wrist",
                    "global": "observations/images/cam_high", "cam_low": "observations/images/cam_low"},
        "notes": ["JPEG images of the camera left are assumed to be BGR; color= says otherwise",
                  "not used: observations/effort [8, 14]; select with joint='observations/effort'"],
    },
    "LIBERO": {
        "write": write_libero, "layout": "robomimic", "action": "actions", "groups": ["data/demo_0", "data/demo_1"],
        "joint": ["obs/joint_states", "obs/gripper_states"],
        "cameras": {"global": "obs/agentview_rgb", "eye_in_hand": "obs/eye_in_hand_rgb"},
        "notes": ["not used: obs/ee_states [5, 6]; select with joint='obs/ee_states'"],
    },
    "Minari": {
        "write": write_minari, "layout": "Minari", "action": "actions", "groups": ["episode_0", "episode_1"],
        "joint": [f"observations/{name}" for name in ("achieved_goal", "desired_goal", "observation",
                                                      "parts/_index_0", "parts/_index_2", "parts/_index_10")],
        "cameras": {}, "notes": [],
    },
    "D4RL": {
        "write": write_d4rl, "layout": "D4RL", "action": "actions", "groups": [""], "joint": ["observations"],
        "cameras": {}, "notes": [],
    },
    "RoboNet": {
        "write": write_robonet, "layout": "RoboNet", "action": "policy/actions", "groups": [""], "joint": ["env/qpos"],
        "cameras": {},
        "notes": ["not used: env/cam0_video/frames: an MP4 video in one piece, expected a row per step"],
    },
    "CALVIN": {
        "write": write_calvin, "layout": "B (at the root)", "action": "actions", "groups": [""], "joint": [],
        "cameras": {"rgb_static": "rgb_static", "rgb_gripper": "rgb_gripper"},
        "notes": ["not used: depth_static: depth, not an image of a camera",
                  "not used: robot_obs [9, 15]; select with joint='robot_obs'"],
    },
    "Isaac Lab": {
        "write": write_isaaclab, "layout": "robomimic", "action": "actions", "groups": ["data/demo_0", "data/demo_1"],
        "joint": ["obs/joint_pos"], "cameras": {}, "notes": [],
    },
    "a group per episode": {
        "write": write_pusht, "layout": "a group per episode", "action": "action",
        "groups": ["train/run0", "train/run1", "train/run2"], "joint": ["obs/agent_pos"],
        "cameras": {"image": "obs/image"}, "notes": [],
    },
}  # fmt: skip
