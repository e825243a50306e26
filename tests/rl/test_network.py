"""NavRL's network: its names, its order, its initial state, and what it writes."""

import copy

import pytest
import torch
from tensordict import TensorDict

from slipstream import ConfigurationError
from slipstream.rl import NavRLPolicy

CNN, DYNAMIC, MLP = (f"feature_extractor.module.{name}" for name in ("0.module", "1.module.1", "3.module"))
HEADS = "actor.module.0.module"
ORIGINAL = {
    f"{CNN}.0.weight": (4, 1, 5, 3),
    f"{CNN}.0.bias": (4,),
    f"{CNN}.2.weight": (16, 4, 5, 3),
    f"{CNN}.2.bias": (16,),
    f"{CNN}.4.weight": (16, 16, 5, 3),
    f"{CNN}.4.bias": (16,),
    f"{CNN}.7.weight": (128, 288),
    f"{CNN}.7.bias": (128,),
    f"{CNN}.8.weight": (128,),
    f"{CNN}.8.bias": (128,),
    f"{DYNAMIC}.0.weight": (128, 50),
    f"{DYNAMIC}.0.bias": (128,),
    f"{DYNAMIC}.2.weight": (128,),
    f"{DYNAMIC}.2.bias": (128,),
    f"{DYNAMIC}.3.weight": (64, 128),
    f"{DYNAMIC}.3.bias": (64,),
    f"{DYNAMIC}.5.weight": (64,),
    f"{DYNAMIC}.5.bias": (64,),
    f"{MLP}.0.weight": (256, 200),
    f"{MLP}.0.bias": (256,),
    f"{MLP}.2.weight": (256,),
    f"{MLP}.2.bias": (256,),
    f"{MLP}.3.weight": (256, 256),
    f"{MLP}.3.bias": (256,),
    f"{MLP}.5.weight": (256,),
    f"{MLP}.5.bias": (256,),
    f"{HEADS}.alpha_layer.weight": (3, 256),
    f"{HEADS}.alpha_layer.bias": (3,),
    f"{HEADS}.beta_layer.weight": (3, 256),
    f"{HEADS}.beta_layer.bias": (3,),
    "critic.module.weight": (1, 256),
    "critic.module.bias": (1,),
    "value_norm.running_mean": (1,),
    "value_norm.running_mean_sq": (1,),
    "value_norm.debiasing_term": (),
    "gae.gamma": (),
    "gae.lmbda": (),
}


@pytest.mark.parametrize("folded", [True, False])
def test_a_state_dict_of_the_original_loads_strictly_and_entirely(folded):
    generator = torch.Generator().manual_seed(0)
    original = {name: torch.randn(shape, generator=generator) for name, shape in ORIGINAL.items()}
    policy = NavRLPolicy(folded=folded)
    policy.load_state_dict(original, strict=True)
    assert {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()} == ORIGINAL
    assert all(torch.equal(tensor, original[name]) for name, tensor in policy.state_dict().items())


def test_the_concatenation_is_lidar_then_obstacles_then_state(observations):
    policy = NavRLPolicy()
    recognisable = {f"{CNN}.8": 1.0, f"{DYNAMIC}.5": 2.0}
    with torch.no_grad():
        for name, value in recognisable.items():
            norm = policy.get_submodule(name)
            norm.weight.zero_()
            norm.bias.fill_(value)
    seen: list[torch.Tensor] = []
    policy.get_submodule("feature_extractor.module.3").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    data = observations(2)
    data["agents", "observation", "state"].fill_(3.0)
    policy.evaluate(data)
    assert seen[0].tolist() == [[1.0] * 128 + [2.0] * 64 + [3.0] * 8] * 2


def test_lidar_features_reach_the_linear_layer_channel_by_channel_then_azimuth_then_pitch(observations):
    policy = NavRLPolicy()
    cnn = policy.get_submodule("feature_extractor.module.0.module")
    lidar = observations(3)["agents", "observation", "lidar"]
    values = lidar
    for number in range(6):
        values = cnn[number](values)
    assert values.shape == (3, 16, 9, 2)
    expected = cnn[8](cnn[7](values.reshape(3, 288)))
    torch.testing.assert_close(cnn(lidar), expected)


def test_folded_and_plain_have_the_same_outputs_and_gradients(observations, policy):
    results = []
    for folded in (True, False):
        one = policy(folded=folded)
        distribution, value = one.evaluate(observations(64))
        action = torch.linspace(0.1, 0.9, 192).reshape(64, 3)
        (distribution.log_prob(action).mean() + value.square().mean() - distribution.entropy().mean()).backward()
        gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
        outputs = {"alpha": distribution.alpha, "beta": distribution.beta, "value": value}
        results.append({**{name: tensor.detach() for name, tensor in outputs.items()}, **gradients})
    assert results[0].keys() == results[1].keys()
    for name, tensor in results[0].items():
        scale = float(results[1][name].abs().max())
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=name)


def test_actor_and_critic_begin_orthogonal_and_small_with_zero_biases():
    policy = NavRLPolicy()
    for layer in ("actor.module.0.module.alpha_layer", "actor.module.0.module.beta_layer", "critic.module"):
        weight, bias = policy.get_parameter(f"{layer}.weight"), policy.get_parameter(f"{layer}.bias")
        torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(len(weight)), rtol=1e-3, atol=1e-8)
        assert not bias.any()
    assert float(policy.gae.gamma) == pytest.approx(0.99)
    assert float(policy.gae.lmbda) == pytest.approx(0.95)


@pytest.mark.parametrize("batch", [(), (5,), (4, 3), (2, 2, 2)])
def test_any_batch_shape_gives_what_one_row_at_a_time_gives(observations, policy, batch):
    one, data = policy(), observations(*batch)
    acted = one.act(data, "mean")
    assert acted is data
    assert acted["state_value"].shape == (*batch, 1)
    assert acted["sample_log_prob"].shape == batch
    assert acted["agents", "action_normalized"].shape == (*batch, 3)
    rows = torch.stack([one.evaluate(row)[1] for row in data.reshape(-1)])
    torch.testing.assert_close(acted["state_value"].reshape(-1, 1), rows, rtol=1e-4, atol=1e-5)


def test_acting_writes_actions_and_what_an_update_needs_and_no_more(observations, policy):
    one = policy(action_map=lambda unit: 4 * unit - 2)
    data = observations(16)
    before = set(data.keys(True, True))
    torch.manual_seed(0)
    one(data)
    assert set(data.keys(True, True)) - before == set(one.out_keys)
    unit = data["agents", "action_normalized"]
    assert bool(((unit > 0) & (unit < 1)).all())
    assert torch.equal(data["agents", "action"], 4 * unit - 2)
    distribution, value = one.evaluate(data)
    assert torch.equal(data["sample_log_prob"], distribution.log_prob(unit))
    assert torch.equal(data["state_value"], value)
    assert not data["state_value"].requires_grad
    assert ("agents", "action") not in NavRLPolicy()(observations(1)).keys(True)


def test_evaluation_repeats_itself_and_exploration_does_not(observations, policy):
    from tensordict.nn import set_interaction_type
    from tensordict.nn.probabilistic import InteractionType

    one, key = policy(), ("agents", "action_normalized")
    distribution, _ = one.evaluate(observations(4))
    for kind, expected in (("MODE", "mode"), ("MEAN", "mean"), ("DETERMINISTIC", "mean")):
        with set_interaction_type(InteractionType[kind]):
            assert torch.equal(one(observations(4))[key], getattr(distribution, expected))
    assert not torch.equal(one(observations(4))[key], one(observations(4))[key])
    with (
        set_interaction_type(InteractionType.MEDIAN),
        pytest.raises(ConfigurationError, match="exploration type is median"),
    ):
        one(observations(4))
    with pytest.raises(ConfigurationError, match="choose is 'best', expected one of 'sample', 'mean', 'mode'"):
        one.act(observations(4), "best")


def test_observations_of_another_sensor_are_refused_by_name(observations):
    data = observations(4)
    data["agents", "observation", "lidar"] = torch.zeros(4, 1, 72, 4)
    with pytest.raises(ConfigurationError, match="'lidar' has shape .4, 1, 72, 4., expected it to end in .1, 36, 4."):
        NavRLPolicy().evaluate(data)


def test_a_deep_copy_acts_the_same_and_shares_nothing(observations, policy):
    one = policy()
    other = copy.deepcopy(one)
    expected = one.act(observations(3), "mean")["state_value"]
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert torch.equal(other.act(observations(3), "mean")["state_value"], expected)


@pytest.mark.filterwarnings("ignore:Creating .* WeightUpdaterBase is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing transforms:FutureWarning")
def test_it_flies_the_simulator_under_a_collector():
    pytest.importorskip("torchrl")
    from torchrl.collectors import Collector

    from slipstream import NavigationConfig, NavigationEnv
    from slipstream.nav import velocity_from_unit

    settings = {"num_static_obstacles": 20, "num_dynamic_obstacles": 8, "dynamics": "lag", "dt_s": 0.1}
    env = NavigationEnv(NavigationConfig(num_envs=3, **settings))  # type: ignore[arg-type]
    policy = NavRLPolicy(velocity_from_unit)
    collector = Collector(env, policy, frames_per_batch=12, total_frames=12)
    (batch,) = [batch.clone() for batch in collector]
    collector.shutdown()
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == (3, 4)
    assert torch.equal(batch["agents", "action"], velocity_from_unit(batch["agents", "action_normalized"]))
    assert batch["sample_log_prob"].shape == (3, 4)
