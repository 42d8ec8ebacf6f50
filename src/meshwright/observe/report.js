"use strict";
// Reads values off the charts under the pointer; the charts themselves are drawn without it.
const charts = JSON.parse(document.getElementById("hover").textContent);

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - steps[low] < steps[high] - wanted ? low : high;
}

function show(value) {
  const size = Math.abs(value);
  if (size >= 1e5) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(5)));
}

function read(plot, clientX) {
  const chart = charts[Number(plot.dataset.chart)];
  const box = plot.getBoundingClientRect();
  const share = Math.min(1, Math.max(0, (clientX - box.left) / box.width));
  const wanted = chart.x[0] + share * (chart.x[1] - chart.x[0]);
  const first = chart.lines.find((line) => line.steps.length);
  if (!first) return;
  const step = first.steps[nearest(first.steps, wanted)];
  const place = (step - chart.x[0]) / (chart.x[1] - chart.x[0]);
  const rows = [`step ${step.toLocaleString("en")}`];
  for (const line of chart.lines) {
    if (!line.steps.length) continue;
    const index = nearest(line.steps, step);
    const at = line.steps[index] === step ? "" : ` (step ${line.steps[index].toLocaleString("en")})`;
    rows.push(`${line.label}: ${show(line.values[index])}${chart.unit}${at}`);
  }
  const cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
  cursor.style.left = `${100 * place}%`;
  tip.replaceChildren(...rows.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
  const onRight = place > 0.5;
  tip.style.left = onRight ? "auto" : `calc(${100 * place}% + 10px)`;
  tip.style.right = onRight ? `calc(${100 * (1 - place)}% + 10px)` : "auto";
  cursor.hidden = tip.hidden = false;
}

for (const plot of document.querySelectorAll(".plot")) {
  plot.addEventListener("pointermove", (event) => read(plot, event.clientX));
  plot.addEventListener("pointerdown", (event) => read(plot, event.clientX));
  plot.addEventListener("pointerleave", () => {
    plot.querySelector(".cursor").hidden = plot.querySelector(".tip").hidden = true;
  });
}
