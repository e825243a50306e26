"""Run torchrun for ``slipstream ... devices=N``: the same processes, without torchrun's tracebacks.

    python -m slipstream.dist.launch TORCHRUN_ARGUMENTS

torchrun explains every process that ends with an error by a traceback of itself. Our processes say in one line what went
wrong, and that line should be the last one.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; returns the exit code: that of the first process that failed, as a shell reports it.

    Args:
        arguments: Those of torchrun.
    """
    for name in ("agent.server.api", "multiprocessing.api"):
        # What these report besides failures is that processes are stopped, which is what a user has asked for.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    torchrun: Any = run  # it has no type hints
    try:
        torchrun.run(torchrun.parse_args(list(arguments)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        # A number below 0 stands for a signal, which the process could not report.
        number = -failure.exitcode
        sys.stderr.write(f"slipstream: rank {rank} was ended by {signal.Signals(number).name}\n")
        return 128 + number
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
