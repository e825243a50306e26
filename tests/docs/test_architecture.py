"""The page about the architecture names modules and functions that exist, and every box."""

import ast
import re
from pathlib import Path

import slipstream

SOURCE = Path(slipstream.__file__).parent
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.compile(r"`([\w/]+\.pyi?)(?::([\w.]+))?`")


def defined_in(path: Path) -> set[str]:
    """Return the functions and classes of a module, and the methods of its classes as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_every_module_and_function_it_names_exists():
    named = NAMED.findall(PAGE)
    assert len(named) > 40
    missing = []
    for module, name in named:
        path = ROOT / module if module.startswith("tests/") else SOURCE / module
        if not path.exists() or (name and name not in defined_in(path)):
            missing.append(f"{module} {name}")
    assert not missing, "\n".join(missing)


def test_every_box_has_a_row_in_the_table_of_layers():
    boxes = {f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    boxes |= {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    assert set(re.findall(r"^\| `([\w./]+)` \|", PAGE, re.MULTILINE)) >= boxes
