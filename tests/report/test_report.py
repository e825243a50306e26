"""The page as a file: what is in it, what hostile and damaged runs make of it, and what they do not."""

import ast
import json
import logging
import os
import re
import resource
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import slipstream
from slipstream import (
    ConfigurationError,
    DiskFullError,
    WriteError,
    save_rollout_compressed,
    write_comparison,
    write_report,
)
from slipstream.report.run import read_run
from slipstream.text import install_hint

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """The elements of a page as a browser would find them, and the text of each script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.words = ""
        self._inside = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._inside != "style":
            self.words += data + " "

    @property
    def sections(self):
        return [attrs["id"] for tag, attrs in self.tags if tag == "section"]

    def data(self, identifier):
        blocks = [attrs.get("id") for tag, attrs in self.tags if tag == "script"]
        return json.loads(self.scripts[blocks.index(identifier)][1])


def test_a_run_with_everything_has_every_section_and_its_numbers(whole_run):
    path = write_report(whole_run)
    page = Page(path)
    assert path == whole_run / "report.html"
    assert page.sections == ["flights", "learning", "evaluation", "time", "storage", "configuration"]
    words = " ".join(page.words.split())
    for expected in (
        "71.2 % of 512 flights reached their goal Through the field (64 maps, 1000 to 1063, 80 moving obstacles)",
        "95 % interval: 67.2 to 75.2 %",
        "Frames 49,152",
        "Iterations 12",
        "Wall time 36.0 s",
        "Checkpoint stall 3.0 ms per save, 6 saves",
        "Checkpoints packed 2.00x 48.0 MB in 24.0 MB",
        "Rollouts packed 20.00x",
        "Other evaluations (1)",
        "21.5 s",
        "update 1.5 s 150 ms 50 %",
        "checkpoints: 3 files, 3.0 kB on disk",
        "copies/b.slip 1.5 kB",
        "num_envs: 1024",
        "Recorded in the evaluation final, on map 10000.",
        "2.0 ms in the call of save, and 1.0 ms in which an optimizer waits",
    ):
        assert expected in words, expected


def test_the_page_asks_for_nothing_but_itself(whole_run):
    page = Page(write_report(whole_run))
    for tag, attrs in page.tags:
        for name in ("src", "href", "action", "poster", "data"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    policies = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    policy = str(policies[0])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy


def test_curves_evaluations_and_stalls_are_drawn_from_what_the_run_wrote(whole_run):
    page = Page(write_report(whole_run))
    charts = page.data("charts")
    drawn = {series["name"]: series for chart in charts.values() for series in chart["series"] if "x" in series}
    assert drawn["success"]["x"] == [4096 * iteration for iteration in range(2, 13)]
    assert drawn["success"]["y"][0] == 0.5
    assert drawn["Through the field"] == {
        "name": "Through the field",
        "color": "a",
        "x": [6 * 4096, 12 * 4096],
        "y": [0.7125, 0.7125],
        "low": [0.6725, 0.6725],
        "high": [0.7525, 0.7525],
    }
    assert drawn["call of save"]["y"] == [2] * 6
    assert [part["name"] for part in charts["time-parts"]["series"]] == [
        "rollout",
        "update",
        "save",
        "evaluate",
        "other",
    ]
    expected = {"features", "actor", "critic", "entropy", "in an update", "clipped", "explained variance", "return"}
    assert expected | {"learning rate", "static", "dynamic", "staleness", "ESS", "frames/s", "length"} <= set(drawn)


def test_episodes_that_reached_their_goal_are_not_drawn_as_timeouts(builder):
    run = builder()
    stats = {"train/stats.reach_goal": 0.75, "train/stats.truncated": 0.875, "train/stats.collision": 0.125}
    run.lines({"iteration": 1, **stats}, {"iteration": 2, **stats, "train/stats.truncated": 0.5})
    charts = Page(write_report(run.folder)).data("charts")
    assert list(charts) == ["learning-0"]
    drawn = {series["name"]: series["y"] for series in charts["learning-0"]["series"]}
    assert drawn == {"success": [0.75, 0.75], "collision": [0.125, 0.125], "timed out": [0.125, 0]}


def test_features_that_a_run_does_not_use_have_no_charts(builder, line):
    run = builder()
    unused = {"staleness": 0, "ess": 1.0, "behaviour_kl": 1e-9, "schedule/num_dynamic_obstacles": 0}
    unused |= {"schedule/teacher_coefficient": 0, "imitation_loss": 0}
    run.lines({**line(1), **unused}, {**line(2), **unused})
    page = Page(write_report(run.folder))
    titles = " ".join(page.words.split())
    for title in ("Staleness", "Effective sample size", "Distance from the teacher", "Weight of the teacher"):
        assert title not in titles
    names = {series["name"] for chart in page.data("charts").values() for series in chart["series"]}
    assert "static" in names
    assert not {"dynamic", "to behaviour", "ess"} & names


def test_without_scripts_charts_and_flights_are_pictures_with_a_table(whole_run):
    page = Page(write_report(whole_run))
    pictures = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "static"]
    assert len(pictures) == len(page.data("charts"))
    maps = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "map"]
    assert [attrs["aria-label"] for attrs in maps] == ["Flights of Through the field seen from above"]
    paths = [str(attrs["points"]) for tag, attrs in page.tags if tag == "polyline"]
    assert "-9.00,5.00" in paths[0].split()[0]
    assert all(re.fullmatch(r"-?\d+(\.\d+)?,-?\d+(\.\d+)?", pair) for path in paths for pair in path.split())
    assert "How the flights ended" in page.words


def test_stored_size_and_size_on_disk_are_explained_where_they_differ(whole_run):
    words = " ".join(Page(write_report(whole_run)).words.split())
    assert "Checkpoints 6 48.0 MB 24.0 MB 2.00x 1.5 kB 1 file" in words
    assert "Checkpoints: 6 saves in total, and 1 file on disk. 'Stored' is the size of all saves" in words


def test_a_metric_that_nobody_planned_for_gets_a_chart_too(builder):
    run = builder()
    run.lines({"iteration": 1, "my/own metric": 4}, {"iteration": 2, "my/own metric": 5})
    page = Page(write_report(run.folder))
    assert [series["y"] for chart in page.data("charts").values() for series in chart["series"]] == [[4, 5]]
    assert "my/own metric" in page.words


def test_points_of_lines_and_of_files_are_one_curve_and_files_have_intervals(builder, make_evaluation):
    run = builder()
    run.lines(
        {"iteration": 3, "env_frames": 3 * 4096, "eval/through/success": 0.3},
        {"iteration": 6, "env_frames": 6 * 4096, "eval/through/success": 0.71},
    )
    run.evaluation("iter_000006", make_evaluation(6))
    series = Page(write_report(run.folder)).data("charts")["learning-evaluations"]["series"]
    assert series[0]["name"] == "Through the field"
    assert series[0]["y"] == [0.3, 0.7125]
    assert series[0]["low"] == [0.3, 0.6725]


def test_an_empty_run_has_a_page_that_says_so(builder):
    run = builder()
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").touch()
    page = Page(write_report(run.folder))
    assert "Nothing has been measured yet." in page.words
    assert page.sections == []


def test_sections_without_data_are_left_out(builder, line):
    run = builder()
    run.lines({key: value for key, value in line(1).items() if not key.startswith(("perf/", "ckpt/", "rollouts/"))})
    page = Page(write_report(run.folder))
    assert page.sections == ["learning", "time", "storage"]
    assert "Checkpoint stall" not in page.words


def test_a_hundred_thousand_lines_make_a_small_page_that_says_it_was_thinned(builder):
    run = builder()
    numbers = range(1, 100_001)
    run.lines(*({"iteration": each, "env_frames": 4096 * each, "entropy": each % 7} for each in numbers))
    path = write_report(run.folder)
    page = Page(path)
    assert path.stat().st_size < 9_000_000
    entropy = next(
        series for chart in page.data("charts").values() for series in chart["series"] if series["name"] == "entropy"
    )
    assert len(entropy["x"]) == 1000
    assert (set(entropy["low"]), set(entropy["high"])) == ({0}, {6})
    assert "The run has 100,000 lines of metrics." in page.words
    assert "the means of 1,000 stretches" in page.words


def test_hostile_text_is_text_wherever_it_comes_from(builder, line, make_evaluation):
    run = builder(HOSTILE.replace("/", "_"))
    run.lines({**line(1), HOSTILE: 3, f"eval/{HOSTILE}/success": 0.5})
    document = make_evaluation(1)
    document["checkpoint"] = HOSTILE
    document["conditions"] = {"action": HOSTILE}
    for scenario in document["results"]:
        scenario |= {"scenario": HOSTILE, "title": HOSTILE, "flights": f"{HOSTILE}.slip"}
    run.evaluation("final", document)
    (run.folder / "config.yaml").write_text(f"name: {HOSTILE}\n")
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / HOSTILE.replace("/", "_")).write_bytes(b"1")
    page = Page(write_report(run.folder))
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert len([kind for kind, _ in page.scripts if kind is None]) == 2
    assert not any("alert(" in script for kind, script in page.scripts if kind is None)
    assert HOSTILE in page.words
    assert HOSTILE in {series["name"] for chart in page.data("charts").values() for series in chart["series"]}


def test_names_that_are_not_text_do_not_stop_the_page(builder, line):
    run = builder("r\udcffn")
    run.lines(line(1))
    assert "r\\udcffn" in write_report(run.folder).read_text()


def test_a_damaged_flights_file_is_named_in_the_page_and_logged_and_the_others_are_shown(builder, caplog):
    folder = builder().everything()
    file = folder / "eval" / "final_through.slip"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        page = Page(write_report(folder))
    assert "final_through.slip" in caplog.text
    assert page.sections[:2] == ["problems", "flights"]
    assert "final_through.slip" in page.words
    assert [attrs["value"] for tag, attrs in page.tags if attrs.get("name") == "scenario"] == ["0"]
    assert len(page.data("flights-0")["outcomes"]) == 5


def test_crashes_of_the_newest_rollouts_can_be_chosen_beside_recorded_flights(builder, make_evaluation):
    run = builder()
    run.evaluation("final", make_evaluation(12, flights=True))
    run.flights("through")
    run.flights("empty")
    for iteration in (5, 10, 15, 20):
        run.rollout(iteration)
    run.rollout(25, num_drones=2)
    (run.folder / "rollouts" / "rollout_000030.slip").write_bytes(b"damaged")
    found = read_run(run.folder)
    titles = [scene.title for scene in found.flights]
    # Nothing crashed in iteration 25, and the rollout of iteration 30 is damaged.
    assert titles[2:] == ["crashes of iteration 20", "crashes of iteration 15", "crashes of iteration 10"]
    assert ["rollout_000030.slip" in problem for problem in found.problems] == [True]
    page = Page(write_report(run.folder))
    assert page.data("flights-2")["outcomes"] == [2, 3]
    assert "while the rollout of iteration 20 was collected, on map 10000" in page.data("flights-2")["source"]


def test_flights_of_an_earlier_release_are_a_problem_that_says_what_to_do(builder, make_evaluation):
    run = builder()
    run.evaluation("final", make_evaluation(12, flights=True))
    run.flights("through")
    old = TensorDict({"drone": torch.zeros(1, 3, 2)}, batch_size=[1, 3])
    metadata = {"format": "slipstream.flights", "version": 1}
    save_rollout_compressed(old, run.folder / "eval" / "final_empty.slip", metadata=metadata)
    found = read_run(run.folder)
    assert [scene.name for scene in found.flights] == ["through"]
    assert "final_empty.slip: holds flights in the format of an earlier release" in found.problems[0]
    assert "slipstream eval" in found.problems[0]


@pytest.mark.parametrize(
    ("flights", "words"),
    [
        ("../../secret.slip", "expected a file in eval"),
        ("absent.slip", "absent.slip: is missing"),
        ("/etc/passwd", "expected"),
    ],
)
def test_an_evaluation_cannot_make_the_report_read_files_elsewhere(builder, make_evaluation, flights, words):
    run = builder()
    document = make_evaluation(1)
    document["results"][0]["flights"] = flights
    run.evaluation("final", document)
    found = read_run(run.folder)
    assert found.flights == ()
    assert len(found.problems) == 1
    assert words in found.problems[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not an evaluation"),
        ('{"format": "slipstream.evaluation", "version": 9}', "is of version 9, expected 2"),
        ('{"format": "slipstream.evaluation", "version": 2, "results": [3]}', "has no list of results"),
    ],
)
def test_a_damaged_evaluation_is_a_problem_and_the_others_are_shown(builder, make_evaluation, content, words):
    run = builder()
    run.evaluation("iter_000006", make_evaluation(6))
    (run.folder / "eval" / "final.json").write_text(content)
    found = read_run(run.folder)
    assert [evaluation.name for evaluation in found.evaluations] == ["iter_000006"]
    assert words in found.problems[0]
    assert "final.json: " in found.problems[0]


def test_quantities_without_a_sample_or_that_are_nonsense_are_dashes(builder, make_evaluation):
    run = builder()
    document = make_evaluation(1)
    document["results"][0] |= {"success": None, "timeout": {"mean": "x"}, "return": {"mean": 3}, "episodes": None}
    document["results"][0] |= {"static_collision": 7, "title": None}
    run.evaluation("final", document)
    scenario = read_run(run.folder).evaluations[0].scenarios[0]
    assert set(scenario.quantities) == {
        "dynamic_collision",
        "inside_share",
        "time_to_goal_s",
        "path_length_m",
        "return",
    }
    assert scenario.title == "through"
    write_report(run.folder)


def test_the_last_evaluation_is_final_or_else_the_one_of_the_highest_iteration(builder, make_evaluation):
    run = builder()
    for iteration in (100, 20):
        run.evaluation(f"iter_{iteration}", make_evaluation(iteration))
    assert read_run(run.folder).evaluations[-1].iteration == 100
    run.evaluation("again", {**make_evaluation(100), "time": 1_790_000_200.0})
    assert read_run(run.folder).evaluations[-1].name == "again"
    run.evaluation("final", make_evaluation(90))
    last = read_run(run.folder).evaluation
    assert last
    assert last.name == "final"


def test_a_pipe_in_place_of_a_file_is_a_problem_and_nobody_waits_for_it(builder):
    run = builder()
    (run.folder / "eval").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml", "eval/final.json"):
        os.mkfifo(run.folder / name)
    assert all("is a FIFO, expected a file" in problem for problem in read_run(run.folder).problems)
    assert len(read_run(run.folder).problems) == 3


def test_there_is_a_limit_to_what_one_evaluation_can_put_into_a_page(builder, make_evaluation):
    run = builder()
    document = make_evaluation(1, flights=True)
    run.evaluation("iter_000001", {**document, "results": document["results"] * 20})
    run.evaluation("iter_000002", {**document, "results": document["results"] * 100})
    run.flights("through")
    run.flights("empty")
    found = read_run(run.folder)
    assert len(found.flights) == 12
    assert any("has 200 results, expected at most 150" in problem for problem in found.problems)
    assert any("first 12 of 40 scenarios" in problem for problem in found.problems)


def test_a_link_to_a_run_is_that_run(builder, line):
    run = builder("walker")
    run.lines(line(1))
    link = run.folder.parent / "last"
    link.symlink_to("walker")
    assert read_run(link).name == "walker"
    assert write_report(link).resolve() == run.folder / "report.html"


def test_a_missing_folder_a_file_and_a_folder_of_other_things_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such run folder"):
        write_report(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file: is a file, expected a run folder"):
        write_report(tmp_path / "file")
    with pytest.raises(ConfigurationError, match=r"is not a run folder, expected at least one of metrics\.jsonl, "):
        write_report(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_report_that_cannot_be_written_leaves_the_older_one_and_no_litter(builder, line):
    run = builder()
    run.lines(line(1))
    (run.folder / "report.html").write_text("the older report")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(DiskFullError, match="cannot write"):
            write_report(run.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (run.folder / "report.html").read_text() == "the older report"
    assert sorted(os.listdir(run.folder)) == ["metrics.jsonl", "report.html"]


def test_an_output_that_is_a_folder_is_a_write_error(builder, line, tmp_path):
    run = builder()
    run.lines(line(1))
    with pytest.raises(WriteError, match="cannot write"):
        write_report(run.folder, tmp_path)


def test_without_plotly_it_says_what_to_install(builder, line, monkeypatch):
    run = builder()
    run.lines(line(1))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigurationError, match=re.escape(install_hint("train"))):
        write_report(run.folder)
    assert not (run.folder / "report.html").exists()


def test_the_report_reads_files_and_imports_nothing_that_lives():
    for path in (Path(slipstream.__file__).parent / "report").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not re.match(r"slipstream\.(train|nav|rl|collect)\b", node.module), path


def with_references(document):
    """Return an evaluation in which the planner and the shielded policy flew the first scenario too."""
    first = document["results"][0]
    rates = {"policy_shield": 0.9875, "planner": 0.8625}
    others = []
    for candidate, mean in rates.items():
        success = {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}
        others.append({**first, "candidate": candidate, "title": f"Through: {candidate}", "success": success})
    return {**document, "results": [*others, *document["results"]]}


def test_one_map_and_one_flight_are_singular(builder, make_evaluation):
    document = make_evaluation(6)
    document["results"][0] |= {"episodes": 1, "map_seeds": [1000], "num_dynamic_obstacles": 1}
    run = builder()
    run.evaluation("final", document)
    words = " ".join(Page(write_report(run.folder)).words.split())
    assert "of 1 flight reached their goal Through the field (map 1000, 1 moving obstacle)" in words


def test_the_headline_is_the_policy_through_the_field_next_to_shield_and_planner(builder, make_evaluation):
    run = builder()
    run.evaluation("final", with_references(make_evaluation(6)))
    words = " ".join(Page(write_report(run.folder)).words.split())
    assert "of 512 flights reached their goal Through the field (64 maps, 1000 to 1063, 80 moving obstacles)" in words
    assert "Policy with shield: 98.8 % (97.8 to 99.8 %)" in words
    assert "Planner, without learning: 86.2 % (85.2 to 87.2 %)" in words


def test_curves_show_the_policy_alone_under_the_conditions_of_its_training(builder, make_evaluation):
    run = builder()
    run.evaluation("final", with_references(make_evaluation(6)))
    faithful = make_evaluation(8)
    faithful["conditions"]["faithful"] = True
    run.evaluation("evaluation_faithful", faithful)
    noisy = make_evaluation(9)
    for result in noisy["results"]:
        result["sensors"] = {"dropout": 0.5}
    run.evaluation("evaluation_dropout", noisy)
    series = Page(write_report(run.folder)).data("charts")["learning-evaluations"]["series"]
    assert [(one["name"], one["x"]) for one in series] == [
        ("Through the field", [6 * 4096]),
        ("Empty field", [6 * 4096]),
    ]


def test_an_evaluation_under_other_conditions_is_listed_with_them_and_not_the_headline(builder, make_evaluation):
    run = builder()
    run.evaluation("iter_000006", make_evaluation(6))
    changed = make_evaluation(9)
    changed["conditions"] |= {"faithful": True, "overrides": ["env.num_obstacles=100"]}
    run.evaluation("evaluation_faithful", changed)
    found = read_run(run.folder)
    assert found.evaluation is not None
    assert found.evaluation.name == "iter_000006"
    words = " ".join(Page(write_report(run.folder)).words.split())
    assert "evaluation_faithful NavRL's dynamics, env.num_obstacles=100" in words


def test_an_evaluation_without_flights_through_the_field_is_not_the_headline(builder, make_evaluation):
    run = builder()
    run.evaluation("iter_000003", make_evaluation(3))
    other = make_evaluation(9)
    other["results"] = [one for one in other["results"] if one["scenario"] == "line"]
    run.evaluation("evaluation", other)
    found = read_run(run.folder)
    assert [each.name for each in found.evaluations] == ["iter_000003", "evaluation"]
    assert found.evaluation is not None
    assert found.evaluation.name == "iter_000003"


def test_the_flights_shown_first_are_the_policys_through_the_field(builder, make_evaluation):
    run = builder()
    document = make_evaluation(6, flights=True)
    document["results"].reverse()
    run.evaluation("final", document)
    run.flights("through")
    run.flights("empty")
    page = Page(write_report(run.folder))
    radios = [attrs for tag, attrs in page.tags if tag == "input" and attrs.get("name") == "scenario"]
    assert ["checked" in attrs for attrs in radios] == [False, True]


def test_runs_are_compared_by_results_settings_and_curves(builder, line, make_evaluation):
    folders = []
    for name, gamma, success in (("one", 0.97, 0.5), ("two", 0.95, 0.75)):
        run = builder(name)
        run.lines(line(1), line(2))
        document = make_evaluation(2)
        document["results"][0]["success"] = {"mean": success, "low": success - 0.1, "high": success + 0.1}
        run.evaluation("final", document)
        config = f"name: {name}\nseed: 7\nalgo:\n  gamma: {gamma}\n  layers: [1, {len(name)}]\n"
        if name == "two":
            config += "extra: true\n"
        (run.folder / "config.yaml").write_text(config)
        folders.append(run.folder)
    path = write_comparison(folders)
    assert path == folders[0].parent / "comparison.html"
    page = Page(path)
    assert page.sections == ["results", "settings", "learning"]
    words = " ".join(page.words.split())
    assert "Success 50 % 40.0 to 60.0 % 75 % 65.0 to 85.0 %" in words
    assert "algo.gamma 0.97 0.95" in words
    assert "extra \N{EN DASH} True" in words
    assert "seed 7" not in words
    charts = page.data("charts")
    assert [(one["name"], one["color"], one["y"]) for one in charts["evaluations-compared"]["series"]] == [
        ("one", "a", [0.5]),
        ("two", "b", [0.75]),
    ]
    assert [one["name"] for one in charts["compared-entropy"]["series"]] == ["one", "two"]
    assert charts["compared-entropy"]["x"] == "frames"


def test_a_run_that_does_not_count_frames_is_compared_by_iterations(builder, line):
    with_frames = builder("one")
    with_frames.lines(line(1), line(2))
    without = builder("two")
    without.lines({"iteration": 1, "entropy": 2.0}, {"iteration": 2, "entropy": 1.0})
    page = Page(write_comparison([with_frames.folder, without.folder]))
    chart = page.data("charts")["compared-entropy"]
    assert chart["x"] == "iteration"
    assert [series["x"] for series in chart["series"]] == [[1, 2], [1, 2]]
    assert [len(chart["series"]) for key, chart in page.data("charts").items() if key == "compared-actor_loss"] == [1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[" * 100_000, "is not YAML"),
        ("- 1\n", "contains no settings"),
        ("a: &a\n  b: *a\n", "has more than 2000 settings"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: !!python/object/apply:os.system [true]\n", "is not YAML"),
        ("a: " + "1" * 9000 + "\n", "is not YAML"),
    ],
)
def test_settings_of_a_hostile_run_are_a_problem_and_the_curves_are_shown(builder, line, config, words):
    sound = builder("one")
    sound.lines(line(1))
    (sound.folder / "config.yaml").write_text("seed: 1\n")
    hostile = builder("two")
    hostile.lines(line(1))
    (hostile.folder / "config.yaml").write_text(config)
    page = Page(write_comparison([sound.folder, hostile.folder]))
    assert page.sections == ["problems", "results", "settings", "learning"]
    assert f"{hostile.folder / 'config.yaml'}: {words}" in page.words


def test_text_of_compared_runs_is_text(builder, line):
    folders = []
    for name in ("one", "two"):
        run = builder(HOSTILE.replace("/", "_") + name)
        run.lines({**line(1), HOSTILE: 3})
        (run.folder / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE + name}))
        folders.append(run.folder)
    page = Page(write_comparison(folders))
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any("alert(" in script for kind, script in page.scripts if kind is None)
    assert HOSTILE + "one" in page.words


def test_one_run_nine_runs_and_a_run_twice_are_refused(builder, line):
    run = builder()
    run.lines(line(1))
    for folders in ([run.folder], [run.folder] * 9):
        with pytest.raises(ConfigurationError, match=f"{len(folders)} runs were given, expected 2 to 8"):
            write_comparison(folders)
    with pytest.raises(ConfigurationError, match="was given twice"):
        write_comparison([run.folder, run.folder / ".." / run.folder.name])
