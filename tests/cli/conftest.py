"""The command line, run as a person or a script would run it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

# Importing torch takes seconds: one process runs the commands that need it, each as a fresh `slipstream` would.
SERVER = """
import contextlib, io, json, sys
from slipstream.cli import main
for line in sys.stdin:
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["slipstream", *json.loads(line)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            err.write(f"Traceback of {error!r}")
            code = 99
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Server:
    def __init__(self, *group: str) -> None:
        self.group = group
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
        )

    def __call__(self, *arguments: object) -> Result:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([*self.group, *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        return Result(*json.loads(self.process.stdout.readline()))

    def json(self, *arguments: object) -> Any:
        return json.loads(self(*arguments, "--json").out)


def serve(*group: str) -> Iterator[Server]:
    """Run commands, of a group if given, until the tests are done with them."""
    server = Server(*group)
    yield server
    assert server.process.stdin
    assert server.process.stdout
    server.process.stdin.close()
    server.process.wait()
    server.process.stdout.close()


@pytest.fixture(scope="module")
def ckpt() -> Iterator[Server]:
    yield from serve("ckpt")


@pytest.fixture(scope="module")
def rollout() -> Iterator[Server]:
    yield from serve("rollout")


@pytest.fixture(scope="module")
def slipstream() -> Iterator[Server]:
    yield from serve()
