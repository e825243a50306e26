"use strict";
// Draws the charts whose data the page holds, in the colours of its style sheet, and again when those change.
(() => {
  document.documentElement.dataset.charts = "drawing";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const coarse = matchMedia("(pointer: coarse)").matches;
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const translucent = (color, alpha) => {
    const number = parseInt(color.slice(1), 16);
    return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${alpha})`;
  };

  // Plotly takes some markup in names: text from files is shown as it is.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const lines = (chart) => chart.series.flatMap((series) => {
    const color = variable(series.color);
    const few = series.x.length === 1;
    const shown = {
      type: "scatter", x: series.x, y: series.y, name: plain(series.name), line: { color, width: 1.8 },
      mode: few || chart.kind === "dots" ? "markers" : chart.kind === "points" ? "lines+markers" : "lines",
      marker: { color, size: chart.kind === "dots" ? 6 : 7 }, hoverlabel: { namelength: -1 },
    };
    if (!series.low) return [shown];
    if (chart.kind === "points") {
      const above = series.high.map((value, at) => value - series.y[at]);
      const below = series.low.map((value, at) => series.y[at] - value);
      shown.error_y = { type: "data", array: above, arrayminus: below, symmetric: false, color, thickness: 1.2, width: 3 };
      return [shown];
    }
    const edge = { type: "scatter", x: series.x, mode: "lines", line: { width: 0, color }, hoverinfo: "skip", showlegend: false };
    const band = { fill: "tonexty", fillcolor: translucent(color, 0.18) };
    return [{ ...edge, y: series.low }, { ...edge, ...band, y: series.high }, shown];
  });

  const stack = (chart) => chart.series.map((part, at) => ({
    type: "bar", orientation: "h", x: [part.value], y: [""], name: plain(part.name), marker: { color: variable("abcdefg"[at % 7]) },
    hovertemplate: `${plain(part.name)}: %{x:.4f} s<extra></extra>`,
  }));

  const layout = (chart, width) => {
    const stacked = chart.kind === "stack";
    const axis = {
      gridcolor: variable("line"), zerolinecolor: variable("edge"), linecolor: variable("line"), automargin: true, tickfont: { size: 11 },
      title: { font: { size: 12, color: variable("soft") }, standoff: 6 }, fixedrange: coarse, nticks: 6,
    };
    const several = chart.series.length > 1;
    const y = { ...axis, exponentformat: "power", title: { ...axis.title, text: plain(chart.y || "") } };
    if (chart.percent) Object.assign(y, { tickformat: ".0%", rangemode: "tozero" });
    if (chart.zero) y.rangemode = "tozero";
    // Plotly would put a line that never moves between -1 and 1, however small it is.
    const values = stacked ? [] : chart.series.flatMap((series) => [...series.y, ...(series.low || []), ...(series.high || [])]);
    const first = values[0];
    if (values.every((value) => value === first)) y.range = first ? [Math.min(0, 2 * first), Math.max(0, 2 * first)] : [0, 1];
    // Nor is one place on the x axis worth more digits than it has.
    const x = { ...axis, title: { ...axis.title, text: stacked ? "seconds" : plain(chart.x) } };
    const places = stacked ? [] : chart.series.flatMap((series) => series.x);
    if (places.length && places.every((value) => value === places[0]) && places[0]) x.range = [0, 1.25 * places[0]];
    return {
      autosize: true, barmode: "stack", bargap: 0.1, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 10, t: several ? (width < 480 && chart.series.length > 3 ? 46 : 26) : 10, b: 8 }, showlegend: several, hovermode: stacked ? "closest" : "x unified",
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, traceorder: "normal" },
      font: { family: getComputedStyle(document.body).fontFamily, color: variable("ink"), size: 12 },
      hoverlabel: { bgcolor: variable("card"), bordercolor: variable("edge"), font: { color: variable("ink"), size: 12 } },
      xaxis: x,
      yaxis: stacked ? { visible: false, fixedrange: true } : y, dragmode: coarse ? false : "zoom",
    };
  };

  const draw = () => Object.entries(charts).forEach(([identifier, chart]) => {
    const place = document.getElementById(identifier);
    if (!place.data) place.replaceChildren();  // the drawing for readers without scripts
    const traces = chart.kind === "stack" ? stack(chart) : lines(chart);
    Plotly.react(place, traces, layout(chart, place.clientWidth), { responsive: true, displayModeBar: false });
  });

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", () => {
    draw();
    Object.keys(charts).forEach((identifier) => Plotly.Plots.resize(identifier));
  });
  document.documentElement.dataset.charts = "drawn";
})();
