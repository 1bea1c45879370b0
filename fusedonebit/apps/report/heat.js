// Maps of layers over steps: one row a layer, one column a record, drawn into an image inside the SVG.

const CIVIDIS = ["#00204d", "#31446b", "#666970", "#958f78", "#cbba69", "#ffea46"];
const AROUND_LIGHT = ["#7f3b08", "#e08214", "#f4f4f4", "#8073ac", "#2d004b"]; // orange and purple: told apart by all
const AROUND_DARK = ["#fdb863", "#b35806", "#2a2f36", "#6a5aa8", "#cfc6f5"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

/** The colour of a share 0 to 1 of a map's range. */
function blend(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [rgb(stops[i]), rgb(stops[i + 1])];
  return a.map((x, k) => Math.round(x + (b[k] - x) * (at - i)));
}

/** What all maps of one kind share, so that runs can be compared: range, colours, ticks. */
function heatScale(kind) {
  const values = data.heats.filter((map) => map.kind === kind.key).flatMap((map) => map.rows.flat()).filter((v) => v !== null);
  const bound = (f) => values.reduce((a, b) => f(a, b));
  let [low, high] = [bound(Math.min), bound(Math.max)];
  if (kind.middle !== null) {
    const reach = Math.max(high / kind.middle, kind.middle / Math.max(low, 1e-6), 1.001);
    [low, high] = [kind.middle / reach, kind.middle * reach];
    const share = (v) => Math.log(Math.max(v, 1e-6) / low) / Math.log(high / low);
    return { low, high, share, stops: () => (dark.matches && !printing ? AROUND_DARK : AROUND_LIGHT), ticks: logTicks(low, high) };
  }
  // One layer's tiny value must not darken all others: 98 % of the values decide where the colours begin.
  const above = values.filter((v) => v > 0).sort((a, b) => a - b);
  const least = above.length ? above[Math.floor(above.length / 50)] : 1, log = high / least > 8;
  low = log ? least : 0;
  if (!(high > low)) high = low ? low * 1.1 : 1;
  const share = (v) => (log ? Math.log(Math.max(v, low) / low) / Math.log(high / low) : v / high);
  return { low, high, share, stops: () => CIVIDIS, ticks: log ? logTicks(low, high) : ticks(0, high, 4) };
}

let printing = false;

/** Names without the leading and trailing parts that all of them share: those say nothing, and take the room. */
function withoutCommon(names) {
  const parts = names.map((name) => name.split(".")), least = Math.min(...parts.map((p) => p.length));
  let head = 0, tail = 0;
  while (names.length > 1 && head < least - 1 && parts.every((p) => p[head] === parts[0][head])) head++;
  const last = (p, i) => p[p.length - 1 - i];
  while (names.length > 1 && tail < least - head - 1 && parts.every((p) => last(p, tail) === last(parts[0], tail))) tail++;
  const own = parts.map((p) => (head ? "…" : "") + p.slice(head, p.length - tail).join(".") + (tail ? "…" : ""));
  return { names: own, head: parts[0].slice(0, head).join("."), tail: tail ? parts[0].slice(-tail).join(".") : "" };
}

class Heat {
  constructor(map, kind, shared, parent) {
    Object.assign(this, { map, kind, shared, run: data.runs[map.run] });
    this.card = node("section", { class: "card" });
    this.card.appendChild(node("h3", {}, `${this.run.label}: ${kind.title}`));
    const { names, head, tail } = withoutCommon(map.layers);
    this.names = names;
    const common = [head && `begin with ${head}`, tail && `end with ${tail}`].filter(Boolean).join(" and ");
    this.card.appendChild(node("p", { class: "quiet" }, kind.note + (common && ` All names ${common}.`)));
    const longest = this.names.reduce((n, name) => Math.max(n, name.length), 0);
    this.left = Math.min(Math.max(longest * 6.1, 40), NARROW ? 110 : 230) + 8;
    this.letters = Math.floor((this.left - 8) / 6.1);
    this.row = map.layers.length <= 40 ? 14 : Math.max(560 / map.layers.length, 2);
    this.height = Math.max(this.row * map.layers.length, 60);
    this.row = this.height / map.layers.length;
    this.top = MARGIN.top + 10;
    this.svg = draw(this.card, "svg", { viewBox: `0 0 ${WIDTH} ${this.top + this.height + 76}`, role: "img", tabindex: "0" });
    parent.appendChild(this.card);
    this.svg.addEventListener("pointermove", (event) => this.tell(event));
    this.svg.addEventListener("pointerleave", hush);
    this.svg.addEventListener("dblclick", () => zoom(null));
    this.paint();
  }

  paint() {
    const { svg, map, run, left, top, height } = this, right = WIDTH - MARGIN.right;
    this.card.hidden = !state.shown[run.index];
    if (this.card.hidden) return;
    svg.replaceChildren();
    svg.setAttribute("aria-label", `${this.kind.title} of ${run.label}, ${map.layers.length} layers over steps. A table below has each layer's figures.`);
    const range = state.range || [run.first, run.last];
    this.x = scale(range[0], range[1], left, right, false);
    draw(svg, "rect", { x: left, y: top, width: right - left, height, fill: "var(--grid)" });
    const image = draw(svg, "image", { x: left, y: top, width: right - left, height, preserveAspectRatio: "none", style: "image-rendering: pixelated" });
    image.setAttribute("href", this.picture(Math.round(right - left)));
    for (const [first, last, name] of run.bands) {
      const [a, b] = [Math.max(this.x.at(first), left), Math.min(this.x.at(Math.max(last, first)), right)];
      if (b > a) draw(draw(svg, "rect", { x: a, y: MARGIN.top, width: b - a, height: 7, fill: phaseColour(name) }), "title", {}, name);
    }
    const every = Math.ceil(11 / this.row);
    this.names.forEach((name, i) => {
      if (i % every === 0) draw(svg, "text", { x: left - 6, y: top + (i + 0.5) * this.row + 4, "text-anchor": "end" }, this.shorten(name));
    });
    for (const tick of this.x.ticks) {
      draw(svg, "line", { class: "axis", x1: this.x.at(tick), x2: this.x.at(tick), y1: top + height, y2: top + height + 4 });
      draw(svg, "text", { x: this.x.at(tick), y: top + height + 16, "text-anchor": "middle" }, count(tick));
    }
    draw(svg, "text", { x: (left + right) / 2, y: top + height + 30, "text-anchor": "middle" }, "step");
    this.bar(top + height + 42);
  }

  /** One pixel per layer and per place on the axis: columns are as wide as records are apart. */
  picture(width) {
    const { map, shared } = this, stops = shared.stops(), rows = map.layers.length;
    const canvas = node("canvas", { width, height: rows }), context = canvas.getContext("2d");
    const pixels = context.createImageData(width, rows);
    for (let p = 0; p < width; p++) {
      const column = this.column(this.x.back(this.left + p + 0.5));
      if (column < 0) continue;
      for (let r = 0; r < rows; r++) {
        const value = map.rows[r][column];
        if (value !== null) pixels.data.set([...blend(stops, shared.share(value)), 255], 4 * (r * width + p));
      }
    }
    context.putImageData(pixels, 0, 0);
    return canvas.toDataURL();
  }

  /** The record that holds at a step: the last one up to there. */
  column(step) {
    const steps = this.map.steps;
    if (step < steps[0] || step > this.run.last) return -1;
    let low = 0, high = steps.length;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
    return low;
  }

  bar(y) {
    const { svg, shared, left } = this, right = WIDTH - MARGIN.right, stops = shared.stops();
    const name = `bar-${this.map.run}-${this.kind.key}`, gradient = draw(svg, "linearGradient", { id: name });
    stops.forEach((stop, i) => draw(gradient, "stop", { offset: i / (stops.length - 1), "stop-color": stop }));
    draw(svg, "rect", { x: left, y, width: right - left, height: 10, fill: `url(#${name})`, stroke: "var(--line)" });
    for (const tick of shared.ticks) {
      const at = left + shared.share(tick) * (right - left);
      if (at < left - 1 || at > right + 1) continue;
      draw(svg, "line", { class: "axis", x1: at, x2: at, y1: y + 10, y2: y + 14 });
      draw(svg, "text", { x: at, y: y + 25, "text-anchor": "middle" }, number(tick));
    }
  }

  shorten(name) {
    const room = this.letters;
    return name.length <= room ? name : `${name.slice(0, Math.ceil(room / 2) - 1)}…${name.slice(-Math.floor(room / 2))}`;
  }

  tell(event) {
    const box = this.svg.getBoundingClientRect(), unit = WIDTH / box.width;
    const row = Math.floor(((event.clientY - box.top) * unit - this.top) / this.row);
    const column = this.column(this.x.back((event.clientX - box.left) * unit));
    if (row < 0 || row >= this.map.layers.length || column < 0 || (event.clientX - box.left) * unit < this.left) return hush();
    const value = this.map.rows[row][column];
    const said = value === null ? "not recorded" : number(value);
    tip(`step ${number(this.map.steps[column])}`, [[null, this.map.layers[row], said]], event.clientX, event.clientY);
  }
}
