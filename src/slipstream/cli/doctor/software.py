"""Which Python and which packages there are, and which extras of Slipstream are complete.

What Slipstream needs is read from its own metadata: there is no second list that could differ.
"""

from __future__ import annotations

import importlib
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from slipstream import __version__
from slipstream.cli.doctor.findings import Finding, note, ok, problem
from slipstream.text import DISTRIBUTION, install_hint

_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?\s*(?:>=\s*([\w.]+))?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


class Package(NamedTuple):
    """A package that is required: by Slipstream itself, or by one of its extras."""

    name: str
    least: str | None
    version: str | None
    """What is installed; None if nothing is."""

    @property
    def is_fine(self) -> bool:
        """Whether it is installed, and new enough."""
        return self.version is not None and (self.least is None or _release(self.version) >= _release(self.least))

    def __str__(self) -> str:
        return f"{self.name} {self.version}" + ("" if self.is_fine else f" is older than {self.least}")


def examine() -> Iterator[Finding]:
    """Look at Python, Slipstream, the packages that it needs, and those of its extras."""
    version = platform.python_version()
    yield ok("Python", f"{version} ({sys.executable})", version=version, executable=sys.executable)
    place = Path(__file__).parents[2]
    yield ok("slipstream", f"{__version__} ({place})", version=__version__, folder=str(place))
    try:
        requirements = required(metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        advice = "pip install . in its repository lets this command tell what is missing"
        yield note("packages", "slipstream runs from a folder and is not installed", advice)
        return
    yield dependencies(requirements.pop(None, []))
    yield from importable()
    for extra, packages in requirements.items():
        yield extra_finding(str(extra), packages)


def required(requirements: list[str]) -> dict[str | None, list[Package]]:
    """Return the packages that lines of ``Requires-Dist`` ask for, by extra; under None those that are always needed.

    Example:
        >>> required(["numpy>=1.26", "hydra-core>=1.3; extra == 'train'"])["train"][0].least
        '1.3'
    """
    found: dict[str | None, list[Package]] = {}
    for line in requirements:
        text, _, marker = line.partition(";")
        match, extra = _REQUIREMENT.match(text), _EXTRA.search(marker)
        if match is not None:
            package = Package(match[1], match[2], installed(match[1]))
            found.setdefault(extra[1] if extra else None, []).append(package)
    return {extra: sorted(found[extra]) for extra in sorted(found, key=lambda extra: extra or "")}


def installed(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def dependencies(packages: list[Package]) -> Finding:
    """Judge the packages that Slipstream never works without."""
    values = {package.name: package.version for package in packages}
    wrong = [package for package in packages if not package.is_fine]
    if wrong:
        needed = " ".join(f"'{package.name}{f'>={package.least}' if package.least else ''}'" for package in wrong)
        return problem("packages", _complaint(wrong), f"pip install {needed}", **values)
    return ok("packages", ", ".join(map(str, packages)), **values)


def importable() -> Iterator[Finding]:
    """Yield a problem for each package that is there but cannot be imported, such as one of another architecture."""
    for name in ("numpy", "h5py", "lz4.frame", "xxhash", "zstandard"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:
            package = name.partition(".")[0]
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            yield problem(package, f"cannot be imported ({reason})", f"pip install --force-reinstall {package}")


def extra_finding(extra: str, packages: list[Package]) -> Finding:
    """Judge an extra: complete, or what is missing of it and how to get that."""
    values = {"extra": extra, "packages": {package.name: package.version for package in packages}}
    name, missing = f"extra {extra}", [package for package in packages if not package.is_fine]
    command = install_hint(extra)
    if missing:
        return note(name, _complaint(missing), command, **values, complete=False, command=command)
    return ok(name, ", ".join(map(str, packages)), **values, complete=True, command=command)


def _complaint(packages: list[Package]) -> str:
    absent = [package.name for package in packages if package.version is None]
    missing = [f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"] if absent else []
    return ", ".join(missing + [str(package) for package in packages if package.version is not None])


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, as far as they are plain: ``2.13.0+cpu`` is 2, 13, and so is ``2.13``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
