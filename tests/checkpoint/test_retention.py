"""Which checkpoints stay: a pure function, so every rule can be stated as a table."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.checkpoint.folder import CheckpointFile
from slipstream.checkpoint.retention import Plan, RetentionPolicy, apply, by_identity, find_best, find_root, plan


def file(step: int, sequence: int | None = None, reward: Any = None, **options: Any) -> CheckpointFile:
    """Return a checkpoint that was saved as number `sequence`; the step by default."""
    number = step if sequence is None else sequence
    metrics = {} if reward is None else {"reward": reward}
    path = Path(options.pop("name", f"checkpoint_iter_{step}.slip"))
    return CheckpointFile(path, step, number, metrics, f"id {path} {number}", **options)


def steps(files: tuple[CheckpointFile, ...]) -> list[int]:
    return [one.step for one in files]


def delta(step: int, parent: CheckpointFile, **options: Any) -> CheckpointFile:
    return file(step, parents=(parent.identity, *parent.parents), **options)


def test_the_newest_by_time_are_kept_whatever_their_steps_are():
    files = [file(900, 1), file(910, 2), file(920, 3), file(10, 4), file(20, 5)]
    planned = plan(files, RetentionPolicy(keep_last=3))
    assert steps(planned.keep) == [920, 10, 20]
    assert steps(planned.delete) == [900, 910]


def test_multiples_and_the_best_are_kept_too():
    files = [file(step, reward=reward) for step, reward in ((10, 1), (20, 9), (30, 3), (40, 2), (50, 5))]
    policy = RetentionPolicy(keep_last=1, keep_every=40, keep_best=("reward", "max"))
    assert steps(plan(files, policy).keep) == [20, 40, 50]


def test_without_a_limit_nothing_is_deleted():
    files = [file(step) for step in range(100)]
    assert plan(files, RetentionPolicy()).delete == ()


def test_renamed_files_are_kept_and_do_not_count():
    files = [file(1, name="the best one.slip"), file(2), file(3), file(4)]
    planned = plan(files, RetentionPolicy(keep_last=2))
    assert steps(planned.keep) == [1, 3, 4]
    assert steps(planned.delete) == [2]


@pytest.mark.parametrize(
    ("rewards", "mode", "best"),
    [
        ([3.0, float("nan"), 1.0, 2.0], "min", 2),
        ([3.0, float("nan"), 1.0, 2.0], "max", 0),
        ([1, True, 0.5], "max", 1),
        ([float("inf"), 1.0, None], "max", 1),
        ([float("-inf"), None], "max", None),
        (["9", None, 1.0], "max", 2),
        ([1.0, 1.0, 1.0], "max", 2),
        ([], "max", None),
    ],
)
def test_the_best_is_the_newest_of_the_best_finite_numbers(rewards, mode, best):
    files = [file(step, reward=reward) for step, reward in enumerate(rewards)]
    found = find_best(files, ("reward", mode))
    assert (None if found is None else found.step) == best


def test_older_ones_are_thinned_once():
    files = [file(1, thinned=("without optimizer",)), file(2), file(3), file(4)]
    planned = plan(files, RetentionPolicy(keep_last=4, keep_full=2))
    assert steps(planned.thin) == [2]


def test_a_delta_is_completed_before_its_parent_goes():
    first, second = file(1), file(2)
    third = delta(3, second)
    fourth = delta(4, third)
    planned = plan([first, second, third, fourth], RetentionPolicy(keep_last=2))
    assert steps(planned.delete) == [1, 2]
    # The fourth refers to the third, which stays the same checkpoint when it is stored whole.
    assert steps(planned.complete) == [3]


def test_a_copy_of_a_parent_is_not_relied_on_because_it_may_be_damaged():
    parent = file(1)
    copy = CheckpointFile(Path("backup.slip"), 1, 1, {}, parent.identity)
    planned = plan([parent, copy, delta(2, parent), file(3)], RetentionPolicy(keep_last=2))
    assert steps(planned.delete) == [1]
    assert steps(planned.complete) == [2]


def test_copies_of_a_checkpoint_count_as_one():
    first = file(3)
    copies = [CheckpointFile(Path(f"checkpoint_iter_{n}.slip"), 3, 3, {}, first.identity) for n in (7, 8)]
    planned = plan([file(1), file(2), first, *copies], RetentionPolicy(keep_last=3))
    assert planned.delete == ()
    # Thinning changes the identity of a copy, but not which save it is of.
    thinned = CheckpointFile(Path("checkpoint_iter_9.slip"), 3, 3, {}, "other", (), ("without optimizer",))
    assert plan([file(1), file(2), first, thinned], RetentionPolicy(keep_last=3)).delete == ()


def test_what_was_just_written_is_kept_even_if_others_claim_to_be_newer():
    new = file(1, 1)
    planned = plan([new, file(2, 100), file(3, 101)], RetentionPolicy(keep_last=1), just_written=new.path)
    assert new in planned.keep
    assert steps(planned.delete) == [2]


def test_what_is_left_of_the_parents_of_a_delta_stays_while_one_is_missing():
    first, second = file(1), delta(2, file(1))
    third = delta(3, second)
    # The first cannot be read for a moment.
    planned = plan([second, third, file(4)], RetentionPolicy(keep_last=2))
    assert planned.delete == ()
    again = plan([first, second, third, file(4)], RetentionPolicy(keep_last=2))
    assert steps(again.delete) == [1, 2]
    assert steps(again.complete) == [3]


@pytest.mark.parametrize("reward", [10**400, -(10**400)])
def test_a_number_that_is_too_large_is_never_the_best(reward):
    found = find_best([file(1, reward=reward), file(2, reward=1)], ("reward", "max"))
    assert found is not None
    assert found.step == 2


def test_a_delta_is_completed_before_its_parent_is_thinned():
    first = file(1)
    planned = plan([first, delta(2, first)], RetentionPolicy(keep_last=5, keep_full=1))
    assert steps(planned.thin) == [1]
    assert steps(planned.complete) == [2]


def test_the_best_is_completed():
    first = file(1, reward=1)
    planned = plan([first, delta(2, first, reward=2), file(3, reward=0)], RetentionPolicy(3, None, ("reward", "max")))
    assert steps(planned.complete) == [2]


def test_the_root_of_a_chain_is_its_whole_file():
    first = file(1)
    second = delta(2, first)
    third = delta(3, second)
    assert find_root(third, by_identity([first, second, third])) == first.identity
    assert find_root(third, by_identity([first, third])) is None


def test_a_delta_whose_parent_is_missing_is_left_as_it_is():
    planned = plan([file(1), delta(2, file(0)), file(3)], RetentionPolicy(keep_last=3))
    assert planned.complete == ()


def test_files_that_refer_to_each_other_in_a_circle_have_no_root():
    one = CheckpointFile(Path("a.slip"), 1, 1, {}, "a", ("b",))
    two = CheckpointFile(Path("b.slip"), 2, 2, {}, "b", ("a",))
    assert find_root(one, by_identity([one, two])) is None


def test_what_fails_is_reported_and_does_not_stop_the_rest(tmp_path, caplog):
    parent = file(1, name=str(tmp_path / "checkpoint_iter_1.slip"))
    child = delta(2, parent, name=str(tmp_path / "checkpoint_iter_2.slip"))
    old = file(0, name=str(tmp_path / "checkpoint_iter_0.slip"))
    for one in (parent, child, old):
        one.path.touch()

    def fail(broken: CheckpointFile) -> None:
        raise OSError(28, "No space left on device")

    tidied = apply(Plan((child,), (), (old, parent), (child,)), fail, fail)
    assert tidied.deleted == [0]
    assert list(tidied.failures) == [child.path]
    assert "checkpoint_iter_2.slip" in caplog.text
    # The child could not be completed, so its parent stays.
    assert parent.path.exists()


@st.composite
def folders(draw: st.DrawFn) -> list[CheckpointFile]:
    """Return a folder as it may be after any history: branches, copies, renamed files, deltas, gaps."""
    files: list[CheckpointFile] = []
    for sequence in range(draw(st.integers(1, 12))):
        options: dict[str, Any] = {"reward": draw(st.none() | st.integers(0, 4))}
        if draw(st.integers(0, 5)) == 0:
            options["name"] = f"mine {sequence}.slip"
        else:
            options["name"] = f"checkpoint_iter_{sequence}.slip"
        step = draw(st.integers(0, 30))
        is_delta = draw(st.booleans())
        if files and is_delta:
            files.append(delta(step, draw(st.sampled_from(files)), sequence=sequence, **options))
        else:
            files.append(file(step, sequence, **options))
    return draw(st.permutations(files))


policies = st.builds(
    RetentionPolicy,
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 10),
    st.none() | st.sampled_from([("reward", "max"), ("reward", "min")]),
    st.none() | st.integers(1, 3),
)


@given(folders(), policies)
def test_whatever_the_history_the_newest_stays_and_every_kept_file_can_be_read(files, policy):
    planned = plan(files, policy)
    assert sorted(one.path for one in (*planned.keep, *planned.delete)) == sorted(one.path for one in files)
    managed = [one for one in files if one.is_managed]
    assert all(one.is_managed for one in (*planned.delete, *planned.thin))
    if managed:
        assert max(managed, key=lambda one: one.sequence) in planned.keep
    if policy.keep_last is not None:
        assert len([one for one in planned.keep if one.is_managed]) >= min(policy.keep_last, len(managed))
    # After the plan is carried out, every file that is kept is whole or has its parent.
    whole = [*planned.thin, *planned.complete]
    unchanged = {one.identity for one in planned.keep if one not in planned.thin}
    for one in planned.keep:
        assert (
            not one.parents or one in whole or one.parents[0] in unchanged or find_root(one, by_identity(files)) is None
        )
    best = find_best([one for one in planned.keep if one.is_managed], policy.keep_best)
    if best is not None:
        assert not best.parents or best in whole or find_root(best, by_identity(files)) is None


@given(folders(), policies)
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(files, policy):
    planned = plan(files, policy)
    after = []
    for one in planned.keep:
        parents = () if one in (*planned.complete, *planned.thin) else one.parents
        thinned = ("thinned",) if one in planned.thin else one.thinned
        after.append(CheckpointFile(one.path, one.step, one.sequence, one.metrics, one.identity, parents, thinned))
    again = plan(after, policy)
    assert again.delete == again.thin == ()
