"""Portable checkpoints from untrusted sources take bounded memory; those that we write always load."""

import subprocess
import sys
import zipfile
from typing import Any

import pytest
import torch

from slipstream.checkpoint.load import load_checkpoint
from slipstream.checkpoint.portable import write_portable
from slipstream.codecs import bytes as lz4_frames
from slipstream.errors import CorruptFileError

BOMB = """
import resource, sys
import lz4.frame
from slipstream.checkpoint.load import load_checkpoint
from slipstream.errors import CorruptFileError

frame = lz4.frame.compress(bytes(64 << 20), store_size={store_size}, block_size=lz4.frame.BLOCKSIZE_MAX4MB)
with open(sys.argv[1], "wb") as file:
    for _ in range(84):
        file.write(frame)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), used + (400 << 20)))
try:
    load_checkpoint(sys.argv[1])
except CorruptFileError as error:
    print(error)
"""


@pytest.mark.parametrize("store_size", [True, False])
def test_a_small_file_that_expands_to_gigabytes_is_refused_in_little_memory(tmp_path, store_size):
    path = tmp_path / "bomb.pt.lz4"
    script = BOMB.format(store_size=store_size)
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.stat().st_size < 35e6
    assert "hold 5637144576 bytes, more than the limit of" in done.stdout
    assert "decompress it with `lz4 -d`" in done.stdout


def test_an_archive_whose_members_expand_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lz4_frames, "UNCHECKED_BYTES", 1 << 20)
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(4 << 20))
    with pytest.raises(CorruptFileError, match="its members claim 4194304 bytes, more than the limit of 1048576"):
        load_checkpoint(path)


def test_a_state_that_is_almost_constant_is_written_so_that_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(lz4_frames, "UNCHECKED_BYTES", 1 << 20)
    state: dict[str, Any] = {"replay": torch.zeros(6 << 20), "step": 7}
    path, raw_bytes, file_bytes = write_portable(tmp_path / "a.pt", state, compress=True)
    assert raw_bytes / 33 < file_bytes < raw_bytes / 30
    loaded = load_checkpoint(path)
    assert loaded["step"] == 7
    assert torch.equal(loaded["replay"], state["replay"])
