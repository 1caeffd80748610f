"use strict";
// Draws the charts of the page from the data in it, with plotly, and lets the reader walk through the prefix tree.

document.documentElement.dataset.script = "on";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 40rem)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const inEnglish = new Intl.NumberFormat("en"); // toLocaleString would make one for each number
const number = (value) => inEnglish.format(value);
const counted = (count, one) => `${number(count)} ${count === 1 ? one : `${one}s`}`;
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const cut = (text, length) => (text.length > length ? `${text.slice(0, length)}…` : text);
const oneLine = (text) => text.replace(/\s+/g, " ").trim();

/** Unpacks plotly and runs it. As a file of its own it is compiled in the background; as the text of a script element it would take seconds longer. */
async function loadPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const code = new Blob([await new Response(stream).blob()], { type: "text/javascript" });
  const script = document.createElement("script");
  script.src = URL.createObjectURL(code);
  await new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = () => reject(new Error("plotly cannot be run"));
    document.head.append(script);
  });
  URL.revokeObjectURL(script.src);
}

function draw(id, traces, layout) {
  const place = document.getElementById(id);
  if (!place) return;
  const axis = { gridcolor: color("grid"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true, fixedrange: narrow.matches };
  const whole = {
    font: { family: "system-ui, sans-serif", size: 13, color: color("ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 10, r: 10, t: 16, b: 10 },
    hoverlabel: { font: { color: color("ink") }, bgcolor: color("panel"), bordercolor: color("line"), align: "left" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    ...layout,
    xaxis: { ...axis, ...(layout.xaxis || {}) },
    yaxis: { ...axis, ...(layout.yaxis || {}) },
  };
  Plotly.react(place, traces, whole, { displayModeBar: false, responsive: true });
}

// The prefix tree. A cell is a node: its id is its place in the lists of `data.tree`, "all" is the root, "m…" stands for the nodes below a node that
// are not listed, or too narrow to be seen. Zooming into a node draws the cells below it again, when more of them are wide enough.

const tree = data.tree && data.tree.parents.length ? data.tree : null;
const children = new Map([["all", []]]);
const MIN_WIDTH = 3; // pixels of a cell, and of a cell with a text
const MIN_TEXT_WIDTH = 44;
let chosen = "all";

const parentOf = (id) => (tree.parents[id] < 0 ? "all" : `${tree.parents[id]}`);
const rowsOf = (id) => (id === "all" ? tree.rows : tree.node_rows[id]);

function pathTo(id) {
  const path = [];
  for (let at = id; at !== "all"; at = parentOf(at)) path.unshift(at);
  return ["all", ...path];
}

function listChildren() {
  tree.parents.forEach((_, i) => {
    const parent = parentOf(i);
    children.has(parent) || children.set(parent, []);
    children.get(parent).push(`${i}`);
  });
}

/** What is below a node: nodes, rows in them, and tokens that they save. */
const below = (id) =>
  id === "all" ? [tree.node_count, tree.rows - tree.lone_rows, tree.saved_tokens] : [tree.nodes_below[id], tree.node_rows[id] - tree.ending_rows[id], tree.saved_below[id]];

function makeCells() {
  const cells = { ids: [], parents: [], values: [], saved: [], labels: [], hover: [] };
  const width = document.getElementById("tree-chart").clientWidth - (narrow.matches ? 0 : 90);
  const levels = narrow.matches ? 4 : 6;
  const path = pathTo(chosen);
  const pixels = (rows) => (rows / rowsOf(chosen)) * width;
  const add = (id, parent, rows, saved, label, hover) => {
    cells.ids.push(id);
    cells.parents.push(parent);
    cells.values.push(rows);
    cells.saved.push(saved);
    cells.labels.push(label);
    cells.hover.push(hover);
  };
  const addNode = (id) => {
    const text = oneLine(tree.texts[id]);
    const size = `${number(tree.node_rows[id])} × ${number(tree.tokens[id])}`;
    const room = Math.floor(pixels(tree.node_rows[id]) / 7.5) - 2;
    let label = `${escaped(cut(text, room))}<br>${size}`;
    if (path.includes(id) && id !== chosen) label = escaped(cut(text, 18));
    else if (pixels(tree.node_rows[id]) < MIN_TEXT_WIDTH) label = "";
    add(id, parentOf(id), tree.node_rows[id], tree.saved[id], label,
      `${counted(tree.node_rows[id], "row")} × ${counted(tree.tokens[id], "token")} of their own<br>` +
        `${counted(tree.saved[id], "prompt token")} saved<br>${escaped(cut(text, 90))}`);
  };
  const addBelow = (id, level) => {
    if (level >= levels) return;
    let [nodes, rows, saved] = below(id);
    for (const child of children.get(id) || []) {
      if (pixels(tree.node_rows[child]) < MIN_WIDTH) continue;
      nodes -= 1 + tree.nodes_below[child];
      rows -= tree.node_rows[child];
      saved -= tree.saved[child] + tree.saved_below[child];
      addNode(child);
      addBelow(child, level + 1);
    }
    if (nodes > 0) {
      add(`m${id}`, id, Math.max(0, rows), saved, pixels(rows) < 2 * MIN_TEXT_WIDTH ? "" : `${number(nodes)} more`,
        `${counted(nodes, "node")} more, with few rows each<br>${counted(saved, "prompt token")} saved`);
    }
  };
  const says = `all ${number(tree.rows)} prompts`;
  add("all", "", tree.rows, 0, says, `${says}<br>${counted(tree.saved_tokens, "prompt token")} saved`);
  path.slice(1).forEach(addNode);
  addBelow(chosen, 1);
  return cells;
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** Black or white text, whichever has the better contrast (WCAG's relative luminance) on a place of the scale of three colors, from 0 to 1. */
function inkOn(place, scale) {
  const at = Math.min(1, Math.floor(place * 2)), part = place * 2 - at;
  const [a, b] = [channels(scale[at][1]), channels(scale[at + 1][1])];
  const [r, g, blue] = a.map((from, i) => (from + (b[i] - from) * part) / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

function drawTree() {
  if (!tree) return;
  const cells = makeCells();
  const shade = (saved) => Math.log10(1 + Math.max(0, saved));
  const most = Math.max(1, ...tree.saved.map(shade));
  const shades = cells.saved.map((saved) => Math.min(most, shade(saved)));
  const scale = [[0, color("shade-0")], [0.5, color("shade-1")], [1, color("shade-2")]];
  const steps = [...Array(Math.floor(most) + 1).keys()].filter((n) => n > 0);
  draw("tree-chart", [{
    type: "icicle", ids: cells.ids, labels: cells.labels, parents: cells.parents, values: cells.values, branchvalues: "total",
    hovertext: cells.hover, hoverinfo: "text", sort: false, level: chosen, maxdepth: narrow.matches ? 4 : 6,
    tiling: { orientation: "v", pad: 1 }, textposition: "middle left", textinfo: "label",
    textfont: { color: shades.map((shade) => inkOn(shade / most, scale)) },
    pathbar: { visible: true, thickness: 24 },
    marker: {
      colors: shades, colorscale: scale, cmin: 0, cmax: most, line: { width: 0 },
      showscale: !narrow.matches,
      colorbar: {
        title: { text: "tokens saved", side: "right" }, thickness: 12, outlinewidth: 0,
        tickvals: [0, ...steps], ticktext: ["0", ...steps.map((n) => (n > 5 ? `${10 ** (n - 6)}M` : n > 2 ? `${10 ** (n - 3)}k` : `${10 ** n}`))],
      },
    },
  }], { margin: { l: 0, r: 0, t: 26, b: 4 }, uniformtext: { minsize: 11, mode: "hide" } });
}

function choose(id, { focus = false } = {}) {
  if (id.startsWith("m")) return;
  chosen = id;
  drawTree();
  showNode();
  if (focus) document.getElementById("node-text").focus({ preventScroll: true });
}

function button(text, id, current) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.dataset.node = id;
  if (current) made.setAttribute("aria-current", "true");
  const item = document.createElement("li");
  item.append(made);
  return item;
}

const nameOf = (id) => (id === "all" ? "all prompts" : `“${cut(oneLine(tree.texts[id]), 28)}”`);

function showNode() {
  const id = chosen;
  document.getElementById("node-path").replaceChildren(...pathTo(id).map((at) => button(nameOf(at), at, at === id)));
  const text = document.getElementById("node-text");
  let says;
  if (id === "all") {
    says = `${number(tree.rows)} rows, ${number(tree.prompt_tokens)} prompt tokens, of which sharing saves ${number(tree.saved_tokens)}.`;
    text.hidden = true;
  } else {
    says = `${counted(tree.node_rows[id], "row")} share these ${counted(tree.tokens[id], "token")}: ${counted(tree.saved[id], "prompt token")} saved. ` +
      `Below: ${counted(tree.nodes_below[id], "node")}; rows that share nothing more: ${number(tree.ending_rows[id])}.`;
    text.hidden = false;
    text.textContent = tree.texts[id];
  }
  document.getElementById("node-says").textContent = says;
  const under = [...(children.get(id) || [])].sort((a, b) => tree.node_rows[b] - tree.node_rows[a]);
  const shown = under.slice(0, 50).map((at) =>
    button(`${counted(tree.node_rows[at], "row")} × ${counted(tree.tokens[at], "token")}: ${nameOf(at)}`, at, false));
  document.getElementById("node-children").replaceChildren(...shown);
  document.getElementById("below-title").hidden = !shown.length;
  document.getElementById("node").hidden = false;
}

function listenToTree() {
  if (!tree) return;
  const place = document.getElementById("tree-chart");
  place.on("plotly_icicleclick", (event) => {
    const id = event.points && event.points[0] && event.points[0].id;
    if (id !== undefined) choose(id === chosen && id !== "all" ? parentOf(id) : id);
    return false; // the zoom is set above, for the mouse and the keyboard alike
  });
  document.getElementById("node").addEventListener("click", (event) => {
    const id = event.target.dataset && event.target.dataset.node;
    if (id !== undefined) choose(id, { focus: id !== "all" });
  });
  showNode();
}

// Charts over time: runs one after the other; shards side by side.

const runs = (data.runs || []).filter((run) => run.seconds.length > 1);
const sharded = runs.some((run) => run.label);
const DASHES = ["solid", "dash", "dot", "dashdot"];

function startsOfRuns() {
  const ends = new Map();
  return runs.map((run) => {
    const start = ends.get(run.label) || 0;
    ends.set(run.label, start + run.seconds[run.seconds.length - 1]);
    return start;
  });
}

/** The ticks of an axis from 0 to `most`: k and M for thousands and millions, no letter for parts of 1, and no parts of what is counted. */
const ticks = (most, counts = false) => ({ tickformat: most >= 1000 ? ",~s" : ",~r", ...(counts && most < 8 ? { dtick: 1 } : {}) });

function lines(kinds, valuesOf) {
  const starts = startsOfRuns();
  return kinds.flatMap(([name, title, hue], k) => runs.map((run, i) => {
    const values = valuesOf(run, name);
    const isRate = values.length < run.seconds.length; // it belongs to the interval before its moment
    const label = sharded ? `${title}, shard ${run.label}` : title;
    return {
      type: "scatter", mode: "lines", name: label, legendgroup: label, showlegend: sharded || i === 0,
      x: run.seconds.map((s) => s + starts[i]), y: isRate ? [values[0], ...values] : values,
      line: { color: color(hue), width: 2, shape: isRate ? "vh" : "linear", dash: DASHES[(sharded ? i : k) % DASHES.length] },
      hovertemplate: `%{y:,.4~s} at %{x:,.1f} s<extra>${escaped(label)}</extra>`,
    };
  }));
}

const betweenRuns = () => startsOfRuns().filter((start) => start > 0).map((start) => ({
  type: "line", x0: start, x1: start, yref: "paper", y0: 0, y1: 1, line: { color: color("soft"), width: 1, dash: "dot" },
}));

function drawSpeed() {
  if (!runs.length) return;
  const kinds = [["completion_tokens_per_s", "completion tokens/s", "s1"], ["prefill_tokens_per_s", "prompt tokens/s", "s2"],
    ["scored_tokens_per_s", "scored tokens/s", "s3"]].filter(([name]) => runs.some((run) => run[name].some((v) => v > 0)));
  const most = Math.max(0, ...kinds.flatMap(([name]) => runs.flatMap((run) => run[name])));
  draw("speed-chart", lines(kinds, (run, name) => run[name]), {
    xaxis: { title: { text: "seconds" }, rangemode: "tozero" }, yaxis: { rangemode: "tozero", ...ticks(most) }, shapes: betweenRuns(),
    hovermode: "x",
  });
}

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

function drawPlannedMemory() {
  const [unit, name] = UNITS.find(([size]) => Math.max(0, ...data.memory.map((bar) => bar[1])) >= size) || [1, "B"];
  bars("memory-chart", data.memory.map(([what, bytes]) => [what, bytes / unit]), name);
}

function over(id, what, title, hue) {
  const most = Math.max(...runs.flatMap((run) => run[what]));
  const [unit, name] = UNITS.find(([size]) => most >= size) || [1, "B"];
  draw(id, lines([[what, title, hue]], (run) => run[what].map((bytes) => bytes / unit)), {
    xaxis: { title: { text: "seconds" }, rangemode: "tozero" }, yaxis: { title: { text: name }, rangemode: "tozero" }, shapes: betweenRuns(),
    hovermode: "x", showlegend: sharded, title: sharded ? undefined : { text: title, font: { size: 13 }, x: 0, y: 0.98, xanchor: "left", yanchor: "top" },
    margin: { l: 10, r: 10, t: 34, b: 10 },
  });
}

// Bars.

function bars(id, pairs, unit, hues) {
  const shown = [...pairs].reverse();
  draw(id, [{
    type: "bar", orientation: "h", y: shown.map(([name]) => escaped(cut(name, narrow.matches ? 22 : 40))), x: shown.map((pair) => pair[1]),
    text: shown.map((pair) => `${Number(pair[1].toPrecision(pair[1] >= 1000 ? 12 : 3)).toLocaleString("en")}${unit ? ` ${unit}` : ""}`),
    textposition: "outside", cliponaxis: false, marker: { color: hues ? shown.map(([name]) => color(hues(name))) : color("s1") },
    hoverinfo: "text", textfont: { size: 12 },
  }], { xaxis: { rangemode: "tozero", ...ticks(Math.max(0, ...pairs.map((pair) => pair[1])), !unit) }, yaxis: { type: "category" }, showlegend: false, bargap: 0.35, margin: { l: 10, r: 70, t: 4, b: 10 } });
}

/** A histogram. The bins of whole numbers end before their second number, except a last one that holds the long tail; a bar stands over the numbers that it counts. */
function bins(id, found, hue, unit, whole = false) {
  if (!found) return;
  const ends = found.bins.map(([, to], i) => (whole && !(to === found.max && i === found.bins.length - 1) ? to - 1 : to));
  const span = ends[ends.length - 1] - found.bins[0][0];
  draw(id, [{
    type: "bar", x: found.bins.map(([from], i) => (from + ends[i]) / 2), y: found.bins.map((bin) => bin[2]), width: found.bins.map((bin) => (bin[1] - bin[0]) * 0.94),
    marker: { color: color(hue) }, hoverinfo: "text",
    hovertext: found.bins.map(([from, , count], i) => `${from === ends[i] ? number(from) : `${number(from)} to ${number(ends[i])}`}: ${counted(count, "row")}`),
  }], {
    xaxis: { title: { text: unit }, tickformat: ",~r", ...(whole && span < 8 ? { dtick: 1 } : {}) },
    yaxis: { title: { text: "rows" }, ...ticks(Math.max(...found.bins.map((bin) => bin[2])), true) }, showlegend: false,
  });
}

const shownLabels = () => data.rows.labels.filter((label) => label.rows > 0 || label.mean_probability > 0).slice(0, 30);

function drawLabels() {
  const labels = shownLabels().reverse();
  const names = labels.map((label) => escaped(cut(label.label, narrow.matches ? 16 : 32)));
  draw("labels-chart", [
    { type: "bar", orientation: "h", name: "rows", y: names, x: labels.map((label) => label.rows), marker: { color: color("s1") }, hovertemplate: "%{x:,} rows<extra></extra>" },
    { type: "bar", orientation: "h", name: "mean probability where it was chosen", y: names, x: labels.map((label) => label.mean_probability_chosen), xaxis: "x2",
      marker: { color: color("s2") }, hovertemplate: "%{x:.3f}<extra></extra>" },
  ], {
    barmode: "group", yaxis: { type: "category" }, xaxis: { domain: [0, 0.6], rangemode: "tozero", title: { text: "rows" }, ...ticks(Math.max(0, ...labels.map((label) => label.rows)), true) },
    xaxis2: { domain: [0.66, 1], range: [0, 1], gridcolor: color("grid"), zerolinecolor: color("line"), title: { text: "probability" }, fixedrange: true },
  });
}

/** What draws each chart, by the id of its place. */
const drawers = new Map([["tree-chart", drawTree], ["speed-chart", drawSpeed]]);

function listDrawers() {
  const rows = data.rows || {};
  const list = (id, count, drawer) => {
    const place = document.getElementById(id);
    if (place && count) place.style.height = `${count * (id === "labels-chart" ? 2.6 : 2.4) + (id === "labels-chart" ? 6 : 3)}rem`;
    drawers.set(id, drawer);
  };
  list("time-chart", (data.time || []).length, () => bars("time-chart", data.time, "s"));
  list("prompt_tokens-chart", 0, () => bins("prompt_tokens-chart", rows.prompt_tokens, "s2", "tokens of a prompt", true));
  list("completion_tokens-chart", 0, () => bins("completion_tokens-chart", rows.completion_tokens, "s1", "tokens of a completion", true));
  list("rewards-chart", 0, () => bins("rewards-chart", rows.rewards, "s3", "reward"));
  list("scores-chart", 0, () => bins("scores-chart", rows.scores, "s3", "mean log-probability of a token"));
  if (rows.reasons) {
    const ends = [...Object.entries(rows.reasons).filter(([name]) => name !== "error"), ...Object.entries(rows.errors).map(([name, n]) => [`error: ${name}`, n])];
    list("ends-chart", ends.length, () => bars("ends-chart", ends, "", (name) => (name.startsWith("error") ? "bad" : name === "stop" || name === "scored" ? "s1" : "s2")));
  }
  if (rows.labels && rows.labels.length) list("labels-chart", shownLabels().length, drawLabels);
  if (data.kind === "plan") list("memory-chart", data.memory.length, drawPlannedMemory);
  else list("memory-chart", 0, () => over("memory-chart", "memory_bytes", "memory of the processes", "s1"));
  list("kv-chart", 0, () => over("kv-chart", "kv_bytes", "keys and values in use", "s2"));
}

/** Draws each chart when the reader comes near it, so that the page opens at once. */
function drawWhenSeen() {
  const seen = new Set();
  const drawOne = (id) => {
    if (seen.has(id)) return;
    seen.add(id);
    drawers.get(id)();
    if (id === "tree-chart") listenToTree();
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      drawOne(entry.target.id);
    }
    document.documentElement.dataset.charts = "drawn";
  }, { rootMargin: "300px" });
  const places = [...document.querySelectorAll(".chart")].filter((place) => drawers.has(place.id));
  places.forEach((place) => watcher.observe(place));
  const again = () => seen.forEach((id) => drawers.get(id)());
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  addEventListener("beforeprint", () => places.forEach((place) => drawOne(place.id)));
}

if (tree) listChildren();
listDrawers();
loadPlotly().then(drawWhenSeen).catch((error) => {
  const note = document.getElementById("charts-note");
  note.className = "note";
  note.textContent = `The charts cannot be drawn in this browser (${error.message}). The tables below each of them say the same.`;
  note.hidden = false;
});
