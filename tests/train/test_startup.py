"""What a process is set to before it trains."""

import platform
import subprocess
import sys

import pytest

TAKE_AND_FREE = """
import resource
import torch
from slipstream.train.startup import prepare_process

said = prepare_process({threads}) if {prepared} else []

def iteration():
    blocks = [torch.ones(12 << 20) for _ in range(2)]

for _ in range(3):
    iteration()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    iteration()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, torch.get_num_threads(), "; ".join(said), sep="|")
"""


def run(*, prepared: bool, threads: int = 0) -> tuple[int, int, str]:
    program = TAKE_AND_FREE.format(prepared=prepared, threads=threads)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    faults, num_threads, said = done.stdout.strip().split("|")
    return int(faults), int(num_threads), said


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_memory_that_an_iteration_frees_is_there_for_the_next_one_without_asking_linux_again():
    prepared, _, said = run(prepared=True)
    untouched, _, _ = run(prepared=False)
    assert "freed memory is kept" in said
    assert prepared < untouched / 10


def test_torch_computes_with_as_many_threads_as_were_asked_for():
    _, threads, said = run(prepared=True, threads=1)
    assert threads == 1
    assert said.startswith("1 threads on ")
