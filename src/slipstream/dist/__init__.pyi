# The public names of this package: type checkers read them here, and so does lazy_loader at run time.

from .group import ShardGroup as ShardGroup
from .group import shard_seed as shard_seed
