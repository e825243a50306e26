"""Training in more than one process, with the same result for any number of processes.

`ShardGroup` divides a run into shards, which never change, and spreads them over the processes of a ``torchrun`` job.
``__init__.pyi`` lists the public names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
