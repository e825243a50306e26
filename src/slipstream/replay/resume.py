"""`ReplayBufferState`: a TorchRL replay buffer, priorities included, as a part of a `TrainingState`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slipstream.errors import StateMismatchError

_TREES = ("_sum_tree", "_min_tree")


class ReplayBufferState:
    """Makes the state of a TorchRL ``ReplayBuffer`` out of tensors and plain values only.

    ``buffer.state_dict()`` of a prioritized buffer holds compiled trees, which only pickle can store. Here they are
    tensors: the priorities, from which loading builds the same trees. Everything else is as the buffer gives it.

    Args:
        buffer: The replay buffer; its storage should be a `PackedEpisodeStorage`, or the state is as large as the data.

    Example:
        >>> from torchrl.data import ReplayBuffer
        >>> from slipstream import PackedEpisodeStorage, TrainingState
        >>> buffer = ReplayBuffer(storage=PackedEpisodeStorage(100))
        >>> training = TrainingState(replay=ReplayBufferState(buffer))
        >>> training.load_state_dict(training.state_dict())
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        """Return the state; what the storage holds is copied, packed as it is."""
        state = dict(self._buffer.state_dict())
        state["_sampler"] = self._trees_to_tensors(state["_sampler"])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore storage, sampler, writer, generator and what was prefetched.

        Raises:
            StateMismatchError: If the sampler is another one, or the storage of another size.
        """
        state = dict(state_dict)
        try:
            mine = self._buffer.sampler.state_dict()
            state["_sampler"] = self._tensors_to_trees(state["_sampler"], mine)
        except (KeyError, TypeError) as error:
            raise StateMismatchError(f"the state is not that of such a replay buffer (no {error})") from error
        self._buffer.load_state_dict(state)

    def _trees_to_tensors(self, sampler: Mapping[str, Any]) -> dict[str, Any]:
        state = dict(sampler)
        for name in _TREES:
            if name in state:
                leaves = torch.arange(self._buffer.sampler._max_capacity)
                state[name] = torch.as_tensor(state[name][leaves])
        return state

    def _tensors_to_trees(self, sampler: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
        """Fill copies of the trees that the sampler has with priorities."""
        if set(sampler) != set(mine):
            raise StateMismatchError(f"the state is of a sampler with {sorted(sampler)}, this one has {sorted(mine)}")
        state = dict(sampler)
        for name in _TREES:
            if name in state:
                leaves, values = torch.arange(self._buffer.sampler._max_capacity), state[name]
                if len(leaves) != len(values):
                    raise StateMismatchError(f"the state has {len(values)} priorities, this sampler {len(leaves)}")
                tree = mine[name]
                tree[leaves] = values.cpu()
                state[name] = tree
        return state
