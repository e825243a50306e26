"""`SB3HerReplayBuffer`: hindsight experience replay of stable-baselines3 on packed observations."""

from __future__ import annotations

from typing import Any

import numpy as np

# Raises an `ImportError` that says what to install.
from slipstream.adapters.sb3_replay import SB3ReplayBuffer

# isort: split
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer


class SB3HerReplayBuffer(HerReplayBuffer, SB3ReplayBuffer):  # type: ignore[misc, unused-ignore]
    """SB3's ``HerReplayBuffer`` with packed observations: the same random numbers, goals and batches.

    Pass it as ``replay_buffer_class``. Goals are drawn and rewards computed by SB3's code, which reads the observations
    that it needs through ``self.observations``.

    Args:
        args: As for SB3's ``HerReplayBuffer``.
        pack_images: As for `SB3ReplayBuffer`.
        cache_bytes: As for `SB3ReplayBuffer`.
        threads: As for `SB3ReplayBuffer`.
        kwargs: As for SB3's ``HerReplayBuffer``.

    Raises:
        ImportError: If stable-baselines3 is not installed. Raised when the class is imported.
        ConfigurationError: If an option is invalid.
    """

    PLAIN_ARRAYS = (*SB3ReplayBuffer.PLAIN_ARRAYS, "ep_start", "ep_length")

    def __init__(
        self,
        *args: Any,
        pack_images: bool = True,
        cache_bytes: int = 0,
        threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # SB3's constructor passes only its own arguments on.
        self._set_packing(pack_images=pack_images, cache_bytes=cache_bytes, threads=threads)
        self._drop_infos()

    def _drop_infos(self) -> None:
        # SB3 allocates a dictionary for every step, and uses them only with `copy_info_dict`.
        if not self.copy_info_dict:
            self.infos = np.empty((0, self.n_envs), object)

    def reset(self) -> None:
        """Forget all steps and episodes, and free the memory of their observations."""
        super().reset()
        self.ep_start[:] = 0
        self.ep_length[:] = 0
        self._current_ep_start[:] = 0

    def __getstate__(self) -> dict[str, Any]:
        state = SB3ReplayBuffer.__getstate__(self)
        # As in SB3: environments cannot always be pickled. `model.load_replay_buffer` sets the one of the model.
        del state["env"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        SB3ReplayBuffer.__setstate__(self, state)
        self.env = None
