"""Policies for robots: what is exported flies as the policy does."""

import subprocess
import sys

import pytest
import torch

from slipstream import ConfigurationError, NavRLPolicy
from slipstream.nav import velocity_from_unit
from slipstream.rl.network import OBSERVATION_SHAPES
from slipstream.train import export
from slipstream.train.export import INPUTS, export_policy


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(1)
    policy = NavRLPolicy(action_map=velocity_from_unit)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def observations(batch: int) -> list[torch.Tensor]:
    return [3 * torch.rand(batch, *OBSERVATION_SHAPES[name]) for name in INPUTS]


def test_torchscript_needs_torch_only_and_acts_as_the_policy_does(policy, tmp_path):
    exported = export_policy(policy, tmp_path / "policy.ts", "torchscript")
    seen = observations(3)
    torch.save(seen, tmp_path / "seen.pt")
    script = """
import sys, torch
act = torch.jit.load("policy.ts")
torch.save(act(*torch.load("seen.pt")), "acted.pt")
assert not any(name.startswith(("slipstream", "tensordict")) for name in sys.modules)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, cwd=tmp_path)
    expected = velocity_from_unit(policy.heads(policy.features(*seen))[0].mean)
    assert torch.allclose(torch.load(tmp_path / "acted.pt"), expected, atol=1e-5)
    assert exported.max_error_m_s < 1e-5
    assert exported.num_bytes == (tmp_path / "policy.ts").stat().st_size


def test_onnx_acts_as_the_policy_does_for_any_number_of_observations(policy, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_policy(policy, tmp_path / "policy.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == list(INPUTS)
    for batch in (1, 5):
        seen = observations(batch)
        (acted,) = session.run(["velocity"], {name: part.numpy() for name, part in zip(INPUTS, seen, strict=True)})
        expected = velocity_from_unit(policy.heads(policy.features(*seen))[0].mean)
        assert torch.allclose(torch.from_numpy(acted), expected, atol=1e-5)


def test_a_file_that_acts_otherwise_is_not_kept(policy, tmp_path, monkeypatch):
    (tmp_path / "policy.ts").write_bytes(b"older")
    monkeypatch.setattr(export, "TOLERANCE_M_S", -1.0)
    with pytest.raises(ConfigurationError, match=r"differs from it by .*policy\.ts was not written"):
        export_policy(policy, tmp_path / "policy.ts", "torchscript")
    assert (tmp_path / "policy.ts").read_bytes() == b"older"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_format_that_there_is_not_is_an_error(policy, tmp_path):
    with pytest.raises(ConfigurationError, match="kind is 'tflite', expected one of 'onnx', 'torchscript'"):
        export_policy(policy, tmp_path / "policy", "tflite")  # type: ignore[arg-type]
