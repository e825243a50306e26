"""Runs whose checkpoints are in an object store: whether there is one, and with which settings it was trained."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.checkpoint.commits import CommittedRun
from slipstream.checkpoint.finding import newest_first
from slipstream.errors import ConfigurationError, StoreError
from slipstream.run.folder import RunFolder
from slipstream.store.urls import as_path
from slipstream.train.settings import TrainSettings, settings_from, settings_of

logger = logging.getLogger(__name__)


def read_settings(url: Path) -> TrainSettings:
    """Return the settings that the newest checkpoint at a URL was trained with. Reads its commit only.

    Raises:
        ConfigurationError: If there is no checkpoint, or none of a training.
        StoreError: If the store cannot be read.
    """
    try:
        newest = next(newest_first(url))
    except FileNotFoundError:
        raise ConfigurationError(f"{url} has no checkpoint to resume from") from None
    config = newest.metrics.get("config")
    if not isinstance(config, dict):
        raise ConfigurationError(f"{url} cannot be resumed: its checkpoints were not saved by `slipstream train`")
    return settings_from(config, str(url))


def find_stored(settings: TrainSettings, folder: RunFolder) -> bool:
    """Return whether ``resume=auto`` continues a run that only the store has.

    Raises:
        ConfigurationError: If a new run would be written to the URL of an existing one.
        StoreError: If the store cannot be read, and only it can tell whether there is a run to resume.
    """
    if settings.checkpoint_url is None or folder.has_checkpoint():
        return False
    try:
        exists = CommittedRun(as_path(settings.checkpoint_url)).exists()
    except StoreError as error:
        if settings.resume == "auto":
            raise
        logger.warning("%s; the run starts without it", error)
        return False
    if exists and settings.resume != "auto":
        raise ConfigurationError(
            f"{settings.checkpoint_url} already contains a run: resume it with resume={settings.checkpoint_url}, or "
            "choose another checkpoint_url="
        )
    return exists


def require_same_run(settings: TrainSettings, folder: RunFolder, url: Path) -> None:
    """Refuse to continue the run of a URL elsewhere: at another URL, or in the folder of another run.

    Raises:
        ConfigurationError: If `checkpoint_url` is another one, or the folder has a run that is uploaded to another one.
    """
    given = settings.checkpoint_url
    if given is None or as_path(given) != url:
        raise ConfigurationError(f"checkpoint_url={given} contradicts resume={url}: a resumed run keeps its URL")
    if folder.config.exists() and settings_of(folder).checkpoint_url != given:
        raise ConfigurationError(f"{folder.path} contains another run than {url}: choose another folder with run_dir=")
