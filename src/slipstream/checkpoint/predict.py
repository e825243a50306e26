"""Predicting a checkpoint from its parent and from the optimizer: what Adam did can be done again.

Between two checkpoints one Adam step apart, the new first moment tells the gradient, the gradient tells the new second
moment, and both tell the new weights, up to rounding. Only the first moment then has to be stored in full; the others
are stored as their (tiny) distance from the prediction. Further apart the prediction is rougher, and still closer than
the old value. It is lossless in any case, because the distance is stored, and it is used per tensor only where it wins.

Every prediction is elementwise, in IEEE single precision, one correctly rounded operation after another: it gives the
same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.floats import ieee_arithmetic

Array = NDArray[np.float32]
_SAMPLE = 16 << 10


@dataclass(frozen=True)
class Recipe:
    """How to make a prediction: a formula, the arrays it takes, and its constants.

    Attributes:
        kind: A key of `FORMULAS`.
        old: Entries of the parent that it takes.
        new: Entries of the checkpoint itself that it takes, after those of the parent.
        constants: Numbers, exactly as they go into the formula.
    """

    kind: str
    old: tuple[str, ...]
    new: tuple[str, ...] = ()
    constants: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object; constants as hexadecimal floats, which keep every bit."""
        return {
            "kind": self.kind,
            "old": list(self.old),
            "new": list(self.new),
            "constants": [constant.hex() for constant in self.constants],
        }

    @classmethod
    def from_json(cls, node: Any) -> Recipe:
        """Read what `to_json` wrote; raises `ValueError` if it is something else."""
        if not isinstance(node, dict) or node.get("kind") not in FORMULAS:
            raise ValueError(f"the prediction {str(node)[:80]} is not one that is known")
        names = [node.get("old"), node.get("new")]
        constants = node.get("constants")
        lists = [*names, constants]
        if not all(isinstance(item, list) and all(isinstance(text, str) for text in item) for item in lists):
            raise ValueError(f"the prediction {str(node)[:80]} is malformed")
        recipe = cls(node["kind"], tuple(node["old"]), tuple(node["new"]), tuple(map(float.fromhex, node["constants"])))
        arrays, numbers, _ = FORMULAS[recipe.kind]
        if (len(recipe.old) + len(recipe.new), len(recipe.constants)) != (arrays, numbers):
            raise ValueError(f"the prediction {str(node)[:80]} takes other arguments")
        return recipe


def apply(recipe: Recipe, arrays: list[NDArray[Any]]) -> Array:
    """Make a prediction from its arrays, in the order of the recipe."""
    with np.errstate(all="ignore"), ieee_arithmetic():
        constants = [np.float32(constant) for constant in recipe.constants]
        prediction: Array = FORMULAS[recipe.kind][2](*arrays, *constants)
    return prediction


def prediction(recipe: Recipe, arrays: list[NDArray[Any]]) -> Callable[[int, int], Array]:
    """Return a function that makes elements `start` to `stop` of a prediction, in C order."""
    flat = [array.reshape(-1) for array in arrays]
    return lambda start, stop: apply(recipe, [array[start:stop] for array in flat])


def _scale(old: Array, factor: np.float32) -> Array:
    return old * factor


def _second_moment(
    m0: Array, v0: Array, m1: Array, one_less_beta1: np.float32, beta2: np.float32, rest2: np.float32
) -> Array:
    gradient = m0 + (m1 - m0) / one_less_beta1
    return v0 * beta2 + rest2 * gradient * gradient


def _weights(
    w0: Array, m1: Array, v1: Array, rate: np.float32, root: np.float32, epsilon: np.float32, decay: np.float32
) -> Array:
    return _single(w0 * decay - rate * m1 / (np.sqrt(v1) / root + epsilon))


def _drift(
    w0: Array, m0: Array, v0: Array, m1: Array, v1: Array, a0: np.float32, a1: np.float32, eps: np.float32
) -> Array:
    return _single(w0 - (a0 * (m0 / (np.sqrt(v0) + eps)) + a1 * (m1 / (np.sqrt(v1) + eps))))


def _single(array: NDArray[Any]) -> Array:
    return array.astype(np.float32, copy=False)


FORMULAS: dict[str, tuple[int, int, Callable[..., Array]]] = {
    "scale": (1, 1, _scale),
    "adam second moment": (3, 3, _second_moment),
    "adam weights": (3, 4, _weights),
    "adam drift": (5, 3, _drift),
}
"""Each formula by name: how many arrays it takes, how many constants, and the function."""


@dataclass(frozen=True)
class Moments:
    """What an Adam optimizer knows of one parameter."""

    first: str
    second: str
    step: int
    lr: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float


def find_moments(state: Any, entry_of: Mapping[tuple[str, ...], str], path: tuple[str, ...] = ()) -> dict[str, Moments]:
    """Find the state of Adam and AdamW optimizers in a nested state, by the shape of their ``state_dict``."""
    found: dict[str, Moments] = {}
    if isinstance(state, dict):
        if isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list):
            for group in state["param_groups"]:
                for key in group.get("params", ()) if isinstance(group, dict) else ():
                    moments = _moments(state["state"].get(key), group, entry_of, (*path, "state", str(key)))
                    if moments is not None:
                        found["/".join((*path, "state", str(key)))] = moments
            return found
        for key, value in state.items():
            found.update(find_moments(value, entry_of, (*path, str(key))))
    return found


def _moments(
    state: Any, group: Mapping[str, Any], entry_of: Mapping[tuple[str, ...], str], path: tuple[str, ...]
) -> Moments | None:
    first, second = entry_of.get((*path, "exp_avg")), entry_of.get((*path, "exp_avg_sq"))
    if first is None or second is None or not isinstance(state, dict) or group.get("amsgrad"):
        return None
    try:
        step, lr, (beta1, beta2) = float(state["step"]), float(group["lr"]), group["betas"]
        decoupled = bool(group.get("decoupled_weight_decay", False))
        decay = 1 - lr * float(group.get("weight_decay", 0)) if decoupled else 1.0
        numbers = (lr, float(beta1), float(beta2), float(group["eps"]), decay)
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None
    return Moments(first, second, int(step), *numbers)


def recipes(
    arrays: Mapping[str, NDArray[Any]],
    moments: Mapping[str, Moments],
    old: Mapping[str, NDArray[Any]],
    old_moments: Mapping[str, Moments],
) -> dict[str, list[Recipe]]:
    """Return what might predict each entry of a checkpoint from its parent; `choose` tells which does."""
    found: dict[str, list[Recipe]] = {}
    weights = _weights_of(arrays, moments)
    for key, now in moments.items():
        before = old_moments.get(key)
        steps = now.step - before.step if before else 0
        if before is None or steps < 1 or {before.first, before.second} - set(old):
            continue
        m0, v0, m1, v1 = before.first, before.second, now.first, now.second
        found[m1] = [Recipe("scale", (m0,), (), (now.beta1**steps,))]
        found[v1] = [
            Recipe("scale", (v0,), (), (factor,)) for factor in (now.beta2**steps, _growth(arrays[v1], old[v0]))
        ]
        if steps == 1:
            constants = (1 - now.beta1, now.beta2, 1 - now.beta2)
            found[v1].append(Recipe("adam second moment", (m0, v0), (m1,), constants))
        for name in weights.get(key, ()):
            if name not in old:
                continue
            if steps == 1:
                rate = now.lr / (1 - now.beta1**now.step)
                root = math.sqrt(1 - now.beta2**now.step)
                constants4 = (rate, root, now.epsilon, now.decay)
                found.setdefault(name, []).append(Recipe("adam weights", (name,), (m1, v1), constants4))
            else:
                fitted = _fit_drift(arrays, old, (name, m0, v0, m1, v1), now.epsilon)
                found.setdefault(name, []).extend(fitted)
    return found


def _growth(new: NDArray[Any], old: NDArray[Any]) -> float:
    """Return by what factor a sample of an array grew, as a rule: second moments all grow alike early in training."""
    with np.errstate(all="ignore"):
        ratios = sample(new) / sample(old) if new.shape == old.shape else np.ones(1)
    ratios = ratios[np.isfinite(ratios)]
    return float(np.median(ratios)) if ratios.size else 1.0


def _weights_of(arrays: Mapping[str, NDArray[Any]], moments: Mapping[str, Moments]) -> dict[str, list[str]]:
    """Pair each optimizer's parameters with weights: the n-th of a shape here with the n-th of that shape there."""
    taken = {name for pair in moments.values() for name in (pair.first, pair.second)}
    groups: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for name, array in arrays.items():
        if name not in taken and array.dtype == np.float32:
            groups.setdefault(name.split("/")[0], {}).setdefault(array.shape, []).append(name)
    by_optimizer: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for key, pair in moments.items():
        optimizer = key.rpartition("/state/")[0]
        by_optimizer.setdefault(optimizer, {}).setdefault(arrays[pair.first].shape, []).append(key)
    pairs: dict[str, list[str]] = {}
    for shapes in by_optimizer.values():
        for shape, keys in shapes.items():
            for group in groups.values():
                names = group.get(shape, [])
                if len(names) == len(keys):
                    for key, name in zip(keys, names, strict=True):
                        pairs.setdefault(key, []).append(name)
    return pairs


def _fit_drift(
    arrays: Mapping[str, NDArray[Any]],
    old: Mapping[str, NDArray[Any]],
    names: tuple[str, str, str, str, str],
    eps: float,
) -> list[Recipe]:
    """Fit how far the weights drifted along the old and the new direction of Adam, on a sample."""
    name, m0, v0, m1, v1 = names
    if {arrays[m1].shape, arrays[v1].shape, old[m0].shape, old[v0].shape, old[name].shape} != {arrays[name].shape}:
        return []
    with np.errstate(all="ignore"):
        moved = (sample(old[name]) - sample(arrays[name])).astype(np.float64)
        directions = np.stack(
            [
                (sample(source[m]) / (np.sqrt(sample(source[v])) + np.float32(eps))).astype(np.float64)
                for source, m, v in ((old, m0, v0), (arrays, m1, v1))
            ],
            axis=1,
        )
    finite = np.isfinite(moved) & np.isfinite(directions).all(axis=1)
    if finite.sum() < 8:
        return []
    (a0, a1), *_ = np.linalg.lstsq(directions[finite], moved[finite], rcond=None)
    return [Recipe("adam drift", (name, m0, v0), (m1, v1), (float(a0), float(a1), eps))]


def sample(array: NDArray[Any]) -> NDArray[Any]:
    """Return a flat part from the middle of an array."""
    flat = array.reshape(-1)
    start = max(0, (flat.size - _SAMPLE) // 2)
    return flat[start : start + _SAMPLE]
