"use strict";
// Follows runs: the stream says what changed, curves are fetched down-sampled, and everything is drawn here.
// Text from runs reaches the page as text only (textContent), never as markup.

const POINTS = 500;
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 300;
const token = new URLSearchParams(location.search).get("token");
const byId = (id) => document.getElementById(id);

const view = { runs: [], curves: [], details: [], hidden: new Set(), selected: 0, zoom: null, smoothing: 0.6, axis: "step", logarithmic: false };

const CHARTS = [
  { title: "Loss", note: "nats per token", wide: true, free: true, lines: [["loss", "train", "smooth"], ["eval_loss", "held out", "dots"]] },
  { title: "Gradient norm", note: "before clipping", lines: [["grad_norm", "", "smooth"]] },
  { title: "Learning rate", lines: [["lr", "", ""]] },
  { title: "Tokens per second", note: "all ranks", lines: [["tokens_per_second", "", "smooth"]], level: "tokens_per_second" },
  { title: "TFLOP/s per device", note: "model FLOPs", lines: [["tflops_per_gpu", "", "smooth"]], level: "tflops_per_gpu" },
  { title: "MFU", lines: [["mfu", "", "smooth"]], level: "mfu", unit: "%", factor: 100 },
  { title: "Step time", unit: " s", lines: [["step_seconds", "", "smooth"]], level: "step_seconds" },
  { title: "Peak memory", note: "largest over ranks", unit: " GiB", factor: 1 / 2 ** 30, lines: [["peak_bytes", "", ""]], level: "peak_bytes" },
  { title: "Waiting", note: "share of the step", unit: "%", share: true, factor: 100, lines: [["data_wait_seconds", "data", ""], ["reduce_wait_seconds", "exposed collectives of dp", "dashed"]] },
  { title: "Loss scale", lines: [["loss_scale", "", ""]] },
  { title: "Expert load", note: "1 is perfect balance", lines: [["expert_load_max", "most", ""], ["expert_load_min", "fewest", "dashed"]] },
  { title: "Load-balancing loss", lines: [["aux_loss", "", "smooth"]] },
  { title: "Noise scale", note: "tokens", lines: [["noise_scale_tokens", "", ""]] },
];

// Numbers as text ------------------------------------------------------------------------------------------

function short(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
    if (size >= limit) return `${Number((value / (suffix === "K" ? 1e3 : limit)).toPrecision(digits))}${suffix}`;
  }
  return size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits + 1)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

const moment = (seconds) => (seconds < 1 ? `${short(1000 * seconds)} ms` : `${short(seconds)} s`);
const percent = (share, digits = 1) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(digits)}%`);
const bytes = (value) => (value == null ? "-" : value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`);
const whole = (value) => value.toLocaleString("en");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name === "colour") element.style.setProperty("--colour", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const colour = (index) => `var(--run${index % 8})`;
const url = (path, values = {}) => `${path}?${new URLSearchParams({ ...values, ...(token ? { token } : {}) })}`;

// Data -----------------------------------------------------------------------------------------------------

const busy = new Set();

async function fetchJson(path, values) {
  const answer = await fetch(url(path, values));
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function fetchCurves(index) {
  const known = view.curves[index], run = view.runs[index];
  const values = { run: index, points: POINTS };
  const isLive = known && !view.zoom && known.generation === run.generation && known.zoom === null && known.length < 1.6 * POINTS;
  if (isLive) values.first = known.last + 1;
  if (view.zoom) [values.first, values.last] = view.zoom;
  const found = await fetchJson("api/curves", values);
  if (isLive && found.generation === known.generation) append(known, found);
  else view.curves[index] = { ...found, zoom: view.zoom, version: run.version };
  const curves = view.curves[index];
  const all = Object.values(curves.curves);
  curves.length = Math.max(0, ...all.map((curve) => curve.steps.length));
  curves.last = Math.max(0, ...all.map((curve) => curve.steps[curve.steps.length - 1] ?? 0), run.step ?? 0);
  curves.version = run.version;
}

function append(known, found) {
  for (const [name, curve] of Object.entries(found.curves)) {
    const old = known.curves[name];
    if (!old) { known.curves[name] = curve; continue; }
    for (const part of ["steps", "low", "high", "mean", "broken"]) old[part].push(...curve[part]);
  }
  known.marks = found.marks;
}

async function refresh(index) {
  if (busy.has(index) || view.hidden.has(index)) return;
  busy.add(index);
  try {
    await fetchCurves(index);
    if (index === view.selected) {
      view.details[index] = await fetchJson("api/details", { run: index });
      await refreshHistograms();
    }
    draw();
  } catch (error) {
    console.warn(error);
  } finally {
    busy.delete(index);
  }
}

function refreshStale() {
  view.runs.forEach((run, index) => {
    const known = view.curves[index];
    if (!known || known.version !== run.version || known.zoom !== view.zoom) refresh(index);
  });
}

function follow() {
  const stream = new EventSource(url("api/stream"));
  stream.onmessage = (message) => {
    view.runs = JSON.parse(message.data).runs;
    say("live", false);
    drawRuns();
    refreshStale();
  };
  stream.onerror = () => say("the server does not answer; trying again", true);
}

function say(text, isLost) {
  byId("connection").textContent = text;
  byId("connection").classList.toggle("lost", isLost);
}

// Runs and tiles -------------------------------------------------------------------------------------------

function drawRuns() {
  byId("runs").replaceChildren(...view.runs.map(runCard));
  const run = view.runs[view.selected];
  if (!run) return;
  document.title = `${run.name}: ${run.state}${run.step ? `, step ${whole(run.step)}` : ""}`;
  byId("tiles").replaceChildren(...tiles(run).map(([label, value, small, kind]) =>
    make("div", { class: "tile" },
      make("div", { class: "label", text: label }),
      make("div", { class: value === "-" ? "value unknown" : "value", text: value, title: value }),
      make("div", { class: `small ${kind ?? ""}`, text: small }))));
}

function runCard(run, index) {
  const swatch = make("button", { class: "swatch", type: "button", title: "show or hide its curves", "aria-label": `show or hide ${run.name}` });
  swatch.onclick = (event) => {
    event.stopPropagation();
    if (!view.hidden.delete(index)) view.hidden.add(index);
    drawRuns(); refreshStale(); draw();
  };
  const done = run.num_steps && run.step ? Math.min(1, run.step / run.num_steps) : 0;
  const steps = run.step === null ? "" : `step ${whole(run.step)}${run.num_steps ? ` of ${whole(run.num_steps)}` : ""}`;
  const reading = run.progress < 1 ? `reading the metrics: ${Math.floor(100 * run.progress)}%` : "";
  const about = [steps, reading, run.subtitle, run.state_text].filter(Boolean).join(" · ");
  const card = make("div", { class: `run${index === view.selected ? " selected" : ""}${view.hidden.has(index) ? " off" : ""}`, colour: colour(index), role: "button", tabindex: 0, title: run.directory },
    swatch,
    make("span", { class: "name", text: run.name }),
    make("span", { class: `state ${run.state}`, text: run.state }),
    make("span", { class: "about", text: about }),
    make("span", { class: "progress" }, make("i", {})));
  card.querySelector(".progress i").style.width = `${100 * done}%`;
  const select = () => { view.selected = index; view.hidden.delete(index); drawRuns(); refresh(index); draw(); };
  card.onclick = select;
  card.onkeydown = (event) => { if (event.key === "Enter" && event.target === card) select(); };
  return card;
}

function against(value, predicted, isLess) {
  // How a figure compares with its prediction; `isLess`: smaller is better.
  if (value == null || predicted == null) return ["", ""];
  const ratio = value / predicted, off = Math.abs(ratio - 1);
  const worse = isLess ? ratio > 1.1 : ratio < 0.9;
  return [`${off < 0.005 ? "as" : `${percent(off, 0)} ${ratio > 1 ? "above" : "below"} what is`} predicted`, worse ? "bad" : "good"];
}

function tiles(run) {
  const now = run.latest, plan = run.predicted, seconds = now.step_seconds;
  const waiting = seconds && now.data_wait_seconds != null ? now.data_wait_seconds / seconds : null;
  const exposed = seconds && now.reduce_wait_seconds != null ? now.reduce_wait_seconds / seconds : null;
  const speed = against(now.tokens_per_second, plan.tokens_per_second, false);
  const mfu = against(now.mfu, plan.mfu, false);
  const memory = against(now.peak_bytes, plan.peak_bytes, true);
  const left = run.num_steps && run.step !== null ? `${whole(Math.max(0, run.num_steps - run.step))} steps` : "";
  return [
    ["Loss", now.loss == null ? "-" : now.loss.toFixed(4), now.eval_loss == null ? "" : `held out ${now.eval_loss.toFixed(4)}`],
    ["Time left", duration(run.eta_seconds), left],
    ["Tokens/s", short(now.tokens_per_second), speed[0] || plan.text, speed[1]],
    ["MFU", percent(now.mfu), mfu[0] || (now.tflops_per_gpu == null ? "" : `${short(now.tflops_per_gpu)} TFLOP/s per device`), mfu[1]],
    ["Peak memory", bytes(now.peak_bytes), memory[0], memory[1]],
    ["Data wait", percent(waiting), "of the step, slowest rank", waiting > 0.05 ? "bad" : ""],
    ["Exposed reduction", percent(exposed), plan.communication_share == null ? "of the step" : `all communication predicted ${percent(plan.communication_share)}`],
    ["Goodput", percent(run.goodput), run.goodput_causes || "time of steps / wall time"],
  ];
}

// Curves ---------------------------------------------------------------------------------------------------

function draw() {
  requestAnimationFrame(() => {
    const shown = CHARTS.map((chart) => [chart, linesOf(chart)]).filter(([, lines]) => lines.length);
    const section = byId("charts");
    const titles = shown.map(([chart]) => chart.title).join();
    if (section.dataset.titles !== titles) {
      section.dataset.titles = titles;
      section.replaceChildren(...shown.map(([chart]) => frame(chart)));
    }
    shown.forEach(([chart, lines], index) => fill(section.children[index], chart, lines));
    if (!shown.length) section.replaceChildren(make("p", { class: "empty", text: "No step is recorded yet." }));
    if (!shown.length) section.dataset.titles = "";
    byId("unzoom").hidden = !view.zoom;
    drawRanks();
    drawTimeline();
    drawEvents();
  });
}

function frame(chart) {
  const plot = make("div", { class: "plot" }, document.createElementNS(SVG, "svg"), make("div", { class: "cursor", hidden: "" }), make("div", { class: "tip", hidden: "" }), make("div", { class: "selection", hidden: "" }));
  const svg = plot.firstChild;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const figure = make("figure", { class: chart.wide ? "chart wide" : "chart" },
    make("figcaption", {}, make("h2", { text: chart.title }), make("span", { class: "note" })),
    make("div", { class: "frame" }, make("div", { class: "y-axis" }), plot, make("div", { class: "x-axis" })));
  listen(plot);
  return figure;
}

function placeOf(curves, curve) {
  // Steps, or the tokens that were trained on at that step.
  if (view.axis === "step") return curve.steps;
  const tokens = curves.curves.tokens;
  if (!tokens) return curve.steps;
  return curve.steps.map((step) => between(tokens.steps, tokens.mean, step));
}

function between(steps, values, step) {
  const at = nearest(steps, step);
  const other = Math.min(steps.length - 1, Math.max(0, steps[at] < step ? at + 1 : at - 1));
  if (other === at || steps[other] === steps[at]) return values[at];
  return values[at] + (values[other] - values[at]) * (step - steps[at]) / (steps[other] - steps[at]);
}

function linesOf(chart) {
  const found = [];
  view.curves.forEach((curves, index) => {
    if (!curves || view.hidden.has(index) || !view.runs[index]) return;
    for (const [name, label, style] of chart.lines) {
      const curve = curves.curves[name];
      if (!curve || !curve.steps.length) continue;
      const factor = chart.factor ?? 1, scale = chart.share ? scaleOf(curves, curve) : null;
      const scaled = (values) => values.map((value, at) => value === null ? null : value * factor / (scale ? scale[at] : 1));
      found.push({ index, label, style, steps: curve.steps, x: placeOf(curves, curve), low: scaled(curve.low), high: scaled(curve.high), mean: scaled(curve.mean), broken: curve.broken, marks: curves.marks });
    }
  });
  return found;
}

function scaleOf(curves, curve) {
  const time = curves.curves.step_seconds;
  return curve.steps.map((step, at) => (time.steps[at] === step ? time.mean[at] : time.mean[nearest(time.steps, step)]) || 1);
}

function smoothed(values) {
  // Exponential mean, corrected for its start; a value that is missing is skipped.
  const keep = view.smoothing;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function rangeOf(chart, lines, levels) {
  const isLog = chart.free && view.logarithmic;
  const drawn = lines.flatMap((line) => [...line.low, ...line.high]).filter((value) => value !== null && (!isLog || value > 0)).sort((a, b) => a - b);
  if (!drawn.length) return [0, 1];
  let low = drawn[0], high = drawn[drawn.length - 1];
  const usual = drawn[Math.floor(0.98 * (drawn.length - 1))];
  chart.outside = null;
  if (usual > 0 && high > 4 * usual && !isLog) {
    chart.outside = high;
    high = 1.5 * usual;
  }
  for (const [, level] of levels) { low = Math.min(low, level); high = Math.max(high, level); }
  if (isLog) return [Math.log10(low), Math.log10(high) + 1e-9];
  if (!chart.free) low = Math.min(0, low);
  const margin = 0.06 * (high - low) || 0.5 * Math.abs(high) || 1;
  return [low === 0 ? 0 : low - margin, high + margin];
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step; at += step) found.push(Math.abs(at) < 1e-12 * step ? 0 : at);
  return found;
}

function fill(figure, chart, lines) {
  const levels = chart.level ? levelsOf(chart) : [];
  const all = lines.flatMap((line) => line.x);
  let x = [all.reduce((a, b) => Math.min(a, b), Infinity), all.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (!(x[1] > x[0])) x = [x[0] - 0.5, x[1] + 0.5];
  const y = rangeOf(chart, lines, levels), isLog = chart.free && view.logarithmic;
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg");
  const toX = (value) => (WIDTH * (value - x[0])) / (x[1] - x[0]);
  const toY = (value) => HEIGHT - (HEIGHT * Math.min(1.1, ((isLog ? Math.log10(value) : value) - y[0]) / (y[1] - y[0])));
  const yTicks = ticks(y[0], y[1], chart.wide ? 6 : 4), shownY = (value) => short(isLog ? 10 ** value : value) + (chart.unit ?? "");
  const paths = yTicks.map((value) => path("grid", `M0 ${(HEIGHT * (1 - (value - y[0]) / (y[1] - y[0]))).toFixed(1)}H${WIDTH}`));
  paths.push(...marks(lines, toX, x));
  for (const line of lines) paths.push(...drawn(line, toX, toY, isLog));
  for (const [index, value] of levels) paths.push(path("level", `M0 ${toY(value).toFixed(1)}H${WIDTH}`, colour(index)));
  svg.replaceChildren(...paths);
  svg.setAttribute("aria-label", `${chart.title}: ${lines.map((line) => `${view.runs[line.index].name} ${line.label} ${short(line.mean[line.mean.length - 1])}${chart.unit ?? ""}`).join(", ")}`);
  figure.querySelector(".note").textContent = noteOf(chart, lines);
  const isNarrow = plot.clientWidth < 420;
  figure.querySelector(".y-axis").replaceChildren(...yTicks.map((value) => placed("span", "top", 100 * (1 - (value - y[0]) / (y[1] - y[0])), shownY(value))));
  figure.querySelector(".x-axis").replaceChildren(...ticks(x[0], x[1], isNarrow ? 3 : chart.wide ? 9 : 5).filter((value) => view.axis === "tokens" || Number.isInteger(value)).map((value) => placed("span", "left", toX(value) / 10, view.axis === "tokens" ? short(value) : whole(value))));
  plot.querySelectorAll(".rim, .level-label").forEach((old) => old.remove());
  plot.append(...lines.flatMap((line) => line.broken.map((step) => Object.assign(placed("i", "left", toX(view.axis === "step" ? step : line.x[nearest(line.steps, step)]) / 10, ""), { className: "rim", title: `not finite at step ${step}` }))));
  for (const [, value] of levels.slice(0, 1)) plot.append(Object.assign(placed("span", "top", toY(value) / (HEIGHT / 100), "predicted"), { className: "level-label" }));
  plot.chart = { chart, lines, x, toX };
}

function noteOf(chart, lines) {
  const outside = chart.outside ? `off the scale: up to ${short(chart.outside)}${chart.unit ?? ""}` : "";
  const labels = [...new Set(lines.map((line) => line.label).filter(Boolean))];
  return [chart.note, labels.length > 1 ? labels.map((label, at) => (at ? `${label} ${lines.find((line) => line.label === label).style === "dots" ? "(dots)" : "(dashed)"}` : label)).join(", ") : "", outside].filter(Boolean).join(" · ");
}

function levelsOf(chart) {
  return view.runs.flatMap((run, index) => {
    const value = run.predicted[chart.level];
    return value == null || view.hidden.has(index) ? [] : [[index, value * (chart.factor ?? 1)]];
  });
}

function marks(lines, toX, x) {
  const first = lines.find((line) => line.index === view.selected);
  if (!first || view.axis !== "step") return [];
  const inside = (steps) => steps.filter((step) => step >= x[0] && step <= x[1]);
  return [
    path("checkpoint", inside(first.marks.checkpoint).map((step) => `M${toX(step).toFixed(1)} ${HEIGHT}v-7`).join("")),
    path("resume", inside(first.marks.resume).map((step) => `M${toX(step).toFixed(1)} 0V${HEIGHT}`).join("")),
  ];
}

function drawn(line, toX, toY, isLog) {
  const paint = colour(line.index), paths = [];
  const hasBand = line.low.some((value, at) => value !== line.high[at]);
  const isSmooth = line.style === "smooth" && view.smoothing > 0 && line.mean.length > 30;
  if (line.style === "dots") paths.push(path("dots", line.mean.map((value, at) => (value === null ? "" : `M${toX(line.x[at]).toFixed(1)} ${toY(value).toFixed(1)}h0`)).join(""), paint));
  if (hasBand) paths.push(path("band", band(line, toX, toY, isLog), paint));
  else if (isSmooth) paths.push(path("raw", joined(line.x, line.mean, toX, toY, isLog), paint));
  paths.push(path(`line ${line.style === "dashed" || line.style === "dots" ? "dashed" : ""}`, joined(line.x, isSmooth ? smoothed(line.mean) : line.mean, toX, toY, isLog), paint));
  return paths;
}

function joined(x, y, toX, toY, isLog) {
  let pen = "M";
  return y.map((value, at) => {
    if (value === null || (isLog && value <= 0)) { pen = "M"; return ""; }
    const part = `${pen}${toX(x[at]).toFixed(1)} ${toY(value).toFixed(1)}`;
    pen = "L";
    return part;
  }).join("");
}

function band(line, toX, toY, isLog) {
  const kept = line.x.map((_, at) => at).filter((at) => line.low[at] !== null && (!isLog || line.low[at] > 0));
  const point = (at, values) => `${toX(line.x[at]).toFixed(1)} ${toY(values[at]).toFixed(1)}`;
  return kept.length ? `M${kept.map((at) => point(at, line.high)).join("L")}L${kept.reverse().map((at) => point(at, line.low)).join("L")}Z` : "";
}

function path(kind, d, paint) {
  const element = document.createElementNS(SVG, "path");
  element.setAttribute("class", kind.trim());
  element.setAttribute("d", d);
  if (paint) element.style.setProperty("--colour", paint);
  return element;
}

function placed(tag, side, value, text) {
  const element = make(tag, { text });
  element.style[side] = `${value}%`;
  return element;
}

// Pointer --------------------------------------------------------------------------------------------------

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - sorted[low] < sorted[high] - wanted ? low : high;
}

function shareOf(plot, event) {
  const box = plot.getBoundingClientRect();
  return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
}

function listen(plot) {
  let start = null;
  plot.onpointerdown = (event) => { start = event.pointerType === "touch" ? null : shareOf(plot, event); readValues(plot, event); };
  plot.onpointermove = (event) => {
    readValues(plot, event);
    const box = plot.querySelector(".selection");
    if (start === null) return;
    const here = shareOf(plot, event);
    box.hidden = Math.abs(here - start) < 0.01;
    box.style.left = `${100 * Math.min(here, start)}%`;
    box.style.width = `${100 * Math.abs(here - start)}%`;
  };
  plot.onpointerup = (event) => {
    const box = plot.querySelector(".selection"), here = shareOf(plot, event);
    if (start !== null && Math.abs(here - start) >= 0.01) zoom(plot, Math.min(here, start), Math.max(here, start));
    start = null;
    box.hidden = true;
  };
  plot.onpointerleave = () => {
    start = null;
    plot.querySelectorAll(".selection, .cursor, .tip").forEach((one) => { one.hidden = true; });
  };
  plot.ondblclick = () => unzoom();
}

function zoom(plot, from, to) {
  const { x, lines } = plot.chart;
  const at = (share) => x[0] + share * (x[1] - x[0]);
  if (view.axis === "step") view.zoom = [Math.floor(at(from)), Math.ceil(at(to))];
  else view.zoom = [lines[0].steps[nearest(lines[0].x, at(from))], lines[0].steps[nearest(lines[0].x, at(to))]];
  refreshStale();
}

function unzoom() { view.zoom = null; refreshStale(); }

function readValues(plot, event) {
  if (!plot.chart) return;
  const { chart, lines, x } = plot.chart, share = shareOf(plot, event), wanted = x[0] + share * (x[1] - x[0]);
  const rows = [];
  for (const line of lines) {
    const at = nearest(line.x, wanted);
    if (!rows.length) rows.push(view.axis === "step" ? `step ${whole(line.steps[at])}` : `${short(line.x[at])} tokens, step ${whole(line.steps[at])}`);
    const name = [view.runs.length > 1 ? view.runs[line.index].name : "", line.label].filter(Boolean).join(" ");
    const range = line.low[at] !== line.high[at] ? ` (${short(line.low[at])} to ${short(line.high[at])})` : "";
    rows.push(`${name ? `${name}: ` : ""}${line.mean[at] === null ? "not finite" : short(line.mean[at], 4)}${chart.unit ?? ""}${range}`);
  }
  const tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
  tip.replaceChildren(...rows.map((text) => make("div", { text })));
  tip.style.left = share > 0.5 ? "auto" : `calc(${100 * share}% + 10px)`;
  tip.style.right = share > 0.5 ? `calc(${100 * (1 - share)}% + 10px)` : "auto";
  cursor.style.left = `${100 * share}%`;
  tip.hidden = cursor.hidden = false;
}

// Ranks and events -----------------------------------------------------------------------------------------

function drawRanks() {
  const found = view.details[view.selected]?.ranks;
  const isMeasured = Boolean(found?.order.length);
  byId("ranks").hidden = !found || found.peak_bytes.length < 2;
  byId("ranks").classList.toggle("unmeasured", !isMeasured);
  byId("ranks-unmeasured").hidden = isMeasured;
  byId("memory").hidden = !found || !found.peak_bytes.length;
  if (!found) return;
  if (found.order.length) drawHeat(found);
  if (found.peak_bytes.length) drawMemory(found.peak_bytes);
}

function drawHeat(found) {
  const canvas = byId("heat"), numRanks = found.order.length, numSteps = found.steps.length;
  canvas.width = numSteps; canvas.height = numRanks;
  const height = Math.min(360, Math.max(60, 18 * numRanks));
  canvas.style.height = `${height}px`;
  const [cold, hot] = ["--cold", "--hot"].map((name) => rgb(getComputedStyle(document.documentElement).getPropertyValue(name)));
  const context = canvas.getContext("2d"), image = context.createImageData(numSteps, numRanks);
  for (let column = 0; column < numSteps; column++) {
    const sorted = found.own_seconds.map((row) => row[column]).filter((value) => value !== null).sort((a, b) => a - b);
    // The lower middle: of two ranks the faster one, so that the slow one stands out.
    const median = sorted[Math.floor((sorted.length - 1) / 2)] || 1;
    for (let row = 0; row < numRanks; row++) {
      const value = found.own_seconds[row][column], at = 4 * (row * numSteps + column);
      const heat = value === null ? 0 : Math.min(1, Math.max(0, (value / median - 1) / 0.5));
      for (let part = 0; part < 3; part++) image.data[at + part] = cold[part] + heat * (hot[part] - cold[part]);
      image.data[at + 3] = value === null ? 0 : 255;
    }
  }
  context.putImageData(image, 0, 0);
  const every = Math.max(1, Math.ceil((numRanks * 14) / height));
  byId("heat-labels").replaceChildren(...found.order.map((rank, row) => [rank, row]).filter(([, row]) => row % every === 0).map(([rank, row]) => placed("span", "top", (100 * (row + 0.5)) / numRanks, `rank ${rank}`)));
  const middle = [...found.medians].sort((a, b) => a - b)[Math.floor((numRanks - 1) / 2)];
  byId("slowest").replaceChildren(...found.order.slice(0, 3).map((rank, row) => {
    const over = found.medians[row] / middle - 1, isSlow = over > 0.1;
    const wait = found.data_wait_seconds[row] / found.medians[row];
    return make("li", { class: isSlow ? "slow" : "", text: `rank ${rank}: ${moment(found.medians[row])} per step, ${isSlow ? `${percent(over, 0)} above the median rank` : "as the median rank"}${wait > 0.05 ? `, ${percent(wait, 0)} of it waiting for data` : ""}` });
  }));
}

const actionColours = { F: "--run0", B: "--run1", I: "--run6", W: "--run2" };
const timelineRow = 34, measuredHeight = 17, predictedHeight = 7;

function drawTimeline() {
  const found = view.details[view.selected]?.timeline;
  byId("pipeline").hidden = !found;
  if (!found) return;
  const canvas = byId("timeline"), height = timelineRow * found.ranks.length, ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  canvas.width = width * ratio; canvas.height = height * ratio;
  const context = canvas.getContext("2d"), most = Math.max(found.measured_seconds, found.predicted_seconds);
  context.scale(ratio, ratio);
  found.ranks.forEach((rank, row) => {
    const top = row * timelineRow + 3, toX = (seconds) => (seconds / most) * width;
    drawActions(context, rank.measured, toX, top, measuredHeight, 1);
    drawActions(context, rank.predicted, toX, top + measuredHeight + 2, predictedHeight, 0.5);
  });
  byId("pipeline-labels").replaceChildren(...found.ranks.map((rank, row) => placed("span", "top", (100 * (row + 0.4)) / found.ranks.length, `rank ${rank.rank}`)));
  const left = found.num_ranks - found.ranks.length;
  byId("pipeline-note").textContent = `${found.schedule}: measured ${moment(found.measured_seconds)}; the thin row below each rank is what the schedule predicts with the measured time of every stage, ${moment(found.predicted_seconds)}.${left ? ` ${left} more ranks are not drawn.` : ""}`;
}

function drawActions(context, actions, toX, top, height, opacity) {
  const style = getComputedStyle(document.documentElement);
  for (const [kind, , microbatch, start, end] of actions) {
    const x = toX(start), wide = Math.max(1, toX(end) - x - 1);
    context.globalAlpha = opacity;
    context.fillStyle = style.getPropertyValue(actionColours[kind] ?? "--soft").trim();
    context.fillRect(x, top, wide, height);
    if (height < 12 || wide < 14) continue;
    context.fillStyle = style.getPropertyValue("--card").trim();
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillText(microbatch, x + wide / 2, top + height - 5);
  }
}

function rgb(text) {
  const digits = text.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
}

function drawMemory(peaks) {
  const predicted = view.runs[view.selected].predicted.peak_bytes, most = Math.max(...peaks, predicted ?? 0) * 1.08;
  const bars = peaks.map((value, rank) => {
    const bar = make("b", { title: `rank ${rank}: ${bytes(value)}`, colour: colour(view.selected) });
    bar.style.height = `${(100 * value) / most}%`;
    if (peaks.length <= 32) bar.append(make("span", { text: rank }));
    return bar;
  });
  if (predicted) {
    const line = make("i", { class: "limit" }, make("span", { text: `predicted ${bytes(predicted)}` }));
    line.style.bottom = `${(100 * predicted) / most}%`;
    bars.push(line);
  }
  byId("memory-bars").replaceChildren(...bars);
  const largest = peaks.indexOf(Math.max(...peaks));
  byId("memory-note").textContent = `Largest: rank ${largest}, ${bytes(peaks[largest])}; smallest ${bytes(Math.min(...peaks))}.`;
}

function drawEvents() {
  const events = view.details[view.selected]?.events ?? [];
  byId("events-card").hidden = !events.length;
  byId("events").replaceChildren(...events.map(([at, kind, text]) => make("li", { class: kind }, make("time", { text: at }), make("span", { text }))));
}

// Controls -------------------------------------------------------------------------------------------------

byId("smoothing").oninput = (event) => { view.smoothing = Number(event.target.value); draw(); };
byId("axis").onchange = (event) => { view.axis = event.target.value; draw(); };
byId("logarithmic").onchange = (event) => { view.logarithmic = event.target.checked; draw(); };
byId("unzoom").onclick = unzoom;
byId("controls").onsubmit = (event) => event.preventDefault();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { draw(); drawHistograms(); });
addEventListener("resize", draw);
follow();
