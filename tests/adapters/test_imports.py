"""Importing adapters: each with its own library only."""

import json
import sys

import pytest

from tests.adapters.shared import run_script

LIBRARIES = ("lightning", "lightning_fabric", "stable_baselines3", "torchrl")
NAMES = {
    "LightningCheckpointIO": "lightning",
    "SB3CheckpointCallback": "stable-baselines3",
    "TorchRLCheckpointHook": "torchrl",
}


def test_the_package_imports_no_library_until_a_name_is_used(tmp_path):
    script = f"""
import sys
import slipstream.adapters
assert set({list(NAMES)}) < set(dir(slipstream.adapters))
assert not set({LIBRARIES}) & set(sys.modules)
"""
    result = run_script(script, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("name", "package"), NAMES.items())
def test_one_adapter_works_without_the_libraries_of_the_others(tmp_path, name, package):
    own = {"lightning": ("lightning", "lightning_fabric")}.get(package, (package.replace("-", "_"),))
    pytest.importorskip(own[0])
    others = [library for library in LIBRARIES if library not in own]
    script = f"""
import sys
sys.modules.update(dict.fromkeys({others}))
from slipstream.adapters import {name}
"""
    result = run_script(script, tmp_path)
    assert result.returncode == 0, result.stderr


def test_without_the_library_the_error_says_what_to_install(tmp_path):
    script = f"""
import json, sys
from slipstream.text import install_hint
sys.modules.update(dict.fromkeys({LIBRARIES}))
messages = [install_hint("adapters")]
for name in {list(NAMES)}:
    try:
        exec(f"from slipstream.adapters import {{name}}")
    except ImportError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""
    result = run_script(script, tmp_path)
    assert result.returncode == 0, result.stderr
    hint, *messages = json.loads(result.stdout)
    expected = []
    for name, package in NAMES.items():
        expected.append(f"{name} needs {package}, which is not installed: {hint}, or {package} by itself")
    assert messages == expected


def test_the_names_are_imported_from_the_package():
    for library in LIBRARIES:
        pytest.importorskip(library)
    import slipstream.adapters

    for name in dir(slipstream.adapters):
        assert getattr(slipstream.adapters, name).__module__ in sys.modules
