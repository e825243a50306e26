"""The style ratchet: no package gets denser, or harder to read, than it has been; pages stay plain."""

import json

from tests import style


def test_no_package_is_denser_or_more_stilted_than_its_best_value_so_far():
    record = json.loads(style.RECORD.read_text())
    worse = []
    for package, values in style.measure().items():
        # A new package starts from the rates of the best ones.
        best = record.get(package, {"comments": 45, "conditional_expressions": 20, "comprehensions": 30})
        for name, limit in best.items():
            if style.is_worse(name, values[name], limit):
                worse.append(f"{package}: {name} is {values[name]:g}, was {limit:g}")
    assert not worse, "\n".join(["make the code plainer where it got denser:", *worse])


def test_pages_and_examples_have_no_stilted_phrases():
    assert style.find_stilted() == {}
