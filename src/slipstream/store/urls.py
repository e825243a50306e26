"""URLs of stores wherever a path is accepted: ``s3://``, ``gs://``, ``az://``, ``memory://`` and ``file://``.

Credentials come from the environment of the client and nowhere else. A URL is written into settings, logs and messages,
so one that could contain a credential is refused, without repeating it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath

from slipstream.errors import ConfigurationError, CorruptFileError
from slipstream.store.base import FileInfo, MemoryStore, Store, check_name
from slipstream.store.folder import LocalStore
from slipstream.store.ranges import OpenObject

OBJECT_SCHEMES = ("s3", "gs", "az", "memory", "file")
# `Path` collapses slashes, so a URL may arrive with one.
_OBJECT_URL = re.compile(rf"({'|'.join(OBJECT_SCHEMES)}):(/+)(.*)", re.DOTALL | re.IGNORECASE)
_ANY_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)

# The objects of each ``memory://name`` of this process.
_memory: dict[str, dict[str, tuple[bytes, float]]] = {}


class ObjectPath(PosixPath):
    """A URL in an object store that can be used like a path, as far as names and parents are concerned.

    It keeps both slashes of ``s3://``. The file system has nothing at this path.

    Example:
        >>> path = ObjectPath("s3://bucket/runs/walker") / "rollout_000100.slip"
        >>> str(path), path.name, str(path.parent)
        ('s3://bucket/runs/walker/rollout_000100.slip', 'rollout_000100.slip', 's3://bucket/runs/walker')
    """

    __slots__ = ()

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        if scheme == "file":
            return f"file:///{rest}"
        return f"{scheme}://{rest}"

    @property
    def scheme(self) -> str:
        """The scheme of the URL, such as ``s3``."""
        return str(self).partition(":")[0]

    @property
    def bucket(self) -> str:
        """The bucket, the container, or the name of a store in memory."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """What follows the bucket; empty for a whole bucket."""
        return "/".join(self.parts[2:])

    @property
    def local(self) -> Path:
        """The path of a ``file://`` URL."""
        return Path("/", *self.parts[1:])


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return an `ObjectPath` for the URL of an object store, and a `Path` for anything else.

    Raises:
        ConfigurationError: If it is a URL that is not supported, or that contains a user name or a password.

    Example:
        >>> as_path("s3://bucket/run"), as_path("file:///tmp/run"), as_path("runs/a")
        (ObjectPath('s3://bucket/run'), ObjectPath('file:///tmp/run'), PosixPath('runs/a'))
    """
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    found = _OBJECT_URL.fullmatch(text)
    if found is not None:
        scheme, slashes, rest = found.groups()
        scheme = scheme.lower()
        _check_object_url(scheme, slashes, rest)
        return ObjectPath(f"{scheme}:/{rest}")
    other = _ANY_URL.match(text)
    if other is not None:
        raise ConfigurationError(
            f"the scheme {other[1]}:// is not supported, expected a path or one of s3://, gs://, az://, memory:// and "
            "file://"
        )
    return Path(path)


def open_store(url: str | os.PathLike[str]) -> Store:
    """Open a store by its URL, or a folder by its path. Sends no request.

    ``memory://name`` is the same store everywhere in a process. Credentials, regions and endpoints come from the
    environment, in the variables of the provider's command-line tool, such as ``AWS_ACCESS_KEY_ID``.

    Args:
        url: A URL such as ``s3://bucket/runs/walker``, or the path of a folder.

    Raises:
        ConfigurationError: If the URL is not supported, contains credentials, or the environment lacks something.
        ImportError: If `obstore` is needed and not installed; says how to install it.

    Example:
        >>> open_store("memory://doc/run").put_new("a", b"content")
        >>> open_store("memory://doc").list()
        [FileInfo(name='run/a', size_bytes=7)]
    """
    path = as_path(url)
    if not isinstance(path, ObjectPath):
        return LocalStore(path)
    if path.scheme == "file":
        return LocalStore(path.local)
    if path.scheme == "memory":
        return MemoryStore(_memory.setdefault(path.bucket, {}), path.key)
    # Imported here: obstore is an extra.
    from slipstream.store.object import ObjectStore  # noqa: PLC0415

    return ObjectStore(path)


def open_object(url: ObjectPath) -> OpenObject:
    """Open one object for reading by ranges.

    Raises:
        FileNotFoundError: If there is no such object.
        CorruptFileError: If the URL is that of a bucket.
        StoreError: If the store cannot be read.
    """
    if len(url.parts) < 3:
        raise CorruptFileError("is a bucket, expected an object")
    store = open_store(url.parent)
    return OpenObject(store, [FileInfo(url.name, store.size_bytes(url.name))])


def _check_object_url(scheme: str, slashes: str, rest: str) -> None:
    """Raise `ConfigurationError` unless the URL is plain. Never shows it: it may contain a password."""
    bucket = rest.partition("/")[0]
    if scheme == "file":
        if slashes == "//":
            raise ConfigurationError("the file:// URL names a host, expected file:///absolute/path")
    elif "@" in bucket or ":" in bucket:
        raise ConfigurationError(
            f"the {scheme}:// URL contains a user name or a password; credentials come from the environment, see "
            "docs/guides/object-stores.md"
        )
    elif len(slashes) > 2 or not bucket:
        raise ConfigurationError(f"the {scheme}:// URL names no bucket, expected {scheme}://bucket/folder")
    elif "?" in rest or "#" in rest:
        raise ConfigurationError(f"the {scheme}:// URL contains ? or #, expected {scheme}://bucket/folder")
    try:
        check_name(rest.rstrip("/"))
    except ValueError as error:
        raise ConfigurationError(f"the {scheme}:// URL is not valid: {error}") from None
