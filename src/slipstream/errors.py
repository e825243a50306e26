"""Every exception that Slipstream raises, in one tree.

::

    SlipstreamError
    ├── CorruptFileError      (ValueError)    a file is damaged, cut off, or not ours
    ├── FormatVersionError    (ValueError)    a file needs a newer Slipstream
    ├── MissingEntryError     (KeyError)      a file has no entry of that name
    ├── CodecError            (ValueError)    a payload cannot be decoded, or a codec is misconfigured
    ├── ConfigurationError    (ValueError)    a setting that makes no sense, or two that contradict each other
    ├── UnsupportedDtypeError (TypeError)     an array whose elements are not plain numbers
    ├── UnsupportedStateError (TypeError)     state that cannot be stored as data, such as an arbitrary object
    ├── StateMismatchError    (ValueError)    a checkpoint of another model; lists what differs
    ├── NonFiniteError        (FloatingPointError) a loss, gradient, target or recorded value is not finite
    ├── DatasetError          (ValueError)    a recording that does not fit: lengths, shapes, links; or it changed
    ├── ReplayError           (ValueError)    an episode or a batch that a replay buffer cannot hold, or cannot give
    ├── OutOfRangeError       (IndexError)    an index that is not there
    ├── RolloutError          (ValueError)    a batch that is not a rollout: no time axis, time first, ragged
    ├── TornStateError        (RuntimeError)  guarded state changed while it was being copied; nothing was written
    ├── WriteError            (OSError)       a write failed; the previous file is untouched
    │   └── DiskFullError                     ... because there was no space left
    ├── QueueFullError        (RuntimeError)  the background queue is full and its policy is ``raise``
    ├── JobSkippedError       (RuntimeError)  a queued job gave way to a newer one (``skip_oldest``)
    └── BackgroundError       (RuntimeError)  an earlier background job failed; see ``__cause__``

Each also derives from the builtin a caller would reach for, so ``except ValueError`` or ``except OSError`` work.
"""

from __future__ import annotations

__all__ = [
    "BackgroundError",
    "CodecError",
    "ConfigurationError",
    "CorruptFileError",
    "DatasetError",
    "DiskFullError",
    "FormatVersionError",
    "JobSkippedError",
    "MissingEntryError",
    "NonFiniteError",
    "OutOfRangeError",
    "QueueFullError",
    "ReplayError",
    "RolloutError",
    "SlipstreamError",
    "StateMismatchError",
    "TornStateError",
    "UnsupportedDtypeError",
    "UnsupportedStateError",
    "WriteError",
]


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose."""


class CorruptFileError(SlipstreamError, ValueError):
    """A file is damaged, cut off, hostile, or not a Slipstream file at all."""


class FormatVersionError(SlipstreamError, ValueError):
    """A file was written in a format, or with a codec, that this release does not know."""


class MissingEntryError(SlipstreamError, KeyError):
    """A file is sound but holds no entry of the requested name."""

    # KeyError shows the repr of its argument; a sentence should be shown as a sentence.
    __str__ = Exception.__str__


class CodecError(SlipstreamError, ValueError):
    """A payload cannot be decoded, or a codec was given settings it does not have."""


class ConfigurationError(SlipstreamError, ValueError):
    """A setting makes no sense, or contradicts another; the message says which and what was expected."""


class UnsupportedDtypeError(SlipstreamError, TypeError):
    """An array holds something other than bools, integers, floats or complex numbers."""


class UnsupportedStateError(SlipstreamError, TypeError):
    """State holds something that cannot be stored as data; the message says where and what."""


class StateMismatchError(SlipstreamError, ValueError):
    """A checkpoint does not fit what it is loaded into; lists missing, unexpected and differing entries."""


class NonFiniteError(SlipstreamError, FloatingPointError):
    """A loss, a gradient, a target or a recorded value is NaN or infinite; nothing was changed by it."""


class DatasetError(SlipstreamError, ValueError):
    """A recorded dataset contradicts itself or what is asked of it, was closed, or changed since it was opened."""


class RolloutError(SlipstreamError, ValueError):
    """A batch is not a rollout: no time axis, time before environments, keys that differ between environments."""


class ReplayError(SlipstreamError, ValueError):
    """An episode or a batch does not fit a replay buffer, or it cannot give what was asked for."""


class OutOfRangeError(SlipstreamError, IndexError):
    """An index is negative or beyond the last element; the message says what there is."""


class TornStateError(SlipstreamError, RuntimeError):
    """Guarded state changed while it was being copied, so that the snapshot was given up and not written."""


class WriteError(SlipstreamError, OSError):
    """A write failed; nothing was left behind and the previous file, if any, is untouched."""

    def __str__(self) -> str:
        return str(self.strerror or super().__str__())  # OSError would put "[Errno 28] " before the sentence


class DiskFullError(WriteError):
    """A write failed because the disk, a quota or a file-size limit was exhausted."""


class QueueFullError(SlipstreamError, RuntimeError):
    """The background queue is full and its policy is to raise."""


class JobSkippedError(SlipstreamError, RuntimeError):
    """A queued job was dropped to make room for a newer one."""


class BackgroundError(SlipstreamError, RuntimeError):
    """An earlier background job failed and nobody had asked for its result; ``__cause__`` is the failure."""
