"""Invented measurements, for tests of the decision that `advise` makes and of the sentences that explain it."""

import dataclasses

from slipstream.rollout.measure import KeyNumbers, Measured

MB, GB = 10**6, 10**9

COMPRESSIBLE = Measured(
    batch_size=(1000, 32),
    num_envs=1000,
    num_steps=32,
    keys=(KeyNumbers("lidar", "float32", (36, 4), True, 10 * GB, GB, 10.0, 5.0, True),),
    raw_bytes=10 * GB,
    distinct_bytes=5 * GB,
    file_bytes=GB,
    copy_s=1.0,
    encode_s=4.0,
    encode_cpu_s=10.0,
    decode_s=2.0,
    decode_cpu_s=5.0,
    load_s=4.0,
    save_call_s=1.0,
    save_background_s=20.0,
    memory_packed_bytes=2 * GB,
    memory_cache_bytes=GB // 2,
    memory_pack_s=6.0,
    epoch_a_s=2.0,
    epoch_c_s=3.0,
    epoch_c_shuffled_s=30.0,
)
NOISE = dataclasses.replace(COMPRESSIBLE, file_bytes=10 * GB, memory_packed_bytes=10 * GB)
