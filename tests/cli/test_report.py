"""`slipstream report`, as a person or a script meets it."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.cli import main


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process, as a fresh one would: importing torch takes seconds."""

    def command(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["slipstream", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return Result(int(end.value.code or 0), *capsys.readouterr())

    return command


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "runs" / "walker"
    folder.mkdir(parents=True)
    lines = [{"iteration": number, "env_frames": 64 * number, "entropy": 1 / number} for number in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_help_has_an_example_and_imports_neither_torch_nor_numpy():
    script = (
        "import sys, slipstream.cli\n"
        "sys.argv = ['slipstream', 'report', '--help']\n"
        "try: slipstream.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich.table', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "Example: slipstream report runs/last --open" in result.stdout
    for option in ("--output", "--open", "--json"):
        assert option in result.stdout


def test_it_writes_the_page_and_says_where_and_what_it_found(run, folder):
    result = run(folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{folder / 'report.html'}: 3 lines of metrics, 0 evaluations, flights of 0 scenarios\n"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_json_has_the_path_and_what_was_found_and_damage_goes_to_stderr(run, folder, tmp_path):
    (folder / "eval").mkdir()
    (folder / "eval" / "bad\x1b[31m.json").write_text("{")
    result = run(folder, "--json", "--output", tmp_path / "out" / "page.html")
    document = json.loads(result.stdout)
    page = tmp_path / "out" / "page.html"
    assert result.returncode == 0
    assert (document["report"], document["bytes"]) == (str(page), page.stat().st_size)
    assert (document["run"], document["metrics_lines"], document["iteration"]) == ("walker", 3, 3)
    assert len(document["problems"]) == 1
    assert result.stderr.startswith("slipstream: warning: ")
    assert "bad\\x1b[31m.json: is not JSON" in result.stderr
    assert "\x1b" not in result.stderr
    assert not (folder / "report.html").exists()


def test_several_runs_are_compared(run, folder):
    other = folder.parent / "runner"
    other.mkdir()
    for one, seed in ((folder, 1), (other, 2)):
        (one / "metrics.jsonl").write_text('{"iteration": 1, "env_frames": 64, "entropy": 2.0}\n')
        (one / "config.yaml").write_text(f"seed: {seed}\n")
    page = folder.parent / "comparison.html"
    result = run(folder, other)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{page}: walker, runner; 1 setting differs\n"
    document = json.loads(run(folder, other, "--json").stdout)
    assert document["report"] == str(page)
    assert [each["run"] for each in document["runs"]] == ["walker", "runner"]
    assert document["differing_settings"] == {"seed": {"walker": "1", "runner": "2"}}


def test_open_hands_the_page_to_the_browser(folder, tmp_path):
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(f'#!/bin/sh\necho "$1" > {tmp_path / "opened"}\n')
    opener.chmod(stat.S_IRWXU)
    environment = {**os.environ, "PATH": f"{opener.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "slipstream", "report", str(folder), "--open"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    while not (tmp_path / "opened").exists() or not (tmp_path / "opened").read_text().endswith("\n"):
        time.sleep(0.02)
    assert (tmp_path / "opened").read_text().strip() == str(folder / "report.html")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("absent", "there is no such run folder"),
        ("file", "is a file, expected a run folder"),
        (".", "is not a run folder"),
    ],
)
def test_what_is_no_run_is_one_line_and_code_2(run, tmp_path, path, words):
    (tmp_path / "file").touch()
    result = run(tmp_path / path)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr
    assert os.listdir(tmp_path) == ["file"]


def test_where_it_may_not_write_it_says_so_in_one_line_and_the_older_report_stays(run, folder):
    # Root may write anywhere, but not into a file system that is gone from under it: /proc takes no files.
    (folder / "report.html").write_text("the older report")
    result = run(folder, "--output", "/proc/report.html")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "cannot write /proc/report.html" in result.stderr
    assert (folder / "report.html").read_text() == "the older report"
