"""Names in HDF5 files: bytes that are UTF-8 as a rule, and Latin-1 in some old files."""

from __future__ import annotations

import h5py


def encoded(name: str) -> bytes:
    """Return a name as it is in the file: UTF-8, with other bytes as Python keeps them."""
    return name.encode("utf-8", "surrogateescape")


def decoded(name: bytes) -> str:
    """Return a name as text; bytes that are not UTF-8 are kept, so that `encoded` gives the same name."""
    return name.decode("utf-8", "surrogateescape")


def shown(name: str) -> str:
    """Return a name for people: names that are not UTF-8 are read as Latin-1."""
    raw = encoded(name)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def name_of(data: h5py.Dataset | h5py.Group) -> str:
    """Return the path of an object in its file, for people."""
    raw = h5py.h5i.get_name(data.id)
    return "an object without a name" if raw is None else shown(decoded(raw))
