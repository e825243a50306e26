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

# From the bottom up. A module may import from its own box and from the lines above its line; boxes of one line are
# siblings that do not know each other.
LAYERS = [
    {"errors"},
    {"checks", "floats", "text"},
    {"devices", "threads"},
    {"dist"},
    {"memory", "nav", "rl"},
    {"codecs"},
    {"store"},
    {"schema"},
    {"run"},
    {"trajectory"},
    {"spans"},
    {"compiling", "tensors"},
    {"batches"},
    {"lazy"},
    {"checkpoint", "datasets", "replay", "rollout"},
    {"adapters", "collect"},
    {"train"},
    {"report"},
    {"cli"},
    {"__main__"},
]
# What works without torch: commands answer at once, and files can be read where torch is not installed.
TORCH_FREE = {"errors", "checks", "floats", "text", "threads", "memory", "codecs", "store", "schema", "trajectory"}
TORCH_FREE |= {f"checkpoint.{name}" for name in ("archive", "commits", "delta", "finding", "folder", "formats")}
TORCH_FREE |= {f"checkpoint.{name}" for name in ("inspect", "layout", "mirror", "reader", "retention", "verify")}
TORCH_FREE |= {"rollout.files", "rollout.layout", "rollout.reading", "run", "report", "cli", "__main__"}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def name_of(path: Path) -> str:
    """Return the dotted name of a module, without ``slipstream`` in front."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def box_of(path: Path) -> str:
    """Return the package, or the module at the root, that a module belongs to."""
    return name_of(path).partition(".")[0]


def is_torch_free(path: Path) -> bool:
    name = name_of(path)
    return any(name == free or name.startswith(f"{free}.") for free in TORCH_FREE)


def imports_of(path: Path) -> set[str]:
    """Return the dotted names that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_downwards_only():
    boxes = {box_of(path) for path in modules()}
    placed = set().union(*LAYERS)
    offenders = [f"{box} is not in LAYERS" for box in sorted(boxes - placed)]
    for path in modules():
        box = box_of(path)
        level = next((level for level, line in enumerate(LAYERS) if box in line), len(LAYERS))
        allowed = {box}.union(*LAYERS[:level])
        for name in sorted(imports_of(path)):
            package, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if package == "slipstream" and imported not in allowed | {"__version__"}:
                # A name from the root, such as slipstream.Container, would hide which box it is from.
                offenders.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not offenders, "\n".join(offenders)


def test_what_works_without_torch_does_not_import_it():
    offenders = [name_of(path) for path in modules() if is_torch_free(path) and "torch" in imports_of(path)]
    assert offenders == []


# Imports modules where torch cannot be imported, and prints those that fail.
WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None
sys.modules["tensordict"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module("slipstream." + name)
    except ImportError:
        print(name)
"""


def test_what_works_without_torch_does_not_import_it_through_others():
    names = [name_of(path) for path in modules() if is_torch_free(path)]
    found = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *names], check=True, stdout=subprocess.PIPE, text=True)
    assert found.stdout.split() == []


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
