"""`slipstream doctor`: what it finds on this machine, and how it judges machines that are not this one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.cli import doctor, limits, packages
from slipstream.cli.packages import Package
from slipstream.codecs import Raw
from slipstream.text import install_hint

ALWAYS = [
    *("Python", "packages", "extra train", "cores", "memory", "open files", "torch", "CUDA", "C++ compiler"),
    *("disk", "writing", "file locks", "codec planes", "codec timewise"),
]


def run(*arguments: object, before: str = "") -> subprocess.CompletedProcess[str]:
    script = f"import sys\n{before}\nsys.argv = ['slipstream', *{list(map(str, arguments))!r}]\n"
    command = [sys.executable, "-c", script + "from slipstream.cli import main; main()"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "40"})


def test_it_finds_something_of_everything_and_leaves_nothing_behind(slipstream, tmp_path):
    result = slipstream("doctor", "--folder", tmp_path)
    assert result.code == 0, result.out
    *lines, empty, verdict = result.out.splitlines()
    assert not empty
    assert verdict.startswith("Slipstream works here")
    names = [line[9:26].strip() for line in lines]
    assert [name for name in names if name in ALWAYS] == ALWAYS
    assert all(re.match(r"(ok|note) +\S", line) for line in lines)
    assert all(": " in line for line in lines if line.startswith("note"))  # says what to do
    assert list(tmp_path.iterdir()) == []


def test_a_script_gets_numbers(slipstream, tmp_path):
    document = slipstream.json("doctor", "--folder", tmp_path)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert document["works"] is True
    assert (document["folder"], document["problems"]) == (str(tmp_path), 0)
    assert document["notes"] == sum(finding["status"] == "note" for finding in document["findings"])
    assert all((finding["advice"] is None) == (finding["status"] == "ok") for finding in document["findings"])
    assert found["Python"]["values"]["executable"] == sys.executable
    assert found["packages"]["values"]["torch"].startswith("2.")
    assert found["extra train"]["values"]["command"] == install_hint("train")
    assert found["cores"]["values"]["usable"] == len(os.sched_getaffinity(0))
    assert 0 < found["memory"]["values"]["free_bytes"] <= found["memory"]["values"]["total_bytes"]
    assert found["writing"]["values"]["bytes_per_s"] > 0
    assert found["codec planes"]["values"]["ratio"] > 1
    assert found["codec timewise"]["values"]["ratio"] > 1


def test_a_folder_that_does_not_exist_or_is_a_file_is_one_line(slipstream, tmp_path):
    (tmp_path / "file").touch()
    absent = slipstream("doctor", "--folder", tmp_path / "absent")
    file = slipstream("doctor", "--folder", tmp_path / "file")
    assert (absent.code, absent.err) == (2, f"slipstream: {tmp_path / 'absent'}: No such file or directory\n")
    assert (file.code, file.err) == (2, f"slipstream: {tmp_path / 'file'}: is not a folder\n")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc, where nobody may write")
def test_a_folder_that_cannot_be_written_to_is_a_problem_and_the_rest_is_still_checked(slipstream):
    document = slipstream("doctor", "--folder", "/proc", "--json")
    assert document.code == 1
    findings = json.loads(document.out)["findings"]
    [problem] = [finding for finding in findings if finding["status"] == "problem"]
    assert problem["name"] == "writing"
    assert problem["fact"].startswith("cannot write to /proc (")
    assert "codec timewise" in [finding["name"] for finding in findings]


def test_packages_that_cannot_be_imported_are_problems_and_say_how_to_reinstall_them(tmp_path):
    result = run("doctor", "--folder", tmp_path, before="sys.modules.update(zstandard=None, torch=None)")
    assert (result.returncode, result.stderr) == (1, "")
    for name in ("zstandard", "torch"):
        [line] = [line for line in result.stdout.splitlines() if line.startswith(f"problem  {name} ")]
        assert "cannot be imported (" in line
        assert line.endswith(f": pip install --force-reinstall {name}")
    assert "problem  codecs            check failed (" in result.stdout
    assert "\nok       cores " in result.stdout
    assert result.stdout.endswith("Slipstream does not work here until the problems are solved\n")


def test_interrupted_it_leaves_nothing_behind_either(tmp_path):
    command = [sys.executable, "-m", "slipstream", "doctor", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in errors


def test_requirements_are_sorted_into_what_is_always_needed_and_extras():
    lines = [
        "torch",
        "numpy>=1.26",
        'ray[default]>=2.30; extra == "ray"',
        "no-such-package>=1; python_version > '3' and extra == 'ray'",
    ]
    found = packages.required_packages(lines)
    assert list(found) == [None, "ray"]
    assert [package.requirement for package in found[None]] == ["numpy>=1.26", "torch"]
    assert [package.requirement for package in found["ray"]] == ["no-such-package>=1", "ray>=2.30"]
    assert found[None][0].version == np.__version__
    assert found["ray"][0].version is None


@pytest.mark.parametrize(
    ("version", "least", "is_fine"),
    [
        ("2.13.0+cpu", "2.5", True),
        ("2.5", "2.5.0", True),
        ("2.4.9", "2.5", False),
        ("1.10", "1.9", True),
        ("2024.2.0", "2024.2", True),
        ("3.0rc1", "3.0", True),
        ("0.1", None, True),
        (None, "1.0", False),
    ],
)
def test_a_package_is_fine_if_it_is_new_enough(version, least, is_fine):
    assert Package("walker", least, version).is_fine == is_fine


def test_missing_and_old_packages_are_named_with_the_command_that_installs_them():
    found = [Package("rotor", "1.0", None), Package("tail", "2.0", "1.9"), Package("wings", None, "3")]
    extra = doctor.judge_extra("fly", found)
    assert (extra.status, extra.fact) == ("note", "missing: rotor, tail 1.9 is older than 2.0")
    assert extra.advice == install_hint("fly")
    assert extra.values["complete"] is False
    needed = doctor.judge_dependencies(found)
    assert (needed.status, needed.advice) == ("problem", "pip install 'rotor>=1.0' 'tail>=2.0'")
    assert doctor.judge_dependencies(found[2:]).status == "ok"


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Make the kernel's files, of a machine with 8 GB of which 6 are free."""
    monkeypatch.setattr(limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(limits, "CGROUP", tmp_path / "cgroup")

    def make(**files: str) -> None:
        memory = "MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\nHugePages_Total: 0"
        named = {"proc/self/cgroup": "1:cpu:/other\n0::/pod/box", "proc/meminfo": memory}
        for name, content in files.items():
            named["cgroup/" + name.replace("__", "/").replace("_at", ".")] = content
        for name, content in named.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content + "\n")

    return make


def test_the_limits_of_a_container_are_the_strictest_of_its_groups(container):
    container(
        pod__cpu_atmax="150000 100000",
        pod__box__cpu_atmax="max 100000",
        pod__box__memory_atmax="3000000000",
        pod__box__memory_atcurrent="500000000",
    )
    assert limits.cpu_quota() == 1.5
    assert limits.memory_limit() == (3_000_000_000, 500_000_000)
    [finding] = doctor.check_memory()
    assert finding.status == "ok"
    assert finding.fact == "2.5 GB free of 8.2 GB, and this container may use 3.0 GB"


def test_a_container_without_limits_has_none(container):
    container(pod__box__memory_atmax="max", pod__box__memory_atcurrent="500000000")
    assert limits.cpu_quota() is None
    assert limits.memory_limit() is None
    [finding] = doctor.check_memory()
    assert finding.fact == "6.1 GB free of 8.2 GB"


def test_less_time_than_cores_and_little_memory_are_notes(container):
    container(cpu_atmax="50000 100000", pod__box__memory_atmax="1000000000", pod__box__memory_atcurrent="900000000")
    cores = doctor.check_cores()
    assert (cores.status, cores.advice) == ("note", "train with num_threads=1, or threads wait for each other")
    [memory] = doctor.check_memory()
    assert (memory.status, memory.values["free_bytes"]) == ("note", 100_000_000)


@pytest.mark.parametrize(
    ("built", "names", "fact"),
    [
        (None, [], "this build of torch has none"),
        ("13.0", [], "torch is built for CUDA 13.0 and finds no GPU"),
        ("13.0", ["Walker 0", "Walker 1"], "13.0: Walker 0, Walker 1"),
    ],
)
def test_gpus_are_listed_or_it_says_why_there_are_none(built, names, fact):
    cuda = SimpleNamespace(
        is_available=lambda: bool(names), device_count=lambda: len(names), get_device_name=names.__getitem__
    )
    finding = doctor.check_gpus(SimpleNamespace(version=SimpleNamespace(cuda=built), cuda=cuda))
    assert finding.fact == fact
    assert finding.values["devices"] == names
    assert (finding.status == "ok") == bool(names)


def test_a_compiler_that_is_not_installed_is_a_note(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/g++")
    *_, finding = doctor.check_torch()
    assert (finding.status, finding.fact) == ("note", "/no/such/g++ is not installed")


def test_a_folder_where_locks_do_not_work_is_a_note(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    assert doctor.check_locks(tmp_path).status == "ok"
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    assert doctor.check_locks(tmp_path).fact == "do not work in this folder"
    monkeypatch.setattr("fcntl.flock", refuse)
    assert doctor.check_locks(tmp_path).fact == "do not work in this folder"


@dataclass(frozen=True)
class Forgetful(Raw):
    """Changes a bit."""

    def decode(self, payload: Any, out: Any) -> None:
        super().decode(payload, out)
        out.view(np.uint8).flat[0] ^= 1


def test_a_codec_that_restores_something_else_is_a_problem():
    finding = doctor.measure_codec("codec", Forgetful(), np.arange(100, dtype=np.float32), "numbers")
    assert (finding.status, finding.fact) == ("problem", "does not restore what it was given")
