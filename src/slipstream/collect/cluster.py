"""Connect to Ray, or start it on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from slipstream.errors import ConfigurationError
from slipstream.text import install_hint
from slipstream.threads import usable_cores

_LOCAL = "local"
_REACHABLE_S = 10.0
# How many users there are of the connection that `connect` has made.
_users = 0


def import_ray() -> Any:
    """Return Ray's module.

    Raises:
        ImportError: If Ray is not installed; says how to install it.
    """
    try:
        import ray  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ImportError(f"collecting on other machines needs Ray: {install_hint('ray')}") from error
    return ray


def connect(address: str | None, num_cpus: int = 1) -> bool:
    """Connect this process to Ray; returns whether to call `disconnect` at the end.

    A process has one connection. If it has one already, it is used, whatever the address.

    Args:
        address: ``auto`` for the cluster that this machine belongs to, ``HOST:PORT`` for another, or ``local`` to start
            Ray on this machine until this process disconnects. None is the environment variable ``RAY_ADDRESS``, and
            ``local`` if that is not set.
        num_cpus: How many CPUs a Ray that is started has to offer at least. They are counted, not reserved.

    Raises:
        ImportError: If Ray is not installed.
        ConfigurationError: If there is no cluster at that address.
    """
    global _users  # noqa: PLW0603 - Ray's connection belongs to the process, too
    ray = import_ray()
    if ray.is_initialized():
        if _users:
            _users += 1
        return bool(_users)
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or _LOCAL
    # Its log would interrupt the progress display. What matters of it arrives as exceptions.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == _LOCAL:
        options["num_cpus"] = max(num_cpus, usable_cores())
        options["include_dashboard"] = False
    try:
        _require_reachable(address)
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigurationError(f"cannot connect to Ray at {address!r}: {_explain(ray, error)}") from error
    _print_messages(ray, enabled=False)
    _users = 1
    return True


def disconnect() -> None:
    """Undo a `connect` that returned True: disconnect this process, unless others use the connection."""
    global _users  # noqa: PLW0603 - see `connect`
    _users = max(0, _users - 1)
    if not _users:
        ray = import_ray()
        ray.shutdown()
        _print_messages(ray, enabled=True)


def _require_reachable(address: str) -> None:
    """Raise an `OSError` or a `ValueError` if nobody listens at ``HOST:PORT``: Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        if not port.isdecimal():
            raise ValueError("expected auto, local or HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHABLE_S).close()


def _explain(ray: Any, error: BaseException) -> str:
    """Return in one line why there is no connection."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ray.exceptions.AuthenticationError):
            return (
                "it expects another token, or none: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token that the "
                "cluster was started with"
            )
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())


def _print_messages(ray: Any, *, enabled: bool) -> None:
    """Let Ray print a paragraph to stdout when a process of the cluster dies, or not: stdout may be a JSON document."""
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    # Ray has no public option for this. Its debugger does the same while it is active.
    if hasattr(worker, "_worker_logs_enabled"):
        vars(worker)["_worker_logs_enabled"] = enabled


@contextlib.contextmanager
def connected(address: str | None, num_cpus: int = 1) -> Iterator[Any]:
    """Connect to Ray for the time of a block; yields Ray's module. See `connect`."""
    is_user = connect(address, num_cpus)
    ray = import_ray()
    try:
        yield ray
    finally:
        if is_user:
            disconnect()
