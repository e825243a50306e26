"""HTML in which text is text: whatever is not markup of ours is escaped on its way in."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any


class Html(str):
    """Markup that is ready to be put into a page; only this module and the page's templates make it from text."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return `value` as markup: escaped, unless it is markup already."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    """Return several pieces as one, with `between`, which is text, between them."""
    return Html(text(between).join(text(part) for part in parts))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element; children and attributes are escaped.

    Args:
        tag: Its name.
        *children: What is in it.
        **attributes: ``class_`` stands for ``class`` and ``data_x`` for ``data-x``; those that are None are left out.

    Example:
        >>> element("p", "1 < 2", class_="note")
        '<p class="note">1 &lt; 2</p>'
    """
    inside = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{inside}>{join(children)}</{tag}>")


def table(caption: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table whose first column names its rows; it scrolls by itself where the page is narrow."""
    head = element("tr", *(element("th", name, scope="col") for name in header))
    body = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    )
    content = (element("caption", caption), element("thead", head), element("tbody", *body))
    return element("div", element("table", *content), class_="scroll", tabindex="0", role="region", aria_label=caption)


def section(identifier: str, title: str, *children: object) -> Html:
    """Return a section of the page, with its heading."""
    heading = element("h2", title, id=f"{identifier}-title")
    return element("section", heading, *children, id=identifier, aria_labelledby=f"{identifier}-title")


def data_block(identifier: str, value: Any) -> Html:
    """Return a script element that holds JSON, in which no text can end the element or begin another."""
    content = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        content = content.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{text(identifier)}">{content}</script>')
