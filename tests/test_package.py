"""The package as a whole: what it exports, what it imports, and in which direction."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream import errors

SOURCE = Path(slipstream.__file__).parent
PUBLIC_NAMES = dir(slipstream)

# From the bottom up: a module may import from its own line and from the lines before it.
LAYERS = [
    {"errors", "text"},
    {"memory", "threads"},
    {"codecs", "nav", "rl"},
    {"store"},
    {"trajectory"},
    {"tensors", "tree"},
    {"checkpoint", "datasets", "replay", "rollout"},
    {"collect"},
    {"train"},
    {"report"},
    {"cli", "__main__"},
]
TORCH_FREE = ("errors", "text", "memory", "threads", "codecs", "store", "trajectory", "cli")


def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards_only(path):
    box = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    level = next(level for level, boxes in enumerate(LAYERS) if box in boxes)
    allowed = set().union(*LAYERS[:level]) | {box} | ({"cli"} if box == "__main__" else set())
    for name in imports_of(path):
        parts = name.split(".")
        if (
            parts[0] == "slipstream"
            and len(parts) > 1
            and (SOURCE / parts[1]).with_suffix(".py").exists() | (SOURCE / parts[1]).is_dir()
        ):
            assert parts[1] in allowed, f"{path.relative_to(SOURCE)} imports {name}"
        if box in TORCH_FREE:
            assert parts[0] != "torch"


def test_importing_the_package_imports_nothing_heavy():
    script = "import sys, slipstream; assert not {'torch', 'numpy', 'zstandard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_can_be_imported():
    missing = [name for name in PUBLIC_NAMES if getattr(slipstream, name, None) is None]
    assert missing == []
    assert sorted(vars(slipstream)["__all__"]) == PUBLIC_NAMES


def test_type_checkers_see_exactly_the_public_names():
    stub = ast.parse((SOURCE / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    # Without "as", a name in a stub is private to it.
    seen = [alias.asname for node in imports for alias in node.names]
    assert sorted(PUBLIC_NAMES) == sorted(filter(None, seen))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="slipstream attribute Chekpoint"):
        slipstream.Chekpoint  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_public_in_the_tree_and_derives_from_a_builtin():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert getattr(slipstream, name) is kind
        assert issubclass(kind, errors.SlipstreamError)
        assert name in (errors.__doc__ or "")
        if kind is not errors.SlipstreamError:
            assert any(
                base.__module__ == "builtins" and base not in (Exception, BaseException, object)
                for base in kind.__mro__
            )
