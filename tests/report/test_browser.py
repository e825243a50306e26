"""The page in a real browser: it renders, it is silent, it asks nobody, and the flights play."""

from pathlib import Path

import pytest

from slipstream import write_comparison, write_report
from tests.report.conftest import flights, save_flights

PIXELS = """(() => {
  const stage = document.getElementById('stage');
  const copy = new OffscreenCanvas(stage.width, stage.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(stage, 0, 0);
  const data = copy.getImageData(0, 0, stage.width, stage.height).data;
  let sum = 0; const colors = new Set();
  for (let at = 0; at < data.length; at += 4) {
    const color = data[at] << 16 | data[at + 1] << 8 | data[at + 2];
    colors.add(color); sum = (sum * 31 + color) % 4294967291;
  }
  return [sum, colors.size];
})()"""
SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
LEGEND = "[...document.querySelectorAll('#legend li')].map(item => [...item.children].map(part => part.textContent))"
TRACES = """Object.entries(JSON.parse(document.getElementById('charts').textContent)).map(([name, chart]) => {
  const place = document.getElementById(name);
  const lines = place.querySelectorAll('.scatterlayer .trace path.js-line, .scatterlayer .trace path.point');
  const bars = place.querySelectorAll('.barlayer .trace path');
  return [name, chart.series.length, place.data.length, lines.length + bars.length, place.clientHeight];
})"""
SET = """(() => {{
  const control = document.getElementById('{name}');
  control.value = '{value}';
  control.dispatchEvent(new Event('{event}'));
}})()"""
WHERE = """(() => {{
  const box = document.getElementById('stage').getBoundingClientRect(), span = 2 * (10 + 1.2);
  return [box.left + box.width * ({x} / span + .5), box.top + box.height * (.5 - {y} / span)];
}})()"""
UNNAMED = """[...document.querySelectorAll('button, input, select, #stage, [role=img], [role=region]')].filter((one) =>
  !one.getAttribute('aria-label') && !one.textContent.trim() && !(one.labels && one.labels.length)).length"""
HEADED = """[...document.querySelectorAll('table')].every((one) =>
  one.caption && one.tHead && one.tBodies[0].rows[0].querySelector('th[scope=row]'))"""


@pytest.fixture(scope="module")
def page(whole_run) -> Path:
    return write_report(whole_run)


@pytest.fixture
def calm(chromium, flights_only):
    """A browser with a page of flights, in which nothing moves by itself."""
    chromium.open(write_report(flights_only), prefers_reduced_motion="reduce")
    return chromium


@pytest.fixture
def whole(chromium, page):
    """A browser with a page that has everything."""
    chromium.open(page, prefers_reduced_motion="reduce")
    chromium.wait_until("document.documentElement.dataset.charts === 'drawn'")
    return chromium


def clock(browser) -> float:
    return float(browser.evaluate("document.getElementById('clock').textContent").split(" ")[0])


def counts(browser) -> dict[str, int]:
    return {name: int(number) for _, name, number in browser.evaluate(LEGEND) if number != "0"}


def pixels(browser) -> tuple[int, int]:
    browser.evaluate(SETTLED)
    total, colors = browser.evaluate(PIXELS)
    return total, colors


def scrub(browser, time_s: float) -> None:
    browser.evaluate(SET.format(name="time", value=time_s, event="input"))
    browser.evaluate(SETTLED)


def click(browser, identifier: str) -> None:
    browser.evaluate(f"document.getElementById('{identifier}').click()")
    browser.evaluate(SETTLED)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_loads_without_a_word_or_a_request_and_fits_the_screen(chromium, page, scheme, width):
    chromium.open(page, width, prefers_color_scheme=scheme)
    chromium.wait_until("document.documentElement.dataset.charts === 'drawn'")
    assert chromium.complaints() == []
    asked = chromium.requests()
    assert asked
    assert all(url.startswith(("file://", "data:")) for url in asked)
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    dark = chromium.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(12, 17, 23)"
    assert dark == (scheme == "dark")


def test_every_chart_has_drawn_the_traces_that_it_has_data_for(whole):
    drawn = whole.evaluate(TRACES)
    assert len(drawn) >= 16
    for name, series, traces, marks, height in drawn:
        assert series == traces, name
        assert marks >= series, name
        assert height > 50, name


def test_the_flights_play_by_themselves_and_pause(chromium, page):
    chromium.open(page)
    before = pixels(chromium)
    assert before[1] > 50
    start = clock(chromium)
    chromium.wait_until(f"parseFloat(document.getElementById('clock').textContent) > {start + 0.3}")
    assert pixels(chromium)[0] != before[0]
    click(chromium, "play")
    assert chromium.evaluate("document.getElementById('play').textContent") == "Play"
    paused, still = clock(chromium), pixels(chromium)
    chromium.evaluate("new Promise(done => setTimeout(() => done(true), 300))")
    assert clock(chromium) == paused
    assert pixels(chromium) == still
    click(chromium, "play")
    chromium.wait_until(f"parseFloat(document.getElementById('clock').textContent) > {paused + 0.3}")
    assert chromium.complaints() == []


def test_whoever_wants_less_motion_presses_play_first(calm):
    assert calm.evaluate("document.getElementById('play').textContent") == "Play"
    assert clock(calm) == 0.0
    assert pixels(calm)[1] > 50


def test_the_scrubber_goes_to_a_moment_and_outcomes_are_those_of_that_moment(calm):
    assert counts(calm) == {"flying": 6}
    first = pixels(calm)
    scrub(calm, 4.9)
    assert clock(calm) == 4.9
    assert counts(calm) == {"flying": 4, "out of bounds": 1, "timed out": 1}
    assert pixels(calm) != first
    scrub(calm, 6.0)
    assert counts(calm) == {
        "flying": 1,
        "reached the goal": 1,
        "hit a static obstacle": 1,
        "hit a moving obstacle": 1,
        "out of bounds": 1,
        "timed out": 1,
    }
    assert calm.evaluate("document.getElementById('play').textContent") == "Replay"


def test_flights_stop_at_their_end_and_can_be_played_again(calm):
    scrub(calm, 5.9)
    click(calm, "play")
    calm.wait_until("document.getElementById('play').textContent === 'Replay'")
    assert clock(calm) == 6.0
    click(calm, "play")
    calm.wait_until("parseFloat(document.getElementById('clock').textContent) < 5")


def test_another_drone_and_another_scenario_can_be_chosen(calm):
    scrub(calm, 3.0)
    before = pixels(calm)
    assert calm.evaluate("document.getElementById('drone').value") == "1"
    calm.evaluate(SET.format(name="drone", value=4, event="change"))
    assert pixels(calm) != before
    scrub(calm, 6.0)
    assert "out of bounds" in calm.evaluate("document.getElementById('facts').textContent")
    calm.evaluate("document.querySelector('input[name=scenario][value=\"1\"]').click()")
    calm.evaluate(SETTLED)
    assert calm.evaluate("document.getElementById('drone').options.length") == 5
    assert clock(calm) == 0.0
    assert sum(counts(calm).values()) == 5
    assert calm.complaints() == []


def test_following_a_drone_brings_it_closer(calm):
    before = pixels(calm)
    click(calm, "follow")
    assert calm.evaluate("document.getElementById('follow').getAttribute('aria-pressed')") == "true"
    assert pixels(calm) != before
    click(calm, "follow")
    assert pixels(calm) == before


def test_the_keyboard_does_all_that_the_buttons_do(calm):
    calm.evaluate("document.getElementById('stage').focus()")
    calm.press("ArrowRight")
    calm.evaluate(SETTLED)
    assert clock(calm) == 0.1
    calm.press("ArrowLeft")
    calm.evaluate(SETTLED)
    assert clock(calm) == 0.0
    chosen = int(calm.evaluate("document.getElementById('drone').value"))
    calm.press("ArrowDown")
    assert int(calm.evaluate("document.getElementById('drone').value")) == chosen + 1
    calm.press("f")
    assert calm.evaluate("document.getElementById('follow').getAttribute('aria-pressed')") == "true"
    calm.press(" ")
    calm.wait_until("parseFloat(document.getElementById('clock').textContent) > 0.2")
    calm.press("End")
    calm.evaluate(SETTLED)
    assert clock(calm) == 6.0


def test_another_size_or_pixel_ratio_of_the_screen_leaves_no_blank_stage(calm):
    before = calm.evaluate("document.getElementById('stage').width")
    assert before > 100
    for width, ratio in ((1280, 2), (700, 2), (1280, 1)):
        calm.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=ratio, mobile=False)
        scrub(calm, 1.0)  # a browser that nobody looks at does not tell that nothing but the ratio changed
        calm.wait_until(
            "(stage => stage.width === stage.clientWidth * devicePixelRatio)(document.getElementById('stage'))"
        )
        assert calm.evaluate(PIXELS)[1] > 50
    assert calm.evaluate("document.getElementById('stage').width") == before


def test_a_click_on_the_stage_chooses_the_drone_there(calm):
    left, top = calm.evaluate(WHERE.format(x=-9, y=3))
    for kind in ("mousePressed", "mouseReleased"):
        calm.call("Input.dispatchMouseEvent", type=kind, x=left, y=top, button="left", clickCount=1)
    assert calm.evaluate("document.getElementById('drone').value") == "4"


def test_controls_have_names_and_tables_have_headers(whole):
    assert whole.evaluate(UNNAMED) == 0
    assert whole.evaluate("document.querySelectorAll('h1').length") == 1
    assert whole.evaluate(HEADED)


def test_hostile_text_is_shown_and_not_executed(chromium, builder, line, make_evaluation, make_flights):
    hostile = "</script><img src=x onerror=window.owned=1><script>window.owned=1</script>"
    run = builder(hostile.replace("/", "_"))
    run.lines({**line(1), hostile: 1}, {**line(2), hostile: 2})
    document = make_evaluation(1, flights=True)
    for scenario in document["results"]:
        scenario["title"] = hostile
    run.evaluation("final", document)
    run.flights("through")
    run.flights("empty")
    chromium.open(write_report(run.folder))
    chromium.wait_until("document.documentElement.dataset.charts === 'drawn'")
    assert chromium.evaluate("typeof window.owned") == "undefined"
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
    assert chromium.evaluate("document.querySelector('.scenarios span').textContent") == hostile
    legends = chromium.evaluate("[...document.querySelectorAll('.legendtext')].map((one) => one.textContent).join()")
    assert hostile in legends
    assert chromium.complaints() == []


def test_a_flight_of_one_step_is_shown(chromium, builder, make_evaluation):
    run = builder()
    run.evaluation("final", make_evaluation(1, flights=True))
    run.flights("through", num_drones=1, num_steps=1, num_obstacles=0)
    run.flights("empty")
    chromium.open(write_report(run.folder), prefers_reduced_motion="reduce")
    assert pixels(chromium)[1] > 10
    assert chromium.evaluate("document.getElementById('clock').textContent") == "0.0 / 0.1 s"
    assert chromium.complaints() == []


def test_crashes_of_the_training_play_from_where_each_of_them_began(chromium, builder):
    run = builder()
    run.lines({"iteration": 120})
    run.rollout(120)
    batch, world = flights()
    # Another drone begins an episode in the middle of the rollout, and crashes.
    batch["next", "done"][0, [29, 49]] = True
    batch["next", "info", "reached_goal"][0, 29] = True
    batch["next", "info", "static_collision"][0, 49] = True
    save_flights(batch, world, run.folder / "rollouts" / "rollout_000120.slip")
    chromium.open(write_report(run.folder), prefers_reduced_motion="reduce")
    assert chromium.evaluate("document.querySelector('.scenarios span').textContent") == "crashes of iteration 120"
    assert "map 10000" in chromium.evaluate("document.getElementById('source').textContent")
    scrub(chromium, 2.0)
    assert counts(chromium) == {"flying": 2}
    scrub(chromium, 4.0)
    assert counts(chromium) == {"flying": 3}
    scrub(chromium, 5.4)
    assert counts(chromium) == {"hit a static obstacle": 2, "hit a moving obstacle": 1}
    assert chromium.complaints() == []


def test_a_page_whose_scripts_are_blocked_shows_pictures_and_no_dead_controls(chromium, page):
    chromium.open(page)
    chromium.call("Emulation.setScriptExecutionDisabled", value=True)
    chromium.call("Page.reload")
    chromium.wait_until("document.readyState === 'complete' && !document.documentElement.dataset.flights")
    visible = "[...document.querySelectorAll('{}')].filter((one) => one.getClientRects().length > 0).length"
    try:
        assert chromium.evaluate(visible.format("svg.map")) == 1
        assert chromium.evaluate(visible.format("svg.static")) >= 16
        assert chromium.evaluate(visible.format("button, select, canvas")) == 0
    finally:
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("width", [390, 1440])
def test_compared_runs_are_drawn_in_one_chart_each_and_fit_the_screen(chromium, builder, line, width):
    folders: list[Path] = []
    for name in ("one", "two"):
        run = builder(name)
        run.lines(line(1), line(2))
        (run.folder / "config.yaml").write_text(f"seed: {len(folders)}\n")
        folders.append(run.folder)
    chromium.open(write_comparison(folders), width)
    chromium.wait_until("document.documentElement.dataset.charts === 'drawn'")
    drawn = chromium.evaluate(TRACES)
    assert drawn
    for name, series, traces, _, _ in drawn:
        assert series == traces == 2, name
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    assert chromium.complaints() == []


def test_a_run_that_has_nothing_is_a_page_without_complaints(chromium, builder):
    run = builder()
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text("seed: 1\n")
    chromium.open(write_report(run.folder))
    assert "Nothing has been measured yet." in chromium.evaluate("document.body.textContent")
    assert chromium.complaints() == []


def test_printing_is_in_light_colours_even_from_a_dark_screen(chromium, page):
    chromium.open(page, prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    chromium.wait_until("document.documentElement.dataset.charts === 'drawn'")
    features = [
        {"name": "prefers-color-scheme", "value": "dark"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    chromium.call("Emulation.setEmulatedMedia", media="print", features=features)
    chromium.evaluate(SETTLED)
    corner = "[...document.getElementById('stage').getContext('2d').getImageData(2, 2, 1, 1).data].slice(0, 3).join()"
    chromium.wait_until(f"{corner} === '238,242,245'")
    chromium.call("Emulation.setEmulatedMedia", media="", features=features)
    chromium.wait_until(f"{corner} === '12,18,24'")
