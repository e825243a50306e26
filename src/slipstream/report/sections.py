"""The sections of the page below its headline; each is None where the run has nothing for it."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.report.charts import Chart, learning_charts, stall_chart, time_charts, time_parts
from slipstream.report.counters import Stalls, find_stalls, total
from slipstream.report.headline import interval_bar, say_stall
from slipstream.report.markup import Html, element, join, section, table
from slipstream.report.run import Files, Run
from slipstream.report.wording import say_interval
from slipstream.run.evaluation import Evaluation, Interval, Scenario
from slipstream.run.metrics import MAX_POINTS, Metrics
from slipstream.text import format_bytes, format_count, format_percent, format_ratio, format_seconds, plural

NOTHING = "\N{EN DASH}"
MAX_LISTED = 30
_RATE_TITLES = (
    ("success", "Success"),
    ("static_collision", "Hit a static obstacle"),
    ("dynamic_collision", "Hit a moving one"),
    ("out_of_bounds", "Out of bounds"),
    ("timeout", "Timed out"),
)
_AMOUNT_TITLES = (("time_to_goal_s", "Time to goal", " s"), ("path_length_m", "Path", " m"), ("return", "Return", ""))
_INSIDE = ("inside_share", "Time inside the field")


def problems(run: Run) -> Html | None:
    """Return what could not be read."""
    if not run.problems:
        return None
    lines = element("ul", *(element("li", problem) for problem in run.problems))
    return section("problems", "What could not be read", lines)


def learning(run: Run) -> tuple[Html, list[Chart]] | None:
    """Return the curves."""
    charts = learning_charts(run.metrics, run.evaluations)
    if not charts:
        return None
    thinned = run.metrics.num_lines > 2 * MAX_POINTS
    note = (
        f"The run has {format_count(run.metrics.num_lines)} lines of metrics. Curves of more than {2 * MAX_POINTS:,} "
        f"points, here and below, show the means of {MAX_POINTS:,} stretches or fewer; the band is from the least to "
        f"the greatest value in each."
    )
    content = [element("p", note, class_="note")] if thinned else []
    return section("learning", "Learning curves", *content, grid(charts)), charts


def grid(charts: Iterable[Chart]) -> Html:
    """Return places for charts, which the page's script fills."""
    return element("div", *(_figure(chart) for chart in charts), class_="charts")


def _figure(chart: Chart) -> Html:
    place = element(
        "div", id=chart.identifier, class_=f"plot {chart.data['kind']}", role="img", aria_label=chart.summary
    )
    caption = element("figcaption", chart.title)
    return element("figure", caption, place, class_="chart wide" if chart.wide else "chart")


def evaluations(run: Run) -> Html | None:
    """Return the table of the last evaluation, and the others to open."""
    last = run.evaluation
    if last is None:
        return None
    content = [element("p", _about(last), class_="note"), _evaluation_table(last)]
    if len(run.evaluations) > 1:
        others = [each for each in run.evaluations[::-1] if each is not last]
        earlier = [(each, scenario) for each in others for scenario in each.scenarios]
        header = ("Evaluation", "Iteration", "Scenario", *(title for _, title in _RATE_TITLES))
        rows = [
            (_named(each), _count(each.iteration), scenario.title, *(_rate(scenario, key) for key, _ in _RATE_TITLES))
            for each, scenario in earlier
        ]
        summary = element("summary", f"Other evaluations ({len(others)})")
        content.append(element("details", summary, table("Other evaluations", header, rows)))
    return section("evaluation", "Evaluation", *content)


def _named(evaluation: Evaluation) -> Html:
    return join([evaluation.name, element("small", ", ".join(evaluation.changes))])


def _about(evaluation: Evaluation) -> str:
    words = [f"Evaluation {evaluation.name}"]
    if evaluation.iteration is not None:
        words.append(f"of iteration {format_count(evaluation.iteration)}")
    if evaluation.env_frames is not None:
        words.append(f"after {format_count(evaluation.env_frames)} frames")
    if evaluation.action is not None:
        words.append(f"with the action {evaluation.action!r}")
    if evaluation.changes:
        words.append(f"under other conditions ({', '.join(evaluation.changes)})")
    return f"{' '.join(words)}. Means with their 95 % intervals, which account for flights that share a map."


def _evaluation_table(evaluation: Evaluation) -> Html:
    shares = (*_RATE_TITLES, _INSIDE)
    titles = (*(title for _, title in shares), *(title for _, title, _ in _AMOUNT_TITLES))
    rows = (
        (
            _described(scenario),
            _count(scenario.episodes),
            *(_rate(scenario, key) for key, _ in shares),
            *(_amount(scenario.quantities.get(key), unit) for key, _, unit in _AMOUNT_TITLES),
        )
        for scenario in evaluation.scenarios
    )
    return table(f"Evaluation {evaluation.name}", ("Scenario", "Flights", *titles), rows)


def _described(scenario: Scenario) -> Html:
    facts = scenario.facts
    names = (("num_static_obstacles", "static"), ("num_dynamic_obstacles", "moving"))
    words = [f"{format_count(facts[key])} {name}" for key, name in names if facts.get(key)]
    if "num_maps" in facts:
        words.append(plural(int(facts["num_maps"]), "map"))
    elif "map_seed" in facts:
        words.append(f"map {facts['map_seed']:.0f}")
    return join([scenario.title, element("small", ", ".join(words))])


def _count(number: float | None) -> str:
    return NOTHING if number is None else format_count(number)


def _rate(scenario: Scenario, key: str) -> Html | str:
    quantity = scenario.quantities.get(key)
    if quantity is None:
        return NOTHING
    bar = interval_bar(quantity) if key == "success" else ""
    return join([format_percent(quantity.mean), element("small", say_interval(quantity, percent=True) or ""), bar])


def _amount(quantity: Interval | None, unit: str) -> Html | str:
    if quantity is None:
        return NOTHING
    return join([f"{quantity.mean:,.1f}{unit}", element("small", say_interval(quantity) or "")])


def time(run: Run) -> tuple[Html, list[Chart]] | None:
    """Return where time went."""
    charts = time_charts(run.metrics)
    if not charts:
        return None
    parts = time_parts(run.metrics)
    content: list[Html] = []
    if parts:
        content.append(_time_table(run.metrics))
    return section("time", "Where time went", grid(charts), *content), charts


def _time_table(metrics: Metrics) -> Html:
    parts = time_parts(metrics)
    whole = metrics.last("perf/iteration_mean")
    spread = metrics.last("perf/iteration_std")
    together = sum(mean for _, mean, _ in parts)
    rows = [(name, *_timing(mean, std), _share(mean, whole)) for name, mean, std in parts]
    if whole is not None:
        rows.append(("iteration", *_timing(whole, spread), ""))
    note = "Means and standard deviations at the end of the run, over the last 100 times that each part ran."
    if whole is not None and together > 1.02 * whole:
        note += " These are not the same iterations for all parts, so that their sum is longer than an iteration."
    header = ("Part", "Mean", "± std", "Share")
    return join([element("p", note, class_="note"), table("Parts of an iteration", header, rows)])


def _timing(mean: float, std: float | None) -> tuple[str, str]:
    return format_seconds(mean), NOTHING if std is None else format_seconds(std)


def _share(part: float, whole: float | None) -> str:
    return format_percent(part / whole) if whole else NOTHING


def storage(run: Run) -> tuple[Html, list[Chart]] | None:
    """Return what storage saved, and what it cost."""
    metrics = run.metrics
    rows = [row for row in (_checkpoints(metrics), _rollouts(metrics), _memory(metrics)) if row is not None]
    content, charts = [], []
    if rows:
        header = ("", "Count", "Raw", "Stored", "Ratio", "Loop waited, each", "Background, each")
        content.append(table("What was packed", header, rows))
    stalls = find_stalls(metrics)
    if stalls is not None:
        content.append(element("p", _about_stalls(stalls, metrics), class_="note"))
        chart = stall_chart(stalls, metrics.x[1])
        charts = [chart] if chart is not None else []
        content.append(grid(charts))
    content += [_files(part, files) for part, files in run.files.items() if files.sizes]
    return (section("storage", "What storage saved", *content), charts) if content else None


def _about_stalls(stalls: Stalls, metrics: Metrics) -> str:
    call_s = stalls.call_s / stalls.num_saves
    barrier_s = stalls.barrier_s / stalls.num_saves
    words = (
        f"A checkpoint holds training up for {say_stall(stalls)} on average: {format_seconds(call_s)} in the call of "
        f"save, and {format_seconds(barrier_s)} in which an optimizer waits for the rest of the snapshot."
    )
    resumes = int(metrics.starts.sum()) - 1
    if resumes > 0:
        words += f" Counters begin again with each of the {resumes + 1} processes of this run; all are counted."
    failed = total(metrics, "ckpt/failed_count")
    return words + (f" {format_count(failed)} saves failed." if failed else "")


def _packed(
    metrics: Metrics, name: str, keys: tuple[str, str, str], times: tuple[float | None, float | None]
) -> tuple[str, ...] | None:
    count, raw, stored = (total(metrics, key) for key in keys)
    if not count:
        return None
    sizes = (NOTHING if size is None else format_bytes(size) for size in (raw, stored))
    ratio = format_ratio(raw, stored) if raw is not None and stored is not None else NOTHING
    each = (NOTHING if seconds is None else format_seconds(seconds / count) for seconds in times)
    return (name, format_count(count), *sizes, ratio, *each)


def _checkpoints(metrics: Metrics) -> tuple[str, ...] | None:
    call, barrier = total(metrics, "ckpt/total_call_s"), total(metrics, "ckpt/total_barrier_s")
    waited = None if call is None else call + (barrier or 0.0)
    keys = ("ckpt/save_count", "ckpt/total_saved_bytes", "ckpt/total_compressed_bytes")
    return _packed(metrics, "Checkpoints", keys, (waited, total(metrics, "ckpt/total_write_s")))


def _rollouts(metrics: Metrics) -> tuple[str, ...] | None:
    keys = ("rollouts/save_count", "rollouts/raw_bytes", "rollouts/stored_bytes")
    times = (total(metrics, "rollouts/call_s"), total(metrics, "rollouts/write_s"))
    return _packed(metrics, "Rollouts on disk", keys, times)


def _memory(metrics: Metrics) -> tuple[str, ...] | None:
    keys = ("memory/batch_count", "memory/raw_bytes", "memory/packed_bytes")
    return _packed(metrics, "Batches in memory (plan C)", keys, (total(metrics, "memory/pack_s"), None))


def _files(part: str, files: Files) -> Html:
    sizes = files.sizes
    newest = list(sizes.items())[-MAX_LISTED:]
    rows = [(name, format_bytes(size)) for name, size in newest]
    left = f"; the last {MAX_LISTED} by name" if len(sizes) > MAX_LISTED else ""
    summary = f"{part}: {format_count(len(sizes))} files, {format_bytes(files.disk_bytes)} on disk{left}"
    return element("details", element("summary", summary), table(f"Files in {part}", ("File", "Size"), rows))


def configuration(run: Run) -> Html | None:
    """Return the configuration as it is in its file."""
    if not run.config:
        return None
    opened = element("details", element("summary", "config.yaml"), element("pre", run.config, tabindex="0"))
    return section("configuration", "Configuration", opened)
