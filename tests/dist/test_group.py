"""`ShardGroup`: which process owns which shard, sums, agreement, and what happens if a process is lost."""

import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import ConfigurationError
from slipstream.dist import ShardGroup, shard_seed
from slipstream.dist.group import sum_in_pairs
from tests.dist.ranks import finish, run_ranks, start_ranks

PREAMBLE = """
import atexit
import sys
import torch
import torch.distributed as torch_dist
from slipstream.dist import ShardGroup
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch_dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
# Threads of a group that is not destroyed abort a process that ends.
atexit.register(torch_dist.destroy_process_group)
# One that ends at once must not end while others still connect.
torch_dist.barrier()
"""


def test_a_group_of_one_process_owns_all_shards():
    group = ShardGroup(4)
    assert (group.rank, group.world, list(group.local_shards)) == (0, 1, [0, 1, 2, 3])
    assert group.gather(["a", "b", "c", "d"]) == ["a", "b", "c", "d"]
    assert group.broadcast({"seed": 1}) == {"seed": 1}
    assert group.any(flag=True)
    assert not group.any(flag=False)


@pytest.mark.parametrize("shards", [3, 6, 12])
def test_a_number_of_shards_that_is_no_power_of_two_is_refused(shards):
    with pytest.raises(ConfigurationError, match=f"shards is {shards}, expected a power of two"):
        ShardGroup(shards)


def test_no_shards_are_refused():
    with pytest.raises(ConfigurationError, match="shards is 0"):
        ShardGroup(0)


def test_every_process_owns_consecutive_shards_and_valid_numbers_of_processes_are_listed(tmp_path):
    script = PREAMBLE + "print(list(ShardGroup(8).local_shards))"
    assert run_ranks(script, 2, tmp_path) == ["[0, 1, 2, 3]\n", "[4, 5, 6, 7]\n"]
    script = PREAMBLE + "try: ShardGroup(4)\nexcept ValueError as error: print(error)"
    expected = "4 shards cannot be divided among 3 processes, expected 1, 2 or 4 processes\n"
    assert run_ranks(script, 3, tmp_path) == [expected] * 3


def test_a_sum_needs_one_tensor_for_each_shard():
    with pytest.raises(ConfigurationError, match="1 tensors were given for 2 shards"):
        ShardGroup(2).sum([torch.zeros(1)])


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_a_sum_in_pairs_is_the_sum_of_the_sums_of_its_parts(power, part, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = list(torch.randn(2**power, 5, generator=generator) * 1e3)
    size = 2 ** min(power, part)
    parts = [sum_in_pairs(rows[place : place + size]) for place in range(0, len(rows), size)]
    assert torch.equal(sum_in_pairs(parts), sum_in_pairs(rows))
    torch.testing.assert_close(sum_in_pairs(rows), torch.stack(rows).sum(0), rtol=1e-4, atol=1e-2)


# Prints a digest of the sum over eight shards, computed by the group and by torch's own reduction.
SUMS = """
import hashlib
shards = 8
group = ShardGroup(shards)
rows = []
for shard in group.local_shards:
    rows.append(torch.randn(10_000, generator=torch.Generator().manual_seed(shard)))
def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:8]
plain = torch.stack(rows).sum(0)
torch_dist.all_reduce(plain)
print(digest(group.sum(rows)), digest(plain))
"""


def test_sums_are_the_same_bits_for_any_number_of_processes_unlike_all_reduce(tmp_path):
    printed = []
    for world in (1, 2, 4):
        outputs = run_ranks(PREAMBLE + SUMS, world, tmp_path)
        assert len(set(outputs)) == 1
        printed.append(outputs[0].split())
    ours, plain = zip(*printed, strict=True)
    assert len(set(ours)) == 1
    # If this ever fails, torch sums in a fixed order itself, and the tree is not needed any more.
    assert len(set(plain)) > 1


AGREE = """
group = ShardGroup(4)
print(group.any(rank == 1), group.any(False), group.broadcast(f"from {rank}"))
print(group.gather([f"shard {shard}" for shard in group.local_shards]))
"""


def test_processes_agree_on_flags_values_and_the_order_of_shards(tmp_path):
    first, second = run_ranks(PREAMBLE + AGREE, 2, tmp_path)
    assert first.splitlines() == ["True False from 0", "['shard 0', 'shard 1', 'shard 2', 'shard 3']"]
    assert second.splitlines() == ["True False from 0", "None"]


FAIL = """
group = ShardGroup(4)
print(group.first(lambda: f"from {rank}"), group.together(lambda: rank))
class OwnError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")
def fail(error):
    raise error
def tell(function):
    try:
        function()
    except Exception as error:
        print(type(error).__name__, error, *getattr(error, "__notes__", []))
tell(lambda: group.first(lambda: fail(ValueError("bad"))))
tell(lambda: group.together(lambda: fail(KeyError("gone")) if rank else None))
tell(lambda: group.first(lambda: fail(OwnError("cannot", "travel"))))
print(group.any(rank == 0))
"""


def test_what_fails_in_one_process_fails_in_all_of_them_and_they_stay_in_step(tmp_path):
    first, second = run_ranks(PREAMBLE + FAIL, 2, tmp_path)
    expected = ["from 0 0", "ValueError bad", "KeyError 'gone' in rank 1", "OwnError cannot travel", "True"]
    assert first.splitlines() == expected
    expected = ["from 0 1", "ValueError bad in rank 0", "KeyError 'gone'"]
    assert second.splitlines() == [*expected, "RuntimeError OwnError: cannot travel in rank 0", "True"]


# Rank 3 waits until it is killed; the others wait for its part of a sum.
LOSE = """
import signal
from slipstream import RankLostError
group = ShardGroup(4)
group.any(False)
print("ready", flush=True)
if rank == 3:
    signal.pause()
try:
    group.sum([torch.zeros(5)])
except RankLostError as error:
    print(error)
    sys.exit(3)
"""


def test_a_killed_process_is_an_error_in_all_others_and_no_hang(tmp_path):
    processes = start_ranks(PREAMBLE + LOSE, 4, tmp_path)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    processes[3].send_signal(signal.SIGKILL)
    results = finish(processes)
    assert [code for code, _, _ in results] == [3, 3, 3, -signal.SIGKILL]
    for rank, (_, output, _) in enumerate(results[:3]):
        assert f"exited or cannot be reached by rank {rank}" in output


def test_seeds_of_shards_differ_and_fit_into_63_bits():
    seeds = {shard_seed(seed, shard) for seed in range(20) for shard in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_local_shards_are_mapped_in_order_and_the_first_error_is_raised():
    group = ShardGroup(8, threads=3)
    assert group.map(str) == ["0", "1", "2", "3", "4", "5", "6", "7"]
    before = torch.get_num_threads()
    assert group.map(lambda _: torch.get_num_threads()) == [1] * 8
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError):
        group.map(lambda shard: 1 // (shard - 2))


# The device comes first: nccl communicates on the current one.
PREAMBLE_ON_GPUS = PREAMBLE.replace(
    'torch_dist.init_process_group("gloo"', 'torch.cuda.set_device(rank)\ntorch_dist.init_process_group("nccl"'
)
ON_GPUS = """
group = ShardGroup(4)
rows = [torch.full((3,), float(shard), device=group.device) for shard in group.local_shards]
print(group.sum(rows).tolist(), group.any(flag=rank == 1), group.first(lambda: "one"))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_group_works_on_gpus(tmp_path):
    assert run_ranks(PREAMBLE_ON_GPUS + ON_GPUS, 2, tmp_path) == ["[6.0, 6.0, 6.0] True one\n"] * 2
