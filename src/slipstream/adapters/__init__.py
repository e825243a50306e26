"""Checkpoints in the training loops of Lightning, Stable-Baselines3 and TorchRL, and replay buffers for the second.

``__init__.pyi`` lists the public names, except for the replay buffers, which are imported from ``slipstream``. Each is
imported on first use, together with its library only: the adapter for Lightning does not need Stable-Baselines3. If the
library is missing, the `ImportError` says how to install it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
