// Script of the score page, part 1 of 2: data, threshold, histogram, and lists that draw their visible part only.
// Untrusted text enters the document through textContent only, never as markup.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const numbers = (values) => Float64Array.from(values, (x) => (x === null ? NaN : Number(x)));
const scores = numbers(data.scores), pvalues = data.pvalues && numbers(data.pvalues);
const familiar = numbers(data.familiar).filter((x) => !Number.isNaN(x)).sort();
const scored = scores.filter((x) => !Number.isNaN(x)).sort();
const calibrated = data.threshold === null ? null : Number(data.threshold);
const { log, lo, hi } = data.axis;
const count = scores.length, STEPS = 1000, STANDING_OUT = 3, INSET = 11; // INSET: half of the slider's thumb

/* Words and numbers */
const whole = (x) => x.toLocaleString("en");
const percent = (part, all) => (all ? ((100 * part) / all).toFixed(1) + "\u00a0%" : "–");
const short = (x) => {
  if (Number.isNaN(x)) return "no score";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const tiny = x !== 0 && (Math.abs(x) < 1e-4 || Math.abs(x) >= 1e6);
  return (tiny ? x.toExponential(2) : String(Number(x.toPrecision(4)))).replace(/-/g, "−");
};
const chance = (i) => {
  const p = pvalues ? pvalues[i] : NaN;
  return Number.isNaN(p) ? "" : p < 0.001 ? "p < 0.001" : "p " + String(Number(p.toPrecision(2)));
};
const make = (tag, className = "", text = "", parent = null) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  if (parent) parent.append(element);
  return element;
};
const above = (sorted, limit) => { // number of values in a sorted array that are greater than the limit
  let from = 0, to = sorted.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (sorted[middle] > limit) to = middle; else from = middle + 1;
  }
  return sorted.length - from;
};
const brief = (name) => { // the last part of a path without its middle, as names often differ at the end
  const letters = [...(name.split(/[\\/]/).filter(Boolean).pop() ?? name)];
  return letters.length > 16 ? letters.slice(0, 5).join("") + "…" + letters.slice(-10).join("") : letters.join("");
};
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

/* The threshold, and where it lies on the axis that the histogram and the slider share */
const along = (score) => clamp(((log ? Math.log10(Math.max(score, 1e-320)) : score) - lo) / (hi - lo), 0, 1);
const scoreAt = (share) => (log ? 10 ** (lo + share * (hi - lo)) : lo + share * (hi - lo));
const stepOf = (score) => Math.round(along(score) * STEPS);
const start = calibrated === null ? scoreAt(1) : calibrated;
let threshold = start;
const flagged = (i) => scores[i] > threshold;

/* Thumbnails: cut out of their sheets, which are decoded when first needed */
const sheet = (atlas, number) => {
  atlas.decoded ??= [];
  atlas.decoded[number] ??= (async () => {
    const image = new Image();
    image.src = atlas.sheets[number];
    await image.decode();
    return createImageBitmap(image);
  })();
  return atlas.decoded[number];
};
const picture = (atlas, item, parent) => {
  const canvas = make("canvas", Math.max(atlas.width, atlas.height) <= 96 ? "coarse" : "", "", parent);
  canvas.width = atlas.width;
  canvas.height = atlas.height;
  const place = item % atlas.perSheet;
  const x = (place % atlas.across) * atlas.cellWidth, y = Math.floor(place / atlas.across) * atlas.cellHeight;
  sheet(atlas, Math.floor(item / atlas.perSheet)).then((source) =>
    canvas.getContext("2d").drawImage(source, x, y, atlas.width, atlas.height, 0, 0, atlas.width, atlas.height));
  return canvas;
};

/* Histogram */
const svg = $("histogram");
const shape = (tag, attributes, parent = svg) => {
  const element = document.createElementNS(svg.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
};
let wide = 0, cut = null, line = null;
const across = (score) => INSET + along(score) * (wide - 2 * INSET);

const bars = (values, base, height) => { // a path of bars; a negative height hangs them below the base
  const bins = clamp(Math.round(wide / 14), 24, 64), counts = new Array(bins).fill(0);
  for (const value of values) counts[Math.min(bins - 1, Math.floor(along(value) * bins))] += 1;
  const most = Math.max(1, ...counts), step = (wide - 2 * INSET) / bins;
  return counts.map((n, i) => {
    if (!n) return "";
    const size = Math.sign(height) * Math.max(2, (Math.abs(height) * n) / most);
    return `M${(INSET + i * step + 0.75).toFixed(2)} ${base}v${(-size).toFixed(2)}h${(step - 1.5).toFixed(2)}V${base}z`;
  }).join("");
};
const ticks = () => {
  if (log) {
    const every = Math.ceil((hi - lo) / Math.max(2, wide / 90));
    const powers = Array.from({ length: Math.floor(hi) - Math.ceil(lo) + 1 }, (_, i) => Math.ceil(lo) + i);
    const decades = powers.filter((p) => p % every === 0).map((p) => 10 ** p);
    const parts = [Math.ceil(lo) - 1, ...powers].flatMap((p) => [1, 2, 5].map((m) => m * 10 ** p));
    return (hi - lo < 2.5 ? parts : decades).filter((x) => x > 10 ** lo && x < 10 ** hi);
  }
  const rough = (hi - lo) / Math.max(2, wide / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const first = Math.ceil(lo / step);
  return Array.from({ length: Math.max(0, Math.floor(hi / step) - first + 1) }, (_, i) => (first + i) * step);
};
const label = (score) => {
  const power = Math.round(Math.log10(Math.abs(score)));
  if (!log || hi - lo < 2.5 || Math.abs(power) < 3) return short(Number(score.toPrecision(6)));
  return "10" + String(power).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
};
const drawHistogram = () => {
  wide = svg.clientWidth;
  const tall = svg.clientHeight, floor = tall - 24, top = 20;
  const base = familiar.length ? Math.round((top + floor) / 2) : floor;
  svg.replaceChildren($("histogram-text"));
  svg.setAttribute("viewBox", `0 0 ${wide} ${tall}`);
  const clip = shape("clipPath", { id: "cut" }, shape("defs", {}));
  cut = shape("rect", { y: 0, height: tall, width: wide }, clip);
  const upper = familiar.length ? bars(familiar, base - 1, base - top - 2) : "";
  const lower = familiar.length ? bars(scored, base + 1, base - floor + 2) : bars(scored, floor, floor - top);
  shape("path", { class: "familiar", d: upper });
  shape("path", { class: "plain", d: lower });
  shape("path", { class: "accent", d: upper + lower, "clip-path": "url(#cut)" });
  shape("line", { class: "base", x1: 0, x2: wide, y1: base, y2: base });
  for (const tick of ticks()) {
    const x = across(tick), anchor = x < 24 ? "start" : x > wide - 24 ? "end" : "middle";
    shape("text", { x: x.toFixed(1), y: tall - 4, "text-anchor": anchor }).textContent = label(tick);
  }
  if (calibrated !== null) {
    const x = across(calibrated), right = x > wide - 90, anchor = right ? "end" : "start";
    shape("line", { class: "mark", x1: x, x2: x, y1: 4, y2: floor });
    shape("text", { x: x + (right ? -7 : 7), y: 13, "text-anchor": anchor }).textContent = "calibrated";
  }
  line = shape("line", { class: "threshold", y1: 4, y2: floor });
  moveLine();
};
const moveLine = () => {
  const x = across(threshold).toFixed(1);
  cut.setAttribute("x", x);
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
};

/* A long list of which only the visible part, and whatever has the focus, is in the document */
class Roll {
  constructor(box, clip, layout, build, refresh) {
    Object.assign(this, { box, clip, layout, build, refresh, list: [], entries: new Map(), active: -1 });
    this.where = new Int32Array(count);
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("click", (event) => {
      const entry = event.target.closest("[data-item]");
      if (entry) openDetail(Number(entry.dataset.item));
    });
    box.addEventListener("focusin", (event) => {
      const entry = event.target.closest("[data-item]");
      if (entry) this.activate(Number(entry.dataset.item));
    });
    (clip || window).addEventListener("scroll", () => this.later(), { passive: true });
  }
  later() {
    this.pending ??= requestAnimationFrame(() => { this.pending = undefined; this.draw(); });
  }
  show(list) {
    this.list = list;
    this.where.fill(-1);
    list.forEach((item, position) => { this.where[item] = position; });
    if (this.active < 0 || this.where[this.active] < 0) this.active = list.length ? list[0] : -1;
    this.draw();
  }
  draw() {
    const { columns, width, stride, across } = this.layout();
    Object.assign(this, { columns, stride });
    this.box.style.height = Math.ceil(this.list.length / columns) * stride + "px";
    const rect = this.box.getBoundingClientRect();
    const frame = this.clip ? this.clip.getBoundingClientRect() : { top: 0, bottom: innerHeight };
    const first = Math.max(0, (Math.floor((frame.top - rect.top) / stride) - 2) * columns);
    const last = Math.min(this.list.length, (Math.ceil((frame.bottom - rect.top) / stride) + 2) * columns);
    const wanted = new Set(this.list.slice(first, Math.max(first, last)));
    if (this.active >= 0) wanted.add(this.active); // keep the active entry reachable by Tab
    for (const [item, entry] of this.entries) if (!wanted.has(item)) { entry.remove(); this.entries.delete(item); }
    for (const item of wanted) {
      let entry = this.entries.get(item);
      if (!entry) this.entries.set(item, (entry = this.build(item))), this.box.append(entry);
      const position = this.where[item], row = Math.floor(position / columns);
      entry.style.transform = `translate(${(position % columns) * across}px, ${row * stride}px)`;
      if (width) entry.style.width = width + "px", entry.style.height = stride - GAP + "px";
      this.refresh(entry, item, position);
    }
    this.activate(this.active);
  }
  target(item) {
    const entry = this.entries.get(item);
    return entry?.hasAttribute("data-item") ? entry : entry?.querySelector("[data-item]");
  }
  activate(item) {
    this.target(this.active)?.setAttribute("tabindex", "-1");
    this.active = item;
    this.target(item)?.setAttribute("tabindex", "0");
  }
  focus(item) {
    if (this.where[item] < 0) return;
    this.activate(item);
    this.draw();
    const target = this.target(item);
    target.scrollIntoView({ block: "nearest", inline: "nearest" });
    target.focus({ preventScroll: true });
  }
  key(event) {
    const page = this.columns * 4, side = this.columns > 1 ? 1 : 0;
    const moves = { ArrowRight: side, ArrowLeft: -side, ArrowDown: this.columns, ArrowUp: -this.columns,
      PageDown: page, PageUp: -page, Home: -count, End: count };
    const to = clamp(this.where[this.active] + moves[event.key], 0, this.list.length - 1);
    if (event.key === "Enter" || event.key === " ") openDetail(this.active);
    else if (moves[event.key]) this.focus(this.list[to]);
    else return;
    event.preventDefault();
  }
}
