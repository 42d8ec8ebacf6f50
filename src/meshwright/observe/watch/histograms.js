// Histograms of magnitudes: layer by exponent at one step, and exponents over steps.

const chosen = { kind: "", name: "", step: null, layer: null };
const KIND_TEXT = { activation: "inputs of matmuls", output_gradient: "gradients of matmul outputs", weight_gradient: "weight gradients" };
let histogramKey = "";

async function refreshHistograms() {
  const run = view.runs[view.selected];
  byId("histograms").hidden = !run || !run.num_histograms;
  if (!run || !run.num_histograms) return;
  const key = JSON.stringify([view.selected, run.num_histograms, chosen]);
  if (key === histogramKey) return;
  histogramKey = key;
  const values = { run: view.selected, kind: chosen.kind, name: chosen.name };
  for (const name of ["step", "layer"]) if (chosen[name] !== null) values[name] = chosen[name];
  view.histograms = (await fetchJson("api/histograms", values)).histograms;
  drawHistograms();
}

function choose(changes) {
  Object.assign(chosen, changes);
  refreshHistograms().catch((error) => console.warn(error));
}

function drawHistograms() {
  const found = view.histograms;
  byId("histograms").hidden = !found;
  if (!found) return;
  fillSelect(byId("histogram-kind"), Object.keys(found.kinds), found.kind, (kind) => KIND_TEXT[kind] ?? kind);
  fillSelect(byId("histogram-name"), found.kinds[found.kind], found.name, (name) => name);
  const slider = byId("histogram-step"), at = found.all_steps.indexOf(found.step);
  slider.max = found.all_steps.length - 1;
  slider.value = at;
  slider.disabled = found.all_steps.length < 2;
  byId("histogram-at").textContent = `step ${whole(found.step)}`;
  drawLayers(found);
  drawSteps(found);
  byId("histogram-note").replaceChildren(...histogramLines(found).map((text) => make("li", { text })));
}

function fillSelect(select, values, value, text) {
  if ([...select.options].map((one) => one.value).join() !== values.join()) {
    select.replaceChildren(...values.map((one) => make("option", { value: one, text: text(one) })));
  }
  select.value = value;
}

// The colour of a share; the square root shows rare magnitudes too.
function shade(image, at, share, most) {
  const style = getComputedStyle(document.documentElement);
  const [cold, hot] = ["--grid", "--run0"].map((name) => rgb(style.getPropertyValue(name)));
  const heat = most ? Math.sqrt(share / most) : 0;
  for (let part = 0; part < 3; part++) image.data[at + part] = cold[part] + heat * (hot[part] - cold[part]);
  image.data[at + 3] = 255;
}

function paint(canvas, columns, rows, shareAt) {
  canvas.width = columns; canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  let most = 0;
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) most = Math.max(most, shareAt(row, column));
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) shade(image, 4 * (row * columns + column), shareAt(row, column), most);
  context.putImageData(image, 0, 0);
}

const layerText = (layer) => (layer === null ? "-" : `layer ${layer}`);

function drawLayers(found) {
  const canvas = byId("histogram-layers"), numLayers = found.layers.length, numBins = found.layer_shares[0].length;
  const height = Math.min(420, Math.max(90, 20 * numLayers));
  canvas.style.height = `${height}px`;
  paint(canvas, numBins, numLayers, (row, column) => found.layer_shares[row][column]);
  const every = Math.max(1, Math.ceil((numLayers * 14) / height));
  byId("histogram-layer-labels").replaceChildren(...found.layers.map((one, row) => [one, row]).filter(([, row]) => row % every === 0).map(([one, row]) => placed("span", "top", (100 * (row + 0.5)) / numLayers, layerText(one.layer))));
  const toShare = (exponent) => (100 * (exponent - found.first_exponent)) / numBins;
  byId("histogram-exponents").replaceChildren(...exponentTicks(found.first_exponent, numBins).map((exponent) => power("left", toShare(exponent), exponent)));
  limits(byId("histogram-layer-limits"), found, "left", toShare);
  canvas.onclick = (event) => {
    const box = canvas.getBoundingClientRect(), row = Math.floor(((event.clientY - box.top) / box.height) * numLayers);
    const layer = found.layers[Math.min(numLayers - 1, Math.max(0, row))].layer;
    choose({ layer: layer === found.layer ? null : layer });
  };
}

function drawSteps(found) {
  const canvas = byId("histogram-steps"), numBins = found.layer_shares[0].length, numSteps = found.steps.length;
  canvas.style.height = byId("histogram-layers").style.height;
  paint(canvas, numSteps, numBins, (row, column) => found.step_shares[column]?.[numBins - 1 - row] ?? 0);
  const toShare = (exponent) => 100 - (100 * (exponent - found.first_exponent)) / numBins;
  byId("histogram-step-exponents").replaceChildren(...exponentTicks(found.first_exponent, numBins, 24).map((exponent) => power("top", toShare(exponent), exponent)));
  limits(byId("histogram-step-limits"), found, "top", toShare);
  const ends = numSteps > 1 ? [0, numSteps - 1] : [0];
  byId("histogram-step-axis").replaceChildren(...ends.map((at) => placed("span", "left", (100 * (at + 0.5)) / numSteps, `step ${whole(found.steps[at])}`)));
  byId("histogram-steps-title").textContent = `${found.layer === null ? "All layers" : `Layer ${found.layer}`} over steps`;
}

function exponentTicks(first, count, most = 40) {
  const every = [2, 4, 8, 16].find((one) => count / one <= most / 4) ?? 16, found = [];
  for (let exponent = Math.ceil(first / every) * every; exponent <= first + count; exponent += every) found.push(exponent);
  return found;
}

function power(side, share, exponent) {
  const element = make("span", { text: "2" }, make("sup", { text: String(exponent).replace("-", "\u2212") }));
  element.style[side] = `${share}%`;
  return element;
}

// Dashed lines where the fp8 format begins and ends, where the picture reaches so far.
function limits(box, found, side, toShare) {
  const { name, zero_exponent, largest_exponent } = found.format;
  const drawn = [[zero_exponent, `${name} rounds to 0`], [largest_exponent, `${name} ends`]].filter(([exponent]) => toShare(exponent) > 0 && toShare(exponent) < 100);
  box.replaceChildren(...drawn.map(([exponent, title]) => {
    const line = make("i", { title });
    line.style[side] = `${toShare(exponent)}%`;
    return line;
  }));
}

function histogramLines(found) {
  const form = found.format.name, percentOf = (share) => (share > 0 && share < 5e-4 ? "< 0.1%" : percent(share));
  const worst = [...found.layers].sort((a, b) => b.scaled_underflow + b.overflow + b.underflow - a.scaled_underflow - a.overflow - a.underflow).slice(0, 3);
  return worst.map((one) => {
    const broken = one.not_finite ? `, ${whole(one.not_finite)} not finite` : "";
    return `${one.layer === null ? found.name : layerText(one.layer)}: largest ${short(one.amax)}, zero ${percentOf(one.zero)}${broken}. In ${form} without a scale ${percentOf(one.underflow)} would become zero and ${percentOf(one.overflow)} would be too large; with one scale for the tensor ${percentOf(one.scaled_underflow)} would become zero.`;
  });
}

byId("histogram-kind").onchange = (event) => choose({ kind: event.target.value, name: "", layer: null });
byId("histogram-name").onchange = (event) => choose({ name: event.target.value, layer: null });
byId("histogram-step").oninput = (event) => {
  const step = view.histograms.all_steps[Number(event.target.value)];
  byId("histogram-at").textContent = `step ${whole(step)}`;
};
byId("histogram-step").onchange = (event) => {
  const { all_steps: steps } = view.histograms, at = Number(event.target.value);
  choose({ step: at === steps.length - 1 ? null : steps[at] });  // the newest: follow the run
};
