"""How dense the code of each package is, how plain the prose, and the best values that they have reached.

``python -m tests.style`` prints the table and tightens ``tests/style.json`` where a package got better; `make fix` runs
it. The numbers are symptoms: a package that gets worse deserves a look, not a trick.
"""

import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "slipstream"
RECORD = Path(__file__).with_name("style.json")

HIGHER_IS_BETTER = {"comments"}
MAX_MODULE_LINES = 400
PER_1000_LINES = ("comments", "conditional_expressions", "comprehensions", "tuple_assignments", "lambdas")

# Phrases that make the prose hard to read; DESIGN.md lists what to write instead.
STILTED = re.compile(
    r"\b(goes on|go on with|of its own|of one's own|of their own|anew|so many|no writer writes|as a writer writes"
    r"|makes no sense|what became of|not to be had|(is|are|was) told|under way|whoever|in vain|put together"
    r"|taken apart|is not to be|numbers that are none|what no|what came of|go on (exactly|from|to)|going on|somebody"
    r"|for ever|as long again)\b",
    re.IGNORECASE,
)
# What people read besides the source: pages and examples. CHANGELOG.md is history.
PROSE = "docs, README and examples"
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.py")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SILENT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.STRING,
    tokenize.ENDMARKER,
}


def measure() -> dict[str, dict[str, float]]:
    """Return the values of every package, of the modules at the root together, and of the prose."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        package = parts[0] if len(parts) > 1 else "root modules"
        found = _count(path.read_text(encoding="utf-8"))
        longest = max(counts[package]["longest_module"], found.pop("longest_module"))
        counts[package].update(found)
        counts[package]["longest_module"] = longest
    values = {package: _rates(found) for package, found in counts.items()}
    values[PROSE] = {"stilted_phrases": sum(len(phrases) for phrases in find_stilted().values())}
    return values


def find_stilted() -> dict[str, list[str]]:
    """Return the phrases of each page and example that are hard to read, with the lines that they are in."""
    found: dict[str, list[str]] = {}
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            lines = path.read_text(encoding="utf-8").splitlines()
            hits = [f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if STILTED.search(line)]
            if hits:
                found[str(path.relative_to(ROOT))] = hits
    return found


def _count(text: str) -> Counter[str]:
    """Count what there is in one module."""
    found: Counter[str] = Counter(longest_module=text.count("\n"), stilted_phrases=len(STILTED.findall(text)))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.search(r"noqa|type: ignore|fmt:", token.string):
            found["comments"] += 1
        if token.type not in _SILENT_TOKENS:
            lines.add(token.start[0])
    found["code_lines"] = len(lines)
    for node in ast.walk(ast.parse(text)):
        found["conditional_expressions"] += isinstance(node, ast.IfExp)
        found["lambdas"] += isinstance(node, ast.Lambda)
        found["tuple_assignments"] += _assigns_tuple(node)
        found["private_accesses"] += _reads_private(node)
        if isinstance(node, _COMPREHENSIONS):
            found["comprehensions"] += 1
            inner = (part for part in ast.walk(node) if part is not node)
            found["nested_comprehensions"] += any(isinstance(part, _COMPREHENSIONS) for part in inner)
    return found


def _assigns_tuple(node: ast.AST) -> bool:
    """Tell ``a, b = c, d`` from other statements."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def _reads_private(node: ast.AST) -> bool:
    """Tell whether a node reaches for a private attribute of something other than ``self`` or ``cls``."""
    if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def _rates(found: Counter[str]) -> dict[str, float]:
    values: dict[str, float] = {
        name: found[name] for name in ("nested_comprehensions", "private_accesses", "stilted_phrases", "longest_module")
    }
    for name in PER_1000_LINES:
        values[name] = round(1000 * found[name] / max(found["code_lines"], 1), 1)
    return values


def is_worse(name: str, value: float, best: float) -> bool:
    """Tell whether a value is worse than the best one so far.

    Rates have some slack: they change by a few percent when plain lines are deleted. The record keeps the best value,
    so the slack does not add up. A module may always have 400 lines.
    """
    if name == "longest_module":
        return value > max(best, MAX_MODULE_LINES)
    slack = 0.05 * best if name in PER_1000_LINES else 0.0
    if name in HIGHER_IS_BETTER:
        return value < best - slack
    return value > best + slack


def main() -> None:
    """Print the table, and record every value that got better."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    now = measure()
    for package, values in now.items():
        best = record.get(package, {})
        for name, value in values.items():
            if name not in best:
                continue
            better = max if name in HIGHER_IS_BETTER else min
            values[name] = better(value, best[name])
        print(f"{package:14}" + "".join(f"  {name} {value:g}" for name, value in values.items()))  # noqa: T201
    RECORD.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
