"""Commands that run in several processes: how they are started, and how they report errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from slipstream.cli.errors import sentence_of
from slipstream.cli.output import print_error
from slipstream.errors import RankLostError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.train.processes import Processes


def relaunch(devices: int, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun, which starts a command in several processes.

    Args:
        devices: How many processes.
        arguments: Of ``slipstream``, the command first.
    """
    from slipstream.train.processes import torchrun_command  # noqa: PLC0415 - imports torch

    # What torchrun would choose as well, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The processes are started by `python -m`, which would prefer a slipstream.py in the current folder.
    if not {"", str(Path.cwd())}.intersection(sys.path):
        os.environ["PYTHONSAFEPATH"] = "1"
    sys.stdout.flush()
    command = torchrun_command(devices, arguments)
    os.execv(command[0], command)  # noqa: S606 - our own interpreter


@contextlib.contextmanager
def one_voice(processes: Processes | None) -> Iterator[None]:
    """Let an error of the first process be reported by that one only, and those of others with their number."""
    if processes is None:
        yield
        return
    from slipstream.dist.group import is_copied  # noqa: PLC0415 - imports torch

    waits = True
    try:
        yield
        waits = False
    except typer.Exit as end:
        waits = end.exit_code != 0
        raise
    except (SlipstreamError, ImportError, OSError) as error:
        waits = not isinstance(error, RankLostError)
        if processes.rank == 0:
            print_error(sentence_of(error))
        elif not is_copied(error):
            print_error(f"rank {processes.rank}: {sentence_of(error)}")
        raise typer.Exit(2) from error
    finally:
        processes.leave(waits=waits)
