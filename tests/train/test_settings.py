"""What a training is set to: NavRL's names and defaults, and an answer to everything else."""

import dataclasses

import pytest

from slipstream import ConfigurationError, NavigationConfig, PPOConfig
from slipstream.run.folder import RunFolder
from slipstream.train.settings import compose_settings, load_yaml, override_settings, settings_from, to_yaml
from slipstream.train.startup import open_run
from tests.train.conftest import SMALL, small


def test_without_overrides_the_settings_are_those_of_navrl():
    settings = compose_settings()
    assert settings.navigation() == NavigationConfig()
    assert settings.ppo() == PPOConfig()
    assert settings.max_frame_num == 1.2e9


COMMAND = """headless=True env.num_envs=1024 env.num_obstacles=350 env_dyn.num_obstacles=80 wandb.mode=offline
compress_checkpoint=True async_checkpoint_queue_size=2 save_compression_level=3 save_interval=5 eval_interval=7
rollout_save_interval=11 use_pipelined_collector=True compress_lidar=True gpu_memory_limited=True max_frame_num=12e8
seed=3 device=cpu sensor.lidar_range=4.0 sensor.lidar_hres=10 algo.actor.clip_ratio=0.1 algo.navrl_compat=True
algo.feature_extractor.learning_rate=5e-4 env.max_episode_length=2200 env_dyn.vel_range=[0.5,1.5]
env_dyn.local_range=[5.0,5.0,4.5]"""


def test_the_command_line_of_a_navrl_user_is_understood():
    settings = compose_settings(COMMAND.split())
    assert settings.seed == settings.navigation().seed == 3
    assert settings.ppo().navrl_compat
    assert settings.compress_lidar
    assert settings.gpu_memory_limited
    assert settings.use_pipelined_collector


def test_the_quick_preset_flies_with_a_lag_and_a_discount_for_its_longer_steps():
    settings = compose_settings(["preset=quick"])
    assert (settings.sim.dynamics, settings.sim.dt) == ("lag", 0.1)
    assert settings.algo.gamma < PPOConfig().gamma
    assert (settings.env.num_obstacles, settings.env_dyn.num_obstacles) == (350, 80)


def test_settings_survive_yaml(tmp_path):
    settings = compose_settings(["preset=quick", "env.num_envs=48", "name=x"])
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    assert load_yaml(tmp_path / "config.yaml") == settings


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("env.num_env=3", "there is no setting 'env.num_env'; did you mean env.num_envs"),
        ("num_envs=3", "there is no setting 'num_envs'; did you mean env.num_envs"),
        ("preset=slow", "preset is 'slow', expected one of 'navrl', 'quick'"),
        ("sim=isaac", "sim is 'isaac', expected one of 'hummingbird', 'lag'"),
        ("foo", "'foo' is not an override, expected key=value such as env.num_envs=256"),
        ("+extra=1", "'+extra=1' adds or deletes a setting, expected key=value"),
        ("seed=1,2", "'seed=1,2' is a sweep, which is not supported: start one training for each value"),
        ("seed=range(1,4)", "'seed=range(1,4)' is a sweep, which is not supported"),
        ("hydra.run.dir=x", "'hydra.run.dir=x' configures Hydra itself, which is not supported: run_dir= and name="),
        ("hydra/launcher=basic", "'hydra/launcher=basic' configures Hydra itself, which is not supported"),
        ("env.num_envs=many", "the configuration: env.num_envs: Value 'many' of type 'str' could not be converted"),
        ("env.num_envs=0", "env.num_envs is 0, expected a whole number of at least 1"),
        ("env.num_obstacles=-1", "env.num_obstacles is -1, expected a whole number of at least 0"),
        ("env_dyn.num_obstacles=7", "env_dyn.num_obstacles is 7, expected a multiple of 8"),
        ("sim.dt=0.1", "sim.dt is 0.1, expected at most 0.02 for the dynamics 'hummingbird'"),
        ("sensor.lidar_hres=7", "sensor.lidar_hres is 7.0, expected degrees that divide 360"),
        ("sensor.lidar_vbeams=8", "the sensor has 36 x 8 beams, expected 36 x 4: the network is NavRL's"),
        ("sensor.lidar_vfov=[1]", "sensor.lidar_vfov is [1.0], expected two numbers"),
        ("algo.gamma=1.5", "algo.gamma is 1.5, expected a number from 0 to 1"),
        ("algo.feature_extractor.dyn_obs_num=6", "algo.feature_extractor.dyn_obs_num is 6, expected 5"),
        ("algo.learning_rate_schedule=cosine", "algo.learning_rate_schedule is 'cosine', expected one of 'constant'"),
        ("algo.num_minibatches=100000", "env.num_envs x algo.training_frame_num is 32768 steps, expected at least one"),
        ("wandb.mode=maybe", "wandb.mode is 'maybe', expected one of 'offline', 'online', 'disabled'"),
        ("name=../outside", "name is '../outside', expected the name of a folder"),
        ("name=last", "name is 'last', expected the name of a folder other than 'last'"),
        ("save_compression_level=13", "save_compression_level is 13, expected a whole number from 0 to 12"),
        ("seed=-1", "seed is -1, expected a number of at least 0"),
        ("max_frame_num=inf", "max_frame_num is inf, expected a number of at least 1"),
        ("device=tpu9", "device 'tpu9' is not available"),
        ("device=meta", "device 'meta' is not available"),
        ("name=..", "name is '..', expected the name of a folder"),
        ("name=.", "name is '.', expected the name of a folder"),
        (f"seed={2**64}", f"seed is {2**64}, expected a whole number from 0 to"),
        (f"env.map_seed={2**64}", f"env.map_seed is {2**64}, expected a whole number from 0 to"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_sentence_that_says_which_and_why(override, sentence):
    with pytest.raises(ConfigurationError) as caught:
        compose_settings([override])
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_config_file_that_is_none_is_refused(tmp_path):
    for content in ("a: [", "- 1\n- 2\n", "seed: 1\n", "unknown: 3\n"):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ConfigurationError, match=r"config\.yaml"):
            load_yaml(tmp_path / "config.yaml")


def test_a_group_of_a_run_that_is_resumed_cannot_be_replaced():
    with pytest.raises(ConfigurationError, match="replaces a group of settings"):
        override_settings(compose_settings(), ["preset=quick"])


def test_a_run_is_found_by_its_folder_or_by_its_name(tmp_path, train):
    train("x", "name=x", f"run_dir={tmp_path}", until=1)
    settings, folder, is_resumed = open_run([f"resume={tmp_path / 'x'}", "max_frame_num=5000"])
    assert is_resumed
    assert folder.name == "x"
    assert settings.max_frame_num == 5000
    assert settings.env.num_envs == 16
    command = [f"{key}={value}" for key, value in (("run_dir", tmp_path), ("name", "x"))]
    with pytest.raises(ConfigurationError, match=r"already contains a run: resume it with resume=.*x, or choose"):
        open_run([*command])
    settings, folder, is_resumed = open_run([*SMALL, *command, "resume=auto"])
    assert is_resumed
    assert folder.path == tmp_path / "x"
    with pytest.raises(ConfigurationError, match=r"resume=auto needs the name of the run"):
        open_run(["resume=auto"])
    settings, _, is_resumed = open_run([*command[:1], "name=y", "resume=auto"])
    assert not is_resumed
    assert settings.name == "y"
    assert not (tmp_path / "y").exists()


def test_a_folder_that_is_no_run_is_not_resumed(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"empty has no config\.yaml, so it is not the folder of a run"):
        open_run([f"resume={tmp_path / 'empty'}"])
    with pytest.raises(ConfigurationError, match="missing: there is no such run, expected a folder"):
        open_run([f"resume={tmp_path / 'missing'}"])


def test_settings_with_something_missing_say_what():
    values = dataclasses.asdict(small())
    del values["env"]["num_envs"]
    with pytest.raises(ConfigurationError, match=r"env\.num_envs"):
        settings_from(values)


def test_a_run_of_a_version_without_the_newer_settings_has_what_that_version_did():
    values = dataclasses.asdict(compose_settings())
    for name in ("num_maps", "inside_starts", "centred_reward", "collision_penalty", "danger_weight"):
        del values["env"][name]
    for name in ("mirror", "mirror_coefficient", "precision", "update_threads"):
        del values["algo"][name]
    del values["sim"]["response_delay"]
    assert settings_from(values) == compose_settings(["preset=navrl"])


def test_a_run_without_a_name_is_called_by_the_time(tmp_path):
    settings, folder, _ = open_run(["preset=quick", f"run_dir={tmp_path}"])
    assert settings.name == folder.path.name
    assert RunFolder(folder.path).name.startswith("20")
