// The runs' data, as megarl/report/reading.py makes it, and small helpers. All text of a run goes into the page as text nodes.
"use strict";
const $ = (selector, root = document) => root.querySelector(selector);
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else if (key in node && typeof value !== "string") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
// Characters that could hide or reorder text are shown by their numbers. Newlines and tabs stay.
const UNSAFE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202f\\u205f-\\u206f\\ufeff" +
    "\\ufff9-\\ufffb\\ud800-\\udfff\\ue000-\\uf8ff\\u{e0000}-\\u{e0fff}]",
  "u",
);
function shown(text) {
  const parts = [],
    pieces = String(text).split(new RegExp(`(${UNSAFE.source})`, "u"));
  for (const piece of pieces) {
    if (!piece) continue;
    if (UNSAFE.test(piece))
      parts.push(
        el(
          "span",
          { class: "ctl", title: "a character that is not printed" },
          "U+" + piece.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"),
        ),
      );
    else parts.push(document.createTextNode(piece));
  }
  return parts;
}
const plain = (text) =>
  shown(text)
    .map((node) => node.textContent)
    .join(""); // for attributes, titles and canvases
function exact(value) {
  return value === null || value === undefined ? "–" : Number.isFinite(value) ? String(Number(value.toPrecision(9))) : "not finite";
}
function brief(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
}
function tick(v) {
  // short, for an axis
  const size = Math.abs(v);
  for (const [unit, factor] of [
    ["T", 1e12],
    ["G", 1e9],
    ["M", 1e6],
    ["k", 1e3],
  ])
    if (size >= factor * 10 || (size >= factor && factor > 1e3)) return `${Number((v / factor).toPrecision(4))}${unit}`;
  return size !== 0 && size < 1e-3 ? v.toExponential(1).replace(".0e", "e") : String(Number(v.toPrecision(5)));
}
function shortNames(names) {
  // without what all have in common at both ends
  const cut = (some) => {
    const words = some.map((name) => name.split(/(?<=[-_.])/));
    let n = 0;
    while (words.every((w) => w.length > n + 1 && w[n] === words[0][n])) n++;
    return some.map((name, i) => words[i].slice(n).join(""));
  };
  const flip = (text) => [...text].reverse().join("");
  if (names.length < 2 || new Set(names).size < names.length) return names;
  return cut(cut(names).map(flip))
    .map(flip)
    .map((name) => name.replace(/^[-_.]+|[-_.]+$/g, ""))
    .map((name, i) => name || names[i]);
}
function bytes(n) {
  for (const [unit, size] of [
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ])
    if (n >= size) return `${brief(n / size, 3)} ${unit}`;
  return `${n} B`;
}
function seconds(s) {
  if (s === null || s === undefined || Number.isNaN(s)) return "–";
  const size = Math.abs(s);
  if (size < 1e-3) return `${brief(s * 1e6, 3)} µs`;
  if (size < 1) return `${brief(s * 1e3, 3)} ms`;
  if (size < 120) return `${brief(s, 3)} s`;
  if (size < 7200) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
}
function median(values) {
  const some = values.filter((v) => v !== null && v !== undefined && !Number.isNaN(v)).sort((a, b) => a - b);
  return some.length ? (some[(some.length - 1) >> 1] + some[some.length >> 1]) / 2 : NaN;
}
function smooth(values, weight) {
  // an exponential mean without the pull towards its start; gaps stay gaps
  let mean = 0,
    total = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return v;
    mean = weight * mean + (1 - weight) * v;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}
async function inflate(base64) {
  const text = atob(base64.trim()),
    data = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) data[i] = text.charCodeAt(i);
  return new Response(new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Run {
  constructor(index) {
    this.index = index;
    this.visible = true;
    this.clear();
  }
  clear() {
    this.steps = [];
    this.metrics = Object.create(null); // names are the run's: "constructor" too may be one
    this.notFinite = Object.create(null);
    this.lanes = Object.create(null);
    this.marks = [];
    this.pauses = [];
    this.pairs = {};
    this.chunks = [];
    this.index_ = null;
    this.opened = new Map();
    this.skipped = {};
  }
  get color() {
    return css(`--r${this.index % 8}`);
  }
  absorb(found) {
    if (found.afresh) this.clear();
    const before = this.steps.length,
      rows = found.steps.length;
    this.steps.push(...found.steps);
    for (const key of new Set([...Object.keys(this.metrics), ...Object.keys(found.metrics)])) {
      const column = (this.metrics[key] ??= new Array(before).fill(null)),
        fresh = found.metrics[key];
      for (let i = 0; i < rows; i++) {
        const value = fresh ? fresh[i] : null;
        if (value === "n") (this.notFinite[key] ??= []).push(found.steps[i]);
        column.push(value === "n" ? null : value);
      }
    }
    for (const [name, spans] of Object.entries(found.lanes)) {
      (this.lanes[name] ??= []).push(...spans);
      if (before) this.lanes[name].sort((a, b) => a[1] - b[1]);
    }
    this.marks.push(...found.marks);
    this.pauses.push(...found.pauses);
    Object.assign(this.pairs, found.pairs);
    for (const key of ["name", "path", "settings", "advisories", "expected", "engine_tokens", "out_of_order", "ranks", "epoch_s"])
      this[key] = found[key];
    this.skipped = found.skipped;
    this.every = found.samples.every;
    const first = this.index_ ? this.index_.step.length : 0,
      columns = found.samples.index;
    if (!this.index_) this.index_ = columns;
    else for (const [key, values] of Object.entries(columns)) for (const value of values) this.index_[key].push(value);
    this.samplesBefore = first;
    this.chunks.push(...found.samples.chunks);
    this._ends = null;
  }
  get count() {
    return this.index_ ? this.index_.step.length : 0;
  }
  column(key) {
    return this.metrics[key];
  }
  last(key) {
    const c = this.metrics[key] ?? [];
    for (let i = c.length - 1; i >= 0; i--) if (c[i] !== null) return c[i];
    return null;
  }
  // Where on the axis of steps something happened, from the ends of the trainer's steps.
  stepAt(at) {
    this._ends ??= (this.lanes["trainer.0"] ?? []).filter((span) => span[0] === "train").map((span) => [span[1] + span[2], span[3]]);
    let low = 0,
      high = this._ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this._ends[middle][0] <= at) low = middle + 1;
      else high = middle;
    }
    return low ? this._ends[low - 1][1] : (this.steps[0] ?? 0);
  }
  get begin() {
    // before the first line of the trace, where a clock has gone back
    return Math.min(0, ...Object.values(this.lanes).map((spans) => spans[0]?.[1] ?? 0), ...this.marks.map((m) => m.at));
  }
  get end() {
    return Math.max(
      0,
      ...Object.values(this.lanes).map((spans) => (spans.length ? spans[spans.length - 1][1] + spans[spans.length - 1][2] : 0)),
      ...this.marks.map((m) => m.at),
    );
  }
  async group(chunk, place) {
    // the texts of a chunk are opened when one of them is looked at; the newest few are kept
    if (!this.opened.has(chunk)) {
      const held = this.chunks[chunk];
      const text = typeof held === "string" ? held : $(`#chunk-${this.index}-${chunk}`)?.textContent;
      if (!text) throw new Error("these texts are not in the page yet");
      this.opened.set(chunk, inflate(text));
      if (this.opened.size > 8) this.opened.delete(this.opened.keys().next().value);
    }
    return (await this.opened.get(chunk))[place];
  }
}
