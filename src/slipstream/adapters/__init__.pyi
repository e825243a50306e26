# The public names of this package: type checkers read them here, and so does lazy_loader at run time.

from .lightning import LightningCheckpointIO as LightningCheckpointIO
from .stable_baselines3 import SB3CheckpointCallback as SB3CheckpointCallback
from .stable_baselines3 import restore_into as restore_into
from .torchrl import TorchRLCheckpointHook as TorchRLCheckpointHook
