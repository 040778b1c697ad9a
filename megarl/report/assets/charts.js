// Curves: one chart a metric, all runs over each other, with one common zoom, cursor, axis and smoothing.
"use strict";
const view = { range: null, smoothing: 0, axis: "step", charts: new Set(), runs: [] };
const AXES = { step: "step", hours: "hours since the start" };
function xOf(run) {
  if (view.axis === "step") return run.steps;
  const ends = new Map((run.lanes["trainer.0"] ?? []).filter((s) => s[0] === "train").map((s) => [s[3], (s[1] + s[2]) / 3600]));
  let last = 0;
  return run.steps.map((step) => (last = Math.max(last, ends.get(step) ?? last)));
}
const DASHES = [undefined, [5, 4], [2, 3], [12, 4]]; // of the lines of one run in a chart
const sampleOf = (color, dash) =>
  dash ? `repeating-linear-gradient(90deg, ${color} 0 ${dash[0]}px, transparent ${dash[0]}px ${dash[0] + dash[1]}px)` : color;
class Chart {
  // keys: [[metric, suffix of its name in the readout], …]
  constructor(title, why, keys, { log = false, derive = null, warms = false } = {}) {
    Object.assign(this, { title, why, keys, log, derive, warms });
    this.readout = el("div", { class: "readout num" });
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title });
    this.missing = el("div", { class: "missing" });
    const toggle = el(
      "button",
      {
        class: "button",
        type: "button",
        "aria-pressed": String(log),
        title: "logarithmic scale",
        "aria-label": `logarithmic scale of ${title}`,
        onclick: () => {
          this.log = !this.log;
          toggle.setAttribute("aria-pressed", String(this.log));
          this.draw();
        },
      },
      "log",
    );
    this.node = el(
      "section",
      { class: "card chart", "aria-label": title, "data-key": keys.map((k) => k[0]).join(" ") },
      el("header", {}, el("h3", {}, title), toggle),
      why ? el("p", { class: "why" }, why) : null,
      this.readout,
      this.plot,
      this.missing,
    );
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("focus", () => this.u && this.u.cursor.idx == null && this.point(this.u.data[0].length - 1));
    observer.observe(this.node);
    view.charts.add(this);
  }
  values(run, key) {
    return this.derive ? this.derive(run, key) : run.column(key);
  }
  lines() {
    const found = [];
    for (const run of view.runs)
      if (run.visible)
        for (const [key, suffix] of this.keys) {
          const values = this.values(run, key);
          if (values && values.some((v) => v !== null)) found.push({ run, key, suffix, values });
        }
    return found;
  }
  draw() {
    if (!this.seen || !this.node.isConnected || !this.plot.clientWidth) return;
    const lines = this.lines();
    this.u?.destroy();
    this.u = null;
    this.missing.replaceChildren(...this.gaps(), ...this.beyond());
    if (!lines.length) {
      this.readout.replaceChildren(el("span", { class: "soft" }, "not measured"));
      return;
    }
    const x = new Map(),
      byRun = view.runs.map((run) => (x.has(run) ? x.get(run) : x.set(run, xOf(run)).get(run)));
    const tables = [],
      series = [{}];
    this.drawn = [];
    for (const line of lines) {
      const few = line.values.reduce((n, v) => n + (v !== null), 0) <= 25,
        axis = byRun[line.run.index],
        place = this.keys.findIndex((k) => k[0] === line.key);
      const stroke = line.run.color,
        dash = DASHES[place % DASHES.length],
        style = { stroke, width: 1.6, dash, spanGaps: true, points: { show: few, size: 4, fill: stroke } };
      const values = this.log ? line.values.map((v) => (v > 0 ? v : null)) : line.values;
      tables.push([axis, values]);
      series.push(view.smoothing ? { ...style, alpha: 0.3, width: 1 } : style);
      this.drawn.push({ ...line, dash, at: series.length - 1 });
      if (view.smoothing) {
        tables.push([axis, smooth(values, view.smoothing)]);
        series.push({ ...style, points: { show: false }, width: 2 });
        this.drawn[this.drawn.length - 1].smoothAt = series.length - 1;
      }
    }
    const ink = css("--soft"),
      grid = { stroke: css("--grid"), width: 1 };
    const data = this.join(tables),
      span = [data[0][0], data[0][data[0].length - 1]];
    this.full = span[0] === span[1] ? [span[0] - 1, span[1] + 1] : span;
    const most = this.warms ? settled(this.drawn.map((line) => line.values)) : Infinity;
    const flat = (u, low, high) => scale(low, high === null ? high : Math.max(Math.min(high, most), low));
    const scale = (low, high) =>
      low === null || (low === 0 && high === 0)
        ? [0, 1]
        : low === high
          ? [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5]
          : uPlot.rangeNum(low, high, 0.08, false);
    const power = (v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-6;
    const tens = this.log ? { ...grid, filter: (u, splits) => splits.map((v) => (power(v) ? v : null)) } : grid;
    this.u = new uPlot(
      {
        width: this.plot.clientWidth,
        height: 190,
        legend: { show: false },
        series,
        scales: { x: { time: false, range: () => view.range ?? this.full }, y: this.log ? { distr: 3 } : { range: flat } },
        axes: [
          { stroke: ink, grid, ticks: grid, size: 30, font: "12px system-ui, sans-serif" },
          {
            stroke: ink,
            grid: tens,
            ticks: tens,
            size: 58,
            values: (u, values) => values.map((v) => (v === null ? "" : tick(v))),
            font: "12px system-ui, sans-serif",
          },
        ],
        cursor: {
          sync: { key: "all", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
          drag: { x: true, y: false, setScale: false },
          focus: { prox: 24 },
          points: { size: 6 },
          bind: {
            dblclick: () => () => {
              zoom(null);
              return null;
            },
          },
        },
        hooks: {
          setCursor: [(u) => this.tell(u.cursor.idx)],
          draw: [(u) => this.marks(u)],
          setSelect: [
            (u) => {
              if (u.select.width > 4) zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            },
          ],
        },
      },
      data,
      this.plot,
    );
    const last = (line) => `${plain(line.run.name)}${line.suffix} last ${exact(line.values.findLast((v) => v !== null))}`;
    this.plot.setAttribute(
      "aria-label",
      `${this.title}: ${this.drawn.map(last).join("; ")}. Arrow keys move along the curve, plus and minus zoom, 0 shows all.`,
    );
    this.tell(null);
  }
  join(tables) {
    return tables.every((t) => t[0] === tables[0][0]) ? [tables[0][0], ...tables.map((t) => t[1])] : uPlot.join(tables);
  }
  beyond() {
    // what a warm-up has put above the chart
    const lines = this.warms && !this.log ? this.lines() : [],
      most = settled(lines.map((line) => line.values)),
      first = Math.max(...lines.map((line) => line.values[0] ?? 0));
    return first > most ? [el("div", { class: "soft" }, `the first step, ${seconds(first)}, is above the chart; log shows it`)] : [];
  }
  gaps() {
    return this.derive
      ? []
      : view.runs
          .filter((run) => run.visible)
          .flatMap((run) =>
            this.keys
              .map((k) => k[0])
              .filter((key) => run.notFinite[key])
              .map((key) => {
                const steps = run.notFinite[key];
                return el(
                  "div",
                  {},
                  `not finite at ${steps.length} of the steps: ${steps.slice(0, 5).join(", ")}${steps.length > 5 ? ", …" : ""}`,
                );
              }),
          );
  }
  marks(u) {
    // faults and restarts
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4, 3]);
    for (const run of view.runs)
      if (run.visible) {
        const bad = new Set(faults(run));
        for (const mark of events(run)) {
          const x = u.valToPos(view.axis === "step" ? run.stepAt(mark.at) : mark.at / 3600, "x", true);
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          ctx.strokeStyle = css(bad.has(mark) ? "--k-away" : "--soft");
          ctx.globalAlpha = 0.55;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
      }
    ctx.restore();
  }
  tell(index) {
    if (!this.u) return;
    const parts = [];
    let at = index;
    if (at === null || at === undefined) at = null;
    else parts.push(el("span", {}, `${AXES[view.axis].split(" ")[0]} ${exact(this.u.data[0][at])}`));
    for (const line of this.drawn) {
      const values = this.u.data[line.at];
      let place = at ?? values.length - 1;
      if (at === null) while (place > 0 && (values[place] === null || values[place] === undefined)) place--;
      const smoothed = line.smoothAt && values[place] != null ? ` (smoothed ${brief(this.u.data[line.smoothAt][place])})` : "";
      const name = [view.runs.length > 1 ? line.run.short : "", line.suffix].join(" ").trim();
      parts.push(
        el(
          "span",
          { "data-run": String(line.run.index), "data-metric": line.key },
          el("i", { class: "stroke", style: `background:${sampleOf(line.run.color, line.dash)}` }),
          name ? `${name} ` : "",
          el("b", {}, at === null ? brief(values[place], 5) : exact(values[place])),
          smoothed,
        ),
      );
    }
    this.readout.replaceChildren(...parts);
  }
  point(index) {
    const u = this.u,
      at = Math.max(0, Math.min(index, u.data[0].length - 1));
    u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.bbox.height / devicePixelRatio / 2 });
  }
  key(event) {
    const u = this.u;
    if (!u) return;
    const at = u.cursor.idx ?? u.data[0].length - 1,
      far = event.shiftKey ? 10 : 1,
      [low, high] = view.range ?? this.full,
      middle = u.data[0][at];
    const moves = {
      ArrowLeft: () => this.point(at - far),
      ArrowRight: () => this.point(at + far),
      Home: () => this.point(0),
      End: () => this.point(u.data[0].length - 1),
      "+": () => zoom([middle - (middle - low) / 2, middle + (high - middle) / 2]),
      "-": () => zoom([middle - (middle - low) * 2, middle + (high - middle) * 2], this.full),
      0: () => zoom(null),
      Escape: () => zoom(null),
    };
    moves["="] = moves["+"];
    if (moves[event.key]) {
      event.preventDefault();
      moves[event.key]();
    }
  }
}
const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries)
      if (entry.isIntersecting)
        for (const chart of view.charts)
          if (chart.node === entry.target && !chart.seen) {
            chart.seen = true;
            chart.draw();
          }
  },
  { rootMargin: "400px" },
);
// What happened to a run: all marks but its first start and an end that was due.
function events(run) {
  return run.marks.filter(
    (mark) =>
      !(mark.what === "start" && mark === run.marks.find((m) => m.what === "start")) && !(mark.what === "end" && mark.how === "finished"),
  );
}
// Of these, what nobody has asked for: not that a user or Slurm stopped it, nor that it was started again after that.
function faults(run) {
  let stopped = false;
  return events(run).filter((mark) => {
    const asked = (mark.what === "end" && /^stopped by /.test(mark.how)) || (mark.what === "start" && stopped);
    if (mark.what === "end" || mark.what === "start") stopped = asked && mark.what === "end";
    return !asked;
  });
}
// The largest value of lines without their first steps, if these are by far larger, as where engines compile; otherwise Infinity.
function settled(lines) {
  const rest = Math.max(...lines.flatMap((values) => values.slice(1).filter((v) => v !== null))),
    first = Math.max(...lines.map((values) => values[0] ?? 0));
  return rest > 0 && first > 2 * rest ? rest : Infinity;
}
function zoom(range, limits) {
  view.range = range && limits && range[0] <= limits[0] && range[1] >= limits[1] ? null : range;
  for (const chart of view.charts)
    if (chart.u) {
      chart.u.setSelect({ width: 0, height: 0, left: 0, top: 0 }, false);
      chart.u.batch(() => chart.u.setScale("x", { min: (view.range ?? chart.full)[0], max: (view.range ?? chart.full)[1] }));
    }
  $("#unzoom").disabled = !view.range;
}
function redraw() {
  for (const chart of view.charts) chart.draw();
}
