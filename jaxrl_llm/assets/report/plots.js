// Draws the figures in the colors of the page, which follow the system's light or dark scheme.
const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const hidden = new Set();
const touch = matchMedia("(pointer: coarse)").matches;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// #rrggbb and an opacity, as plotly reads it.
function alpha(name, opacity) {
  const [r, g, b] = color(name).match(/[0-9a-f]{2}/gi).map((x) => parseInt(x, 16));
  return `rgba(${r}, ${g}, ${b}, ${opacity})`;
}

function painted(trace) {
  const name = `--run${trace.meta.run % 8}`;
  const shade = { raw: 0.5, mean: 1, cross: 1, mark: 0.9, edge: 0.8, band: 0 }[trace.meta.role];
  const paint = alpha(name, shade);
  return {
    ...trace,
    visible: !hidden.has(trace.meta.run),
    fillcolor: alpha("--healthy", 0.09),
    line: { ...trace.line, color: paint },
    marker: { ...trace.marker, color: paint, line: { ...trace.marker?.line, color: paint } },
    textfont: { ...trace.textfont, color: paint },
    hoverlabel: { bgcolor: color("--card"), font: { color: color("--ink") } },
  };
}

function laidOut(layout, now) {
  const axis = { gridcolor: color("--grid"), linecolor: color("--line"), tickcolor: color("--line"), zeroline: false, showgrid: true, tickfont: { size: 11 } };
  return {
    ...layout,
    paper_bgcolor: "rgba(0, 0, 0, 0)",
    plot_bgcolor: "rgba(0, 0, 0, 0)",
    font: { family: "system-ui, sans-serif", size: 12, color: color("--quiet") },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
    dragmode: touch ? false : "zoom",
    xaxis: { ...layout.xaxis, ...axis, showgrid: false, ...now },
    yaxis: { ...layout.yaxis, ...axis },
  };
}

let range = null; // of steps, the same in all plots

function draw() {
  plots.forEach((plot, i) => {
    const { data, layout } = figures[i];
    Plotly.react(plot, data.map(painted), laidOut(layout, range ? { range } : {}), { displayModeBar: false, responsive: true });
  });
}

draw();
let following = false; // while the other plots take the range of one, which they announce as well
plots.forEach((plot) => {
  plot.on("plotly_relayout", async (change) => {
    const zoomed = "xaxis.range[0]" in change;
    const ended = "xaxis.autorange" in change || "xaxis.range" in change;
    if (following || !(zoomed || ended)) return;
    following = true;
    range = zoomed ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null;
    const others = plots.map((other, i) => [other, range ?? figures[i].layout.xaxis.range]);
    await Promise.all(others.map(([other, steps]) => other !== plot && Plotly.relayout(other, { "xaxis.range": [...steps] })));
    following = false;
  });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.querySelectorAll("input[data-run]").forEach((box) => {
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(Number(box.dataset.run));
    else hidden.add(Number(box.dataset.run));
    draw();
  });
});
