"""What the documentation shows is so: code compiles, names exist, links lead somewhere, options are real."""

import ast
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import slipstream
from slipstream.cli import app
from slipstream.codecs import CODECS, Raw, codec_from_header
from slipstream.errors import CodecError, SlipstreamError
from slipstream.train.settings import compose_settings
from tests.datasets.conftest import write_a, write_aloha, write_d4rl, write_minari, write_robomimic

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")
INLINE = re.compile(r"`(slipstream [^`]+)`")


class Block(NamedTuple):
    language: str
    code: str


def blocks(page: Path, language: str) -> list[str]:
    found = [Block(*match) for match in FENCE.findall(page.read_text())]
    return [block.code for block in found if block.language == language]


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the Python of a page from top to bottom, in a folder of its own; returns what it left."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": page.stem}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)
    return names


def test_there_is_something_to_test():
    assert len(PAGES) > 25
    assert sum(len(blocks(page, "python")) for page in PAGES) > 30
    assert len(LINES) > 60


def test_python_compiles():
    offenders = []
    for page in PAGES:
        for code in blocks(page, "python"):
            try:
                compile(code, str(page), "exec")
            except SyntaxError as error:
                offenders.append(f"{page.relative_to(ROOT)}: {error}")
    assert not offenders, "\n".join(offenders)


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield modules of ours and the names that code takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "slipstream":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "slipstream":
            yield "slipstream", node.attr


def test_what_is_imported_from_here_is_there():
    offenders = []
    for page in PAGES:
        for code in blocks(page, "python"):
            for module, name in imported_names(ast.parse(code)):
                if not hasattr(importlib.import_module(module), name):
                    offenders.append(f"{page.relative_to(ROOT)}: {module} has no {name}")
    assert not offenders, "\n".join(offenders)


def anchors(page: Path) -> set[str]:
    """Return what headings of a page can be linked to, as Python-Markdown names them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def find_broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page to files or headings of the repository that do not exist."""
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{page.relative_to(ROOT)}: {link}"


def test_links_lead_somewhere():
    broken = [link for page in PAGES for link in find_broken_links(page)]
    assert not broken, "\n".join(broken)


def console_lines(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield the commands that a page shows, each side of ``a|b`` by itself, and whether they are there to be typed."""
    typed = [line[2:] for code in blocks(page, "console") for line in code.splitlines() if line.startswith("$ ")]
    mentioned = [" ".join(span.split()) for span in INLINE.findall(prose(page))]
    for line, is_typed in [*((line, True) for line in typed), *((line, False) for line in mentioned)]:
        words = shlex.split(line, comments=True)
        ends = [number for number, word in enumerate(words) if word in ("&&", "||", "|", ">")]
        words = words[: min(ends, default=len(words))]
        if words[:1] == ["slipstream"]:
            choices = list(itertools.product(*(word.split("|") for word in words)))
            yield from ((shlex.join(choice), is_typed and len(choices) == 1) for choice in choices)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that words name, and what is left of them."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no {words[0]!r}, there are {', '.join(command.commands)}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


USAGE_ERROR: Any = typer.BadParameter.__base__
LINES = sorted({line for page in PAGES for line in console_lines(page)})


def check_line(line: str, *, is_typed: bool) -> None:
    """Raise unless a command line names a command and options that exist, and parses if it is there to be typed."""
    words = shlex.split(line)[1:]
    if words[0].isupper():  # slipstream COMMAND --help
        return
    command, rest = find_command(words)
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - {*options, "--help"}
    assert not unknown, f"there is no {', '.join(unknown)}"
    if is_typed and not hasattr(command, "commands"):
        context = command.make_context(command.name, list(rest))  # parses, and runs nothing
        overrides = context.params.get("overrides") or []
        if command.name == "eval":  # where this is not a setting
            overrides = [override for override in overrides if not override.startswith("devices=")]
        if overrides and not any(override.startswith("resume=") for override in overrides):
            compose_settings(overrides)


def test_commands_and_options_that_are_shown_exist():
    offenders = []
    for line, is_typed in LINES:
        try:
            check_line(line, is_typed=is_typed)
        except (AssertionError, SlipstreamError, USAGE_ERROR) as error:
            offenders.append(f"{line}: {error}")
    assert not offenders, "\n".join(offenders)


def test_the_next_steps_that_the_demo_prints_are_commands_that_exist():
    lines = re.findall(r'echo "  (slipstream [^"#]+?) +#', (ROOT / "Makefile").read_text())
    assert len(lines) >= 3
    for line in lines:
        check_line(line, is_typed=True)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in sorted(ROOT.glob("docs/**/*.md"))]


def test_every_public_name_is_in_the_reference():
    documented = re.findall(r"^::: slipstream\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    values = [getattr(slipstream, name) for name in dir(slipstream)]
    public = {f"{value.__module__}.{value.__name__}".removeprefix("slipstream.") for value in values}
    errors = {f"errors.{name}" for name in importlib.import_module("slipstream.errors").__all__}
    assert public - errors - set(documented) == set()
    assert "errors" in documented


def test_the_tests_that_guarantees_name_exist():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)`", page)
    assert len(named) > 20
    assert [name for name in named if not any(path.endswith(f"/{name}") or path == name for path in files)] == []
    functions = re.findall(r"`(test_\w+)`", page)
    assert [name for name in functions if not any(f"def {name}(" in text for text in files.values())] == []


def test_the_quickstart_runs(tmp_path, monkeypatch):
    names = run_page(ROOT / "docs" / "quickstart.md", tmp_path, monkeypatch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "demos.hdf5", "rollouts"]
    assert names["restored"].step == 20


def test_the_page_about_the_shield_runs(tmp_path, monkeypatch):
    names = run_page(ROOT / "docs" / "guides" / "shield.md", tmp_path, monkeypatch)
    assert names["outcome"].observation.state.shape == (8, 8)
    assert not names["terminated"].any()


def test_the_guide_about_recorded_datasets_runs(tmp_path, monkeypatch):
    write_a(tmp_path / "demos.hdf5", ends=(9, 19))
    write_robomimic(tmp_path / "image.hdf5", (20, 30, 25))
    with h5py.File(write_robomimic(tmp_path / "low_dim.hdf5"), "a") as file:
        for demo in file["data"].values():
            for name in ("agentview_image", "robot0_eye_in_hand_image"):
                del demo["obs"][name], demo["next_obs"][name]
    (tmp_path / "aloha").mkdir()
    for number in range(3):
        write_aloha(tmp_path / "aloha" / f"episode_{number}.hdf5", jpeg=True)
    (tmp_path / "minari" / "data").mkdir(parents=True)
    write_minari(tmp_path / "minari" / "data" / "main_data.hdf5")
    write_d4rl(tmp_path / "hopper.hdf5", steps=120)
    names = run_page(ROOT / "docs" / "guides" / "offline-datasets.md", tmp_path, monkeypatch)
    assert len(names["observation"]) == 100
    assert names["left"].shape == (64, 3, 224, 224)


def test_the_page_about_windows_runs(tmp_path, monkeypatch):
    names = run_page(ROOT / "docs" / "guides" / "windows.md", tmp_path, monkeypatch)
    assert len(names["data"]) == sum(range(30, 42))
    assert names["live"].shape == (1, 256)


def test_the_page_about_object_stores_runs(tmp_path, monkeypatch):
    names = run_page(ROOT / "docs" / "guides" / "object-stores.md", tmp_path, monkeypatch)
    assert names["manager"].path(100).exists()
    assert names["manager"].wait_uploaded()


def test_the_page_about_plans_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    names = run_page(ROOT / "docs" / "guides" / "which-plan.md", tmp_path, monkeypatch)
    decision = names["advice"].decision
    assert (decision.plan, decision.fits, decision.packing_pays, decision.packed_fits) == ("C", False, True, True)
    assert (decision.costs_too_much, decision.num_envs_that_fit, decision.save_interval) == (False, 43, 100)


def test_the_transport_on_the_page_about_many_machines_loses_and_repeats_nothing(capsys):
    [program] = [
        code for code in blocks(ROOT / "docs" / "guides" / "many-machines.md", "python") if "OrderLedger" in code
    ]
    names: dict[str, Any] = {"__name__": "many-machines"}
    exec(compile(program, "many-machines.md", "exec"), names)
    # The page says what is printed.
    assert f"print(batch.batch_size, ledger.redone)  # {capsys.readouterr().out}" in program
    assert names["ledger"].num_rounds == 3


def test_the_programs_with_replay_on_the_page_for_sb3_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs = [code for code in blocks(ROOT / "docs" / "guides" / "for-sb3.md", "python") if "ReplayBuffer" in code]
    names: dict[str, Any] = {"__name__": "for-sb3"}
    for code in programs:
        exec(compile(code, "for-sb3.md", "exec"), names)
        if "load_replay_buffer" in code:
            # Four environments; the second half was added to what was loaded.
            assert names["model"].num_timesteps == 4 * names["model"].replay_buffer.size() >= 1_600
    assert len(programs) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.zip", "replay.pkl"]


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """What the page about extending leaves: a codec, a described dataset, a logged run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODECS, "counting", Raw)  # so that what the page registers is taken back
        yield run_page(ROOT / "docs" / "extending.md", tmp_path_factory.mktemp("extending"), patch)


def test_the_page_about_extending_runs(extended):
    assert extended["entry"].stored_bytes < extended["entry"].nbytes // 1000
    assert (extended["found"].num_episodes, extended["found"].num_transitions) == (3, 60)
    assert len(Path("run.csv").read_text().splitlines()) == 3


@settings(max_examples=50, deadline=None)
@given(
    array=hnp.arrays(
        st.sampled_from(["u1", "i2", "f4", "i8", "c16", "?"]), hnp.array_shapes(min_dims=0, min_side=0, max_side=6)
    )
)
def test_the_codec_of_that_page_gives_back_every_bit_and_refuses_the_rest(extended, array):
    codec = extended["Counting"]()
    payload = codec.encode(array)
    decoded = np.empty_like(array)
    codec.decode(payload, decoded)
    assert decoded.tobytes() == array.tobytes()
    assert codec_from_header(codec.to_header()) == codec
    for other, shape in ((payload[:-1], array.shape), (payload, (*array.shape, 2))):
        if array.size:  # of nothing there is nothing to lose
            with pytest.raises(CodecError):
                codec.decode(other, np.empty(shape, array.dtype))


def test_that_codec_takes_arrays_of_any_layout(extended):
    array = np.arange(24, dtype=np.uint16).reshape(4, 6)[::-1, ::2]
    codec = extended["Counting"](level=9)
    decoded = np.empty(array.shape, array.dtype)
    extended["Counting"]().decode(codec.encode(array), decoded)
    assert (decoded == array).all()
