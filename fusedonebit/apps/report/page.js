// Which charts there are, and the switches above them.

const line = (run, key, style, legend) => {
  const curve = run.curves[key];
  return curve ? [{ x: curve.x, y: curve.y, breaks: curve.bad, style, legend }] : [];
};
const lossLines = (by) => (run) => {
  const { loss, mean } = run.curves;
  if (!loss) return [];
  const raw = { x: loss[by], y: loss.y, breaks: by === "x" ? loss.bad : [] };
  if (!state.smooth || !mean) return [raw];
  return [{ ...raw, style: "raw", legend: "this step" }, { x: mean[by], y: mean.y, legend: "running mean" }];
};
const has = (key) => data.runs.some((run) => run.curves[key]);
const spread = (key) => {
  const ys = data.runs.flatMap((run) => (run.curves[key] ? run.curves[key].y : []));
  return ys.length && ys.every((y) => y > 0) && ys.reduce((a, b) => Math.max(a, b)) / ys.reduce((a, b) => Math.min(a, b)) > 30;
};
const sent = data.runs.some((run) => run.curves.bytes_total && run.curves.bytes_total.y.some((y) => y > 0));

const SPECS = [
  {
    key: "loss", title: "Loss", x: "steps", format: number, marks: true, log: spread("loss"), of: lossLines("x"), when: has("loss"),
    note: "Circles: held out. ▲ skipped step, ◆ refused by the guard, × no number. Strips above: phases.",
  },
  {
    key: "loss-bytes", title: "Loss against bytes sent", x: "bytes", format: number, marks: true, log: spread("loss"),
    of: lossLines("b"), when: has("loss") && sent, note: "What one rank has sent to others by then, on a logarithmic axis.",
  },
  {
    key: "bytes", title: "Bytes per step", x: "steps", format: bytes, log: spread("bytes_step"), zero: true, when: sent,
    of: (run) => [...line(run, "bytes_step"), ...line(run, "bytes_fp32", "ideal")],
    note: "Sent by one rank. Dotted: what averaging float32 gradients would send.",
  },
  {
    key: "bytes-total", title: "Bytes in all", x: "steps", format: bytes, log: false, zero: true, when: sent,
    of: (run) => [...line(run, "bytes_total"), ...line(run, "fp32_total", "ideal")], note: "Dotted: float32 gradients.",
  },
  {
    key: "residual", title: "Compression error", x: "steps", format: number, log: spread("residual_over_momentum"), zero: true,
    of: (run) => line(run, "residual_over_momentum"), when: has("residual_over_momentum"),
    note: "The workers' residuals over the norm of the averaged momentum.",
  },
  {
    key: "tokens", title: "Tokens per second", x: "steps", format: count, log: false, zero: true,
    of: (run) => line(run, "tokens_per_s"), when: has("tokens_per_s"),
  },
  { key: "lr", title: "Learning rate", x: "steps", format: number, log: false, zero: true, of: (run) => line(run, "lr"), when: has("lr") },
  ...data.own.map((key, i) => ({
    key: `own-${i}`, title: key, x: "steps", format: number, log: spread(key), of: (run) => line(run, key), when: has(key),
    note: "Recorded by the training loop.",
  })),
];

const KINDS = [
  {
    key: "residual_over_momentum", title: "residual over momentum by layer", middle: null,
    note: "Of rank 0's own residual. Empty: nothing was compressed.",
  },
  { key: "ratio", title: "LAMB's ratio r by layer", middle: 1, note: "By which the layer's frozen coefficient is adapted; 1: as it was." },
];

const heats = [];

function repaint() {
  hush();
  charts.forEach((chart) => chart.paint());
  heats.forEach((map) => map.paint());
}

function zoom(range) {
  state.range = range && [Math.max(range[0], 0), range[1]];
  document.getElementById("unzoom").hidden = !range;
  repaint();
}

function toggle(name, on, change, swatch) {
  const button = node("button", { type: "button", "aria-pressed": String(on) });
  if (swatch) button.appendChild(swatch);
  else button.className = "option";
  button.appendChild(node("span", { class: "name" }, name));
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    change(now);
    repaint();
  });
  return button;
}

function legend() {
  const bar = document.getElementById("legend");
  const buttons = data.runs.map((run) => {
    const swatch = document.createElementNS(NS, "svg");
    for (const [key, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true" })) swatch.setAttribute(key, value);
    draw(swatch, "line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour(run.index), "stroke-width": 3, "stroke-dasharray": dash(run.index) });
    return toggle(run.label, true, (on) => { state.shown[run.index] = on; }, swatch);
  });
  bar.append(...buttons);
  if (data.runs.length > 3) {
    const all = node("button", { type: "button", class: "option" }, "all or none");
    all.addEventListener("click", () => {
      const on = !state.shown.every((shown) => shown);
      state.shown.fill(on);
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(on)));
      repaint();
    });
    bar.appendChild(all);
  }
  for (const name of data.phases) {
    const phase = node("span", { class: "phase" });
    phase.append(node("i", { style: `background:${phaseColour(name)}` }), document.createTextNode(name));
    bar.appendChild(phase);
  }
  bar.appendChild(node("span", { class: "gap" }));
  if (has("loss")) {
    bar.appendChild(toggle("running mean", true, (on) => { state.smooth = on; }));
    const losses = charts.filter((chart) => chart.spec.key.startsWith("loss"));
    bar.appendChild(toggle("logarithmic loss", spread("loss"), (on) => losses.forEach((chart) => { chart.log = on; })));
  }
  const back = node("button", { type: "button", class: "option", id: "unzoom", hidden: "" }, "whole run");
  back.addEventListener("click", () => zoom(null));
  bar.appendChild(back);
}

for (const spec of SPECS.filter((one) => one.when)) charts.push(new Chart(spec, document.getElementById("charts")));
for (const kind of KINDS) {
  const maps = data.heats.filter((map) => map.kind === kind.key);
  if (!maps.length) continue;
  const shared = heatScale(kind);
  for (const map of maps) heats.push(new Heat(map, kind, shared, document.getElementById("heats")));
}
legend();
dark.addEventListener("change", repaint);
for (const [event, value] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { printing = value; repaint(); });
}
document.body.dataset.drawn = "yes"; // for those who look whether it was
