"""How values are written in messages, tables and reports."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from slipstream import text
from slipstream.text import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_percent,
    format_ratio,
    format_seconds,
    plural,
)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"),
        (600_000, "600 kB"),
        (999_600, "1.0 MB"),
        (57_300_000, "57.3 MB"),
        (10**13, "10.0 TB"),
        (10**19, "10000 PB"),
    ],
)
def test_sizes_have_about_three_digits_in_decimal_units(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0 ms"),
        (0.00123, "1.2 ms"),
        (0.00999, "10 ms"),
        (0.25, "250 ms"),
        (0.9996, "1.0 s"),
        (2.5, "2.5 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 0 s"),
        (300, "5 min 0 s"),
        (3599.6, "1 h 0 min"),
        (7384, "2 h 3 min"),
        (172_799, "2 d 0 h"),
        (180_000, "2 d 2 h"),
    ],
)
def test_times_have_the_unit_that_suits_them(seconds, expected):
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0, "0 %"),
        (1e-6, "under 0.01 %"),
        (0.005, "0.50 %"),
        (0.00997, "1 %"),
        (0.052, "5.2 %"),
        (0.996, "99.6 %"),
        (1, "100 %"),
    ],
)
def test_a_share_near_the_whole_is_not_rounded_up_to_it(share, expected):
    assert format_percent(share) == expected


def test_bandwidths_are_in_bits():
    assert [format_bandwidth(125e6), format_bandwidth(12.5e6)] == ["1.0 Gbit/s", "100 Mbit/s"]


def test_a_ratio_of_nothing_is_a_dash():
    assert [format_ratio(10, 4), format_ratio(1000, 1), format_ratio(1, 0)] == ["2.50x", "1000x", "-"]


def test_counts_have_separators_and_nouns_a_plural():
    assert [format_count(1589248.0), format_count(1e20)] == ["1,589,248", "1e+20"]
    assert [plural(0, "step"), plural(1, "step"), plural(2000, "step")] == ["0 steps", "1 step", "2,000 steps"]


def load_copy(folder: Path):
    """Import a copy of the module from ``folder/src/slipstream``, as if the package were there."""
    place = folder / "src" / "slipstream" / "text.py"
    place.parent.mkdir(parents=True)
    shutil.copy(text.__file__, place)
    spec = importlib.util.spec_from_file_location("copy_of_text", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_in_a_checkout_extras_are_installed_from_it(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "slipstream-rl"\n')
    assert load_copy(tmp_path).install_hint("train") == "pip install -e '.[train]'"


@pytest.mark.parametrize("project_file", ['[project]\nname = "rover"\n', "[tool.ruff]\n", "name = [", None])
def test_elsewhere_extras_are_installed_by_the_name_of_the_distribution(tmp_path, project_file):
    if project_file is not None:
        (tmp_path / "pyproject.toml").write_text(project_file)
    assert load_copy(tmp_path).install_hint("train") == "pip install 'slipstream-rl[train]'"
