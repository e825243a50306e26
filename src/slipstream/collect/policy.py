"""The policy that collects: a copy of the one that is trained, given new weights only between two batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slipstream.batches import is_tensordict
from slipstream.collect.isolation import PrivateRandomness
from slipstream.collect.streams import Fence
from slipstream.errors import ConfigurationError, StateMismatchError

Tensors = dict[str, torch.Tensor]


class Weights:
    """A policy's parameters and buffers at one moment, and which of its modules were in training mode.

    Attributes:
        tensors: By their names in the policy.
        training: For each module, in the order of ``modules()``.
        fence: Behind it, they may be read (or, once given back, overwritten).
    """

    __slots__ = ("fence", "tensors", "training")

    def __init__(self, tensors: Tensors, training: list[bool], fence: Fence) -> None:
        self.tensors = tensors
        self.training = training
        self.fence = fence


class FrozenPolicy:
    """Gives a collector a policy that training does not touch, and takes weights from one to the other.

    `copy_weights` belongs to the thread that trains and `load` to the one that collects; they may run at the same time.
    The memory of weights is reused.

    Args:
        base: The collector. If its ``policy`` is a module that shares memory with the trained one, it is given a copy.
        trained: The policy that is trained, if it is not the collector's.
        cuda: The device on whose streams weights are copied, if any.

    Attributes:
        is_module: Whether there is a module, and with it anything that training could change.
    """

    def __init__(self, base: Any, trained: nn.Module | None, cuda: torch.device | None) -> None:
        own = getattr(base, "policy", None)
        if trained is None:
            original = getattr(base, "_orig_policy", None)  # TorchRL's, if it had to copy it to another device
            trained = original if isinstance(original, nn.Module) else own
        elif not isinstance(own, nn.Module):
            raise ConfigurationError(
                f"a policy to train was given, but the policy of {type(base).__name__} is a {type(own).__name__}, "
                "expected a torch module that its weights can be loaded into"
            )
        self.is_module = isinstance(trained, nn.Module)
        self._trained = trained if isinstance(trained, nn.Module) else nn.Module()
        self._cuda = cuda
        self._free: deque[Weights] = deque()
        if any(nn.parameter.is_lazy(tensor) for tensor in _tensors_of(self._trained).values()):
            raise ConfigurationError("the policy has lazy parameters that are not initialised: run it once before")
        if isinstance(own, nn.Module) and _share_memory(own, self._trained):
            _give_copy(base)
        collecting = getattr(base, "policy", None)
        self._collecting = collecting if isinstance(collecting, nn.Module) else nn.Module()
        self._check_names(_tensors_of(self._trained), _tensors_of(self._collecting))

    def copy_weights(self, given: Any = None, into: Weights | None = None) -> Weights:
        """Return a copy of the trained policy's weights as they are now.

        Args:
            given: A module, a TensorDict or a state dict whose weights come in place of the trained policy's.
            into: A copy that nobody uses any more, to be overwritten.

        Raises:
            StateMismatchError: If `given` has weights that the policy does not have.
        """
        source = _tensors_of(self._trained)
        if given is not None:
            given = _as_tensors(given)
            self._check_names(given, source, all_of=False)
            source = {**source, **given}
        into = into or (self._free.popleft() if self._free else None)
        if into is None:
            tensors = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in source.items()}
        else:
            into.fence.wait()
            tensors = into.tensors
        with torch.no_grad():
            for name, tensor in source.items():
                tensors[name].copy_(tensor)
        return Weights(tensors, [module.training for module in self._trained.modules()], Fence(self._cuda))

    def load(self, weights: Weights) -> None:
        """Collect with these weights from now on; their memory is reused."""
        weights.fence.wait()
        target = _tensors_of(self._collecting)
        with torch.no_grad():
            for name, tensor in weights.tensors.items():
                target[name].copy_(tensor)
        modules = list(self._collecting.modules())
        if len(modules) == len(weights.training):
            for module, training in zip(modules, weights.training, strict=True):
                module.training = training
        weights.fence = Fence(self._cuda)
        self._free.append(weights)

    def weights_to_state(self, weights: Weights | None) -> dict[str, Any] | None:
        """Return weights as plain data, copied; None for None."""
        if weights is None:
            return None
        tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        return {"tensors": tensors, "training": list(weights.training)}

    def weights_from_state(self, state: Mapping[str, Any] | None) -> Weights | None:
        """Return weights from plain data, copied; None for None.

        Raises:
            StateMismatchError: If they are the weights of another policy.
        """
        if state is None:
            return None
        source = _tensors_of(self._trained)
        self._check_names(state["tensors"], source)
        tensors = {name: state["tensors"][name].to(tensor.device, copy=True) for name, tensor in source.items()}
        return Weights(tensors, list(state["training"]), Fence(self._cuda))

    def collecting_weights(self) -> Weights:
        """Return a copy of the weights that collect."""
        tensors = {name: tensor.detach().clone() for name, tensor in _tensors_of(self._collecting).items()}
        return Weights(tensors, [module.training for module in self._collecting.modules()], Fence(self._cuda))

    @staticmethod
    def _check_names(given: Mapping[str, Any], expected: Mapping[str, Any], *, all_of: bool = True) -> None:
        unknown = sorted(given.keys() - expected.keys())
        missing = sorted(expected.keys() - given.keys()) if all_of else []
        if unknown or missing:
            raise StateMismatchError(
                f"weights of another policy: unexpected {unknown or 'none'}, missing {missing or 'none'}"
            )


def hook_randomness(base: Any, randomness: PrivateRandomness) -> list[Any]:
    """Let a collector's policy draw from generators of its own; returns the hooks, which can be removed.

    Raises:
        ConfigurationError: If the policy is not a module, so that nothing can be hooked to it.
    """
    policy = getattr(base, "_wrapped_policy_uncompiled", None)  # what TorchRL calls; it may be the policy itself
    policy = policy if isinstance(policy, nn.Module) else getattr(base, "policy", None)
    if not isinstance(policy, nn.Module):
        raise ConfigurationError(
            f"rng is 'policy', but the policy of {type(base).__name__} is a {type(policy).__name__}, expected a torch "
            "module; rng='all' does without"
        )

    def enter(*_: Any) -> None:
        randomness.__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        randomness.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return [policy.register_forward_pre_hook(enter), policy.register_forward_hook(leave, always_call=True)]


def _tensors_of(policy: nn.Module) -> Tensors:
    return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}


def _as_tensors(given: Any) -> Tensors:
    if isinstance(given, nn.Module):
        return _tensors_of(given)
    if is_tensordict(given):
        return dict(given.flatten_keys(".").items())
    return dict(given)


def _storages(policy: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(policy).values()}


def _share_memory(one: nn.Module, other: nn.Module) -> bool:
    return one is other or bool(_storages(one) & _storages(other) - {0})


def _give_copy(base: Any) -> None:
    """Replace a collector's policy, under each name it is kept by, with one and the same deep copy.

    TorchRL keeps it several times: as it was given, as it is called, and as its state is read.
    """
    memo: dict[int, Any] = {}
    for name, value in _policies_of(base):
        frozen = copy.deepcopy(value, memo).requires_grad_(requires_grad=False)
        frozen.zero_grad(set_to_none=True)
        setattr(base, name, frozen)
    if hasattr(base, "_wrapped_policy_maybe_compiled"):
        base._wrapped_policy_maybe_compiled = None  # made anew from the copy when it is called


def _policies_of(base: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, value in list(vars(base).items()):
        if "policy" in name and name != "_wrapped_policy_maybe_compiled" and isinstance(value, nn.Module):
            yield name, value
