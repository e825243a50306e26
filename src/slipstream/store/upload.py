"""A thread that brings an object store up to date with what is on local disk, whatever the network does.

What has to be uploaded is never queued: it is derived from the files on disk. So memory is bounded, nothing is lost if
the process is killed, and the next process continues where this one stopped.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import random
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import CorruptFileError, FormatVersionError, WriterConflictError
from slipstream.store.background import NICENESS, set_niceness
from slipstream.store.lifetime import grace_period_s
from slipstream.store.urls import ObjectPath
from slipstream.text import format_bytes, plural
from slipstream.threads import Notifier

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SLIPSTREAM_CACHE"
"""Environment variable with the folder for files that wait to be uploaded; by default ``~/.cache/slipstream``."""

# Seconds until the next attempt if the store is not available; doubled each time.
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0


class Upload(Protocol):
    """A file that is not in the store yet."""

    @property
    def path(self) -> Path:
        """The file."""


class Destination(Protocol):
    """What an `Uploader` keeps up to date."""

    def pending(self) -> Sequence[Any]:
        """Return what is not in the store yet, most important first. May read the store."""

    def waiting(self) -> Sequence[Path]:
        """Return the files that are not in the store, as far as that is known without asking it."""

    def upload(self, item: Any) -> int:
        """Put one of these into the store; return its size. Safe to repeat."""


@dataclass(frozen=True)
class UploadStats:
    """What an uploader has done so far."""

    num_uploaded: int = 0
    num_failed: int = 0
    uploaded_bytes: int = 0
    upload_s: float = 0.0


class Uploader:
    """Uploads in a thread of its process, one file after another, and again while the store is not available.

    An unavailable store is logged once, and is never an error. The thread starts with the first `wake`.

    Args:
        url: Where to, for messages.
        destination: What to keep up to date.
    """

    def __init__(self, url: ObjectPath, destination: Destination) -> None:
        self.url = url
        self._destination = destination
        self._stats = UploadStats()
        self._changed = Notifier()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        # Each call of `wake` adds one. The thread is idle if it has seen all of them.
        self._num_woken = 0
        self._num_seen = 0
        self._is_closing = False
        self._has_given_up = False
        self._unavailable: str | None = None
        # Files that cannot be uploaded whatever the network does, by name.
        self._refused: set[str] = set()
        self._conflict: WriterConflictError | None = None
        self._at_exit: Callable[[], None] | None = None

    def wake(self) -> None:
        """Look for files to upload. Returns at once. Does nothing in a forked child: its parent uploads."""
        if os.getpid() != self._process or self._is_closing:
            return
        self._num_woken += 1
        # The main thread and the one that writes checkpoints may be here at once.
        with self._starting:
            if self._thread is None:
                self._start()
        self._changed.notify_all()

    def raise_conflict(self) -> None:
        """Raise `WriterConflictError` if another process was found to write to the same place."""
        if self._conflict is not None:
            raise WriterConflictError(str(self._conflict))

    def flush(self, timeout: float | None = None) -> bool:
        """Block until everything is uploaded, or the store is not available; return whether everything is."""
        if self._thread is not None and os.getpid() == self._process:
            self._changed.wait_until(self._is_idle_or_unavailable, timeout)
        return self._is_idle() and not self._waiting()

    def close(self, timeout: float | None = None) -> None:
        """Finish what is pending if the store is available, stop the thread, and log what was not uploaded.

        Idempotent. Waits at most as long as a signal waits for background jobs, and at most `timeout` seconds.
        """
        limit_s = grace_period_s()
        if timeout is not None:
            limit_s = min(limit_s, timeout)
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
        if self._is_closing or self._thread is None or os.getpid() != self._process:
            self._is_closing = True
            return
        # From here on, one failed attempt is enough to give up.
        self._is_closing = True
        self._changed.notify_all()
        self._changed.wait_until(self._is_idle, limit_s)
        self._has_given_up = True
        self._changed.notify_all()
        waiting = self._waiting()
        if waiting:
            logger.warning(
                "%s: %s not uploaded: %s; the next start uploads them",
                self.url,
                plural(len(waiting), "file"),
                ", ".join(waiting[:8]),
            )

    def get_stats(self) -> dict[str, float]:
        """Return ``upload_count, upload_failed_count, uploaded_bytes, upload_s`` and ``upload_pending``."""
        stats = self._stats
        return {
            "upload_count": stats.num_uploaded,
            "upload_failed_count": stats.num_failed,
            "uploaded_bytes": stats.uploaded_bytes,
            "upload_s": stats.upload_s,
            "upload_pending": len(self._waiting()),
        }

    def describe(self) -> str:
        """Return the progress as one line."""
        stats = self._stats
        parts = [f"{plural(stats.num_uploaded, 'upload')} to {self.url}, {format_bytes(stats.uploaded_bytes)}"]
        waiting = self._waiting()
        if waiting:
            parts.append(f"{plural(len(waiting), 'file')} waiting")
        if self._conflict is not None:
            parts.append(str(self._conflict))
        elif self._unavailable is not None:
            parts.append(f"not available: {self._unavailable}")
        return "; ".join(parts)

    def _waiting(self) -> list[str]:
        """Return the names of the files that should be uploaded and are not."""
        names = []
        for path in self._destination.waiting():
            # These were logged when they were refused, and the next attempt would end the same way.
            if path.name not in self._refused:
                names.append(path.name)  # noqa: PERF401 - a loop is easier to read
        return names

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="slipstream-upload", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is shutting down. The files stay, and the next start uploads them.
            return
        self._thread = thread
        self._at_exit = _closing_at_exit(self)
        atexit.register(self._at_exit)

    def _is_idle(self) -> bool:
        return self._num_seen == self._num_woken or self._has_given_up

    def _is_idle_or_unavailable(self) -> bool:
        return self._is_idle() or self._unavailable is not None

    def _has_work(self) -> bool:
        return self._num_woken != self._num_seen or self._is_closing

    def _run(self) -> None:
        """Upload until the uploader is closed; runs on its thread."""
        set_niceness(threading.get_native_id(), NICENESS)
        delay_s = _FIRST_DELAY_S
        while not self._has_given_up:
            # Calls of `wake` from here on are not covered by what follows.
            woken = self._num_woken
            try:
                self._upload_all()
            except WriterConflictError as error:
                self._conflict = error
                self._has_given_up = True
                logger.error("%s", error)  # noqa: TRY400 - the next save raises it
            except OSError as error:
                self._note_failure(error)
                if self._is_closing:
                    self._has_given_up = True
                    break
                # A random part keeps several machines from coming back at the same moment.
                wait_s = delay_s * random.uniform(0.5, 1.0)  # noqa: S311
                self._changed.wait_until(self._may_stop_waiting, wait_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            except BaseException:
                # A mistake in this program, or a panic of the client. Training must not end for that, and nothing may
                # wait for this thread.
                logger.exception("%s: uploading failed; the files stay on local disk", self.url)
                self._has_given_up = True
            else:
                delay_s = _FIRST_DELAY_S
                self._num_seen = woken
                self._changed.notify_all()
                if self._is_closing and self._is_idle():
                    self._has_given_up = True
                    break
                self._changed.wait_until(self._has_work)
        self._changed.notify_all()

    def _may_stop_waiting(self) -> bool:
        return self._is_closing or self._has_given_up

    def _upload_all(self) -> None:
        """Upload everything, the most important first; looks again after each file, because there may be newer ones."""
        while not self._has_given_up:
            pending = self._destination.pending()
            # The store has answered.
            self._note_success()
            item = self._first_of(pending)
            if item is None:
                return
            self._upload(item)

    def _first_of(self, pending: Sequence[Any]) -> Any:
        """Return the most important file, or None if there is none that can be uploaded."""
        for item in pending:
            if item.path.name not in self._refused:
                return item
        return None

    def _upload(self, item: Any) -> None:
        started = time.perf_counter()
        try:
            num_bytes = self._destination.upload(item)
        except FileNotFoundError:
            # If the file is there, something in the store has vanished, and trying at once would find the same.
            if item.path.exists():
                raise
            # Retention deleted it meanwhile. If the bucket is what is missing, that is a WriteError.
            return
        except (CorruptFileError, FormatVersionError) as error:
            self._refused.add(item.path.name)
            self._stats = replace(self._stats, num_failed=self._stats.num_failed + 1)
            logger.warning("%s; it is not uploaded to %s", error, self.url)
            return
        seconds = time.perf_counter() - started
        stats = self._stats
        self._stats = replace(
            stats,
            num_uploaded=stats.num_uploaded + 1,
            uploaded_bytes=stats.uploaded_bytes + num_bytes,
            upload_s=stats.upload_s + seconds,
        )
        logger.debug("uploaded %s to %s: %s in %.2f s", item.path.name, self.url, format_bytes(num_bytes), seconds)

    def _note_failure(self, error: OSError) -> None:
        self._stats = replace(self._stats, num_failed=self._stats.num_failed + 1)
        if self._unavailable is None:
            logger.warning("%s; files stay on local disk until it is available, and nothing waits for it", error)
        self._unavailable = str(error)
        self._changed.notify_all()

    def _note_success(self) -> None:
        if self._unavailable is not None:
            logger.warning("%s is available again", self.url)
        self._unavailable = None


def _closing_at_exit(uploader: Uploader) -> Callable[[], None]:
    """Return a function that closes an uploader, and does not keep it alive."""
    reference = weakref.ref(uploader)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    return close


# Where files for stores in memory wait: these stores end with the process, and so should the files.
_temporary: dict[str, Path] = {}


def spool_folder(url: ObjectPath) -> Path:
    """Return the folder on local disk for files that are written to a URL, until they are uploaded.

    The same for every process of a user on this machine, so that a process that was killed is continued by the next.
    """
    text = str(url)
    if url.scheme == "memory":
        if text not in _temporary:
            _temporary[text] = Path(tempfile.mkdtemp(prefix="slipstream-"))
            atexit.register(shutil.rmtree, _temporary[text], ignore_errors=True)
        return _temporary[text]
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "slipstream"
    if CACHE_VARIABLE in os.environ:
        base = Path(os.environ[CACHE_VARIABLE])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return base.expanduser().absolute() / "uploads" / f"{url.name}-{digest}"
