"use strict";
// Curves over steps or bytes, drawn as SVG. What all of the page shares is in here as well.

const data = JSON.parse(document.getElementById("data").textContent);
const NS = document.getElementById("ns").namespaceURI; // not spelt out: the page names no address
const state = { shown: data.runs.map(() => true), range: null, smooth: true, log: {} };
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const NARROW = matchMedia("(max-width: 700px)").matches; // a telephone: letters as large, curves smaller
const WIDTH = NARROW ? 350 : 640, HEIGHT = NARROW ? 230 : 280;
const charts = []; // those over steps share a zoom and a crosshair

const MARGIN = { left: NARROW ? 52 : 62, right: NARROW ? 14 : 24, top: 8, bottom: 34 };
const colour = (i) => `var(--run-${data.runs[i].colour % 8})`; // of the run with this index
const dash = (i) => DASHES[Math.floor(data.runs[i].colour / 8) % DASHES.length];
const KNOWN_PHASES = ["warmup", "compression", "uncompressed", "one-bit", "local"];
const otherPhases = data.phases.filter((name) => !KNOWN_PHASES.includes(name));
const phaseColour = (name) => {
  const i = KNOWN_PHASES.indexOf(name);
  return `var(--phase-${i >= 0 ? i : 5 + (otherPhases.indexOf(name) % 3)})`;
};
const visible = () => data.runs.filter((run) => state.shown[run.index]);

function node(tag, attributes = {}, text = null) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text; // never as HTML: names come from elsewhere
  return made;
}

function draw(parent, tag, attributes = {}, text = null) {
  const made = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.appendChild(made);
  return made;
}

// ---------------------------------------------------------------- numbers

function number(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(x.toPrecision(3)).toExponential().replace("e+", "e");
  if (Number.isInteger(x)) return x.toLocaleString("en");
  return String(Number(x.toPrecision(4)));
}

function bytes(x) {
  for (const unit of ["B", "kB", "MB", "GB", "TB", "PB"]) {
    if (Math.abs(x) < 1000 || unit === "PB") return `${Number(x.toPrecision(3))} ${unit}`;
    x /= 1000;
  }
}

function count(x) {
  return x < 1e4 ? number(x) : x < 1e6 ? `${Number((x / 1e3).toPrecision(3))}k` : `${Number((x / 1e6).toPrecision(3))}M`;
}

/** A scale from values to pixels, with its ticks. */
function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (x) => x;
  if (!(f(high) > f(low))) [low, high] = log ? [low / 2, low * 2] : [low - (Math.abs(low) || 1) / 2, low + (Math.abs(low) || 1) / 2];
  const a = f(low), b = f(high);
  const at = (x) => from + ((f(x) - a) / (b - a)) * (to - from);
  const back = (p) => { const y = a + ((p - from) / (to - from)) * (b - a); return log ? 10 ** y : y; };
  return { at, back, low, high, ticks: log ? logTicks(low, high) : ticks(low, high, 5), log };
}

function ticks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low), found = [];
  if (decades < 0.5) return ticks(low, high, 4).filter((x) => x > 0);
  const every = Math.ceil(decades / 6), factors = decades < 2 ? [1, 2, 5] : [1];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    if (decades >= 2 && e % every) continue;
    for (const k of factors) if (k * 10 ** e >= low * 0.999 && k * 10 ** e <= high * 1.001) found.push(k * 10 ** e);
  }
  return found;
}

/** The index of the point nearest to x, by bisection; -1 where there is none. */
function nearest(xs, x) {
  if (!xs.length) return -1;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return x - xs[low] <= xs[high] - x ? low : high;
}

// ---------------------------------------------------------------- a chart

/**
 * One card with curves. spec: title, note, key; x "steps" or "bytes"; format of y; log (can it be, is it at first);
 * of: (run) => [{x, y, style, legend}]; marks: whether held-out points, skips and NaN are drawn.
 */
class Chart {
  constructor(spec, parent) {
    this.spec = spec;
    this.log = spec.log;
    this.card = node("section", { class: "card" });
    this.card.appendChild(node("h3", {}, spec.title));
    this.card.appendChild(node("p", { class: "quiet" }, spec.note || ""));
    this.svg = draw(this.card, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
    parent.appendChild(this.card);
    this.listen();
    this.paint();
  }

  paint() {
    const svg = this.svg, spec = this.spec, runs = visible();
    svg.replaceChildren();
    const lines = runs.flatMap((run) => spec.of(run).map((line) => ({ ...line, run })));
    const range = spec.x === "steps" ? state.range : null;
    const inside = (x) => !range || (x >= range[0] && x <= range[1]);
    const positive = spec.x === "bytes"; // on a logarithmic axis nothing sent has no place
    const xs = lines.flatMap((line) => line.x.filter((x) => inside(x) && (!positive || x > 0)));
    const ys = lines.flatMap((line) => line.y.filter((y, i) => inside(line.x[i]) && (!this.log || y > 0)));
    svg.setAttribute("aria-label", this.describe(lines));
    this.x = null;
    if (!xs.length || !ys.length) {
      draw(svg, "text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, runs.length ? "nothing to show" : "no run is shown");
      return;
    }
    const bound = (values, f) => values.reduce((a, b) => f(a, b));
    let [low, high] = [bound(ys, Math.min), bound(ys, Math.max)];
    if (spec.zero && !this.log) low = Math.min(0, low);
    const room = this.log ? (high / low) ** 0.04 : (high - low) * 0.04;
    [low, high] = this.log ? [low / room, high * room] : [spec.zero && low === 0 ? 0 : low - room, high + room];
    const strips = spec.x === "steps" ? runs.filter((run) => run.bands.length) : [];
    this.strip = strips.length > 4 ? 3 : 6;
    this.top = MARGIN.top + strips.length * (this.strip + 1) + (strips.length ? 3 : 0);
    const whole = [runs.map((run) => run.first), runs.map((run) => run.last)]; // alike in all charts over steps
    const ends = range || (spec.x === "steps" ? [bound(whole[0], Math.min), bound(whole[1], Math.max)] : [bound(xs, Math.min), bound(xs, Math.max)]);
    this.x = scale(ends[0], ends[1], MARGIN.left, WIDTH - MARGIN.right, spec.x === "bytes");
    this.y = scale(low, high, HEIGHT - MARGIN.bottom, this.top, this.log);
    this.phases(strips);
    this.axes();
    this.clip = draw(svg, "g");
    const name = `clip-${spec.key}`, clip = draw(svg, "clipPath", { id: name });
    draw(clip, "rect", { x: MARGIN.left, y: 0, width: WIDTH - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.bottom });
    this.clip.setAttribute("clip-path", `url(#${name})`);
    for (const line of lines) this.curve(line);
    if (spec.marks) runs.forEach((run) => this.marks(run));
    this.cross = draw(svg, "line", { class: "cross", y1: this.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  }

  describe(lines) {
    const told = lines.filter((line) => line.y.length && !line.style).map((line) => {
      const ys = line.y.filter((y) => y !== null), format = this.spec.format;
      return `${line.run.label}: from ${format(ys[0])} to ${format(ys[ys.length - 1])}, least ${format(ys.reduce((a, b) => Math.min(a, b)))}, greatest ${format(ys.reduce((a, b) => Math.max(a, b)))}`;
    });
    return `${this.spec.title}. ${told.join("; ")}. The results are in a table above.`;
  }

  phases(runs) {
    const bottom = HEIGHT - MARGIN.bottom;
    runs.forEach((run, row) => {
      const y = MARGIN.top + row * (this.strip + 1);
      draw(this.svg, "rect", { x: MARGIN.left - 6, y, width: 4, height: this.strip, fill: colour(run.index) });
      run.bands.forEach(([first, last, name], i) => {
        const next = i + 1 < run.bands.length ? run.bands[i + 1][0] : last;
        const [a, b] = [Math.max(this.x.at(first), MARGIN.left), Math.min(this.x.at(next), WIDTH - MARGIN.right)];
        if (b < a) return;
        const height = runs.length === 1 ? bottom - y : this.strip; // one alone has room for bands
        const band = draw(this.svg, "rect", { x: a, y, width: Math.max(b - a, 0.5), height, fill: phaseColour(name) });
        if (runs.length === 1) band.setAttribute("opacity", 0.3);
        draw(band, "title", {}, `${run.label}: ${name}, steps ${first} to ${last}`);
        if (i > 0 && run.bands.length <= 6 && a > MARGIN.left) {
          draw(this.svg, "line", { class: "change", x1: a, x2: a, y1: y + this.strip, y2: bottom, stroke: colour(run.index) });
        }
      });
    });
  }

  axes() {
    const { svg, x, y, spec } = this, bottom = HEIGHT - MARGIN.bottom;
    for (const tick of y.ticks) {
      const at = y.at(tick);
      if (at < this.top - 1 || at > bottom + 1) continue;
      draw(svg, "line", { class: "grid-line", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: at, y2: at });
      draw(svg, "text", { x: MARGIN.left - 7, y: at + 4, "text-anchor": "end" }, spec.format(tick));
    }
    const label = spec.x === "bytes" ? bytes : count;
    for (const tick of x.ticks) {
      const at = x.at(tick);
      if (at < MARGIN.left - 1 || at > WIDTH - MARGIN.right + 1) continue;
      draw(svg, "line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 });
      draw(svg, "text", { x: at, y: bottom + 16, "text-anchor": "middle" }, label(tick));
    }
    draw(svg, "line", { class: "axis", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: bottom, y2: bottom });
    const under = spec.x === "bytes" ? "sent by one rank" : "step";
    draw(svg, "text", { x: (MARGIN.left + WIDTH - MARGIN.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, under);
  }

  curve({ x, y, run, style, breaks }) {
    const bad = new Set(breaks || []);
    let path = "", up = true, next = 0;
    const gaps = [...bad].sort((a, b) => a - b);
    for (let i = 0; i < x.length; i++) {
      while (next < gaps.length && gaps[next] < x[i]) { up = true; next++; } // a NaN lies between
      if (y[i] === null || (this.log && !(y[i] > 0)) || (this.x.log && !(x[i] > 0))) { up = true; continue; }
      path += `${up ? "M" : "L"}${this.x.at(x[i]).toFixed(1)} ${this.y.at(y[i]).toFixed(1)}`;
      up = false;
    }
    const attributes = { d: path, stroke: colour(run.index), class: `curve ${style || ""}` };
    if (dash(run.index) && style !== "ideal") attributes["stroke-dasharray"] = dash(run.index);
    draw(this.clip, "path", attributes);
  }

  marks(run) {
    const held = run.curves.held_out_loss, by = this.spec.x === "bytes" ? "b" : "x", stroke = colour(run.index);
    if (held) held[by].forEach((x, i) => {
      if ((this.log && !(held.y[i] > 0)) || (this.x.log && !(x > 0))) return;
      const at = { cx: this.x.at(x), cy: this.y.at(held.y[i]), r: 3.2, fill: "var(--card)", stroke, "stroke-width": 1.8 };
      draw(this.clip, "circle", at);
    });
    if (by === "b") return;
    const bottom = HEIGHT - MARGIN.bottom;
    for (const [step, skipped, vetoed] of run.skips) {
      const x = this.x.at(step), shape = vetoed ? `M${x} ${bottom - 12}l5 6l-5 6l-5 -6z` : `M${x} ${bottom - 9}l4.5 9h-9z`;
      const mark = draw(this.clip, "path", { d: shape, fill: stroke, class: "skip" });
      draw(mark, "title", {}, `${run.label}, step ${step}: ${skipped} skipped, ${vetoed} of them by the guard`);
    }
    for (const step of run.curves.loss ? run.curves.loss.bad : []) {
      const x = this.x.at(step), y = this.top + 6;
      const mark = draw(this.clip, "path", { d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`, stroke, "stroke-width": 2, class: "nan" });
      draw(mark, "title", {}, `${run.label}, step ${step}: the loss is no number`);
    }
  }

  // ------------------------------------------------------------ looking closer

  place(event) {
    const box = this.svg.getBoundingClientRect();
    return Math.min(Math.max(((event.clientX - box.left) / box.width) * WIDTH, MARGIN.left), WIDTH - MARGIN.right);
  }

  listen() {
    const svg = this.svg;
    let from = null, shade = null;
    svg.addEventListener("pointerdown", (event) => {
      if (this.spec.x === "steps" && this.x && event.pointerType === "mouse" && event.button === 0) from = this.place(event);
    });
    svg.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      const to = this.place(event);
      if (from !== null) {
        if (!shade) shade = draw(svg, "rect", { class: "zoom", y: this.top, height: HEIGHT - MARGIN.bottom - this.top });
        shade.setAttribute("x", Math.min(from, to));
        shade.setAttribute("width", Math.abs(to - from));
      }
      this.tell(this.x.back(to), event.clientX, event.clientY);
    });
    svg.addEventListener("pointerup", (event) => {
      const to = from === null ? null : this.place(event);
      if (to !== null && Math.abs(to - from) > 8) zoom([from, to].sort((a, b) => a - b).map(this.x.back));
      else if (shade) shade.remove();
      from = shade = null;
    });
    svg.addEventListener("pointerleave", () => { from = null; if (shade) shade.remove(); shade = null; hush(); });
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("blur", hush);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") zoom(null);
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || !this.x) return;
      event.preventDefault();
      const middle = (MARGIN.left + WIDTH - MARGIN.right) / 2, box = svg.getBoundingClientRect();
      this.at = Math.min(Math.max((this.at ?? middle) + way * 8, MARGIN.left), WIDTH - MARGIN.right);
      this.tell(this.x.back(this.at), box.left + (this.at / WIDTH) * box.width, box.top + box.height / 3);
    });
  }

  tell(x, left, top) {
    const rows = [];
    for (const run of visible()) {
      for (const line of this.spec.of(run)) {
        if (line.style === "ideal") continue;
        const i = nearest(line.x, x);
        if (i >= 0) rows.push([run, `${run.label}${line.legend ? `, ${line.legend}` : ""}`, this.spec.format(line.y[i])]);
      }
      const reach = (this.x.high - this.x.low) / 150;
      if (!this.spec.marks || this.spec.x !== "steps") continue;
      const held = run.curves.held_out_loss, i = held ? nearest(held.x, x) : -1;
      if (i >= 0 && Math.abs(held.x[i] - x) <= reach) rows.push([run, `${run.label}, held out`, number(held.y[i])]);
      const near = run.skips.filter(([step]) => Math.abs(step - x) <= reach);
      const [all, vetoed] = near.reduce(([a, b], [, n, v]) => [a + n, b + v], [0, 0]);
      if (all) rows.push([run, `${run.label}, skipped here`, vetoed ? `${all}, ${vetoed} by the guard` : String(all)]);
    }
    const head = this.spec.x === "bytes" ? `${bytes(x)} sent` : `step ${number(Math.round(x))}`;
    tip(head, rows.slice(0, 24), left, top);
    if (this.spec.x === "steps") charts.forEach((chart) => chart.point(x));
  }

  point(x) {
    if (!this.x || this.spec.x !== "steps") return;
    const at = x === null ? -1 : this.x.at(x), shown = at >= MARGIN.left - 1 && at <= WIDTH - MARGIN.right + 1;
    this.cross.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) { this.cross.setAttribute("x1", at); this.cross.setAttribute("x2", at); }
  }
}

function tip(head, rows, left, top) {
  const box = document.getElementById("tip");
  box.replaceChildren(node("b", {}, head));
  for (const [run, name, value] of rows) {
    const row = node("div", { class: "row" }), label = node("span");
    if (run) label.appendChild(node("i", { style: `background:${colour(run.index)}` }));
    label.appendChild(document.createTextNode(name));
    row.append(label, node("b", {}, value));
    box.appendChild(row);
  }
  box.hidden = false;
  const size = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, left + 16 + size.width > innerWidth ? left - size.width - 16 : left + 16)}px`;
  box.style.top = `${Math.max(4, Math.min(top + 12, innerHeight - size.height - 8))}px`;
}

function hush() {
  document.getElementById("tip").hidden = true;
  charts.forEach((chart) => chart.point(null));
}
