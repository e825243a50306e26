"""An S3 server on this machine, for tests: moto, in a virtual environment that only it uses.

moto needs another version of antlr4 than Hydra. ``make`` installs it; otherwise the first test that needs it does.
"""

import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.store.lock import FileLock

FOLDER = Path(__file__).parents[1] / ".venv" / "moto"
REQUIREMENT = "moto[server]>=5.1"
BUCKET = "bucket"
SECRET = "do-not-show-this-secret"
INSTALL_TIMEOUT_S = 240


@contextmanager
def serving_s3() -> Iterator[str]:
    """Run a server with one bucket; yields its endpoint. Skips the test if the server cannot be installed."""
    command = [_server(), "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            endpoint = _read_endpoint(process)
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
            yield endpoint
        finally:
            process.kill()


def environment(endpoint: str) -> dict[str, str]:
    """Return what a client needs to use the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def _read_endpoint(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"Running on (http://\S+)", line)
        if found is not None:
            # The server logs every request. Nobody reads a full pipe, and then it would wait.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return found[1]
    raise RuntimeError("the S3 server did not start")


def _server() -> str:
    server = FOLDER / "bin" / "moto_server"
    FOLDER.parent.mkdir(exist_ok=True)
    # Several test processes may need it at once, and each would install it.
    with FileLock(FOLDER.with_suffix(".lock"), timeout_s=INSTALL_TIMEOUT_S):
        if not server.exists():
            _install(FOLDER)
    return str(server)


def _install(folder: Path) -> None:
    python = str(folder / "bin" / "python")
    pip = ["-m", "pip", "--python", python, "install", "-qq", "--disable-pip-version-check", REQUIREMENT]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    for command in ([sys.executable, "-m", "venv", "--without-pip", str(folder)], [sys.executable, *pip]):
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=environment
            )
        except (subprocess.SubprocessError, OSError) as error:
            reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            pytest.skip(f"the S3 server moto cannot be installed: {reason}")
