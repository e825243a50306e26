"""The policy that collects: a copy of the trained one that gets new weights only between two batches.

Weights and batches cross from one thread to another. If they are on a GPU, then they also cross from one CUDA stream to
another: a `Fence` makes one stream wait for the other. Without CUDA, fences do nothing.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slipstream.batches import is_tensordict
from slipstream.collect.randomness import PrivateRandomness, with_index
from slipstream.errors import ConfigurationError, StateMismatchError

Tensors = dict[str, torch.Tensor]

# Copies that collect. No one trains them, so they must not be taken for the trained policy of another collector.
_frozen_policies: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Fence:
    """A position in the CUDA stream that is current when the fence is created.

    Args:
        device: The CUDA device of the stream; None creates a fence that does nothing.
    """

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._event: Any = None
        if device is not None:
            self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Make the stream that is current now wait for that position. Does not block the thread."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait, and keep the memory of `tensors` from being reused before the current stream has read them."""
        self.wait()
        if self._device is None:
            return
        stream = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


def find_cuda(devices: Iterable[torch.device | str | None]) -> torch.device | None:
    """Return the first of these devices that is a CUDA device, with its index, or None."""
    for name in devices:
        if name is None:
            continue
        device = torch.device(name)
        if device.type == "cuda":
            return with_index(device)
    return None


@contextlib.contextmanager
def side_stream(device: torch.device | None) -> Iterator[None]:
    """Run this thread's CUDA work inside the block on a separate stream."""
    if device is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


class Weights:
    """A policy's parameters and buffers at one moment, and which of its modules were in training mode.

    Attributes:
        tensors: Parameters and buffers by their names in the policy.
        training: For each module, in the order of ``modules()``.
        fence: The tensors can be read (or overwritten, once they are free) after it.
    """

    __slots__ = ("fence", "tensors", "training")

    def __init__(self, tensors: Tensors, training: list[bool], fence: Fence) -> None:
        self.tensors = tensors
        self.training = training
        self.fence = fence

    def state_dict(self) -> dict[str, Any]:
        """Return the weights as plain data, copied."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return {"tensors": tensors, "training": list(self.training)}


def weights_to_state(weights: Weights | None) -> dict[str, Any] | None:
    """Return weights as plain data, copied; None for None."""
    if weights is None:
        return None
    return weights.state_dict()


class FrozenPolicy:
    """Give a collector a policy that training does not change, and copy weights from the trained policy to it.

    The training thread calls `copy_weights` and the collecting thread calls `load`; both may run at the same time. The
    memory of weights is reused.

    Args:
        base: The collector. If its ``policy`` is a module that shares memory with the trained one, it gets a copy.
        trained: The policy that is trained, if it is not the collector's.
        cuda: The CUDA device whose streams copy weights, if any.

    Attributes:
        is_module: Whether the policy is a module. If not, then it has no weights that training could change.

    Raises:
        ConfigurationError: If there is no module to load weights into, or the policy cannot be copied.
        StateMismatchError: If the trained policy and the collector's have different weights.
    """

    def __init__(self, base: Any, trained: nn.Module | None, cuda: torch.device | None) -> None:
        own = getattr(base, "policy", None)
        if trained is None:
            trained = _find_trained(base)
        elif not isinstance(own, nn.Module):
            raise ConfigurationError(
                f"a policy to train was given, but the policy of {type(base).__name__} is a {type(own).__name__}, "
                "expected a torch module that its weights can be loaded into"
            )
        if trained in _frozen_policies:
            raise ConfigurationError(
                f"the {type(base).__name__} belongs to another PipelinedDataCollector, which replaced its policy by a "
                "copy: create another base collector, or pass the policy that you train as policy="
            )
        self.is_module = trained is not None
        self._trained = trained or nn.Module()
        self._cuda = cuda
        self._free: deque[Weights] = deque()
        if any(nn.parameter.is_lazy(tensor) for tensor in _tensors_of(self._trained).values()):
            raise ConfigurationError("the policy has lazy parameters that are not initialised: run it once before")
        if isinstance(own, nn.Module) and _share_memory(own, self._trained):
            _give_copy(base)
            _require_separate(base, self._trained)
        self._collecting = nn.Module()
        if isinstance(own, nn.Module):
            self._collecting = base.policy
        _check_weights(_tensors_of(self._trained), _tensors_of(self._collecting))

    def select_weights(self, given: Any = None) -> Tensors:
        """Return the tensors to copy weights from: those of the trained policy, not copied.

        Args:
            given: A module, a TensorDict or a state dict with weights to use instead of the trained policy's.

        Raises:
            StateMismatchError: If `given` has weights that the policy does not have, or with other shapes.
        """
        source = _tensors_of(self._trained)
        if given is None:
            return source
        given = _as_tensors(given)
        _check_weights(given, source, require_all=False)
        return {**source, **given}

    def copy_weights(self, source: Tensors, into: Weights | None = None) -> Weights:
        """Return a copy of weights as they are now.

        Args:
            source: What `select_weights` returned.
            into: A copy that is no longer needed, to be overwritten.
        """
        if into is None and self._free:
            into = self._free.popleft()
        if into is None:
            tensors = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in source.items()}
        else:
            into.fence.wait()
            tensors = into.tensors
        with torch.no_grad():
            for name, tensor in source.items():
                tensors[name].copy_(tensor)
        return Weights(tensors, _training_flags(self._trained), Fence(self._cuda))

    def load(self, weights: Weights) -> None:
        """Collect with these weights from now on. Their memory is reused."""
        weights.fence.wait()
        target = _tensors_of(self._collecting)
        with torch.no_grad():
            for name, tensor in weights.tensors.items():
                target[name].copy_(tensor)
        modules = list(self._collecting.modules())
        # A collector may wrap its policy in more modules than the trained one has.
        if len(modules) == len(weights.training):
            for module, training in zip(modules, weights.training, strict=True):
                module.training = training
        weights.fence = Fence(self._cuda)
        self._free.append(weights)

    def weights_from_state(self, state: Mapping[str, Any] | None) -> Weights | None:
        """Return weights from plain data, copied; None for None.

        Raises:
            StateMismatchError: If they are the weights of another policy.
        """
        if state is None:
            return None
        source = _tensors_of(self._trained)
        _check_weights(state["tensors"], source)
        tensors = {name: state["tensors"][name].to(tensor.device, copy=True) for name, tensor in source.items()}
        return Weights(tensors, list(state["training"]), Fence(self._cuda))

    def collecting_weights(self) -> Weights:
        """Return a copy of the weights that collect."""
        tensors = {name: tensor.detach().clone() for name, tensor in _tensors_of(self._collecting).items()}
        return Weights(tensors, _training_flags(self._collecting), Fence(self._cuda))


def called_policy(base: Any) -> nn.Module | None:
    """Return the module that a collector calls to act, or None if its policy is not a module."""
    # TorchRL may wrap the policy. What it calls is this attribute, which may be the policy itself.
    for policy in (getattr(base, "_wrapped_policy_uncompiled", None), getattr(base, "policy", None)):
        if isinstance(policy, nn.Module):
            return policy
    return None


def hook_randomness(base: Any, randomness: PrivateRandomness) -> list[Any]:
    """Make a collector's policy draw from private generators; returns the hooks, which can be removed.

    Raises:
        ConfigurationError: If the policy is not a module, so that it has no hooks.
    """
    policy = called_policy(base)
    if policy is None:
        kind = type(getattr(base, "policy", None)).__name__
        raise ConfigurationError(
            f"rng is 'policy', but the policy of {type(base).__name__} is a {kind}, expected a torch module; "
            "rng='all' works with any policy"
        )

    entered: list[PrivateRandomness] = []

    def enter(*_: Any) -> None:
        randomness.__enter__()  # type: ignore[no-untyped-call]
        entered.append(randomness)

    def leave(*_: Any) -> None:
        # torch calls this also if another hook raised before `enter`.
        if entered:
            entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return [policy.register_forward_pre_hook(enter), policy.register_forward_hook(leave, always_call=True)]


def _find_trained(base: Any) -> nn.Module | None:
    """Return the policy that a user of this collector trains, or None if that is not a module."""
    # TorchRL keeps the original here if it had to copy it to another device.
    for policy in (getattr(base, "_orig_policy", None), getattr(base, "policy", None)):
        if isinstance(policy, nn.Module):
            return policy
    return None


def _tensors_of(policy: nn.Module) -> Tensors:
    return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}


def _training_flags(policy: nn.Module) -> list[bool]:
    return [module.training for module in policy.modules()]


def _as_tensors(given: Any) -> Tensors:
    if isinstance(given, nn.Module):
        return _tensors_of(given)
    if is_tensordict(given):
        return dict(given.flatten_keys(".").items())
    return dict(given)


def _check_weights(given: Mapping[str, Any], expected: Mapping[str, Any], *, require_all: bool = True) -> None:
    """Raise `StateMismatchError` if weights are those of another policy."""
    unknown = sorted(given.keys() - expected.keys())
    missing = []
    if require_all:
        missing = sorted(expected.keys() - given.keys())
    if unknown or missing:
        raise StateMismatchError(
            f"weights of another policy: unexpected {unknown or 'none'}, missing {missing or 'none'}"
        )
    for name, tensor in given.items():
        # Copying would broadcast some of these without an error.
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
            raise StateMismatchError(f"weights of another policy: the shape of {name!r} is {shapes}")


def _storages(policy: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(policy).values()}


def _share_memory(one: nn.Module, other: nn.Module) -> bool:
    return one is other or bool(_storages(one) & _storages(other) - {0})


def _give_copy(base: Any) -> None:
    """Replace a collector's policy by a deep copy.

    TorchRL refers to the policy by several names: as it was given, as it is called, and as its state is read. All of
    them get the same copy. If the policy cannot be copied, then the collector stays as it is.
    """
    memo: dict[int, Any] = {}
    copies = {}
    for name, value in _policies_of(base):
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"the {type(value).__name__} cannot be copied, but collecting needs a copy of the policy that training "
                f"does not change ({reason}): remove what cannot be copied, or pass the trained policy as policy= and "
                "give the base another instance"
            ) from error
    for name, frozen in copies.items():
        frozen.requires_grad_(requires_grad=False)
        frozen.zero_grad(set_to_none=True)
        _frozen_policies.add(frozen)
        setattr(base, name, frozen)
    if hasattr(base, "_wrapped_policy_maybe_compiled"):
        # TorchRL creates it from the copy at the next call.
        base._wrapped_policy_maybe_compiled = None


def _require_separate(base: Any, trained: nn.Module) -> None:
    """Raise `ConfigurationError` if a collector still has the trained policy: training would change it at any time."""
    if _share_memory(base.policy, trained):
        raise ConfigurationError(
            f"the policy of {type(base).__name__} cannot be replaced by a copy, because it is not an attribute of the "
            "collector itself; if this is a wrapper, pass the collector that it wraps, and wrap the "
            "PipelinedDataCollector instead, as in CompressedDataCollector(PipelinedDataCollector(...))"
        )


def _policies_of(base: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, value in list(vars(base).items()):
        if "policy" in name and name != "_wrapped_policy_maybe_compiled" and isinstance(value, nn.Module):
            yield name, value
