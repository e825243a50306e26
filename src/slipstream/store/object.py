"""`ObjectStore`: a bucket of S3, Google Cloud Storage or Azure as a store of immutable objects, through `obstore`.

Objects are created with a conditional put, which every provider carries out atomically. If the reply to a put is lost,
a second attempt finds the name taken. Then the object is read back: identical content means that the first attempt
succeeded.
"""

from __future__ import annotations

import builtins
import datetime as dt
import errno
import functools
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.errors import ConfigurationError, OutOfRangeError, SlipstreamError, StoreError, WriteError
from slipstream.store.base import Buffer, FileInfo, Range, already_exists, check_name, check_prefix, check_ranges
from slipstream.store.local import open_regular
from slipstream.store.ranges import cut, merge_ranges
from slipstream.text import install_hint
from slipstream.threads import parallel_map

if TYPE_CHECKING:
    from slipstream.store.urls import ObjectPath

T = TypeVar("T")

# Seconds before each further attempt at a request that may succeed later.
_DELAYS_S = (0.1, 0.5, 2.0)
_CLIENT_OPTIONS = {
    "connect_timeout": dt.timedelta(seconds=5),
    # No byte arrives for so long. An upload of 32 MiB may take the whole of the second.
    "read_timeout": dt.timedelta(seconds=60),
    "timeout": dt.timedelta(seconds=600),
    # Takes effect only if an endpoint in the environment begins with http://.
    "allow_http": True,
}
_MAX_PARALLEL = 8

# What object stores accept in a name and obstore does not, and the character that marks them.
_QUOTED = re.compile(r"[%\x00-\x1f\x7f]")
_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z ]*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_URL = re.compile(r"\w+://\S+")
_MISSING_RANGE = "416"
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_CONFLICT = "409"

# The process that sent the first request. obstore's threads exist only there: a forked child would wait forever.
_first_process: list[int] = []


class ObjectStore:
    """A folder of a bucket as a `Store`. Thread-safe and process-safe.

    A request that fails for a reason that may pass, such as a lost connection, is repeated three times. Pickling keeps
    the URL only. A forked child cannot use it: start processes with ``spawn``.

    Args:
        url: Such as ``s3://bucket/runs/walker``.

    Raises:
        ConfigurationError: If the environment lacks something, such as the account of Azure.
        ImportError: If obstore is not installed.
    """

    def __init__(self, url: ObjectPath) -> None:
        self.url = url
        self._api = _import_obstore()
        self._client = _make_client(self._api, url)

    def put_new(self, name: str, data: Buffer) -> None:
        """Create an object with one request; see `Store.put_new`."""
        key = _quote(name)
        # A copy: the caller may change the buffer as soon as this returns, and a retry must send the same bytes.
        content = memoryview(data).tobytes()
        self._require_usable()
        is_unsure = False
        for delay_s in (*_DELAYS_S, None):
            try:
                self._api.put(self._client, key, content, mode="create", use_multipart=False)
            except self._api.exceptions.AlreadyExistsError as error:
                # S3 says so too while another put of the name is in progress. That one may fail.
                if _status_of(error) == _CONFLICT and delay_s is not None:
                    time.sleep(delay_s)
                    continue
                # An earlier attempt may have created it, and its reply was lost.
                if is_unsure and self.get(name) == content:
                    return
                raise already_exists(name) from None
            except self._errors() as error:
                if delay_s is None or not _may_pass(error):
                    raise self._write_error(name, error) from None
                # The request may have been carried out all the same.
                is_unsure = True
                time.sleep(delay_s)
            else:
                return
        raise AssertionError("unreachable")

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Create an object from a local file; see `Store.put_file`. The whole file is in memory meanwhile."""
        # One request, because requests for parts cannot be conditional. Checkpoints are uploaded in pieces instead.
        with open_regular(path) as file:
            content = file.read()
        self.put_new(name, content)

    def get(self, name: str) -> bytes:
        """Return the content of an object; see `Store.get`."""
        key = _quote(name)
        return self._read(name, functools.partial(self._fetch_all, key))

    def get_ranges(self, name: str, ranges: Sequence[Range]) -> builtins.list[bytes]:
        """Return parts of an object; see `Store.get_ranges`. Neighbouring parts are fetched by one request."""
        key = _quote(name)
        merged = merge_ranges(ranges)
        # Nothing to fetch. The object has to exist all the same.
        if not merged:
            check_ranges(name, ranges, self.size_bytes(name))
            return [b""] * len(ranges)

        def fetch(part: Range) -> bytes:
            return self._read(name, functools.partial(self._fetch, key, part))

        try:
            blocks = list(parallel_map(fetch, merged, _MAX_PARALLEL))
            check_ranges(name, ranges, merged[-1].offset + merged[-1].length)
        except OutOfRangeError:
            # The first request that goes beyond the end does not say what the others would have done.
            check_ranges(name, ranges, self.size_bytes(name))
            raise
        return [cut(merged, blocks, part) for part in ranges]

    def size_bytes(self, name: str) -> int:
        """Return the size of an object; see `Store.size_bytes`."""
        key = _quote(name)
        head = self._read(name, functools.partial(self._api.head, self._client, key))
        return int(head["size"])

    def list(self, prefix: str = "") -> builtins.list[FileInfo]:
        """Return the objects whose names begin with `prefix`; see `Store.list`. One request per thousand objects."""
        # obstore lists folders, and not what begins with part of a name.
        folder = check_prefix(prefix)
        key = None
        if folder:
            key = _quote(folder)
        found = self._read(prefix, functools.partial(self._list_folder, key))
        matching = []
        for name in sorted(found):
            if name.startswith(prefix):
                matching.append(found[name])  # noqa: PERF401 - a loop is easier to read
        return matching

    def delete(self, name: str) -> None:
        """Delete an object; see `Store.delete`."""
        key = _quote(name)
        try:
            self._repeat(functools.partial(self._api.delete, self._client, key))
        except FileNotFoundError:
            # S3 does not mind, other providers do.
            return
        except self._errors() as error:
            raise self._write_error(name, error) from None

    def __repr__(self) -> str:
        return f"ObjectStore({str(self.url)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The client contains credentials. Where the store is loaded, the environment has them.
        return type(self), (self.url,)

    def _list_folder(self, key: str | None) -> dict[str, FileInfo]:
        """Return the objects of a folder by name."""
        found = {}
        for batch in self._api.list(self._client, key):
            for meta in batch:
                name = urllib.parse.unquote(meta["path"])
                try:
                    check_name(name)
                except ValueError:
                    # An object of another program, or the marker of a folder.
                    continue
                found[name] = FileInfo(name, meta["size"], meta["last_modified"].timestamp())
        return found

    def _fetch_all(self, key: str) -> bytes:
        content: bytes = self._api.get(self._client, key).bytes().to_bytes()
        return content

    def _fetch(self, key: str, part: Range) -> bytes:
        """Return one range; raise `OutOfRangeError` if the object is shorter."""
        stop = part.offset + part.length
        try:
            reply = self._api.get(self._client, key, options={"range": (part.offset, stop)})
            content: bytes = reply.bytes().to_bytes()
        except self._api.exceptions.GenericError as error:
            if _status_of(error) == _MISSING_RANGE:
                raise OutOfRangeError(f"{self.url}/{key}: ends before byte {stop}") from None
            raise
        # A range that ends beyond the object is answered with what there is.
        if len(content) != part.length:
            raise OutOfRangeError(f"{self.url}/{key}: ends before byte {stop}")
        return content

    def _require_usable(self) -> None:
        """Raise `StoreError` in a forked child, instead of waiting forever."""
        # Appending is atomic, so two threads that are first agree.
        _first_process.append(os.getpid())
        if _first_process[0] != os.getpid():
            raise StoreError(
                f"{self.url}: cannot be used in a forked process, because its parent has used an object store; start "
                "processes with spawn or forkserver"
            )
        del _first_process[1:]

    def _read(self, name: str, request: Callable[[], T]) -> T:
        """Send a request that changes nothing; translate its errors."""
        try:
            return self._repeat(request)
        except FileNotFoundError as error:
            if any(sign in str(error) for sign in _MISSING_BUCKET):
                raise StoreError(f"{self.url}: the bucket does not exist") from None
            raise FileNotFoundError(errno.ENOENT, f"no such object in {self.url}", name) from None
        except self._errors() as error:
            raise StoreError(f"{self._name(name)}: cannot be read ({_reason(error)})") from None

    def _repeat(self, request: Callable[[], T]) -> T:
        """Send an idempotent request, again if that may help."""
        self._require_usable()
        for delay_s in _DELAYS_S:
            try:
                return request()
            except self._errors() as error:
                if not _may_pass(error):
                    raise
            time.sleep(delay_s)
        return request()

    def _errors(self) -> tuple[type[Exception], ...]:
        # A bucket that does not exist is a FileNotFoundError.
        return self._api.exceptions.BaseError, OSError

    def _name(self, name: str) -> str:
        if not name:
            return str(self.url)
        return f"{self.url}/{name}"

    def _write_error(self, name: str, error: Exception) -> SlipstreamError:
        return WriteError(errno.EIO, f"cannot write {self._name(name)} ({_reason(error)})")


def _import_obstore() -> Any:
    try:
        import obstore  # noqa: PLC0415 - an extra
        import obstore.exceptions  # noqa: PLC0415
        import obstore.store  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            f"object stores need the package obstore, which is not installed: {install_hint('cloud')}"
        ) from error
    return obstore


def _make_client(api: Any, url: ObjectPath) -> Any:
    """Return the client for a URL. It takes everything else from the environment."""
    options: dict[str, Any] = {
        "prefix": url.key or None,
        "client_options": _CLIENT_OPTIONS,
        # Requests are repeated here and not there: a put that was repeated unnoticed finds its own object.
        "retry_config": {"max_retries": 0, "retry_timeout": dt.timedelta(seconds=60)},
    }
    stores = {"s3": api.store.S3Store, "gs": api.store.GCSStore, "az": api.store.AzureStore}
    try:
        return stores[url.scheme](url.bucket, **options)
    except (api.exceptions.BaseError, ValueError, OSError) as error:
        raise ConfigurationError(f"{url}: cannot be opened ({_reason(error)})") from None


def _quote(name: str) -> str:
    """Return the key of an object: its name, with the characters escaped that obstore refuses."""
    check_name(name)
    return _QUOTED.sub(_escape, name)


def _escape(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"


def _status_of(error: Exception) -> str | None:
    """Return the status code of the reply, or None if there was none."""
    found = _STATUS.search(str(error))
    if found is None:
        return None
    return found[1]


def _may_pass(error: Exception) -> bool:
    """Return whether the same request may succeed later: no reply, an overloaded server, or too many requests."""
    status = _status_of(error)
    if status is None:
        # Wrong credentials and missing settings are errors without a reply, too. Their classes differ.
        return type(error).__name__ == "GenericError"
    return status.startswith("5") or status in ("408", "409", "429")


def _reason(error: Exception) -> str:
    """Return why a request failed, in a few words and without anything secret.

    The text of the client contains URLs, which may be signed, and replies, which may repeat an access key.
    """
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        words = f"{status[1]} {status[2].strip()}"
        code = _CODE.search(text)
        if code is not None:
            words = f"{words}, {code[1]}"
        return words
    line = text.partition("\n")[0].rpartition(" - ")[2]
    # A key that cannot be parsed is quoted as a list of its bytes.
    line = line.partition("[")[0]
    return _URL.sub("", line).strip()[:200] or type(error).__name__
