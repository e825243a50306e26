"""``slipstream rollout export``: a rollout, or a part of it, as a file that other tools read."""
# ruff: noqa: PLC0415 - keeps --help quick

from __future__ import annotations

import errno
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.errors import one_line, reading
from slipstream.errors import SlipstreamError
from slipstream.store.local import check_regular

if TYPE_CHECKING:
    from slipstream.rollout.files import RolloutFile
    from slipstream.rollout.layout import Key


class Format(StrEnum):
    """What a rollout can be exported to."""

    PT = "pt"
    NPZ = "npz"
    HDF5 = "hdf5"
    MINARI = "minari"


_SUFFIXES = {".pt": Format.PT, ".pth": Format.PT, ".npz": Format.NPZ, ".hdf5": Format.HDF5, ".h5": Format.HDF5}
_EPISODIC = (Format.HDF5, Format.MINARI)
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")


def export(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A rollout.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    *,
    format: Annotated[  # noqa: A002 - what it is
        str | None,
        typer.Option(
            "--format",
            metavar="pt|npz|hdf5|minari",
            help="By default what OUT's suffix says: .pt, .npz, .hdf5 or .h5. minari: OUT becomes a dataset's folder.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY,...", help="pt, npz: only these keys, and what is under them.", show_default=False),
    ] = None,
    envs: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only environments A to B, without B.", show_default=False)
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B, without B.", show_default=False)
    ] = None,
    observation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY,...",
            help="hdf5, minari: what is observed [agents/observation, observation].",
            show_default=False,
        ),
    ] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY,...", help="hdf5, minari: what is done [agents/action, action].", show_default=False),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="hdf5, minari: [next/agents/reward, next/reward].", show_default=False),
    ] = None,
    terminated: Annotated[
        str | None, typer.Option(metavar="KEY", help="hdf5, minari: [next/terminated].", show_default=False)
    ] = None,
    truncated: Annotated[
        str | None, typer.Option(metavar="KEY", help="hdf5, minari: [next/truncated].", show_default=False)
    ] = None,
    done: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="hdf5, minari: where episodes end [next/done].", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a rollout, or a part of it, for other tools; on any error there is no OUT, or the old one.

    pt is a nested dict of tensors: torch.load reads it as it is, with weights_only=True and without tensordict, and
    TensorDict(torch.load(OUT), batch_size=[environments, steps]) makes it a batch again.

    npz is arrays by name, such as agents/observation.

    hdf5 is one group per episode, as Minari stores them: an observation more than steps, and truncated where the
    rollout ends. minari is the same in a folder that minari.MinariDataset("OUT/data") opens.
    """
    from slipstream.cli.output import print_lines

    with one_line(source):
        kind = _format(target, format)
        roles = {"observation": observation, "action": action, "reward": reward}
        roles |= {"terminated": terminated, "truncated": truncated, "done": done}
        misplaced = {"keys": keys} if kind in _EPISODIC else roles
        for name in (name for name, value in misplaced.items() if value):
            raise SlipstreamError(f"--{name} is not for {kind.value} files; see slipstream rollout export --help")
        _check_target(source, target, kind, overwrite=overwrite)
        print_lines(*_export(source, target, kind, keys, (envs, steps), roles))


def _export(
    source: Path,
    target: Path,
    kind: Format,
    keys: list[str] | None,
    parts: tuple[str | None, str | None],
    roles: dict[str, Any],
) -> list[str]:
    """Write `target` and return sentences about it."""
    from slipstream.cli.rollout.reading import find_keys, open_rollout
    from slipstream.text import format_bytes, plural

    with open_rollout(source) as rollout:
        layout = rollout.layout
    envs = _slice("envs", parts[0], layout.num_envs, "environments")
    steps = _slice("steps", parts[1], layout.num_steps, "steps")
    if kind in _EPISODIC:
        summary, notes = _write_episodes(rollout, target, kind, envs, steps, roles)
    else:
        from slipstream.cli.rollout.tensors import write_npz, write_pt

        chosen = [field.key for field in layout.fields]
        if keys:
            chosen = find_keys(rollout, keys)
        batch = _load(source, chosen if keys else None, envs, steps)
        notes = write_pt(target, batch) if kind is Format.PT else write_npz(target, batch)
        summary = plural(len(chosen), "key")
    files = [file for file in target.rglob("*") if file.is_file()] if target.is_dir() else [target]
    size = sum(file.stat().st_size for file in files)
    return [f"{target}: {kind.value}, {summary}, {format_bytes(size)}", *notes]


def _write_episodes(
    rollout: RolloutFile, target: Path, kind: Format, envs: slice | None, steps: slice | None, roles: dict[str, Any]
) -> tuple[str, list[str]]:
    from slipstream.cli.rollout.episodes import split, write_hdf5
    from slipstream.cli.rollout.minari import write_dataset
    from slipstream.cli.rollout.roles import find_roles

    wanted = find_roles(rollout, **roles)
    episodes = split(_load(rollout.path, wanted.keys, envs, steps), wanted, envs, steps)
    write_dataset(target, episodes) if kind is Format.MINARI else write_hdf5(target, episodes)
    return episodes.sentence(), episodes.notes


def _load(source: Path, keys: list[Key] | None, envs: slice | None, steps: slice | None) -> Any:
    """Load a rollout, or a part of it, as a TensorDict."""
    from slipstream.rollout.batch import load_rollout
    from slipstream.tensors import import_tensordict

    import_tensordict()  # now, while failing costs nothing
    with reading(source):
        return load_rollout(source, keys=keys, envs=envs, steps=steps)


def _format(target: Path, said: str | None) -> Format:
    if said is not None and said not in list(Format):
        raise SlipstreamError(f"--format is {said!r}, expected {', '.join(Format)}")
    if said is None and target.suffix not in _SUFFIXES:
        raise SlipstreamError(f"{target}: its suffix names no format, expected {', '.join(_SUFFIXES)}, or --format")
    return Format(said) if said is not None else _SUFFIXES[target.suffix]


def _check_target(source: Path, target: Path, kind: Format, *, overwrite: bool) -> None:
    """Raise unless `target` may be written, while failing costs nothing."""
    from slipstream.cli.rollout.minari import is_dataset

    check_regular(source)
    if target.exists() and source.samefile(target):
        raise SlipstreamError(f"{target}: is the rollout itself, and would be lost")
    if kind is not Format.MINARI and target.is_dir():
        raise SlipstreamError(f"{target}: is a folder, expected a file")
    if target.exists() and not overwrite:
        raise FileExistsError(errno.EEXIST, "exists already; --overwrite replaces it", str(target))
    if kind is Format.MINARI and target.exists() and not is_dataset(target):
        raise SlipstreamError(f"{target}: is no Minari dataset, and is not replaced by one")


def _slice(option: str, text: str | None, size: int, what: str) -> slice | None:
    """Return the part of an axis that an option asks for; negative numbers count from the end."""
    if text is None:
        return None
    match = _SLICE.fullmatch(text)
    if not match:
        raise SlipstreamError(f"--{option} is {text!r}, expected A:B, such as 0:8, :8 or -8:")
    start, stop = (
        default if said is None else int(said) + (size if said.startswith("-") else 0)
        for said, default in zip(match.groups(), (0, size), strict=True)
    )
    if not 0 <= start < stop <= size:
        raise SlipstreamError(f"--{option} is {text}, which is not within the {size} {what} that there are")
    return slice(start, stop)
