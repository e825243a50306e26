"""What a check finds: a fact, how it is judged, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """One line of what the doctor says.

    Attributes:
        status: ``ok``, ``note`` if something could be better, ``problem`` if Slipstream does not work because of it.
        name: What was looked at; the same on every machine.
        fact: What was found.
        advice: What to do about it; none if it is ok.
        values: The fact as numbers and texts for scripts; sizes in bytes, times in seconds.
    """

    status: Literal["ok", "note", "problem"]
    name: str
    fact: str
    advice: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The fact, and what to do about it."""
        return f"{self.fact}: {self.advice}" if self.advice else self.fact

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return dict(vars(self))


def ok(name: str, fact: str, **values: Any) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding("ok", name, fact, None, values)


def note(name: str, fact: str, advice: str, **values: Any) -> Finding:
    """Return a finding that one may do something about."""
    return Finding("note", name, fact, advice, values)


def problem(name: str, fact: str, advice: str, **values: Any) -> Finding:
    """Return a finding that keeps Slipstream from working."""
    return Finding("problem", name, fact, advice, values)
