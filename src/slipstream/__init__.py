"""Slipstream: the data plane of a robot-learning training loop.

``__init__.pyi`` lists the public names. Each is imported on first use, so ``import slipstream`` takes milliseconds and
imports neither torch nor NumPy.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
