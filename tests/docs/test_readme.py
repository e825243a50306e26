"""The front page: its numbers are measured ones, and its translation keeps up with it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TRANSLATION = (ROOT / "README.zh-CN.md").read_text()
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()


def code_blocks(text: str) -> list[str]:
    """The code blocks of a page, without comments: those are translated."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s*#.*", "", block) for block in blocks]


def table(text: str) -> list[list[str]]:
    """The cells of the table of measured results, row by row."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def numbers(cell: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", cell)


def test_the_translation_has_the_same_code():
    assert len(code_blocks(README)) >= 6
    assert code_blocks(README) == code_blocks(TRANSLATION)


def test_the_translation_has_the_same_sections_links_and_numbers():
    assert README.count("\n## ") == TRANSLATION.count("\n## ")
    links, translated = (re.findall(r"\]\(([^)]+)\)", text) for text in (README, TRANSLATION))
    assert set(links) - {"README.zh-CN.md"} == set(translated) - {"README.md"}
    assert [[numbers(cell) for cell in row[1:]] for row in table(README)] == [
        [numbers(cell) for cell in row[1:]] for row in table(TRANSLATION)
    ]


def test_every_number_of_the_front_page_is_in_the_benchmarks():
    rows = table(README)
    assert len(rows) >= 6
    measured = set(re.findall(r"\d+(?:[.,]\d+)*", BENCHMARKS))
    for row in rows:
        found = [number for cell in row[1:-1] for number in numbers(cell)]
        assert found, row
        for number in found:
            assert number in measured, f"{number} of the row {row[0]!r} is not in docs/benchmarks.md"


def test_every_number_comes_with_the_command_that_measures_it():
    for row in table(README):
        script = re.search(r"`bench/(\w+)\.py`", row[-1])
        assert script, row
        assert (ROOT / f"bench/{script[1]}.py").exists()


def test_the_picture_is_there():
    assert (ROOT / "docs/assets/report.png").stat().st_size > 50_000


def test_the_tables_are_filled_though_a_peer_was_not_installed(tmp_path):
    for name in ("README.md", "README.zh-CN.md", "bench/readme.py", "docs/benchmarks.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    page = tmp_path / "docs/benchmarks.md"
    page.write_text("".join(line for line in BENCHMARKS.splitlines(True) if not line.startswith("| robomimic")))
    subprocess.run([sys.executable, tmp_path / "bench/readme.py"], check=True)
    rows, before = table((tmp_path / "README.md").read_text()), table(README)
    assert rows[:-1] == before[:-1]
    assert "robomimic" in before[-1][2]
    assert rows[-1][2] == re.sub(r"robomimic [\d,.]+, ", "", before[-1][2])
