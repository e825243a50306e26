"""Rollouts packed many times smaller: on disk (`RolloutStorage`), in memory (`CompressedTensorDict`), or one by one."""
