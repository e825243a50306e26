"""Which packages Slipstream and its extras need, and which of them are installed.

The list is read from the metadata of the installed package, so there is no second list that could differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?\s*(?:>=\s*([\w.]+))?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


@dataclass(frozen=True, order=True)
class Package:
    """A package that is required.

    Attributes:
        name: Its name.
        least: The oldest version that is new enough; None if any is.
        version: The installed version; None if it is not installed.
    """

    name: str
    least: str | None
    version: str | None

    @property
    def is_fine(self) -> bool:
        """Whether it is installed, and new enough."""
        if self.version is None:
            return False
        return self.least is None or _release(self.version) >= _release(self.least)

    @property
    def requirement(self) -> str:
        """What to pass to pip."""
        if self.least is None:
            return self.name
        return f"{self.name}>={self.least}"


def required_packages(requirements: Sequence[str]) -> dict[str | None, list[Package]]:
    """Return the packages that lines of ``Requires-Dist`` ask for, by extra; under None those that are always needed.

    Example:
        >>> required_packages(["numpy>=1.26", "hydra-core>=1.3; extra == 'train'"])["train"][0].requirement
        'hydra-core>=1.3'
    """
    found: dict[str | None, list[Package]] = {}
    for line in requirements:
        text, _, marker = line.partition(";")
        match = _REQUIREMENT.match(text)
        if match is None:
            continue
        extra = _EXTRA.search(marker)
        name = None
        if extra is not None:
            name = extra[1]
        found.setdefault(name, []).append(Package(match[1], match[2], _installed(match[1])))
    for packages in found.values():
        packages.sort(key=_name_of)
    return found


def complaint(packages: Sequence[Package]) -> str | None:
    """Return which packages are missing or too old, in words; None if all are fine."""
    missing = [package.name for package in packages if package.version is None]
    old = [package for package in packages if package.version is not None and not package.is_fine]
    parts = [f"{package.name} {package.version} is older than {package.least}" for package in old]
    if missing:
        parts.insert(0, f"missing: {', '.join(missing)}")
    return ", ".join(parts) or None


def _name_of(package: Package) -> str:
    return package.name


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``2.13.0+cpu`` is 2, 13, and so is ``2.13``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [0]
    if match is not None:
        numbers = list(map(int, match[0].split(".")))
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
