"""How values are written in messages, tables and reports."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from slipstream import text


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
