"""`slipstream ckpt`, as a person or a script meets it."""

import itertools
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import AsyncCheckpointSaver, CheckpointManager, load_checkpoint, write_container
from slipstream.checkpoint.native import encode_metadata, write_native
from slipstream.text import install_hint

COMMANDS = ["inspect", "verify", "convert", "diff", "prune"]


def alone(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "slipstream", "ckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    frozen = torch.randn(500, 300, generator=generator)
    weight = torch.randn(500, 300, generator=generator) + step * 1e-6
    policy = OrderedDict(weight=weight, tied=weight, half=torch.arange(500).bfloat16(), frozen=frozen)
    return {"policy": policy, "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "lr": 0.25}}


def tensors() -> dict[str, Any]:
    shared = torch.arange(300.0)
    return {
        "a": {"w": shared, "tied": shared, "tail": shared[100:]},
        "list": [torch.arange(5), torch.ones(2, 3).half()],
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of four checkpoints: 300 is stored against 200, and 400 against 300; the best is 200."""
    with CheckpointManager(tmp_path / "run", keep_last=None, differential=True) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, state(step), {"reward": 9.5 if step == 200 else step / 100}).wait()
    return tmp_path / "run"


def step_file(run: Path, step: int) -> Path:
    return run / f"checkpoint_iter_{step}.slip"


def steps(run: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in run.glob("checkpoint_iter_*.slip"))


def damage(path: Path, at: int = 40) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def one_line(result: Any) -> bool:
    return (
        (result.code, result.out) == (2, "") and result.err.startswith("slipstream: ") and result.err.count("\n") == 1
    )


def test_every_command_has_help_with_an_example(ckpt):
    for command in COMMANDS:
        result = ckpt(command, "--help")
        assert result.code == 0
        assert f"Example: slipstream ckpt {command}" in result.out
    assert all(command in ckpt("--help").out for command in COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["ckpt", "--help"], ["ckpt", "convert", "--help"]])
def test_help_imports_neither_torch_nor_numpy(arguments):
    script = (
        "import sys, slipstream.cli\n"
        f"sys.argv = ['slipstream', *{arguments!r}]\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich.table', 'zstandard'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_inspecting_a_native_file_reads_its_index_only_and_needs_no_torch(run):
    path = step_file(run, 100)
    damage(path)  # in the first chunk, which is not read
    script = (
        "import sys, slipstream.cli\n"
        f"sys.argv = ['slipstream', 'ckpt', 'inspect', {str(path)!r}]\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "policy/weight" in result.stdout


def test_verifying_native_files_needs_no_torch(run):
    script = (
        "import sys, slipstream.cli\n"
        f"sys.argv = ['slipstream', 'ckpt', 'verify', {str(run)!r}]\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout.count(": sound, all ") == 4


def test_inspect_shows_step_metrics_and_every_tensor_with_its_torch_dtype(ckpt, run):
    result = ckpt("inspect", step_file(run, 100))
    assert (result.code, result.err) == (0, "")
    for words in ("native checkpoint", "step: 100", '"reward": 1.0', "policy/half", "bfloat16", "500x300", "600 kB"):
        assert words in result.out
    # Tied memory counts once.
    assert "5 tensors, 1.2 MB in a file of" in result.out
    assert "delta of" not in result.out


def test_inspect_of_a_delta_names_its_parents_and_what_is_the_same(ckpt, run):
    document = ckpt.json("inspect", step_file(run, 400))
    assert (document["format"], document["step"], document["metrics"]) == ("native", 400, {"reward": 4.0})
    assert (document["sequence"], document["thinned"]) == (4, [])
    assert document["parents"] == ["checkpoint_iter_300.slip", "checkpoint_iter_200.slip"]
    assert (document["parent"]["file"], document["parent"]["depth"]) == ("checkpoint_iter_300.slip", 2)
    assert "policy/frozen" in document["parent"]["same"]
    parent = ckpt.json("inspect", step_file(run, 300))
    assert document["parent"]["identity"] == parent["identity"]
    codecs = {tensor["name"]: tensor["codec"] for tensor in document["tensors"]}
    assert codecs["policy/weight"] == "difference"
    assert codecs["policy/tied"] == "tied"
    assert codecs["policy/frozen"] == "same"
    assert all(len(tensor["digest"]) == 32 for tensor in document["tensors"])
    shown = ckpt("inspect", step_file(run, 400)).out
    assert "delta of checkpoint_iter_300.slip\n" in shown


def test_inspect_of_a_folder_lists_its_checkpoints_and_the_files_that_cannot_be_read(ckpt, run):
    result = ckpt("inspect", run)
    assert (result.code, result.err) == (0, "")
    rows = {words[0]: words[1:] for words in map(str.split, result.out.splitlines()) if words}
    assert rows["checkpoint_iter_200.slip"][:2] == ["200", "2"]
    assert rows["checkpoint_iter_200.slip"][4:] == ["whole", "reward", "9.5"]
    assert rows["checkpoint_iter_400.slip"][4:8] == ["delta", "of", "3,", "2"]
    step_file(run, 300).write_bytes(b"")
    result = ckpt("inspect", run)
    assert result.code == 1
    assert "checkpoint_iter_300.slip: unreadable: " in result.out
    assert "delta of a missing file" in result.out
    document = ckpt.json("inspect", run)
    assert [checkpoint["step"] for checkpoint in document["checkpoints"]] == [100, 200, 400]
    assert [problem["file"] for problem in document["unreadable"]] == [str(step_file(run, 300))]


def test_a_run_is_inspected_and_verified_like_its_folder_of_checkpoints(ckpt, run, tmp_path):
    (tmp_path / "trained").mkdir()
    run.rename(tmp_path / "trained/checkpoints")
    shown = ckpt("inspect", tmp_path / "trained")
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[-1].startswith(f"{tmp_path / 'trained/checkpoints'}: 4 checkpoints, ")
    assert ckpt("verify", tmp_path / "trained").out.count(": sound, all ") == 4


def test_metrics_of_a_run_are_listed_by_their_last_name_and_without_settings(ckpt, tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state(1), {"train/stats.reach_goal": 0.8271, "config": {"seed": 1}}).wait()
    assert "reach_goal 0.8271\n" in ckpt("inspect", tmp_path / "run").out.replace(" \n", "\n")


def test_a_compressed_file_is_found_by_the_name_that_it_was_saved_under(ckpt, tmp_path):
    with AsyncCheckpointSaver() as saver:
        saver.save_async(tensors(), tmp_path / "900.pt")
    shown = ckpt("inspect", tmp_path / "900.pt")
    assert shown.code == 0, shown.err
    assert f"{tmp_path / '900.pt.lz4'}: lz4 checkpoint" in shown.out
    assert ckpt("verify", tmp_path / "900.pt").code == 0
    missing = ckpt("inspect", tmp_path / "800.pt")
    assert one_line(missing)
    assert "800.pt: No such file" in missing.err


def test_tables_fit_into_80_columns(ckpt, run):
    for path in (run, step_file(run, 400)):
        lines = ckpt("inspect", path).out.splitlines()
        assert "─" * 60 in "\n".join(lines)
        assert max(len(line) for line in lines if not line.startswith(("/", "parents"))) <= 80


def test_inspect_lists_the_same_tensors_whatever_the_format(ckpt, tmp_path):
    write_native(tmp_path / "a.slip", tensors())
    shown = {}
    for name, kind in [("a.slip", "native"), ("b.pt", "pt"), ("b.pt.lz4", "lz4"), ("b.safetensors", "safetensors")]:
        if kind != "native":
            assert ckpt("convert", tmp_path / "a.slip", tmp_path / name).code == 0
        document = ckpt.json("inspect", tmp_path / name)
        assert document["format"] == kind
        shown[kind] = {(item["name"], item["dtype"], *item["shape"]) for item in document["tensors"]}
    assert shown["native"] == shown["pt"] == shown["lz4"] == shown["safetensors"]
    assert ("list/1", "float16", 2, 3) in shown["native"]


def test_verify_tells_sound_files_from_damaged_ones(ckpt, run):
    sound = ckpt("verify", run)
    assert (sound.code, sound.err) == (0, "")
    assert sound.out.count(": sound, all ") == 4
    assert "digests, its 2 parents included, match" in sound.out
    damage(step_file(run, 400))
    result = ckpt("verify", run)
    assert result.code == 1
    assert f"{step_file(run, 400)}: entry 'policy/weight' is damaged in chunk 1 of 1" in result.out
    assert f"{step_file(run, 400)}: damaged" in result.out
    assert result.out.count(": sound, all ") == 3


def test_verify_checks_the_parents_of_a_delta(ckpt, run):
    damage(step_file(run, 200))
    document = ckpt.json("verify", step_file(run, 400))
    assert not document["sound"]
    (file,) = document["files"]
    assert file["parents"] == 2
    assert file["problems"][0].startswith(str(step_file(run, 200)))
    step_file(run, 200).unlink()
    result = ckpt("verify", step_file(run, 400))
    assert result.code == 1
    assert "checkpoint_iter_200.slip, which is missing" in result.out


@pytest.mark.parametrize("name", ["a.slip", "a.pt", "a.pt.lz4"])
def test_verify_finds_damage_in_every_format_with_checksums(ckpt, tmp_path, name):
    save_file({"w": torch.arange(5000.0)}, tmp_path / "source.safetensors")
    assert ckpt("convert", tmp_path / "source.safetensors", tmp_path / name).code == 0
    assert ckpt("verify", tmp_path / name).code == 0
    damage(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    result = ckpt("verify", tmp_path / name)
    assert (result.code, result.err) == (1, "")
    assert str(tmp_path / name) in result.out


def test_verify_calls_a_cut_off_file_damaged_and_a_file_without_checksums_readable(ckpt, run, tmp_path):
    content = step_file(run, 200).read_bytes()
    step_file(run, 200).write_bytes(content[:-9])
    assert ckpt("verify", step_file(run, 200)).code == 1
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    result = ckpt("verify", tmp_path / "a.safetensors")
    assert (result.code, "has no checksums" in result.out) == (0, True)


def test_verify_does_not_call_a_file_damaged_that_it_will_not_run(ckpt, tmp_path):
    torch.save({"w": torch.ones(3), "object": subprocess.Popen}, tmp_path / "a.pt")
    result = ckpt("verify", tmp_path / "a.pt")
    assert one_line(result)
    assert "only running code from the file could load" in result.err


def test_convert_goes_between_all_formats_and_back_without_a_bit_lost(ckpt, tmp_path):
    write_native(tmp_path / "0.slip", tensors())
    chain = ["0.slip", "1.pt", "2.pt.lz4", "3.safetensors", "4.slip"]
    for source, target in itertools.pairwise(chain):
        result = ckpt("convert", tmp_path / source, tmp_path / target)
        assert (result.code, result.err) == (0, "")
        assert "read back and equal" in result.out
    assert ckpt("diff", tmp_path / "0.slip", tmp_path / "4.slip").code == 0


def test_converting_a_delta_makes_it_whole_and_keeps_its_metadata(ckpt, run, tmp_path):
    assert ckpt("convert", step_file(run, 300), tmp_path / "whole.slip").code == 0
    document = ckpt.json("inspect", tmp_path / "whole.slip")
    assert (document["parent"], document["step"], document["metrics"]) == (None, 300, {"reward": 3.0})
    result = ckpt("convert", step_file(run, 300), tmp_path / "whole.pt")
    assert "without its metadata, which this format cannot hold" in result.out
    assert ckpt("diff", tmp_path / "whole.slip", tmp_path / "whole.pt").code == 0


def test_safetensors_takes_tensors_only_and_says_what_is_none(ckpt, run, tmp_path):
    target = tmp_path / "out" / "a.safetensors"
    result = ckpt("convert", step_file(run, 100), target)
    assert one_line(result)
    assert "'optimizer/lr' is of type float" in result.err
    assert not target.exists()
    result = ckpt("convert", step_file(run, 100), target, "--tensors-only")
    assert result.code == 0
    assert "without 1 value that is not a tensor and its metadata" in result.out
    assert torch.equal(load_file(target)["policy/tied"], state(100)["policy"]["weight"])
    assert os.listdir(target.parent) == ["a.safetensors"]
    write_native(tmp_path / "twice.slip", {"a": {"b": torch.ones(3)}, "a/b": torch.ones(3)})
    result = ckpt("convert", tmp_path / "twice.slip", tmp_path / "twice.safetensors")
    assert one_line(result)
    assert "two tensors would be called 'a/b'" in result.err


def test_convert_overwrites_only_if_told_to_and_never_with_less_than_a_whole_file(ckpt, run, tmp_path):
    target = tmp_path / "a.pt"
    target.write_text("precious")
    result = ckpt("convert", step_file(run, 100), target)
    assert result == (2, "", f"slipstream: {target}: exists already; --force (overwrite=True) replaces it\n")
    damage(step_file(run, 400))
    assert one_line(ckpt("convert", step_file(run, 400), target, "--force"))
    assert one_line(ckpt("convert", step_file(run, 100), target, "--force", "--format", "safetensors"))
    assert target.read_text() == "precious"
    target.chmod(0o640)
    assert ckpt("convert", step_file(run, 100), target, "--force").code == 0
    assert torch.equal(torch.load(target)["policy"]["weight"], state(100)["policy"]["weight"])
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "run"]


def test_convert_goes_by_format_if_told_and_else_by_suffix(ckpt, run, tmp_path):
    result = ckpt("convert", step_file(run, 100), tmp_path / "a.bin")
    assert one_line(result)
    assert "expected .slip, .pt, .pt.lz4 or .safetensors, or the option --format" in result.err
    assert one_line(ckpt("convert", step_file(run, 100), tmp_path / "a.bin", "--format", "zip"))
    assert ckpt("convert", step_file(run, 100), tmp_path / "a.bin", "--format", "lz4").code == 0
    assert ckpt.json("inspect", tmp_path / "a.bin")["format"] == "lz4"


def test_a_missing_safetensors_package_is_one_sentence(run, tmp_path):
    (tmp_path / "hidden" / "safetensors").mkdir(parents=True)
    (tmp_path / "hidden" / "safetensors" / "__init__.py").write_text("raise ImportError('hidden')")
    search_path = os.pathsep.join([str(tmp_path / "hidden"), *sys.path])
    result = alone("convert", step_file(run, 100), tmp_path / "a.safetensors", PYTHONPATH=search_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("slipstream: ")
    assert result.stderr.endswith(install_hint("safetensors") + "\n")


def test_diff_says_what_is_missing_what_differs_and_by_how_much(ckpt, tmp_path):
    write_native(tmp_path / "a.slip", {"moved": torch.zeros(10), "only_a": torch.ones(2), "lr": 0.5})
    torch.save({"moved": torch.tensor([0.0] * 8 + [-1.5, 0.5]), "lr": 0.25}, tmp_path / "b.pt")
    result = ckpt("diff", tmp_path / "a.slip", tmp_path / "b.pt")
    assert (result.code, result.err) == (1, "")
    assert "only in A: only_a float32[2]\n" in result.out
    assert "differs: moved float32[10]: 2 of 10 elements, by up to 1.5\n" in result.out
    assert "value differs: lr 0.5 -> 0.25\n" in result.out
    document = ckpt.json("diff", tmp_path / "a.slip", tmp_path / "b.pt")
    assert (document["equal"], document["only_in_a"]) == (False, {"only_a": "float32[2]"})
    same = ckpt("diff", tmp_path / "b.pt", tmp_path / "b.pt")
    assert (same.code, same.out) == (0, f"{tmp_path / 'b.pt'} and {tmp_path / 'b.pt'}: equal, 1 tensor\n")


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (["--keep-last", 1], [400]),
        (["--keep-last", 1, "--keep-every", 300], [300, 400]),
        (["--keep-last", 1, "--keep-best", "reward:max"], [200, 400]),
        (["--keep-last", 1, "--keep-best", "reward:min"], [100, 400]),
        (["--keep-last", 9], [100, 200, 300, 400]),
    ],
)
def test_prune_deletes_what_the_dry_run_said(ckpt, run, rules, kept):
    before = sorted(path for path in run.rglob("*") if path.name != ".lock")
    dry = ckpt("prune", run, *rules, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert sorted(path for path in run.rglob("*") if path.name != ".lock") == before
    wet = ckpt("prune", run, *rules)
    assert wet.out.splitlines()[-1] == dry.out.splitlines()[-1].replace("would delete", "deleted")
    assert steps(run) == kept
    for step in sorted({100, 200, 300, 400} - set(kept)):
        assert str(step) in wet.out
        assert f"delete checkpoint_iter_{step}.slip\n" in dry.out
    assert ckpt("verify", run).code == 0


def test_the_dry_run_of_prune_says_which_deltas_are_made_whole(ckpt, run):
    dry = ckpt("prune", run, "--keep-last", 1, "--dry-run")
    assert dry.out.splitlines()[0] == "make whole checkpoint_iter_400.slip"
    assert ckpt("prune", run, "--keep-last", 1).code == 0
    assert ckpt.json("inspect", step_file(run, 400))["parents"] == []
    assert torch.equal(load_checkpoint(step_file(run, 400))["policy"]["weight"], state(400)["policy"]["weight"])


def test_prune_neither_counts_nor_deletes_damaged_and_renamed_checkpoints(ckpt, run):
    step_file(run, 400).write_bytes(b"")
    step_file(run, 100).rename(run / "mine.slip")
    told = ckpt.json("prune", run, "--keep-last", 1, "--dry-run")
    assert told == {"folder": str(run), "checkpoints": 2, "deleted": [200], "dry_run": True}
    assert ckpt("prune", run, "--keep-last", 1).out == f"{run}: deleted 1 of 2 checkpoints: 200\n"
    assert steps(run) == [300, 400]
    assert (run / "mine.slip").exists()


def test_prune_refuses_what_it_cannot_do_safely(ckpt, run, tmp_path):
    (tmp_path / "file").write_text("hello")
    for arguments, words in [
        ([tmp_path / "absent", "--keep-last", 1], "No such file"),
        ([tmp_path / "file", "--keep-last", 1], "is not a folder"),
        ([run, "--keep-last", 1, "--keep-best", "reward"], "expected a metric and max or min"),
        ([run, "--keep-last", 1, "--keep-best", "rewrd:max"], "no checkpoint has a metric 'rewrd'"),
    ]:
        result = ckpt("prune", *arguments)
        assert one_line(result)
        assert words in result.err
    assert ckpt("prune", run, "--keep-last", 0).code == 2
    assert ckpt("prune", run).code == 2
    assert steps(run) == [100, 200, 300, 400]
    assert not (tmp_path / "absent").exists()


def test_prune_deletes_nothing_beside_a_checkpoint_of_a_newer_release(ckpt, run):
    # It may be a delta, and need the files that would be deleted.
    with write_container(step_file(run, 500), kind="checkpoint") as writer:
        writer.set("checkpoint", {"version": 99})
        writer.set("state", {})
    result = ckpt("prune", run, "--keep-last", 1)
    assert one_line(result)
    assert "nothing was deleted, because checkpoint_iter_500.slip may need other checkpoints" in result.err
    assert steps(run) == [100, 200, 300, 400, 500]


def test_a_checkpoint_whose_metadata_is_forged_is_unreadable_and_does_not_stop_a_command(ckpt, run):
    with write_container(step_file(run, 500), kind="checkpoint") as writer:
        writer.add("regions", np.zeros((0, 5), np.uint64))
        writer.set("checkpoint", {"version": 1, "identity": "forged", "entries": [], "sequence": 9})
        writer.set("state", {})
        writer.set("metadata", {"$": "tensor", "dtype": "float32", "shape": []})
    assert one_line(ckpt("inspect", step_file(run, 500)))
    assert ckpt("inspect", run).code == 1
    assert ckpt("verify", run).code == 1
    assert ckpt("prune", run, "--keep-last", 1).code == 0
    assert steps(run) == [400, 500]


def test_errors_are_one_line_without_a_traceback(ckpt, tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    with write_container(tmp_path / "other.slip", kind="replay") as writer:
        writer.add("x", np.ones(3))
    with write_container(tmp_path / "odd.slip", kind="checkpoint") as writer:
        writer.set("checkpoint", {"version": 1, "identity": "odd", "entries": ["gone"], "parents": [1]})
        writer.set("state", {"w": {"$": "tensor", "dtype": "float32", "shape": [9], "region": 0}})
    (tmp_path / "folder").mkdir()
    for name in ("absent", "folder", "text", "empty", "other.slip", "odd.slip"):
        path = tmp_path / name
        assert one_line(ckpt("inspect", path)), name
        assert one_line(ckpt("convert", path, tmp_path / "target.pt")), name
        assert one_line(ckpt("diff", path, path)), name
    assert one_line(ckpt("verify", tmp_path / "absent"))
    folder = tmp_path / "folder"
    assert ckpt("verify", folder).err == f"slipstream: {folder}: contains no checkpoint *.slip\n"
    assert [ckpt("verify", tmp_path / name).code for name in ("text", "empty", "other.slip", "odd.slip")] == [1] * 4
    assert not (tmp_path / "target.pt").exists()


def test_names_in_a_file_cannot_steer_the_terminal(ckpt, tmp_path):
    hostile = "\x1b]0;title\x07 [red]x\r\nfake line"
    metadata = encode_metadata({hostile: hostile, "step": hostile, "metrics": {hostile: hostile}})
    (tmp_path / "run").mkdir()
    write_native(tmp_path / "a.slip", {hostile: torch.ones(100), "x": {hostile: hostile}}, metadata)
    write_native(tmp_path / "run" / f"{hostile}.slip", {hostile: torch.ones(100)}, metadata)
    write_native(tmp_path / "b.slip", {hostile: torch.zeros(100)})
    torch.save({hostile: torch.ones(3).to_sparse()}, tmp_path / "c.pt")
    for arguments in (
        ["inspect", tmp_path / "a.slip"],
        ["inspect", tmp_path / "a.slip", "--json"],
        ["inspect", tmp_path / "run"],
        ["inspect", tmp_path / "run", "--json"],
        ["verify", tmp_path / "a.slip"],
        ["verify", tmp_path / "run"],
        ["diff", tmp_path / "a.slip", tmp_path / "b.slip"],
        ["convert", tmp_path / "a.slip", tmp_path / "d.safetensors"],
        ["convert", tmp_path / "c.pt", tmp_path / "d.slip"],
    ):
        result = ckpt(*arguments)
        assert result.code in (0, 1, 2)
        assert not {"\x1b", "\r", "\x07"} & set(result.out + result.err)
        assert "\nfake line" not in result.out + result.err
    assert "\\x1b]0;title\\x07 [red]x\\r\\nfake line" in ckpt("inspect", tmp_path / "a.slip").out


def test_the_exit_code_of_a_process_of_its_own_is_that_of_the_command(run):
    damage(step_file(run, 100))
    result = alone("verify", step_file(run, 100))
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.endswith(": damaged\n")
