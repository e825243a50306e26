"""What people install: the wheel, unpacked where nothing else of the repository is."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[1]
SOURCE = Path(slipstream.__file__).parent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds it, is missing"),
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="there is no repository to build it from"),
]

# What pip does without isolation; a virtual environment may have no pip of its own.
BUILD = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], check=True, cwd=ROOT, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


@pytest.fixture
def run(installed, tmp_path):
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)

    return call


def test_it_holds_the_package_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"slipstream", f"slipstream_rl-{slipstream.__version__}.dist-info"}
    assert not [name for name in wheel.namelist() if "test" in Path(name).name or "__pycache__" in name]


def test_every_file_of_the_package_is_in_it(wheel):
    files = {str(Path("slipstream") / path.relative_to(SOURCE)) for path in SOURCE.rglob("*") if path.is_file()}
    expected = {name for name in files if not name.endswith(".pyc")}
    assert expected <= set(wheel.namelist())
    for name in ("__init__.pyi", "py.typed", "report/templates/run.html", "train/conf/preset/quick.yaml"):
        assert f"slipstream/{name}" in expected


def test_its_metadata_has_the_command_and_every_extra(wheel):
    information = f"slipstream_rl-{slipstream.__version__}.dist-info"
    assert "slipstream = slipstream.cli:main" in wheel.read(f"{information}/entry_points.txt").decode()
    metadata = wheel.read(f"{information}/METADATA").decode()
    for extra in ("train", "datasets", "gym", "export", "adapters", "safetensors", "minari"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_it_is_the_wheel_that_runs(run, installed):
    found = run("-c", "import slipstream; print(slipstream.__file__)")
    assert Path(found.stdout.strip()) == installed / "slipstream" / "__init__.py"


def test_it_tells_its_version(run):
    assert run("-m", "slipstream", "--version").stdout == f"slipstream {slipstream.__version__}\n"


def test_the_settings_of_training_are_in_it(run):
    pytest.importorskip("hydra")
    shown = run("-m", "slipstream", "train", "--cfg", "job", "preset=quick")
    assert shown.returncode == 0, shown.stderr
    assert "num_envs: 512" in shown.stdout


def test_reports_can_be_written_with_it(run, tmp_path):
    pytest.importorskip("plotly")
    assert run("-m", "slipstream", "report", "--help").returncode == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"iteration": 1, "train/stats.return": 2.5}\n')
    written = run("-m", "slipstream", "report", "run", "--json")
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["metrics_lines"] == 1
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000


def test_the_doctor_reads_the_extras_from_it(run):
    script = (
        "from importlib import metadata; from slipstream.cli.packages import required_packages; "
        "print(*required_packages(metadata.requires('slipstream-rl')))"
    )
    extras = run("-c", script).stdout.split()
    assert {"None", "train", "safetensors", "minari"} <= set(extras)


# What each extra brings, and something that cannot be without it.
EXTRAS = {
    "tensordict": ("train", "from slipstream import load_rollout; load_rollout(ROLLOUT)"),
    "tensordict.nn": ("train", "from slipstream import PPO"),
    "torchrl": ("train", "from slipstream import NavigationEnv"),
    "hydra": ("train", "from slipstream import compose_settings"),
    "plotly": ("train", "from slipstream.report.page import _plotly; _plotly()"),
    "gymnasium": ("gym", "from slipstream.nav import NavigationVectorEnv"),
    "safetensors": ("safetensors", "from slipstream import load_checkpoint; load_checkpoint(SAFETENSORS)"),
    "onnx": ("export", "from slipstream.train.export import _to_onnx; _to_onnx(None)"),
    "onnxscript": ("export", "from slipstream.train.export import _to_onnx; _to_onnx(None)"),
    "lightning": ("adapters", "from slipstream.adapters import LightningCheckpointIO"),
    "stable_baselines3": ("adapters", "from slipstream.adapters import SB3CheckpointCallback"),
    "torchrl.trainers": ("adapters", "from slipstream.adapters import TorchRLCheckpointHook"),
    "cv2": ("datasets", "from slipstream import MultimodalReplayBuffer"),
}
# Importing torch takes seconds: once, and then a child for each case, in which one library cannot be imported.
WITHOUT = """
import json, os, sys
import torch
cases, (ROLLOUT, SAFETENSORS) = json.loads(sys.argv[1]), sys.argv[2:]
for module, (_, code) in cases.items():
    if (child := os.fork()) == 0:
        sys.modules[module] = None
        if module == "lightning":
            sys.modules["lightning_fabric"] = None  # its other name
        sentence = "no error"
        try:
            exec(code)
        except Exception as error:
            sentence = str(error)
        print(json.dumps([module, sentence]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    import torch
    from tensordict import TensorDict

    folder = tmp_path_factory.mktemp("files")
    steps = torch.arange(24.0).reshape(2, 4, 3)
    rollout = slipstream.save_rollout_compressed(TensorDict({"x": steps}, batch_size=[2, 4]), folder / "rollout.slip")
    content = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "w.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(4))
    return [str(rollout), str(folder / "w.safetensors")]


def test_what_needs_an_extra_fails_with_one_sentence_that_names_it(run, files):
    result = run("-c", WITHOUT, json.dumps(EXTRAS), *files)
    assert result.stderr == ""
    sentences = dict(map(json.loads, result.stdout.splitlines()))
    assert sentences.keys() == EXTRAS.keys()
    for module, (extra, _) in EXTRAS.items():
        assert f"pip install 'slipstream-rl[{extra}]'" in sentences[module], (module, sentences[module])
        assert "\n" not in sentences[module]
