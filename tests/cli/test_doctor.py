"""`slipstream doctor`: what it finds on this machine, and how it judges machines that are not this one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.cli.doctor import backend, codecs, disk, machine, software
from slipstream.cli.doctor.software import Package
from slipstream.codecs import Raw
from slipstream.text import install_hint

ALWAYS = [
    *("Python", "slipstream", "packages", "cores", "open files", "OMP_WAIT_POLICY", "terminal"),
    *("torch", "denormal numbers", "CUDA", "C++ compiler"),
    *("disk", "writing", "atomic writes", "file locks", "codec planes", "codec timewise"),
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
    names = [line[9:27].strip() for line in lines]
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
    speed, free = found["writing"]["values"]["bytes_per_s"], found["disk"]["values"]["free_bytes"]
    assert speed is None if free < 1 << 30 else speed > 0  # where others have filled the disk, it is not measured
    assert found["atomic writes"]["values"]["median_s"] <= found["atomic writes"]["values"]["worst_s"]
    assert found["codec planes"]["values"]["ratio"] > 1
    assert found["codec timewise"]["values"]["ratio"] > 1


def test_a_folder_that_is_none_is_one_line(slipstream, tmp_path):
    (tmp_path / "file").touch()
    absent, file = (
        slipstream("doctor", "--folder", tmp_path / "absent"),
        slipstream("doctor", "--folder", tmp_path / "file"),
    )
    assert (absent.code, absent.err) == (2, f"slipstream: {tmp_path / 'absent'}: No such file or directory\n")
    assert (file.code, file.err) == (2, f"slipstream: {tmp_path / 'file'}: is not a folder\n")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc, where nobody may write")
def test_a_folder_that_cannot_be_written_to_is_a_problem_and_the_rest_is_still_looked_at(slipstream):
    document = slipstream("doctor", "--folder", "/proc", "--json")
    assert document.code == 1
    findings = json.loads(document.out)["findings"]
    (problem,) = [finding for finding in findings if finding["status"] == "problem"]
    assert problem["name"] == "writing"
    assert problem["fact"].startswith("/proc cannot be written to (")
    assert "codec timewise" in [finding["name"] for finding in findings]


def test_a_package_that_cannot_be_imported_is_a_problem_and_says_how_to_get_it(tmp_path):
    result = run("doctor", "--folder", tmp_path, before="sys.modules['zstandard'] = None")
    assert (result.returncode, result.stderr) == (1, "")
    (line,) = [line for line in result.stdout.splitlines() if "zstandard" in line and "cannot be imported" in line]
    assert line.startswith("problem  zstandard ")
    assert line.endswith(": pip install --force-reinstall zstandard")
    assert "\nok       cores " in result.stdout
    assert result.stdout.endswith("Slipstream does not work here until the problems are solved\n")


def test_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    result = run("doctor", "--folder", tmp_path, before="sys.modules['torch'] = None")
    assert result.returncode == 1
    assert "problem  torch              cannot be imported (" in result.stdout
    assert "\nok       codec planes " in result.stdout


def test_interrupted_it_leaves_nothing_behind_either(tmp_path):
    command = [sys.executable, "-m", "slipstream", "doctor", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in told


class TestSoftware:
    def test_requirements_are_sorted_into_what_is_always_needed_and_extras(self):
        lines = [
            "numpy>=1.26",
            "torch",
            'ray[default]>=2.30; extra == "ray"',
            "no-such-package>=1; python_version > '3' and extra == 'ray'",
        ]
        found = software.required(lines)
        assert list(found) == [None, "ray"]
        assert [(package.name, package.least) for package in found[None]] == [("numpy", "1.26"), ("torch", None)]
        assert [(package.name, package.least) for package in found["ray"]] == [
            ("no-such-package", "1"),
            ("ray", "2.30"),
        ]
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
    def test_a_package_is_fine_if_it_is_new_enough(self, version, least, is_fine):
        assert Package("walker", least, version).is_fine == is_fine

    def test_an_extra_that_is_not_complete_names_what_is_missing_and_the_command(self):
        packages = [Package("rotor", "1.0", None), Package("tail", "2.0", "1.9"), Package("wings", None, None)]
        finding = software.extra_finding("fly", packages)
        expected = f"rotor, wings are missing, tail 1.9 is older than 2.0: {install_hint('fly')}"
        assert (finding.status, finding.name, finding.sentence) == ("note", "extra fly", expected)
        assert finding.values["complete"] is False

    def test_a_dependency_that_is_missing_or_old_is_a_problem(self):
        packages = [Package("numpy", "1.26", "2.0"), Package("rich", "13.7", None), Package("torch", "2.5", "2.4.1")]
        finding = software.dependencies(packages)
        assert finding.status == "problem"
        expected = "rich is missing, torch 2.4.1 is older than 2.5: pip install 'rich>=13.7' 'torch>=2.5'"
        assert finding.sentence == expected
        assert software.dependencies(packages[:1]).status == "ok"


class TestMachine:
    @pytest.fixture
    def limits(self, tmp_path, monkeypatch):
        """Make the kernel's files, of a machine with 8 GB of which 6 are free."""
        monkeypatch.setattr(machine, "_PROCESSES", tmp_path / "proc")
        monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")

        def make(groups: str, files: dict[str, str]) -> None:
            files = {"proc/self/cgroup": groups, "proc/meminfo": meminfo(8_000_000, 6_000_000)} | files
            for name, content in files.items():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(content + "\n")

        return make

    def test_the_limits_of_a_container_are_found_in_the_second_version_of_control_groups(self, limits):
        limits(
            "0::/pod/box",
            {
                "cgroup/pod/cpu.max": "150000 100000",
                "cgroup/pod/box/cpu.max": "max 100000",
                "cgroup/pod/box/memory.max": "3000000000",
                "cgroup/pod/box/memory.current": "500000000",
            },
        )
        assert machine.cpu_quota() == 1.5
        assert machine.memory_limit() == (3_000_000_000, 500_000_000)
        (finding,) = machine.memory()
        assert finding.status == "ok"
        assert finding.fact == "2.5 GB free of 8.2 GB, and this container may use 3.0 GB"

    def test_and_in_the_first(self, limits):
        limits(
            "4:memory:/box\n1:cpu,cpuacct:/\n0::/",
            {
                "cgroup/memory/box/memory.limit_in_bytes": "1000000000",
                "cgroup/memory/box/memory.usage_in_bytes": "900000000",
                "cgroup/cpu/cpu.cfs_quota_us": "-1",
                "cgroup/cpu/cpu.cfs_period_us": "100000",
            },
        )
        assert machine.cpu_quota() is None
        (finding,) = machine.memory()
        assert (finding.status, finding.values["free_bytes"]) == ("note", 100_000_000)

    def test_no_limit_is_none(self, limits):
        limits("4:memory:/", {"cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
        assert machine.memory_limit() == (None, 0)
        (finding,) = machine.memory()
        assert finding.values["limit_bytes"] is None

    def test_fewer_cores_time_than_cores_is_a_note(self, limits):
        limits("0::/", {"cgroup/cpu.max": "50000 100000"})
        finding = machine.cores()
        assert finding.status == "note"
        assert "0.5 cores' time: train with num_threads=1" in finding.sentence

    def test_threads_that_spin_are_a_note(self):
        assert machine.wait_policy("passive").status == "ok"
        assert machine.wait_policy("ACTIVE").sentence.startswith("ACTIVE, threads spin")
        assert machine.wait_policy(None).sentence.startswith("not set, threads spin")


class TestBackend:
    def test_torch_without_cuda_is_a_note(self):
        torch = SimpleNamespace(
            __version__="9.0+cpu", version=SimpleNamespace(cuda=None), cuda=SimpleNamespace(is_available=lambda: False)
        )
        (finding,) = backend.cuda(torch)
        assert (finding.status, finding.values["available"]) == ("note", False)
        assert finding.sentence.startswith("9.0+cpu is a build of torch without it: ")

    def test_a_driver_that_is_too_old_is_told_as_torch_tells_it(self):
        def is_available() -> bool:
            warnings.warn("The NVIDIA driver is too old\nand more", UserWarning, stacklevel=1)
            return False

        cuda = SimpleNamespace(is_available=is_available)
        (finding,) = backend.cuda(SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda))
        assert "built for CUDA 13.0 (The NVIDIA driver is too old): see whether nvidia-smi" in finding.sentence

    @pytest.mark.parametrize("pinned", [True, False])
    def test_gpus_are_listed_with_their_memory(self, pinned):
        def empty(*_: Any, **__: Any) -> Any:
            if pinned:
                return SimpleNamespace(is_pinned=lambda: True)
            raise RuntimeError("cannot lock memory")

        cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            mem_get_info=lambda index: (1_000_000_000, 8_000_000_000),
            get_device_name=lambda index: f"Walker {index}",
        )
        torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda, empty=empty, uint8=None)
        gpus, memory = backend.cuda(torch)
        assert gpus.fact == "13.0: Walker 0, 1.0 GB free of 8.0 GB; Walker 1, 1.0 GB free of 8.0 GB"
        assert [device["total_bytes"] for device in gpus.values["devices"]] == [8_000_000_000, 8_000_000_000]
        assert (memory.status, memory.values["pinned"]) == ("ok" if pinned else "note", pinned)

    def test_a_compiler_that_is_not_there_is_a_note(self):
        finding = backend.compiler("/no/such/g++")
        assert finding.sentence.startswith("/no/such/g++, which CXX names, is not there: install it")

    def test_a_compiler_without_what_torch_compile_needs_says_what_it_missed(self, tmp_path):
        broken = tmp_path / "c++"
        broken.write_text(
            "#!/bin/sh\n[ $1 = --version ] && echo c++ 1.0 && exit\necho 'fatal error: Python.h' >&2; exit 1\n"
        )
        broken.chmod(0o755)
        finding = backend.compiler(str(broken))
        assert (finding.status, finding.values["works"]) == ("note", False)
        assert f"{broken} cannot build for torch.compile (fatal error: Python.h): install Python's" in finding.sentence

    def test_flushing_of_denormal_numbers_is_left_as_it_was(self):
        asked: list[bool] = []

        def flush(on: bool) -> bool:
            asked.append(on)
            return False

        assert backend.denormals(SimpleNamespace(set_flush_denormal=flush)).status == "note"
        assert asked == [True, False]


class TestDisk:
    def test_a_folder_where_locks_lock_nothing_is_a_note(self, tmp_path, monkeypatch):
        assert disk.locks(tmp_path).status == "ok"
        monkeypatch.setattr("fcntl.flock", lambda *_: None)
        assert disk.locks(tmp_path).fact == "in this folder lock nothing"

    def test_a_folder_without_locks_is_a_note(self, tmp_path, monkeypatch):
        def refuse(*_: object) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
        assert disk.locks(tmp_path).fact == "none in this folder (No locks available)"

    def test_a_disk_that_is_nearly_full_is_not_filled_to_measure_it(self, tmp_path):
        finding = disk.writing(tmp_path, free_bytes=1000)
        assert (finding.status, finding.values["bytes_per_s"]) == ("note", None)


@dataclass(frozen=True)
class Forgetful(Raw):
    """Changes a bit."""

    def decode(self, payload: Any, out: Any) -> None:
        super().decode(payload, out)
        out.view(np.uint8).flat[0] ^= 1


def test_a_codec_that_gives_back_something_else_is_a_problem():
    finding = codecs.speed("codec", Forgetful(), np.arange(100, dtype=np.float32), "numbers")
    assert (finding.status, finding.fact) == ("problem", "does not give back what it was given")


def meminfo(total_kib: int, available_kib: int) -> str:
    return f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\nHugePages_Total: 0"
