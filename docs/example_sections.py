"""Read what docstrings here call ``Example:`` as examples, and their ``::`` as what it says: Griffe knows neither."""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Changes docstrings in what was read of the source, so that mkdocstrings does not take code for Markdown."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"^::$", "", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
