"""What keeps a checkpoint from being loaded is listed, and wrappers of modules do not."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import AsyncCheckpointSaver, StateMismatchError, TrainingState, load_checkpoint
from tests.checkpoint.parts import assert_nothing_changes, content, train


def test_a_checkpoint_of_another_model_is_refused_with_a_list_and_nothing_changes():
    small = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    large = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4))
    saved = TrainingState(model=large, extra={}).state_dict()
    parts = {"model": small, "optimizer": torch.optim.Adam(small.parameters())}
    message = str(assert_nothing_changes(parts, saved))
    for problem in (
        "missing optimizer",
        "unexpected extra",
        "model/0.weight has shape [3, 2], the checkpoint [4, 2]",
        "model/1.weight has shape [1, 3], the checkpoint [4]",
    ):
        assert problem in message


def test_a_long_list_of_differences_is_cut_short():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    with pytest.raises(StateMismatchError, match="and 32 more"):
        TrainingState(rng=False, model=model).load_state_dict({"model": {}})


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        (torch.zeros(2, dtype=torch.float64), "has dtype float32, the checkpoint float64"),
        (torch.zeros(2, dtype=torch.int64), "has dtype float32, the checkpoint int64"),
        (torch.zeros(2, dtype=torch.bool), "has dtype float32, the checkpoint bool"),
        (torch.zeros(2, dtype=torch.complex64), "has dtype float32, the checkpoint complex64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "has dtype float32, the checkpoint float8_e4m3fn"),
        (torch.zeros(1), r"has shape \[2\], the checkpoint \[1\]"),
        (torch.zeros(()), r"has shape \[2\], the checkpoint \[\]"),
        (torch.zeros(2).to_sparse(), "has layout torch.strided, the checkpoint torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "has no values in the checkpoint"),
        ([0.0, 0.0], "is a tensor, in the checkpoint a list"),
        (np.zeros(2), "is a tensor, in the checkpoint a ndarray"),
        (None, "is a tensor, in the checkpoint a NoneType"),
    ],
)
def test_a_tensor_that_torch_would_round_or_reshape_is_a_difference(saved, problem):
    model = torch.nn.Linear(3, 2)
    state = {"model": {**model.state_dict(), "bias": saved}}
    assert_nothing_changes({"model": model}, state, match=f"model/bias {problem}", rng=False)


def test_a_number_and_a_list_of_one_number_are_different():
    model = torch.nn.BatchNorm1d(2)
    state = {"model": {**model.state_dict(), "num_batches_tracked": torch.tensor([5])}}
    problem = r"model/num_batches_tracked has shape \[\], the checkpoint \[1\]"
    assert_nothing_changes({"model": model}, state, match=problem, rng=False)


def test_a_lazy_module_takes_any_shape_but_does_not_round():
    saved = TrainingState(rng=False, model=torch.nn.Linear(3, 2, dtype=torch.float64)).state_dict()
    problem = "model/weight has dtype float32, the checkpoint float64"
    assert_nothing_changes({"model": torch.nn.LazyLinear(2)}, saved, match=problem, rng=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_fit_a_model_of_full_precision(dtype):
    model = torch.nn.Linear(3, 2)
    half = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    TrainingState(rng=False, model=model).load_state_dict({"model": half})
    assert all(torch.equal(model.state_dict()[name], tensor.float()) for name, tensor in half.items())


def test_a_model_without_memory_is_refused_instead_of_staying_empty():
    saved = TrainingState(rng=False, model=torch.nn.Linear(2, 2)).state_dict()
    training = TrainingState(rng=False, model=torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(StateMismatchError, match=r"meta device and has no memory, call to_empty\(\)"):
        training.load_state_dict(saved)


def adam(*shapes: Any, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer after one step."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.Adam(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_an_optimizer_of_other_parameters_is_refused():
    saved = TrainingState(rng=False, optimizer=adam(3, 4)).state_dict()
    sizes = r"optimizer has parameter groups of \[3\], the checkpoint of \[2\]"
    assert_nothing_changes({"optimizer": adam(3, 4, 5)}, saved, match=sizes, rng=False)
    shapes = r"optimizer/1/exp_avg has shape \[5\], the checkpoint \[4\]"
    assert_nothing_changes({"optimizer": adam(3, 5)}, saved, match=shapes, rng=False)
    scalars = r"optimizer/1/exp_avg has shape \[\], the checkpoint \[1\]"
    saved = TrainingState(rng=False, optimizer=adam(3, 1)).state_dict()
    assert_nothing_changes({"optimizer": adam(3, ())}, saved, match=scalars, rng=False)


def lose_moment(state: Any) -> None:
    del state["state"][0]["exp_avg_sq"]


def add_entry(state: Any) -> None:
    state["state"][7] = {"step": torch.tensor(1.0)}


def round_moment(state: Any) -> None:
    state["state"][1]["exp_avg"] = state["state"][1]["exp_avg"].double()


def widen_step(state: Any) -> None:
    state["state"][1]["step"] = torch.ones(4)


def lose_option(state: Any) -> None:
    del state["param_groups"][0]["lr"]


def lose_groups(state: Any) -> None:
    del state["param_groups"]


def spoil_entry(state: Any) -> None:
    state["state"][1] = 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lose_moment, "missing optimizer/0/exp_avg_sq"),
        (add_entry, "unexpected optimizer/7"),
        (round_moment, "optimizer/1/exp_avg has dtype float32, the checkpoint float64"),
        (widen_step, r"optimizer/1/step is one number, the checkpoint has shape \[4\]"),
        (lose_option, "missing optimizer/param_groups/0/lr"),
        (lose_groups, "is not the state of an optimizer"),
        (spoil_entry, "optimizer/1 is a int, expected a dict"),
    ],
)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_an_incomplete_state_of_an_optimizer_is_refused(change, problem, is_fresh):
    state = copy.deepcopy(TrainingState(rng=False, optimizer=adam(3, 4)).state_dict())
    change(state["optimizer"])
    optimizer = adam(3, 4)
    if is_fresh:
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))])
    assert_nothing_changes({"optimizer": optimizer}, state, match=problem, rng=False)
    assert len(optimizer.state) == (0 if is_fresh else 2)


def test_a_parameter_that_had_no_gradient_yet_has_no_moments_in_the_checkpoint():
    used = torch.nn.Parameter(torch.ones(2))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([used, unused])
    used.grad = torch.ones(2)
    optimizer.step()
    saved = copy.deepcopy(TrainingState(rng=False, optimizer=optimizer).state_dict())
    unused.grad = torch.ones(2)
    optimizer.step()
    TrainingState(rng=False, optimizer=optimizer).load_state_dict(saved)
    assert list(optimizer.state) == [used]


def test_options_that_an_older_torch_did_not_have_are_filled_in():
    saved = copy.deepcopy(TrainingState(rng=False, optimizer=adam(3)).state_dict())
    for option in ("foreach", "capturable", "differentiable", "fused"):
        del saved["optimizer"]["param_groups"][0][option]
    TrainingState(rng=False, optimizer=adam(3)).load_state_dict(saved)


def test_an_optimizer_whose_parameters_are_in_another_order_is_refused():
    def named(*names: str) -> torch.optim.Optimizer:
        return torch.optim.Adam([(name, torch.nn.Parameter(torch.ones(2))) for name in names])

    saved = TrainingState(rng=False, optimizer=named("_orig_mod.a", "_orig_mod.b")).state_dict()
    assert_nothing_changes({"optimizer": named("b", "a")}, saved, match="is of the parameters", rng=False)
    TrainingState(rng=False, optimizer=named("a", "b")).load_state_dict(saved)


OPTIMIZERS = ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"]
OPTIMIZERS += ["Rprop", "SGD"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_is_restored_into_a_fresh_one(name):
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.01)

    model, optimizer = make()
    train(model, optimizer)
    saved = copy.deepcopy(TrainingState(rng=False, model=model, optimizer=optimizer).state_dict())
    fresh_model, fresh = make()
    training = TrainingState(rng=False, model=fresh_model, optimizer=fresh)
    training.load_state_dict(saved)
    assert content(training.state_dict()) == content(saved)


def test_an_optimizer_of_another_author_may_keep_different_state_for_each_parameter():
    class Factored(torch.optim.SGD):
        """Keeps sums of rows for large matrices only, as several implementations of Adafactor do."""

    def make() -> torch.optim.Optimizer:
        small = torch.nn.Parameter(torch.rand(2, 2))
        large = torch.nn.Parameter(torch.rand(40, 2))
        optimizer = Factored([small, large], lr=0.1)
        optimizer.state[small]["squares"] = torch.rand(2, 2)
        optimizer.state[large]["rows"] = torch.rand(40)
        return optimizer

    saved = copy.deepcopy(TrainingState(rng=False, optimizer=make()).state_dict())
    training = TrainingState(rng=False, optimizer=make())
    training.load_state_dict(saved)
    assert content(training.state_dict()) == content(saved)


def test_the_state_of_another_scheduler_is_refused():
    def schedule(kind: Any, *arguments: Any) -> Any:
        return kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), *arguments)

    step = schedule(torch.optim.lr_scheduler.StepLR, 3)
    cosine = schedule(torch.optim.lr_scheduler.CosineAnnealingLR, 3)
    saved = TrainingState(rng=False, schedule=cosine).state_dict()
    assert_nothing_changes({"schedule": step}, saved, match="missing schedule/step_size", rng=False)
    assert_nothing_changes({"schedule": step}, {"schedule": {}}, match="missing schedule/last_epoch", rng=False)
    texts = {"schedule": {**step.state_dict(), "last_epoch": "three"}}
    problem = "schedule/last_epoch is a number, in the checkpoint a str"
    assert_nothing_changes({"schedule": step}, texts, match=problem, rng=False)
    groups = {"schedule": {**step.state_dict(), "base_lrs": [0.1, 0.2]}}
    problem = "schedule/base_lrs has 1 values, in the checkpoint 2"
    assert_nothing_changes({"schedule": step}, groups, match=problem, rng=False)


def test_the_state_of_combined_schedulers_is_checked_inside():
    def combined(last: Any) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, last(optimizer)], milestones=[5])

    step = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    decay = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    saved = copy.deepcopy(TrainingState(rng=False, schedule=combined(step)).state_dict())
    missing = "unexpected schedule/_schedulers/1/step_size"
    assert_nothing_changes({"schedule": combined(decay)}, saved, match=missing, rng=False)
    schedule = combined(step)
    schedule.optimizer.step()
    schedule.step()
    TrainingState(rng=False, schedule=schedule).load_state_dict(saved)
    assert content(TrainingState(rng=False, schedule=schedule).state_dict()) == content(saved)


@pytest.mark.parametrize("is_combined", [True, False])
def test_milestones_are_stored_in_every_format_and_are_a_counter_again(tmp_path, is_combined):
    def make() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3], gamma=0.5)
        if not is_combined:
            return optimizer, steps
        warmup = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=2)
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, steps], milestones=[2])

    def rates(optimizer: Any, schedule: Any, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, schedule = make()
    rates(optimizer, schedule, 1)
    saved = TrainingState(optimizer=optimizer, schedule=schedule).state_dict()
    with AsyncCheckpointSaver() as saver:
        saver.save_async(saved, tmp_path / "native.slip", format="native")
        saver.save_async(saved, tmp_path / "plain.pt", compress=False)
    expected = rates(optimizer, schedule, 6)
    for name in ("native.slip", "plain.pt"):
        optimizer, schedule = make()
        TrainingState(optimizer=optimizer, schedule=schedule).load_state_dict(load_checkpoint(tmp_path / name))
        assert rates(optimizer, schedule, 6) == expected


def test_a_scheduler_saved_by_another_version_of_torch_fits():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    saved = {**schedule.state_dict(), "verbose": False}
    saved.pop("_is_initial", None)
    TrainingState(rng=False, schedule=schedule).load_state_dict({"schedule": saved})


def test_the_state_of_a_gradient_scaler_is_checked():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    switched_off = torch.amp.GradScaler("cpu", enabled=False)
    assert_nothing_changes({"scaler": scaler}, {"scaler": {}}, match="missing scaler/scale", rng=False)
    saved = TrainingState(rng=False, scaler=scaler).state_dict()
    assert_nothing_changes({"scaler": switched_off}, saved, match="unexpected scaler/scale", rng=False)
    text = {"scaler": {**scaler.state_dict(), "scale": "large"}}
    assert_nothing_changes({"scaler": scaler}, text, match="scaler/scale is a number", rng=False)
    TrainingState(rng=False, scaler=scaler).load_state_dict({"scaler": {**scaler.state_dict(), "scale": 4.0}})
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    ("generator", "state", "problem"),
    [
        (np.random.default_rng(1), np.random.MT19937(1).state, "a PCG64 generator, the checkpoint has .* of MT19937"),
        (np.random.Generator(np.random.MT19937(1)), np.random.PCG64(1).state, "a MT19937 .* the state of PCG64"),
        (np.random.default_rng(1), {"bit_generator": "PCG64"}, "is not a random state of NumPy"),
        (np.random.default_rng(1), None, "the checkpoint has the state of a NoneType"),
        (np.random.default_rng(1), torch.Generator().get_state(), "the checkpoint has the state of a Tensor"),
        (torch.Generator(), np.random.PCG64(1).state, "is a torch.Generator on cpu, the checkpoint has a dict"),
        # The state of a generator on a GPU: a seed and an offset.
        (torch.Generator(), torch.zeros(16, dtype=torch.uint8), "on cpu, the checkpoint has a state that it does not"),
        (torch.Generator(), torch.Generator().get_state().float(), "on cpu, the checkpoint has a state"),
    ],
)
def test_the_state_of_another_generator_is_refused(generator, state, problem):
    assert_nothing_changes({"noise": generator}, {"noise": state}, match=problem, rng=False)


def test_a_position_outside_the_buffer_of_a_generator_is_refused():
    generator = np.random.Generator(np.random.MT19937(1))
    state = generator.bit_generator.state
    state["state"]["pos"] = 10**6
    assert_nothing_changes({"noise": generator}, {"noise": state}, match="not a random state of NumPy", rng=False)


def test_global_random_states_that_do_not_fit_are_refused_before_anything_changes():
    parts = {"counters": {"n": 1}}
    state = TrainingState(counters={"n": 2}).state_dict()
    python = state["rng"]["python"]
    wrong: list[tuple[Any, str]] = [
        (None, "rng is a NoneType"),
        ({}, "missing rng/python; missing rng/numpy; missing rng/torch"),
        ({**state["rng"], "torch": torch.zeros(3)}, "rng/torch is the state of the CPU"),
        ({**state["rng"], "numpy": np.random.PCG64(1).state}, "rng/numpy is a MT19937 generator"),
        ({**state["rng"], "python": {**python, "words": python["words"][:-1]}}, "rng/python is not a random state"),
        ({**state["rng"], "python": {**python, "gauss": "none"}}, "rng/python is not a random state"),
        ({**state["rng"], "python": 3}, "rng/python is not a random state"),
    ]
    for rng, problem in wrong:
        assert_nothing_changes(parts, {**state, "rng": rng}, match=problem)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.head = torch.nn.Linear(3, 1)


def plain() -> torch.nn.Module:
    return Net()


def compiled() -> Any:
    return torch.compile(Net(), backend="eager")


def parallel() -> torch.nn.Module:
    return torch.nn.DataParallel(Net())


def parallel_compiled() -> torch.nn.Module:
    return torch.nn.DataParallel(compiled())


def compiled_parallel() -> Any:
    return torch.compile(parallel(), backend="eager")


def compiled_inside() -> torch.nn.Module:
    net = Net()
    net.encoder = torch.compile(net.encoder, backend="eager")  # type: ignore[assignment]
    net.head = torch.nn.DataParallel(net.head)  # type: ignore[assignment]
    return net


WRAPPED = [plain, compiled, parallel, parallel_compiled, compiled_parallel, compiled_inside]


@pytest.mark.parametrize("saved_as", WRAPPED)
@pytest.mark.parametrize("loaded_as", WRAPPED)
def test_a_model_is_restored_whether_compiled_or_parallel_or_not(saved_as, loaded_as):
    source = saved_as()
    target = loaded_as()
    TrainingState(rng=False, model=target).load_state_dict(TrainingState(rng=False, model=source).state_dict())
    for mine, theirs in zip(target.state_dict().values(), source.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_wrapped_model_of_another_shape_lists_only_what_differs():
    saved = TrainingState(rng=False, model=compiled()).state_dict()
    net = Net()
    net.head = torch.nn.Linear(3, 2)
    net.extra = torch.nn.Linear(1, 1, bias=False)
    error = assert_nothing_changes({"model": net}, saved, rng=False)
    listed = str(error).split(": ", 1)[1].split("; ")
    assert listed[0] == "missing model/extra.weight"
    assert listed[1:] == [
        "model/head.weight has shape [2, 3], the checkpoint [1, 3]",
        "model/head.bias has shape [2], the checkpoint [1]",
    ]


def test_names_that_are_ambiguous_without_prefixes_are_not_guessed():
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))
            self.module = torch.nn.Linear(2, 1, bias=False)

    saved = {"model": {"_orig_mod.weight": torch.ones(2), "_orig_mod.module.weight": torch.ones(1, 2)}}
    assert_nothing_changes({"model": Pair()}, saved, match="missing model/weight", rng=False)
    same = TrainingState(rng=False, model=Pair()).state_dict()
    TrainingState(rng=False, model=Pair()).load_state_dict(same)


def test_versions_of_modules_survive_the_removal_of_prefixes():
    versions = []

    class Versioned(torch.nn.Linear):
        _version = 5

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments: Any) -> None:
            versions.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)

    saved = TrainingState(rng=False, model=torch.nn.DataParallel(Versioned(2, 2))).state_dict()
    TrainingState(rng=False, model=Versioned(2, 2)).load_state_dict(saved)
    assert versions == [5]
