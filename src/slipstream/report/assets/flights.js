"use strict";
// Plays recorded flights, seen from above, on a canvas.
(() => {
  document.documentElement.dataset.flights = "playing";  // the style sheet now shows the player instead of a still picture
  const OUTCOMES = [
    { key: "flying", label: "flying", said: "is flying" },
    { key: "reached", label: "reached the goal", said: "reached its goal" },
    { key: "static", label: "hit a static obstacle", said: "hit a static obstacle" },
    { key: "dynamic", label: "hit a moving obstacle", said: "hit a moving obstacle" },
    { key: "bounds", label: "out of bounds", said: "left the bounds" },
    { key: "timeout", label: "timed out", said: "timed out" },
  ];
  const FOLLOW_SPAN_M = 14, RECENT_S = 3, PULSE_S = 0.8, BORDER_M = 1.2, TALLEST_M = 6, SHADOW = 0.06;
  const element = (identifier) => document.getElementById(identifier);
  const canvas = element("stage"), pen = canvas.getContext("2d");
  const play = element("play"), scrubber = element("time"), clock = element("clock");
  const legend = element("legend"), facts = element("facts"), droneChoice = element("drone");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const state = { time: 0, playing: false, speed: 2, selected: 0, follow: false, visible: true, view: null, scene: null };
  const scenes = new Map();
  let colors = {}, last = null, asked = false;

  // Quantisation, as report/flights.py packs it: positions are int16 (x, y, z) in steps of step_m metres, level LiDAR
  // readings uint8 in steps of range_m / 255 (range minus distance: 0 sees nothing), little-endian, base64. Of each
  // drone there is every stride-th moment from the beginning of its flight to its end, one drone after the other.
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

  function open(number) {
    if (scenes.has(number)) return scenes.get(number);
    const packed = JSON.parse(element(`flights-${number}`).textContent);
    const positions = new Int16Array(bytes(packed.positions).buffer), lidar = bytes(packed.lidar);
    const obstacles = new Int16Array(bytes(packed.obstacles).buffer);
    const moment = packed.dt_s * packed.stride;
    let first = 0;
    const drones = packed.ends.map((end, index) => {
      const begin = packed.begins[index], count = Math.ceil((end - begin) / packed.stride) + 1;
      const drone = {
        index, count, outcome: packed.outcomes[index], begin: begin * packed.dt_s, end: end * packed.dt_s, start: packed.starts[index], goal: packed.goals[index],
        heading: packed.headings[index], positions: positions.subarray(3 * first, 3 * (first + count)),
        lidar: lidar.subarray(packed.beams * first, packed.beams * (first + count)),
      };
      first += count;
      return drone;
    });
    const boxes = packed.boxes.slice().sort((one, other) => one[4] - other[4]);
    let reach = packed.half_extent_m;
    const show = (east, north) => { reach = Math.max(reach, Math.abs(east), Math.abs(north)); };
    positions.forEach((_, at) => at % 3 || show(positions[at] * packed.step_m, positions[at + 1] * packed.step_m));
    reach = Math.min(reach, 1.5 * packed.half_extent_m);  // one drone that flew far off should not make the others dots
    for (const drone of drones) for (const place of [drone.start, drone.goal]) show(place[0], place[1]);
    const scene = { ...packed, drones, boxes, obstacles, moment, duration: (packed.num_moments - 1) * packed.dt_s, span: 2 * (reach + BORDER_M) };
    scenes.set(number, scene);
    return scene;
  }

  // Where something is at a time: straight on between the moments that are known.
  function between(values, row, width, count, time, moment, step) {
    const exact = Math.min(Math.max(time / moment, 0), count - 1), at = Math.floor(exact), part = exact - at;
    const next = Math.min(at + 1, count - 1);
    const value = (axis) => {
      const here = values[at * width + row + axis];
      return (here + (values[next * width + row + axis] - here) * part) * step;
    };
    return [value(0), value(1), value(2)];
  }
  const since = (drone, time) => Math.min(Math.max(time, drone.begin), drone.end) - drone.begin;
  const place = (scene, drone, time) => between(drone.positions, 0, 3, drone.count, since(drone, time), scene.moment, scene.step_m);
  const momentCount = (scene) => Math.ceil((scene.num_moments - 1) / scene.stride) + 1;
  const mover = (scene, index, time) =>
    between(scene.obstacles, 3 * index, 3 * scene.widths.length, momentCount(scene), time, scene.moment, scene.step_m);
  const begun = (drone, time) => time >= drone.begin - 1e-9;
  const over = (drone, time) => drone.outcome > 0 && time >= drone.end - 1e-9;
  const colorOf = (drone, time) => colors[OUTCOMES[over(drone, time) ? drone.outcome : 0].key];

  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const names = ["stage", "field", "grid", "edge", "shadow", "box-low", "box-high", "mover", "mover-edge", "beam", "goal", "ink", "card", "soft"];
    colors = Object.fromEntries([...names, ...OUTCOMES.map((outcome) => outcome.key)].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const channels = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    const low = channels(colors["box-low"]), high = channels(colors["box-high"]);
    colors.box = (height) => {
      const part = Math.min(Math.max(height / TALLEST_M, 0), 1);
      return `rgb(${low.map((value, at) => Math.round(value + (high[at] - value) * part)).join(",")})`;
    };
  }

  function target() {
    const scene = state.scene;
    if (!state.follow) return { x: 0, y: 0, span: scene.span };
    const [x, y] = place(scene, scene.drones[state.selected], state.time);
    return { x, y, span: Math.min(FOLLOW_SPAN_M, scene.span) };
  }

  // Moves the camera towards what it should show; tells whether it is still on its way.
  function moveCamera(elapsed) {
    const goal = target(), view = state.view;
    if (!view || still.matches) { state.view = goal; return false; }
    const part = 1 - Math.exp(-elapsed * 7);
    for (const key of ["x", "y", "span"]) view[key] += (goal[key] - view[key]) * part;
    const away = Math.abs(goal.span - view.span) + Math.hypot(goal.x - view.x, goal.y - view.y);
    if (away < 0.02) state.view = goal;
    return away >= 0.02;
  }

  function draw() {
    const scene = state.scene, size = canvas.width, ratio = size / (canvas.clientWidth || size);
    const scale = size / state.view.span;
    const x = (value) => (value - state.view.x) * scale + size / 2, y = (value) => size / 2 - (value - state.view.y) * scale;
    const screen = { x, y, scale, ratio, size, dot: (3.2 + Math.min(4.5, scale / ratio / 10)) * ratio };
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.fillStyle = colors.stage;
    pen.fillRect(0, 0, size, size);
    drawField(scene, screen);
    drawEnds(scene, screen);
    drawTrails(scene, screen);
    drawMovers(scene, screen);
    drawLidar(scene, screen);
    scene.drones.forEach((drone) => drone.index === state.selected || drawDrone(scene, drone, screen));
    drawDrone(scene, scene.drones[state.selected], screen);
    drawScale(screen);
    tell(scene);
  }

  function drawField(scene, { x, y, scale, ratio }) {
    const half = scene.half_extent_m, side = 2 * half * scale;
    pen.fillStyle = colors.field;
    pen.fillRect(x(-half), y(half), side, side);
    pen.strokeStyle = colors.grid;
    pen.lineWidth = ratio;
    pen.beginPath();
    for (let line = Math.ceil(-half / 5) * 5; line <= half; line += 5) {
      pen.moveTo(x(line), y(-half)); pen.lineTo(x(line), y(half));
      pen.moveTo(x(-half), y(line)); pen.lineTo(x(half), y(line));
    }
    pen.stroke();
    pen.strokeStyle = colors.edge;
    pen.lineWidth = 1.5 * ratio;
    pen.strokeRect(x(-half), y(half), side, side);
    pen.fillStyle = colors.shadow;
    for (const [left, bottom, right, top, height] of scene.boxes) {
      const shift = SHADOW * height * scale, west = x(left), east = x(right), north = y(top), south = y(bottom);
      pen.beginPath();
      pen.moveTo(east, north);
      pen.lineTo(east + shift, north + shift);
      pen.lineTo(east + shift, south + shift);
      pen.lineTo(west + shift, south + shift);
      pen.lineTo(west, south);
      pen.lineTo(east, south);
      pen.fill();
    }
    for (const [left, bottom, right, top, height] of scene.boxes) {
      pen.fillStyle = colors.box(height);
      pen.fillRect(x(left), y(top), (right - left) * scale, (top - bottom) * scale);
    }
  }

  function circle(centre, radius) {
    pen.beginPath();
    pen.arc(centre[0], centre[1], radius, 0, 2 * Math.PI);
  }

  function drawEnds(scene, { x, y, ratio, scale }) {
    for (const drone of scene.drones) {
      if (!begun(drone, state.time)) continue;
      const chosen = drone.index === state.selected, reached = over(drone, state.time) && drone.outcome === 1;
      const goal = [x(drone.goal[0]), y(drone.goal[1])], start = [x(drone.start[0]), y(drone.start[1])];
      pen.globalAlpha = chosen || reached ? 1 : 0.55;
      pen.lineWidth = (chosen ? 2.2 : 1.3) * ratio;
      pen.strokeStyle = reached ? colors.reached : chosen ? colors.ink : colors.goal;
      circle(goal, Math.max((chosen ? 7 : 4.5) * ratio, 0.5 * scale * (chosen ? 1 : 0.8)));
      pen.stroke();
      pen.fillStyle = pen.strokeStyle;
      circle(goal, 1.6 * ratio);
      pen.fill();
      const half = (chosen ? 4 : 2.6) * ratio;
      pen.strokeStyle = chosen ? colors.ink : colors.goal;
      pen.strokeRect(start[0] - half, start[1] - half, 2 * half, 2 * half);
    }
    const drone = scene.drones[state.selected], here = place(scene, drone, state.time);
    pen.globalAlpha = 0.5;
    pen.strokeStyle = colors.ink;
    pen.lineWidth = ratio;
    pen.setLineDash([5 * ratio, 6 * ratio]);
    pen.beginPath();
    pen.moveTo(x(here[0]), y(here[1]));
    pen.lineTo(x(drone.goal[0]), y(drone.goal[1]));
    if (begun(drone, state.time) && !over(drone, state.time)) pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  function path(scene, drone, from, to, { x, y }) {
    const begin = place(scene, drone, from), end = place(scene, drone, to);
    pen.beginPath();
    pen.moveTo(x(begin[0]), y(begin[1]));
    const stop = since(drone, to) / scene.moment;
    for (let at = Math.floor(since(drone, from) / scene.moment) + 1; at < stop; at++) {
      pen.lineTo(x(drone.positions[3 * at] * scene.step_m), y(drone.positions[3 * at + 1] * scene.step_m));
    }
    pen.lineTo(x(end[0]), y(end[1]));
    pen.stroke();
  }

  function drawTrails(scene, screen) {
    pen.lineJoin = pen.lineCap = "round";
    for (const drone of scene.drones) {
      if (!begun(drone, state.time)) continue;
      const chosen = drone.index === state.selected;
      pen.strokeStyle = colorOf(drone, state.time);
      pen.lineWidth = (chosen ? 2.4 : 1.3) * screen.ratio;
      pen.globalAlpha = chosen ? 0.9 : 0.32;
      path(scene, drone, 0, state.time, screen);
      const recent = state.time - RECENT_S;
      if (!chosen && recent < drone.end) {
        pen.globalAlpha = 0.6;
        pen.lineWidth = 1.7 * screen.ratio;
        path(scene, drone, Math.max(0, recent), state.time, screen);
      }
    }
    pen.globalAlpha = 1;
  }

  function drawMovers(scene, { x, y, scale, ratio }) {
    pen.strokeStyle = colors["mover-edge"];
    scene.widths.forEach((width, index) => {
      const [east, north, up] = mover(scene, index, state.time), before = mover(scene, index, state.time - 0.8);
      const half = width * scale / 2, centre = [x(east), y(north)], shift = SHADOW * (scene.cylinders[index] ? 2.5 : up + 0.5) * scale;
      pen.globalAlpha = 0.35;
      pen.lineWidth = 1.5 * ratio;
      pen.beginPath();
      pen.moveTo(x(before[0]), y(before[1]));
      pen.lineTo(...centre);
      pen.stroke();
      pen.globalAlpha = 1;
      const shape = (at) => {
        if (scene.cylinders[index]) return circle(at, half);
        pen.beginPath();
        return pen.rect(at[0] - half, at[1] - half, 2 * half, 2 * half);
      };
      pen.fillStyle = colors.shadow;
      shape([centre[0] + shift, centre[1] + shift]);
      pen.fill();
      pen.fillStyle = colors.mover;
      pen.lineWidth = 1.3 * ratio;
      shape(centre);
      pen.fill();
      pen.stroke();
    });
  }

  const reading = (scene, drone, time) => {
    const at = Math.min(Math.round(since(drone, time) / scene.moment), drone.count - 1);
    return drone.lidar.subarray(at * scene.beams, (at + 1) * scene.beams);
  };

  function drawLidar(scene, { x, y, scale, ratio }) {
    const drone = scene.drones[state.selected];
    if (!begun(drone, state.time)) return;
    const [east, north] = place(scene, drone, state.time), seen = reading(scene, drone, state.time), centre = [x(east), y(north)];
    const ends = Array.from(seen, (value, beam) => {
      const angle = drone.heading + 2 * Math.PI * beam / scene.beams, distance = scene.range_m * (1 - value / 255);
      return { hit: value > 0, at: [centre[0] + Math.cos(angle) * distance * scale, centre[1] - Math.sin(angle) * distance * scale] };
    });
    pen.fillStyle = pen.strokeStyle = colors.beam;
    pen.globalAlpha = 0.13;
    pen.beginPath();
    ends.forEach(({ at }) => pen.lineTo(...at));
    pen.closePath();
    pen.fill();
    pen.globalAlpha = 0.4;
    pen.lineWidth = ratio;
    pen.setLineDash([2 * ratio, 5 * ratio]);
    circle(centre, scene.range_m * scale);
    pen.stroke();
    pen.setLineDash([]);
    for (const { hit, at } of ends) {
      pen.globalAlpha = hit ? 0.75 : 0.22;
      pen.beginPath();
      pen.moveTo(...centre);
      pen.lineTo(...at);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    for (const { hit, at } of ends) if (hit) { circle(at, 2.6 * ratio); pen.fill(); }
  }

  // The mark of an outcome: each has a shape of its own, so that colour is not all that tells them apart.
  function mark(outcome, centre, radius, width, brush = pen) {
    const [left, top] = centre;
    const stroke = (...points) => {
      brush.beginPath();
      points.forEach(([across, down], at) => brush[at ? "lineTo" : "moveTo"](left + across * radius, top + down * radius));
      brush.stroke();
    };
    brush.lineWidth = width;
    brush.lineJoin = brush.lineCap = "round";
    if (outcome === 1) stroke([-0.8, 0.1], [-0.2, 0.75], [0.9, -0.7]);
    if (outcome === 2 || outcome === 3) { stroke([-0.75, -0.75], [0.75, 0.75]); stroke([-0.75, 0.75], [0.75, -0.75]); }
    if (outcome === 3) { brush.beginPath(); brush.arc(left, top, 1.25 * radius, 0, 2 * Math.PI); brush.stroke(); }
    if (outcome === 4) stroke([0, -1], [1, 0], [0, 1], [-1, 0], [0, -1]);
    if (outcome === 5) { stroke([-0.9, -0.5], [0.9, -0.5]); stroke([-0.9, 0.5], [0.9, 0.5]); }
  }

  function drawDrone(scene, drone, { x, y, ratio, dot }) {
    if (!begun(drone, state.time)) return;
    const [east, north] = place(scene, drone, state.time), centre = [x(east), y(north)], chosen = drone.index === state.selected;
    const color = colorOf(drone, state.time), radius = (chosen ? 1.35 : 1) * dot;
    pen.strokeStyle = pen.fillStyle = color;
    if (over(drone, state.time)) {
      const passed = (state.time - drone.end) / PULSE_S;
      if (passed < 1 && !still.matches) {
        pen.globalAlpha = 1 - passed;
        pen.lineWidth = 2 * ratio;
        circle(centre, dot * (1 + 4 * passed));
        pen.stroke();
        pen.globalAlpha = 1;
      }
      pen.strokeStyle = colors.card;
      mark(drone.outcome, centre, 0.95 * radius, 4.6 * ratio);
      pen.strokeStyle = color;
      mark(drone.outcome, centre, 0.95 * radius, 2.2 * ratio);
      return;
    }
    const ahead = place(scene, drone, state.time + 0.2), behind = place(scene, drone, state.time - 0.2);
    const moved = Math.hypot(ahead[0] - behind[0], ahead[1] - behind[1]) > 0.02;
    const angle = moved ? Math.atan2(ahead[1] - behind[1], ahead[0] - behind[0]) : drone.heading;
    const point = (turn, length) => [centre[0] + Math.cos(angle + turn) * length, centre[1] - Math.sin(angle + turn) * length];
    pen.beginPath();
    [point(0, 1.7 * radius), point(2.4, 1.35 * radius), point(Math.PI, 0.55 * radius), point(-2.4, 1.35 * radius)].forEach((corner) => pen.lineTo(...corner));
    pen.closePath();
    pen.lineWidth = (chosen ? 3 : 1.6) * ratio;
    pen.strokeStyle = chosen ? colors.ink : colors.card;
    pen.stroke();
    pen.fill();
  }

  function drawScale({ scale, ratio, size }) {
    const length = state.view.span > 20 ? 5 : 1, margin = 16 * ratio;
    pen.fillStyle = pen.strokeStyle = colors.soft;
    pen.lineWidth = 2 * ratio;
    pen.beginPath();
    pen.moveTo(margin, size - margin);
    pen.lineTo(margin + length * scale, size - margin);
    pen.stroke();
    pen.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    pen.fillText(`${length} m`, margin, size - margin - 6 * ratio);
  }

  function setText(node, words) {
    if (node.textContent !== words) node.textContent = words;
  }

  function tell(scene) {
    const counts = OUTCOMES.map(() => 0);
    scene.drones.filter((drone) => begun(drone, state.time)).forEach((drone) => counts[over(drone, state.time) ? drone.outcome : 0]++);
    legend.querySelectorAll("li").forEach((item, at) => {
      setText(item.querySelector("b"), String(counts[at]));
      item.classList.toggle("none", !counts[at]);
    });
    setText(clock, `${state.time.toFixed(1)} / ${scene.duration.toFixed(1)} s`);
    if (document.activeElement !== scrubber || state.playing) scrubber.value = String(state.time);
    scrubber.setAttribute("aria-valuetext", `${state.time.toFixed(1)} seconds`);
    const drone = scene.drones[state.selected], time = Math.min(Math.max(state.time, drone.begin), drone.end), here = place(scene, drone, time);
    const ahead = place(scene, drone, time + 0.1), behind = place(scene, drone, time - 0.1);
    const passed = Math.min(time + 0.1, drone.end) - Math.max(time - 0.1, drone.begin);
    const speed = over(drone, time) || passed <= 0 ? 0 : Math.hypot(...ahead.map((value, axis) => value - behind[axis])) / passed;
    const nearest = Math.max(...reading(scene, drone, time));
    const shown = {
      Outcome: begun(drone, state.time) ? OUTCOMES[over(drone, time) ? drone.outcome : 0].label : "not begun yet",
      "To the goal": `${Math.hypot(...here.map((value, axis) => value - drone.goal[axis])).toFixed(1)} m`,
      Height: `${here[2].toFixed(1)} m`,
      Speed: `${speed.toFixed(1)} m/s`,
      "Nearest hit": nearest ? `${(scene.range_m * (1 - nearest / 255)).toFixed(2)} m` : `over ${scene.range_m} m`,
    };
    if (facts.childElementCount !== 2 * Object.keys(shown).length) {
      facts.replaceChildren(...Object.keys(shown).flatMap((name) => {
        const term = document.createElement("dt"), value = document.createElement("dd");
        term.textContent = name;
        return [term, value];
      }));
    }
    Object.values(shown).forEach((words, at) => setText(facts.children[2 * at + 1], words));
  }

  function frame(now) {
    asked = false;
    const elapsed = last === null ? 0 : Math.min((now - last) / 1000, 0.1);
    last = now;
    if (state.playing) {
      state.time = Math.min(state.time + elapsed * state.speed, state.scene.duration);
      if (state.time >= state.scene.duration) setPlaying(false);
    }
    const moving = moveCamera(elapsed);
    fit();
    draw();
    if (state.visible && (state.playing || moving)) ask();
    else last = null;
  }

  function ask() {
    if (!asked) { asked = true; requestAnimationFrame(frame); }
  }

  function setPlaying(playing) {
    state.playing = playing;
    play.textContent = playing ? "Pause" : state.time >= state.scene.duration ? "Replay" : "Play";
    play.setAttribute("aria-label", playing ? "Pause" : "Play");
    ask();
  }

  function toggle() {
    if (!state.playing && state.time >= state.scene.duration) state.time = 0;
    setPlaying(!state.playing);
  }

  function seek(time) {
    state.time = Math.min(Math.max(time, 0), state.scene.duration);
    setPlaying(state.playing && state.time < state.scene.duration);
  }

  function select(index) {
    const count = state.scene.drones.length;
    state.selected = ((index % count) + count) % count;
    droneChoice.value = String(state.selected);
    ask();
  }

  function setFollow(follow) {
    state.follow = follow;
    element("follow").setAttribute("aria-pressed", String(follow));
    ask();
  }

  // The flight to look at first: the longest that ended well.
  function interesting(scene) {
    const worth = (drone) => (drone.outcome === 1 ? 1e6 : 0) + drone.end - drone.begin;
    return scene.drones.reduce((best, drone) => (worth(drone) > worth(best) ? drone : best)).index;
  }

  function show(number) {
    const scene = open(number);
    state.scene = scene;
    state.view = null;
    state.time = Math.min(state.time, scene.duration);
    scrubber.max = String(scene.duration);
    droneChoice.replaceChildren(...scene.drones.map((drone) => {
      const option = document.createElement("option");
      option.value = String(drone.index);
      option.textContent = `${drone.index + 1}: ${OUTCOMES[drone.outcome].said}, ${drone.end.toFixed(1)} s`;
      return option;
    }));
    const counts = OUTCOMES.map((_, outcome) => scene.drones.filter((drone) => drone.outcome === outcome).length);
    const told = OUTCOMES.flatMap((outcome, at) => (counts[at] ? [`${counts[at]} ${outcome.label}`] : []));
    canvas.setAttribute("aria-label", `Flights of ${scene.drones.length} drones seen from above: ${told.join(", ")}`);
    element("source").textContent = scene.source;
    const left = [];
    if (scene.num_recorded > scene.drones.length) left.push(`the first ${scene.drones.length} of ${scene.num_recorded} recorded drones`);
    if (scene.stride > 1) left.push(`every ${scene.stride}th moment, with straight lines between`);
    element("left-out").textContent = left.length ? `Shown: ${left.join("; ")}.` : "";
    select(interesting(scene));
    drawLegend();
    setPlaying(state.playing);
  }

  function drawLegend() {
    const ratio = Math.max(devicePixelRatio, 1), size = Math.round(18 * ratio);
    legend.replaceChildren(...OUTCOMES.map((outcome, at) => {
      const item = document.createElement("li"), icon = document.createElement("canvas"), words = document.createElement("span");
      icon.width = icon.height = size;
      icon.setAttribute("aria-hidden", "true");
      const brush = icon.getContext("2d");
      brush.strokeStyle = brush.fillStyle = colors[outcome.key];
      if (at) mark(at, [size / 2, size / 2], size / 3.4, 2.4 * ratio, brush);
      else {
        brush.beginPath();
        [[0.92, 0.5], [0.15, 0.15], [0.32, 0.5], [0.15, 0.85]].forEach((corner) => brush.lineTo(corner[0] * size, corner[1] * size));
        brush.fill();
      }
      words.textContent = outcome.label;
      item.append(icon, words, document.createElement("b"));
      return item;
    }));
  }

  // Gives the stage as many pixels as the screen shows of it; tells whether that cleared it.
  function fit() {
    const size = Math.round(canvas.clientWidth * Math.max(devicePixelRatio, 1));
    if (!size || canvas.width === size) return false;
    canvas.width = canvas.height = size;
    return true;
  }

  function resize() {
    if (fit() && state.view) draw();
  }

  function choose(event) {
    const box = canvas.getBoundingClientRect(), scale = state.view.span / box.width;
    const east = (event.clientX - box.left - box.width / 2) * scale + state.view.x;
    const north = (box.height / 2 - event.clientY + box.top) * scale + state.view.y;
    const away = (drone) => { const [x, y] = place(state.scene, drone, state.time); return Math.hypot(x - east, y - north); };
    select(state.scene.drones.reduce((best, drone) => (away(drone) < away(best) ? drone : best)).index);
  }

  const KEYS = {
    " ": toggle, f: () => setFollow(!state.follow), ArrowUp: () => select(state.selected - 1), ArrowDown: () => select(state.selected + 1),
    ArrowLeft: () => seek(state.time - state.scene.dt_s), ArrowRight: () => seek(state.time + state.scene.dt_s), Home: () => seek(0), End: () => seek(state.scene.duration),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  canvas.addEventListener("click", choose);
  play.addEventListener("click", toggle);
  scrubber.addEventListener("input", () => { setPlaying(false); seek(Number(scrubber.value)); });
  droneChoice.addEventListener("change", () => select(Number(droneChoice.value)));
  element("speed").addEventListener("change", (event) => { state.speed = Number(event.target.value); });
  element("follow").addEventListener("click", () => setFollow(!state.follow));
  document.querySelectorAll("input[name=scenario]").forEach((choice) => choice.addEventListener("change", () => {
    state.time = 0;
    show(Number(choice.value));
  }));
  const repaint = () => { readColors(); drawLegend(); draw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  matchMedia("print").addEventListener("change", repaint);
  new ResizeObserver(resize).observe(canvas);
  (function watchRatio() {  // the page may move to a screen of another pixel ratio
    const same = matchMedia(`(resolution: ${devicePixelRatio}dppx)`);
    same.addEventListener("change", () => { resize(); watchRatio(); }, { once: true });
  })();
  new IntersectionObserver((entries) => { state.visible = entries[0].isIntersecting; ask(); }).observe(canvas);
  readColors();
  resize();
  show(Number(document.querySelector("input[name=scenario]:checked").value));
  if (!still.matches) setPlaying(true);
})();
