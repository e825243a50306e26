"""`advise`: the decision branch by branch on numbers made up here, and the measuring on small batches."""

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
from slipstream.rollout.advice import conclude, sources
from slipstream.rollout.advice.measure import KeyNumbers, Measured
from slipstream.rollout.advice.plans import Settings, cost_c_s, decide, interval_for_b, network, plans

MB, GB = 10**6, 10**9

COMPRESSIBLE = Measured(
    batch_size=(1000, 32),
    num_envs=1000,
    num_steps=32,
    keys=(KeyNumbers("lidar", "float32", (36, 4), True, 10 * GB, GB, 10.0, 5.0, True),),
    raw_bytes=10 * GB,
    distinct_bytes=5 * GB,
    file_bytes=GB,
    copy_s=1.0,
    encode_s=4.0,
    encode_cpu_s=10.0,
    decode_s=2.0,
    decode_cpu_s=5.0,
    load_s=4.0,
    save_call_s=1.0,
    save_background_s=20.0,
    memory_packed_bytes=2 * GB,
    memory_cache_bytes=GB // 2,
    memory_pack_s=6.0,
    epoch_a_s=2.0,
    epoch_c_s=3.0,
    epoch_c_shuffled_s=30.0,
)
NOISE = dataclasses.replace(COMPRESSIBLE, file_bytes=10 * GB, memory_packed_bytes=10 * GB)


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
    assert decision.headline == "Stay with plan A: the batch fits, and it costs nothing."
    assert decision.tree[0][1] == "Yes: 10.0 GB against a limit of 16.0 GB."
    assert set(decision.why_not) == {"B", "C"}
    assert "2.5 GB instead of 10.0 GB, for 10.0 s per iteration (10 %)" in decision.why_not["C"]


def test_without_a_memory_limit_a_batch_is_taken_to_fit_and_that_is_said():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=100.0))
    assert decision.plan == "A"
    assert "No memory limit was given" in decision.tree[0][1]


def test_a_huge_compressible_batch_with_a_low_limit_is_packed_in_memory():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=4 * GB))
    assert decision.plan == "C"
    assert decision.headline == "Take plan C: 2.5 GB instead of 10.0 GB, for 10.0 s per iteration (10 %)."
    assert "400 of 1000 environments fit" in decision.why_not["A"]
    assert "did not ask" in decision.why_not["B"]


def test_plan_c_is_not_taken_if_it_costs_a_fifth_of_an_iteration():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=50.0, memory_limit_bytes=4 * GB))
    assert decision.plan == "A"
    assert "400 of 1000 environments fit" in decision.headline
    assert decision.why_not["C"] == "it would cost 10.0 s per iteration (20 %), and more than 20 % is too much."
    assert decide(COMPRESSIBLE, Settings(iteration_s=50.1, memory_limit_bytes=4 * GB)).plan == "C"


def test_without_the_time_of_an_iteration_plan_c_is_taken_on_a_condition():
    decision = decide(COMPRESSIBLE, Settings(memory_limit_bytes=4 * GB))
    assert decision.plan == "C"
    assert "if an iteration takes more than 50.0 s" in decision.headline


def test_a_batch_too_large_even_if_packed_has_to_shrink():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=1000.0, memory_limit_bytes=2 * GB))
    assert decision.plan == "A"
    assert "200 of 1000 environments fit" in decision.headline
    assert "over the limit as well" in decision.why_not["C"]
    tiny = decide(COMPRESSIBLE, Settings(iteration_s=1000.0, memory_limit_bytes=MB))
    assert "not even one of 1000 environments fits with 32 steps" in tiny.headline


@pytest.mark.parametrize("limit", [None, 4 * GB, 16 * GB])
def test_noise_stays_with_plan_a_whatever_the_limit(limit):
    decision = decide(NOISE, Settings(iteration_s=1000.0, memory_limit_bytes=limit))
    assert decision.plan == "A"
    assert decision.headline.startswith("Stay with plan A")
    assert "compression does not pay here" in decision.tree[1][1]
    assert "does not get small enough (1.00x in memory)" in decision.why_not["C"]


def test_who_wants_to_keep_rollouts_takes_plan_b():
    decision = decide(COMPRESSIBLE, Settings(iteration_s=100.0, keep_rollouts=True))
    assert decision.plan == "B"
    assert decision.headline == "Take plan B, every 100 iterations: 0.01 % of the time; 1.0 TB of disk per 1000."
    assert set(decision.why_not) == {"A", "C"}
    assert "any interval from 1 up" in decision.tree[2][1]


def test_plan_b_is_given_the_interval_at_which_it_costs_under_a_percent():
    settings = Settings(iteration_s=10.0, keep_rollouts=True, rollout_save_interval=5)
    assert interval_for_b(COMPRESSIBLE, 10.0) == 10
    assert "every 10 iterations instead of every 5" in decide(COMPRESSIBLE, settings).headline


def test_plan_b_is_done_with_a_rollout_before_the_next_one():
    slow = dataclasses.replace(COMPRESSIBLE, save_call_s=0.001, save_background_s=45.0)
    assert interval_for_b(slow, 10.0) == 5


def test_plan_b_says_that_noise_takes_the_disk_of_raw_data():
    decision = decide(NOISE, Settings(iteration_s=100.0, keep_rollouts=True))
    assert decision.plan == "B"
    assert "10.0 TB of disk per 1000, hardly less than raw" in decision.headline


def test_plan_b_without_the_time_of_an_iteration_speaks_of_seconds():
    decision = decide(COMPRESSIBLE, Settings(keep_rollouts=True))
    assert decision.plan == "B"
    assert "a save keeps the loop for 1.0 s" in decision.headline
    assert "20.0 s in the background" in decision.tree[2][1]


def test_plan_b_warns_of_a_copy_over_the_limit():
    decision = decide(COMPRESSIBLE, Settings(keep_rollouts=True, memory_limit_bytes=12 * GB))
    assert decision.plan == "B"
    assert "a copy of 5.0 GB takes more than the limit allows" in decision.tree[2][1]


def test_plan_b_goes_along_with_c_and_with_a_smaller_batch():
    both = decide(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=4 * GB, keep_rollouts=True))
    assert both.plan == "C"
    assert both.headline.endswith("And B along with it, for what you keep.")
    shrunk = decide(COMPRESSIBLE, Settings(iteration_s=1.0, memory_limit_bytes=4 * GB, keep_rollouts=True))
    assert shrunk.plan == "B"
    assert shrunk.headline.endswith("And make the batch smaller: 400 of 1000 environments fit.")


def test_a_faster_order_of_minibatches_is_not_counted_in_favour_of_c():
    quick = dataclasses.replace(COMPRESSIBLE, epoch_a_s=9.0)
    assert cost_c_s(quick, Settings()) == quick.memory_pack_s
    assert cost_c_s(COMPRESSIBLE, Settings(epochs=3)) == 6.0 + 3 * 1.0


def test_the_plans_take_what_was_measured():
    a, b, c = plans(COMPRESSIBLE, Settings(iteration_s=100.0))
    assert (a.time_s, a.share, a.memory_bytes, a.disk_per_1000_bytes) == (0.0, 0.0, 10 * GB, None)
    assert (b.time_s, b.share, b.memory_bytes, b.disk_per_1000_bytes) == (0.01, 0.0001, 15 * GB, 1000 * GB)
    assert (c.time_s, c.share, c.memory_bytes, c.disk_per_1000_bytes) == (10.0, 0.1, 2.5 * GB, None)


def test_on_a_gpu_plan_c_keeps_one_minibatch_there_and_the_rest_on_the_host():
    settings = Settings(device="cuda:0", minibatches=10, iteration_s=100.0, memory_limit_bytes=4 * GB)
    _, b, c = plans(COMPRESSIBLE, settings)
    assert (c.memory_bytes, c.host_bytes) == (GB, 2.5 * GB)
    assert (b.memory_bytes, b.host_bytes) == (10 * GB, 5 * GB)
    advice = conclude(COMPRESSIBLE, settings, "a batch")
    assert advice.plan == "C"
    assert "storing_device='cpu'" in advice.text()


def test_the_break_even_bandwidth_is_where_both_ways_take_as_long():
    found = network(COMPRESSIBLE, Settings(bandwidth_bytes_s=10 * MB))
    assert found.packed_wins
    assert (found.raw_s, found.packed_s) == (1000.0, 5.0 + 100.0 + 4.0)
    assert found.break_even_bytes_s == GB
    at = network(COMPRESSIBLE, Settings(bandwidth_bytes_s=found.break_even_bytes_s))
    assert math.isclose(at.raw_s, at.packed_s)
    assert not network(COMPRESSIBLE, Settings(bandwidth_bytes_s=1.01 * GB)).packed_wins


def test_noise_is_sent_raw_at_any_bandwidth():
    advice = conclude(NOISE, Settings(bandwidth_bytes_s=1.0), "noise")
    assert advice.network.break_even_bytes_s is None
    assert not advice.network.packed_wins
    assert "wins at no bandwidth" in advice.text()


def test_a_step_stands_for_an_iteration_if_only_that_is_known():
    settings = Settings(step_s=0.5, epochs=4, minibatches=10)
    assert settings.known_iteration_s == 20.0
    text = conclude(COMPRESSIBLE, settings, "a batch").text()
    assert "of a training step" in text
    assert "the collection comes on top" in text
    assert Settings(step_s=0.5, iteration_s=100.0).known_iteration_s == 100.0


def test_the_text_asks_for_the_time_of_an_iteration_if_it_is_not_known():
    text = conclude(COMPRESSIBLE, Settings(), "a batch").text()
    assert "give iteration_s (--iteration-seconds). Plan C is for iterations of 50.0 s or more." in text
    assert "give iteration_s" not in conclude(COMPRESSIBLE, Settings(iteration_s=3.0), "a batch").text()


def test_the_text_says_what_is_guessed_scaled_or_disturbed():
    advice = conclude(COMPRESSIBLE, Settings(), "shapes", made_up=True, measured_share=0.25, load=2.0)
    for words in ("ratios and times are a guess", "25 % of its environments", "busy already (2.0 programs per core)"):
        assert words in advice.text()
        assert words not in conclude(COMPRESSIBLE, Settings(), "shapes").text()


def test_the_text_ends_with_the_advice_and_is_what_str_gives():
    advice = conclude(COMPRESSIBLE, Settings(), "a batch")
    assert str(advice) == advice.text()
    assert advice.text().splitlines()[-1].startswith("Advice: stay with plan A")


def test_json_is_valid_and_complete():
    advice = conclude(COMPRESSIBLE, Settings(iteration_s=100.0, memory_limit_bytes=4 * GB), "a batch")
    document = advice.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document) == {field.name for field in dataclasses.fields(Advice)}
    assert set(document["measured"]) == {field.name for field in dataclasses.fields(Measured)} | {"ratio"}
    assert set(document["measured"]["keys"][0]) == {field.name for field in dataclasses.fields(KeyNumbers)} | {"ratio"}
    assert [plan["letter"] for plan in document["plans"]] == ["A", "B", "C"]
    assert document["decision"]["plan"] == "C"
    assert document["network"]["packed_s"] == advice.network.packed_s
    json.dumps(conclude(NOISE, Settings(), "noise").to_json(), allow_nan=False)


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
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(setting, value):
    with pytest.raises(ConfigurationError, match=f"{setting} is "):
        advise(walk(), **{setting: value})


def test_a_compressible_batch_is_measured_and_told_by_key():
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
    assert "compression does not pay here" in str(advice)


def test_what_is_being_measured_is_told_and_nothing_is_left_behind(tmp_path):
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
    with pytest.raises(RolloutError, match=r"refused; if you trust it, pack it first: .*weights_only=False"):
        advise(tmp_path / "batch.pt")


def test_files_that_are_no_batches_are_refused_with_a_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": torch.zeros(2, 3), "b": torch.zeros(5)}, tmp_path / "ragged.pt")
    with pytest.raises(CorruptFileError, match=r"neither a rollout .* expected a .slip or a .pt file"):
        advise(tmp_path / "notes.txt")
    with pytest.raises(CorruptFileError, match="is not a batch that torch can load"):
        advise(tmp_path / "cut.pt")
    with pytest.raises(RolloutError, match="holds a list, expected a TensorDict"):
        advise(tmp_path / "list.pt")
    with pytest.raises(RolloutError, match="do not begin with the same two axes"):
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
    assert advice.source.endswith("rollout_000100.slip (iteration time from metrics.jsonl)")
    assert advise(tmp_path, iteration_s=4.0).settings.iteration_s == 4.0


@pytest.mark.parametrize(
    "content", [None, "", "not json\n", '{"perf/iteration_mean": NaN}\n', '{"perf/iteration_mean": "2"}\n', "\xff\n"]
)
def test_metrics_that_do_not_tell_the_time_are_no_error(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, encoding="latin-1")
    assert sources.iteration_time(tmp_path / "metrics.jsonl") is None


def test_a_folder_without_rollouts_is_refused_with_a_hint(tmp_path):
    with pytest.raises(RolloutError, match="rollout_save_interval"):
        advise(tmp_path)


def test_shapes_are_made_up_and_the_text_says_that_it_is_a_guess():
    shapes = {"lidar": ((36, 4), "float32"), "next/lidar": ((36, 4), "float32"), "state": (8,), "pixel": (3, "uint8")}
    advice = advise({**shapes, "done": ((1,), "bool")}, num_envs=32, num_steps=8)
    assert advice.made_up
    assert "are a guess" in str(advice)
    assert advice.measured.raw_bytes == 32 * 8 * (2 * 144 * 4 + 8 * 4 + 3 + 1)
    lidar = next(key for key in advice.measured.keys if key.key == "lidar")
    assert lidar.with_next


def test_without_a_batch_one_of_navrl_is_made_up():
    advice = advise(num_envs=8, num_steps=8)
    assert advice.made_up
    assert "NavRL" in advice.source
    assert "agents/observation/lidar" in {key.key for key in advice.measured.keys}


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({}, "no shapes were given"),
        ({"a": ((3,), "floaty")}, "dtype of a is 'floaty'"),
        ({"a": (0,)}, r"shape of a is \(0,\)"),
        ({"a": "3"}, "shape of a is '3'"),
        ({"a//b": (3,)}, "the key 'a//b'"),
        (7, "the batch is a int"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(shapes, reason):
    with pytest.raises(ConfigurationError, match=reason):
        advise(shapes)
    with pytest.raises(ConfigurationError, match="num_envs is 0"):
        advise({"a": (3,)}, num_envs=0)


def test_of_a_large_batch_only_some_environments_are_measured_and_scaled_up(tmp_path, monkeypatch):
    batch, whole = walk(), advise(walk()).measured.raw_bytes
    path = save_rollout_compressed(batch, tmp_path / "rollout.slip")
    monkeypatch.setattr(sources, "MEASURED_BYTES", whole // 4)
    for given in (batch, path):
        advice = advise(given)
        assert advice.measured_share == 0.25
        assert (advice.measured.raw_bytes, advice.measured.num_envs) == (whole, 64)
    assert advise({"a": (1000,)}, num_envs=90, num_steps=50).measured.raw_bytes == 90 * 50 * 1000 * 4


def test_batches_of_other_kinds_are_measured_too():
    agents = TensorDict({"observation": torch.zeros(8, 4, 3, 5)}, batch_size=[8, 4, 3])
    assert advise(agents).measured.batch_size == (8, 4)
    one = TensorDict({"observation": torch.zeros(50, 5)}, batch_size=[50])
    assert advise(one).measured.num_envs == 1
    lazy = LazyStackedTensorDict(*walk(8).unbind(0), stack_dim=0)
    assert advise(lazy).measured.num_envs == 8
    assert advise(CompressedTensorDict(walk(8))).measured.num_envs == 8
    assert advise({"observation": torch.zeros(8, 4, 5)}).measured.raw_bytes == 8 * 4 * 5 * 4


def test_a_batch_too_small_for_its_minibatches_is_refused():
    with pytest.raises(ConfigurationError, match="does not make 16 minibatches"):
        advise(walk(2, 4))
    with pytest.raises(RolloutError, match="no batch size"):
        advise(TensorDict({"a": torch.zeros(3)}, batch_size=[]))
