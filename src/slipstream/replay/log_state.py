"""A `FrameLog` as tensors, and back: what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slipstream.errors import CorruptFileError, SlipstreamError, StateMismatchError
from slipstream.replay.fields import RowLayout
from slipstream.replay.folder import split_segments
from slipstream.replay.frames import FrameLog
from slipstream.replay.packing import PackedColumn


def log_state(log: FrameLog) -> dict[str, Any]:
    """Return the packed frames in memory of their own."""
    columns = (
        log.segments(log.first, log.end) if log.end > log.first else [(np.empty(0, np.int64), [])] * len(log.packers)
    )
    return {
        "first": log.first,
        "end": log.end,
        "columns": [
            {
                "rows": torch.from_numpy(np.array(sizes, np.int64)),
                "lengths": torch.tensor([len(payload) for payload in payloads], dtype=torch.int64),
                "bytes": torch.from_numpy(np.frombuffer(bytearray().join(payloads), np.uint8)),
            }
            for sizes, payloads in columns
        ],
    }


def load_log_state(state: Mapping[str, Any], layout: RowLayout, options: Mapping[str, Any]) -> FrameLog:
    """Make the log that `log_state` was taken of.

    Raises:
        StateMismatchError: If it is not such a state.
    """
    try:
        columns: list[PackedColumn] = [
            (
                np.array(column["rows"].cpu().numpy(), np.int64),
                split_segments(column["lengths"].cpu().numpy(), column["bytes"].cpu().numpy()),
            )
            for column in state["columns"]
        ]
        return FrameLog.restore(layout.packers, columns, int(state["first"]), int(state["end"]), **options)
    except (KeyError, TypeError, AttributeError, CorruptFileError, SlipstreamError) as error:
        raise StateMismatchError(f"the packed frames are not as they were saved ({error})") from error
