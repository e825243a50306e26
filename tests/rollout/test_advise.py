"""`advise`: each branch of the decision on invented numbers, and measuring small batches."""

import dataclasses
import json
import math

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from slipstream import (
    Advice,
    CompressedTensorDict,
    ConfigurationError,
    CorruptFileError,
    RolloutError,
    advise,
    save_rollout_compressed,
)
from slipstream.rollout import sources
from slipstream.rollout.advise import Settings, compare_network, compare_plans, conclude, decide
from slipstream.rollout.measure import KeyNumbers, Measured
from slipstream.run.metrics import find_newest
from tests.measured import COMPRESSIBLE, GB, MB, NOISE


def walk(num_envs: int = 64, num_steps: int = 16, width: int = 12) -> TensorDict:
    """Return a batch that packs well: a slow walk on a grid, with its ``next``."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(-1, 2, (num_envs, num_steps + 1, width), generator=generator)
    path = steps.cumsum(1).float() / 8
    return TensorDict(
        {
            "observation": path[:, :-1].clone(),
            "next": {"observation": path[:, 1:].clone(), "reward": torch.ones(num_envs, num_steps, 1)},
        },
        batch_size=[num_envs, num_steps],
    )


def noise(num_envs: int = 64, num_steps: int = 16) -> TensorDict:
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31 - 1, (num_envs, num_steps, 24), generator=generator, dtype=torch.int32)
    return TensorDict({"bits": bits}, batch_size=[num_envs, num_steps])


def test_a_batch_that_fits_stays_with_plan_a():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=16 * GB))
    assert decision.plan == "A"
    assert decision.fits
    assert decision.num_envs_that_fit == 1600


def test_without_a_memory_limit_a_batch_is_assumed_to_fit():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=100.0))
    assert decision.plan == "A"
    assert (decision.fits, decision.packed_fits, decision.save_fits) == (True, True, True)
    assert decision.num_envs_that_fit is None


def test_a_large_compressible_batch_with_a_low_limit_is_packed_in_memory():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=4 * GB))
    assert decision.plan == "C"
    assert (decision.fits, decision.packing_pays, decision.packed_fits) == (False, True, True)
    assert decision.costs_too_much is False
    assert decision.num_envs_that_fit == 400


def test_plan_c_is_not_chosen_if_it_costs_a_fifth_of_an_iteration():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=50.0, memory_limit_bytes=4 * GB))
    assert decision.plan == "A"
    assert decision.costs_too_much is True
    assert decision.num_envs_that_fit == 400
    assert decide(COMPRESSIBLE, Settings(iteration_s=50.1, memory_limit_bytes=4 * GB)).plan == "C"


def test_without_the_duration_of_an_iteration_plan_c_is_chosen_on_a_condition():
    decision = decide(COMPRESSIBLE, Settings(memory_limit_bytes=4 * GB))
    assert decision.plan == "C"
    assert decision.costs_too_much is None
    assert decision.min_iteration_s == 50.0


def test_a_batch_too_large_even_if_packed_has_to_shrink():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=1000.0, memory_limit_bytes=2 * GB))
    assert decision.plan == "A"
    assert (decision.packing_pays, decision.packed_fits) == (True, False)
    assert decision.num_envs_that_fit == 200
    assert decide(COMPRESSIBLE, Settings(iteration_s=1000.0, memory_limit_bytes=MB)).num_envs_that_fit == 0


@pytest.mark.parametrize("limit", [None, 4 * GB, 16 * GB])
def test_noise_stays_with_plan_a_for_any_limit(limit):
    decision = decide(NOISE, Settings(iteration_s=1000.0, memory_limit_bytes=limit))
    assert decision.plan == "A"
    assert not decision.packing_pays
    assert not decision.file_is_smaller


def test_keeping_rollouts_needs_plan_b():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=100.0, keep_rollouts=True))
    assert decision.plan == "B"
    assert decision.file_is_smaller
    assert (decision.save_interval, decision.min_save_interval) == (100, 1)


def test_plan_b_gets_the_interval_at_which_it_costs_under_a_percent():
    settings = Settings(iteration_s=10.0, keep_rollouts=True, rollout_save_interval=5)
    decision = decide(COMPRESSIBLE, settings)
    assert (decision.save_interval, decision.min_save_interval) == (10, 10)


def test_plan_b_writes_a_rollout_before_the_next_one():
    slow = dataclasses.replace(COMPRESSIBLE, save_call_s=0.001, save_background_s=45.0)
    assert decide(slow, Settings(iteration_s=10.0)).min_save_interval == 5


def test_rollouts_of_noise_can_be_kept_but_are_not_smaller():
    decision = decide(NOISE, Settings(iteration_s=100.0, keep_rollouts=True))
    assert decision.plan == "B"
    assert not decision.file_is_smaller


def test_plan_b_without_the_duration_of_an_iteration_keeps_the_requested_interval():
    decision = decide(COMPRESSIBLE, Settings(keep_rollouts=True, rollout_save_interval=7))
    assert decision.plan == "B"
    assert (decision.save_interval, decision.min_save_interval) == (7, None)


def test_the_copy_of_a_save_may_exceed_the_limit():
    decision = decide(COMPRESSIBLE, Settings(keep_rollouts=True, memory_limit_bytes=12 * GB))
    assert decision.plan == "B"
    assert (decision.fits, decision.save_fits) == (True, False)


def test_keeping_rollouts_does_not_prevent_plan_c_unless_c_is_too_slow():
    both = decide(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=4 * GB, keep_rollouts=True))
    assert both.plan == "C"
    shrunk = decide(COMPRESSIBLE, Settings(iteration_s=1.0, memory_limit_bytes=4 * GB, keep_rollouts=True))
    assert shrunk.plan == "B"
    assert (shrunk.fits, shrunk.num_envs_that_fit) == (False, 400)


def test_a_faster_order_of_minibatches_does_not_count_in_favor_of_c():
    quick = dataclasses.replace(COMPRESSIBLE, epoch_a_s=9.0)
    assert compare_plans(quick, Settings())[2].time_s == quick.memory_pack_s
    assert compare_plans(COMPRESSIBLE, Settings(epochs=3))[2].time_s == 6.0 + 3 * 1.0


def test_the_plans_take_what_was_measured():
    a, b, c = compare_plans(COMPRESSIBLE, Settings(iteration_s=100.0))
    assert (a.time_s, a.share, a.memory_bytes, a.disk_per_1000_bytes) == (0.0, 0.0, 10 * GB, None)
    assert (b.time_s, b.share, b.memory_bytes, b.disk_per_1000_bytes) == (0.01, 0.0001, 15 * GB, 1000 * GB)
    assert (c.time_s, c.share, c.memory_bytes, c.disk_per_1000_bytes) == (10.0, 0.1, 2.5 * GB, None)


def test_on_a_gpu_plan_c_keeps_one_minibatch_there_and_the_rest_on_the_host():
    settings = Settings(device="cuda:0", minibatches=10, iteration_s=100.0, memory_limit_bytes=4 * GB)
    _, b, c = compare_plans(COMPRESSIBLE, settings)
    assert (c.memory_bytes, c.host_bytes) == (GB, 2.5 * GB)
    assert (b.memory_bytes, b.host_bytes) == (10 * GB, 5 * GB)
    assert decide(COMPRESSIBLE, settings).plan == "C"


def test_at_the_break_even_bandwidth_both_ways_take_the_same_time():
    found = compare_network(COMPRESSIBLE, Settings(bandwidth_bytes_s=10 * MB))
    assert found.packed_wins
    assert (found.raw_s, found.packed_s) == (1000.0, 5.0 + 100.0 + 4.0)
    assert found.break_even_bytes_s == GB
    at = compare_network(COMPRESSIBLE, Settings(bandwidth_bytes_s=found.break_even_bytes_s))
    assert math.isclose(at.raw_s, at.packed_s)
    assert not compare_network(COMPRESSIBLE, Settings(bandwidth_bytes_s=1.01 * GB)).packed_wins


def test_noise_is_sent_raw_at_any_bandwidth():
    found = compare_network(NOISE, Settings(bandwidth_bytes_s=1.0))
    assert found.break_even_bytes_s is None
    assert not found.packed_wins


def test_the_updates_stand_for_an_iteration_if_only_a_step_is_known():
    assert Settings(step_s=0.5, epochs=4, minibatches=10).known_iteration_s == 20.0
    assert Settings(step_s=0.5, iteration_s=100.0).known_iteration_s == 100.0


def test_str_is_one_line():
    advice = conclude(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=4 * GB), source="a.slip")
    assert str(advice) == "plan C for a.slip: 10.0 s per iteration, 2.5 GB of memory"


def test_advice_is_plain_data_that_cannot_be_changed():
    advice = conclude(COMPRESSIBLE, Settings())
    with pytest.raises(dataclasses.FrozenInstanceError):
        advice.source = "another"  # type: ignore[misc]
    assert advice == conclude(COMPRESSIBLE, Settings())


def test_json_is_valid_and_complete():
    advice = conclude(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=4 * GB))
    document = json.loads(json.dumps(advice.to_json(), allow_nan=False))
    assert set(document) == {field.name for field in dataclasses.fields(Advice)} | {"plan"}
    assert set(document["measured"]) == {field.name for field in dataclasses.fields(Measured)} | {"ratio"}
    assert set(document["measured"]["keys"][0]) == {field.name for field in dataclasses.fields(KeyNumbers)} | {"ratio"}
    assert [plan["letter"] for plan in document["plans"]] == ["A", "B", "C"]
    assert document["plan"] == document["decision"]["plan"] == "C"
    assert document["measured"]["ratio"] == 10
    assert document["network"]["packed_s"] == advice.network.packed_s
    json.dumps(conclude(NOISE, Settings()).to_json(), allow_nan=False)


def test_scaling_up_multiplies_sizes_and_times_and_nothing_else():
    larger = COMPRESSIBLE.scaled(2.5)
    assert (larger.num_envs, larger.num_steps, larger.batch_size) == (2500, 32, (2500, 32))
    assert (larger.raw_bytes, larger.encode_s, larger.epoch_c_s) == (25 * GB, 10.0, 7.5)
    assert larger.keys[0].packed_bytes == 2.5 * GB
    assert larger.keys[0].shape == (36, 4)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("epochs", 0),
        ("minibatches", 2.5),
        ("rollout_save_interval", -1),
        ("iteration_s", 0.0),
        ("step_s", float("nan")),
        ("memory_limit_bytes", -5),
        ("bandwidth_bytes_s", float("inf")),
        ("device", "meta"),
        ("device", "toaster"),
        ("folder", "/no/such/folder"),
        ("iteration_s", 1e-300),
    ],
)
def test_an_invalid_setting_is_refused_by_name(setting, value):
    with pytest.raises(ConfigurationError, match=f"{setting} is "):
        advise(walk(), **{setting: value})


def test_a_compressible_batch_is_measured_key_by_key():
    batch, before = walk(), walk()
    advice = advise(batch, iteration_s=1000.0, memory_limit_bytes=60_000, minibatches=4)
    assert advice.plan == "C"
    measured = advice.measured
    assert measured.raw_bytes == 2 * 64 * 16 * 12 * 4 + 64 * 16 * 4
    assert sum(key.raw_bytes for key in measured.keys) == measured.raw_bytes
    assert sum(key.packed_bytes for key in measured.keys) < measured.file_bytes < measured.raw_bytes / 4
    observation = measured.keys[0]
    assert (observation.key, observation.dtype, observation.shape) == ("observation", "float32", (12,))
    assert observation.with_next
    assert observation.packed_in_c
    assert all(value > 0 for name, value in vars(measured).items() if name.endswith("_s"))
    assert (batch == before).all()
    json.dumps(advice.to_json(), allow_nan=False)


def test_a_batch_of_noise_stays_with_plan_a():
    advice = advise(noise(), iteration_s=1000.0, memory_limit_bytes=50_000)
    assert advice.plan == "A"
    assert not advice.decision.packing_pays


def test_progress_is_reported_and_nothing_is_left_behind(tmp_path):
    heard: list[str] = []
    advise(walk(), folder=tmp_path, progress=heard.append)
    assert len(heard) == 5
    assert list(tmp_path.iterdir()) == []


def test_a_saved_rollout_gives_the_same_sizes_as_its_batch(tmp_path):
    path = save_rollout_compressed(walk(), tmp_path / "rollout.slip")
    given, saved = advise(walk()), advise(path)
    assert saved.source == str(path)
    assert saved.measured.raw_bytes == given.measured.raw_bytes
    assert saved.measured.memory_packed_bytes == given.measured.memory_packed_bytes


@pytest.mark.parametrize("form", ["tensordict", "dict"])
def test_a_batch_that_torch_saved_is_loaded_without_running_code(tmp_path, form):
    batch = walk()
    torch.save(batch if form == "tensordict" else batch.to_dict(), tmp_path / "batch.pt")
    assert advise(tmp_path / "batch.pt").measured.raw_bytes == advise(batch).measured.raw_bytes


class Surprise:
    def __reduce__(self):
        return (pytest.fail, ("code from the file was run",))


def test_a_batch_that_needs_code_to_be_loaded_is_refused_and_the_error_tells_how(tmp_path):
    torch.save({"observation": torch.zeros(2, 3), "more": Surprise()}, tmp_path / "batch.pt")
    with pytest.raises(
        RolloutError, match=r"batch.pt: .*would run code .*if you trust it, convert it first: .*weights_only=False"
    ):
        advise(tmp_path / "batch.pt")


def test_files_that_are_no_batches_are_refused_with_a_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": torch.zeros(2, 3), "b": torch.zeros(5)}, tmp_path / "ragged.pt")
    with pytest.raises(CorruptFileError, match=r"notes.txt: neither a rollout .* expected a .slip or .pt file"):
        advise(tmp_path / "notes.txt")
    with pytest.raises(CorruptFileError, match=r"cut.pt: torch cannot load it"):
        advise(tmp_path / "cut.pt")
    with pytest.raises(RolloutError, match=r"list.pt: contains a list, expected a TensorDict"):
        advise(tmp_path / "list.pt")
    with pytest.raises(RolloutError, match=r"ragged.pt: .*do not begin with the same two axes"):
        advise(tmp_path / "ragged.pt")
    with pytest.raises(FileNotFoundError):
        advise(tmp_path / "absent.pt")


def test_a_run_folder_gives_its_newest_rollout_and_the_time_of_its_iterations(tmp_path):
    for number, envs in ((9, 8), (100, 64), (20, 16)):
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        save_rollout_compressed(walk(envs), tmp_path / "rollouts" / f"rollout_{number:06d}.slip")
    lines = [{"perf/iteration_mean": 9.0}, {"perf/iteration_mean": 2.5, "step": 3}, {"loss": 1.0}, ["no", "object"]]
    content = "".join(json.dumps(line) + "\n" for line in lines) + '{"perf/iteration_mean": 7'
    (tmp_path / "metrics.jsonl").write_text(content)
    advice = advise(tmp_path)
    assert advice.measured.num_envs == 64
    assert advice.settings.iteration_s == 2.5
    assert advice.iteration_from_run
    assert advice.source.endswith("rollout_000100.slip")
    given = advise(tmp_path, iteration_s=4.0)
    assert (given.settings.iteration_s, given.iteration_from_run) == (4.0, False)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "not json\n",
        '{"perf/iteration_mean": NaN}\n',
        '{"perf/iteration_mean": "2"}\n',
        '{"perf/iteration_mean": 1' + 400 * "0" + "}\n",
        "\xff\n",
        100_000 * "[" + "\n",
    ],
)
def test_metrics_without_the_time_of_an_iteration_are_no_error(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, encoding="latin-1")
    assert find_newest(tmp_path / "metrics.jsonl", ["perf/iteration_mean"]) is None


def test_a_folder_without_rollouts_is_refused_with_a_hint(tmp_path):
    with pytest.raises(RolloutError, match="rollout_save_interval"):
        advise(tmp_path)


@pytest.mark.parametrize(
    ("batch", "error", "reason"),
    [
        (7, ConfigurationError, "the batch is a int, expected a TensorDict"),
        (None, ConfigurationError, "the batch is a NoneType"),
        ({}, RolloutError, "expected a TensorDict or a dict that maps names to tensors"),
        ({"lidar": ((36, 4), "float32")}, RolloutError, "the batch: contains a dict, expected a TensorDict"),
        ({1: torch.zeros(8, 4)}, RolloutError, "the batch: contains a dict, expected a TensorDict"),
    ],
)
def test_an_object_that_is_not_a_batch_is_refused(batch, error, reason):
    with pytest.raises(error, match=reason):
        advise(batch)


def test_of_a_large_batch_only_some_environments_are_measured_and_scaled_up(tmp_path, monkeypatch):
    batch, whole = walk(), advise(walk()).measured.raw_bytes
    path = save_rollout_compressed(batch, tmp_path / "rollout.slip")
    monkeypatch.setattr(sources, "MAX_MEASURED_BYTES", whole // 4)
    for given in (batch, path):
        advice = advise(given)
        assert advice.measured_share == 0.25
        assert (advice.measured.raw_bytes, advice.measured.num_envs) == (whole, 64)


def test_batches_of_other_kinds_are_measured_too():
    agents = TensorDict({"observation": torch.zeros(8, 4, 3, 5)}, batch_size=[8, 4, 3])
    assert advise(agents).measured.batch_size == (8, 4)
    one = TensorDict({"observation": torch.zeros(50, 5)}, batch_size=[50])
    assert advise(one).measured.num_envs == 1
    lazy = LazyStackedTensorDict(*walk(8).unbind(0), stack_dim=0)
    assert advise(lazy).measured.num_envs == 8
    assert advise(CompressedTensorDict(walk(8))).measured.num_envs == 8
    assert advise({"observation": torch.zeros(8, 4, 5)}).measured.raw_bytes == 8 * 4 * 5 * 4


def test_a_batch_too_small_for_its_minibatches_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be split into 16 minibatches"):
        advise(walk(2, 4))
    path = save_rollout_compressed(walk(2, 4), tmp_path / "small.slip")
    with pytest.raises(ConfigurationError, match=r"small.slip: shape \[2, 4\] with"):
        advise(path)
    with pytest.raises(RolloutError, match="no batch size"):
        advise(TensorDict({"a": torch.zeros(3)}, batch_size=[]))
