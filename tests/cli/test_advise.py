"""`slipstream advise` as a person or a script uses it, and the sentences in which it explains a decision."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from slipstream import Advice, save_rollout_compressed
from slipstream.cli import advice_text as text
from slipstream.cli import main
from slipstream.rollout.advise import Settings, conclude
from slipstream.rollout.measure import EPISODE_ENDS, KeyNumbers, Measured
from tests.measured import COMPRESSIBLE, GB, MB, NOISE


def advice(measured: Measured = COMPRESSIBLE, limit_gb: float | None = None, **settings: Any) -> Advice:
    limit = None if limit_gb is None else limit_gb * GB
    return conclude(measured, Settings(memory_limit_bytes=limit, **settings))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", "advise", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"})


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    steps = torch.arange(64 * 16 * 30).reshape(64, 16, 30).float()
    batch = TensorDict({"[bold]observation": steps, "action": steps[..., :2].clone()}, batch_size=[64, 16])
    return save_rollout_compressed(batch, tmp_path_factory.mktemp("run") / "rollout.slip")


def test_help_has_an_example_and_imports_neither_torch_nor_numpy():
    script = (
        "import sys, slipstream.cli, slipstream.cli.advice_text\n"
        "sys.argv = ['slipstream', 'advise', '--help']\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich.table', 'zstandard'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "Example: slipstream advise runs/a" in result.stdout
    assert "--memory-limit-gb" in result.stdout


def test_it_prints_plans_keys_and_reasons_and_reports_progress_on_stderr(rollout):
    result = run(rollout, "--iteration-seconds", "1000", "--memory-limit-gb", "80e-6", "--bandwidth-mb-s", "12.5")
    assert result.returncode == 0, result.stderr
    for words in (
        "no compression",
        "a rollout saved to disk every 100 iterations",
        "rollouts packed in memory while training",
        "[bold]observation",
        "1. Does the batch fit in memory? No: it takes 131 kB, the limit is 80.0 kB.",
        "At 100 Mbit/s, sending a batch takes",
        "Packing pays below",
        "Why not A:",
    ):
        assert words in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Advice: use plan C")
    assert result.stderr.splitlines()[0] == "measuring: copying the batch, shared observations once"
    assert "measuring" not in result.stdout


def test_json_is_one_object_that_a_script_can_read(rollout):
    result = run(rollout, "--json", "--keep", "--interval", "7", "--memory-limit-gb", "0.5", "--step-seconds", "0.5")
    document = json.loads(result.stdout)
    assert document["plan"] == "B"
    assert document["settings"]["rollout_save_interval"] == 7
    assert document["settings"]["memory_limit_bytes"] == 500 * MB
    assert document["settings"]["bandwidth_bytes_s"] == 125 * MB
    assert [key["key"] for key in document["measured"]["keys"]] == ["[bold]observation", "action"]


def test_errors_are_one_line_and_exit_code_2(tmp_path, rollout, monkeypatch, capsys):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    for arguments, reason in [
        ([], "no batch was given; give a .slip or .pt file of one, or a run folder, for example: slipstream advise"),
        ([tmp_path / "absent"], "absent: No such file or directory"),
        ([tmp_path / "text"], "text: neither a rollout"),
        ([tmp_path / "cut.pt"], "cut.pt: torch cannot load it"),
        ([tmp_path], "no rollout_*.slip in this folder"),
        ([rollout, "--memory-limit-gb", "-4"], "--memory-limit-gb is -4.0, expected a number above 0"),
        ([rollout, "--memory-limit-gb", "4GB"], "Invalid value for '--memory-limit-gb'"),
        ([rollout, "--memory-limit-gb", "1e308"], "memory_limit_bytes is inf, expected a number above 0"),
        ([rollout, "--bandwidth-mb-s", "nan"], "--bandwidth-mb-s is nan, expected a number above 0"),
        ([rollout, "--iteration-seconds", "-1"], "--iteration-seconds is -1.0, expected a number above 0"),
        ([rollout, "--folder", tmp_path / "absent"], "expected an existing folder"),
    ]:
        monkeypatch.setattr(sys, "argv", ["slipstream", "advise", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        shown = capsys.readouterr()
        assert (stopped.value.code, shown.out) == (2, "")
        assert reason in shown.err
        assert shown.err.startswith("slipstream: ")
        assert shown.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.pt", "text"]


@pytest.mark.parametrize(
    ("found", "headline"),
    [
        (advice(limit_gb=16), "stay with plan A: the batch fits, and plan A costs nothing."),
        (advice(), "stay with plan A: the batch fits, and plan A costs nothing."),
        (advice(NOISE, 4), "stay with plan A and make the batch smaller: 400 of 1000 environments fit."),
        (
            advice(limit_gb=0.001),
            "stay with plan A and make the batch smaller: not even one of 1000 environments fits with 32 steps.",
        ),
        (
            advice(limit_gb=4, iteration_s=100.0),
            "use plan C: 2.5 GB instead of 10.0 GB, for 10.0 s per iteration (10 %).",
        ),
        (
            advice(limit_gb=4),
            "use plan C if an iteration takes longer than 50.0 s: 2.5 GB instead of 10.0 GB, for 10.0 s per iteration.",
        ),
        (
            advice(limit_gb=4, iteration_s=100.0, keep_rollouts=True),
            "use plan C: 2.5 GB instead of 10.0 GB, for 10.0 s per iteration (10 %). Use plan B in addition, for the "
            "rollouts you keep.",
        ),
        (
            advice(iteration_s=100.0, keep_rollouts=True),
            "use plan B, saving every 100 iterations: a save blocks for 1.0 s, 0.01 % of the time, and 1000 rollouts "
            "take 1.0 TB of disk.",
        ),
        (
            advice(NOISE, keep_rollouts=True),
            "use plan B, saving every 100 iterations: a save blocks for 1.0 s, and 1000 rollouts take 10.0 TB of disk, "
            "hardly less than raw.",
        ),
        (
            advice(limit_gb=4, iteration_s=10.0, rollout_save_interval=5, keep_rollouts=True),
            "use plan B, saving every 10 iterations: a save blocks for 1.0 s, 1 % of the time, and 1000 rollouts take "
            "1.0 TB of disk. Also make the batch smaller: 400 of 1000 environments fit.",
        ),
    ],
)
def test_the_last_line_is_the_advice(found, headline):
    assert text.headline(found) == f"Advice: {headline}"


def test_every_other_plan_has_a_reason():
    assert [line[:10] for line in text.reasons(advice())] == ["Why not B:", "Why not C:"]
    assert [line[:10] for line in text.reasons(advice(keep_rollouts=True))] == ["Why not A:", "Why not C:"]
    assert [line[:10] for line in text.reasons(advice(limit_gb=4))] == ["Why not A:", "Why not B:"]
    both = text.reasons(advice(limit_gb=4, keep_rollouts=True))
    assert both == [
        "Why not A: the batch takes 10.0 GB, the limit is 4.0 GB; for plan A, make the batch smaller: 400 of 1000 "
        "environments fit.",
        "Why not B: use it in addition, for the rollouts you keep.",
    ]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (advice(), "there is no need, as the batch fits. It would take 2.5 GB instead of 10.0 GB"),
        (advice(NOISE, 4), "the batch is not compressible enough (1.00x in memory)"),
        (advice(limit_gb=2), "it would take 2.5 GB, which is over the limit too."),
        (advice(limit_gb=4, iteration_s=50.0), "it would cost 10.0 s per iteration (20 %); 20 % or more is too much."),
    ],
)
def test_the_reason_against_plan_c_is_the_fact_that_decided(found, reason):
    assert f"Why not C: {reason}" in text.reasons(found)[-1]


def test_the_questions_are_answered_with_numbers():
    fits, smaller, keep = text.questions(advice(limit_gb=12, iteration_s=10.0, rollout_save_interval=5))
    assert fits == "1. Does the batch fit in memory? Yes: it takes 10.0 GB, the limit is 12.0 GB."
    assert smaller.endswith("Yes: 10.0 GB become 1.0 GB in a file (10.00x) and 2.0 GB in memory (5.00x).")
    assert "You did not ask for it (--keep). If you do: plan B. Every 10 iterations, a save blocks for 1.0 s" in keep
    assert keep.endswith("Every 5 iterations is too often to cost under 1 % and to finish each save before the next.")
    assert "no memory limit was given (--memory-limit-gb)" in text.questions(advice())[0]
    assert text.questions(advice(limit_gb=2))[0].endswith("With plan C it would take 2.5 GB.")
    assert "compression does not pay" in text.questions(advice(NOISE))[1]


def test_keeping_rollouts_mentions_the_interval_the_background_and_a_copy_over_the_limit():
    assert "at any interval of at least 1." in text.questions(advice(iteration_s=100.0, keep_rollouts=True))[2]
    keep = text.questions(advice(limit_gb=12, keep_rollouts=True))[2]
    assert "Each is written in the background in 20.0 s." in keep
    assert keep.endswith("Until a rollout is written, a copy of 5.0 GB exceeds the memory limit.")


def test_caveats_depend_on_the_device_and_on_what_is_known_about_an_iteration():
    memory, unknown = text.caveats(advice())
    assert "the batch and a copy are in memory too, 17.0 GB in total" in memory
    assert "set --iteration-seconds. Plan C is for iterations longer than 50.0 s." in unknown
    assert "storing_device='cpu'" in text.caveats(advice(device="cuda:0", iteration_s=3.0))[0]
    assert len(text.caveats(advice(iteration_s=3.0))) == 1
    assert "only the updates" in text.caveats(advice(step_s=0.5))[1]


def test_speeds_are_compared_with_a_training_step_if_that_is_known():
    assert len(text.speeds(advice())) == 3
    assert text.speeds(advice(step_s=0.5))[-1] == (
        "Reading a minibatch takes 125 ms in plan A and 188 ms in plan C: 25 % and 37.5 % of a training step."
    )


def test_the_network_sentence_names_the_bandwidth_below_which_packing_pays():
    assert text.network(advice(bandwidth_bytes_s=10 * MB)) == (
        "At 80.0 Mbit/s, sending a batch takes 16 min 40 s raw and 1 min 49 s packed (5.0 s to pack, 1 min 40 s to "
        "send, 4.0 s to unpack): packed is faster. Packing pays below 8.0 Gbit/s."
    )
    assert "raw is faster. The packed batch is not smaller" in text.network(advice(NOISE))


def test_the_introduction_says_what_was_scaled_or_disturbed():
    assert len(text.introduction(advice())) == 1
    settings = Settings(iteration_s=2.5)
    found = conclude(COMPRESSIBLE, settings, source="a.slip", iteration_from_run=True, measured_share=0.25, load=2.0)
    assert text.introduction(found) == [
        "a.slip: [1000, 32], 10.0 GB; measured on this machine.",
        "An iteration takes 2.5 s (from metrics.jsonl).",
        "Only 25 % of the environments were measured; the numbers are scaled up.",
        "The machine was busy (2.0 processes per core): the times are upper bounds.",
    ]


def test_tables_have_a_dash_where_there_is_no_number():
    found = advice(device="cuda:0", minibatches=10, iteration_s=100.0)
    rows = [text.plan_row(found, plan) for plan in found.plans]
    assert rows[0][2:] == ["-", "10.0 GB", "-"]
    assert rows[1][2:] == ["10 ms (0.01 %)", "10.0 GB + 5.0 GB on the host", "1.0 TB"]
    assert text.key_row(COMPRESSIBLE.keys[0])[:3] == ["lidar + next", "float32", "36x4"]
    ends = KeyNumbers(EPISODE_ENDS, "bool", (), False, 0, 157, 0.001, 0.001, False)
    assert text.key_row(ends) == [EPISODE_ENDS, "bool", "", "-", "157 bytes", "-", "1.0 ms", "1.0 ms", "raw"]
