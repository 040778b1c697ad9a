// Where the time goes: lanes of spans as the trace has them, and a step's times beside what the plan expected.
"use strict";
const COLORS = {
  train: "--k-train",
  "wait for a batch": "--k-waitb",
  "wait for engines": "--k-waite",
  "write weights": "--k-write",
  save: "--k-save",
  generate: "--k-gen",
  pause: "--k-pause",
  evaluate: "--k-eval",
  probe: "--k-probe",
  "evaluation weights": "--k-evalw",
  compare: "--k-compare",
  away: "--k-away",
  serve: "--k-serve",
};
const MEANS = {
  train: "training step",
  "wait for a batch": "trainer waits for a batch",
  "wait for engines": "trainer waits for engines to take weights",
  "write weights": "trainer writes weights",
  save: "checkpoint or export",
  generate: "a batch is generated",
  pause: "engines stand still for weights",
  evaluate: "evaluation",
  "evaluation weights": "weights for engines that only evaluate",
  probe: "log-probs are compared (probe)",
  compare: "trainer looks for changed weights",
  away: "lost, until it serves again",
  serve: "engine serves",
};
const ROW = 20,
  AXIS = 22;
// Lanes of a run: those of the trace, and one for each engine, which stands still when all do, may be away besides, and is none between
// two starts.
function lanesOf(run) {
  const lanes = Object.entries(run.lanes)
    .filter(([name]) => !/^engine\.\d+$/.test(name))
    .map(([name, spans]) => ({ name, spans }));
  const engines = Math.max(Number(run.settings["generator.engines"] ?? 0), run.engine_tokens.length);
  const begins = run.pauses.length ? run.pauses[0].at + run.pauses[0].pause_s : null;
  const ends = run.marks.filter((mark) => mark.what === "end").map((mark) => mark.at);
  const off = ends.map((at) => ["off", at, (run.pauses.find((p) => p.at > at)?.at ?? run.end) - at]);
  for (let engine = 0; engine < engines && engine < 64 && begins !== null; engine++) {
    const away = run.lanes[`engine.${engine}`] ?? [];
    const own = run.pauses.filter((p) => !p.engines || p.engines.includes(engine)).map((p) => ["pause", p.at, p.pause_s, p.version]);
    const lost = run.marks.filter(
      (m) => m.what === "lost" && m.who === `engine.${engine}` && !away.some((span) => Math.abs(span[1] - m.at) < 1),
    );
    const never = lost.map((m) => ["away", m.at, (ends.find((at) => at > m.at) ?? run.end) - m.at, null]); // it did not come back
    const breaks = [...own, ...away, ...never, ...off].sort((a, b) => a[1] - b[1]),
      spans = [];
    let from = begins;
    for (const span of breaks) {
      if (span[1] > from) spans.push(["serve", from, span[1] - from, null]);
      if (span[0] !== "off") spans.push(span);
      from = Math.max(from, span[1] + span[2]);
    }
    if (run.end > from) spans.push(["serve", from, run.end - from, null]);
    lanes.push({ name: `engine.${engine}`, spans });
  }
  return lanes;
}
class Timeline {
  constructor(run) {
    this.run = run;
    this.canvas = el("canvas", { class: "lanes", tabindex: "0", role: "img", "aria-label": "lanes" });
    this.readout = el("div", { class: "readout num", "aria-live": "polite" });
    this.legend = el("div", { class: "legend" });
    const button = (text, label, action) =>
      el("button", { class: "button", type: "button", "aria-label": label, title: label, onclick: action }, text);
    this.node = el(
      "section",
      { class: "card timeline", "aria-label": "lanes" },
      el("header", {}, el("h3", {}, "What each process did")),
      el(
        "p",
        { class: "why" },
        "Drag to zoom in, double-click for all; keys: arrows, +, −, 0. Where a pixel holds many spans, its colours are their shares.",
      ),
      el(
        "div",
        { class: "tools" },
        button("◀", "earlier", () => this.move(-0.5)),
        button("▶", "later", () => this.move(0.5)),
        button("+", "zoom in", () => this.scale(0.5)),
        button("−", "zoom out", () => this.scale(2)),
        button("all", "show all", () => this.show(null)),
      ),
      this.readout,
      this.canvas,
      this.legend,
      (this.shares = el("details", {}, el("summary", {}, "the same in numbers"), (this.table = el("div", { class: "scroll" })))),
    );
    this.canvas.addEventListener("pointerdown", (e) => {
      this.from = this.x(e);
      this.canvas.setPointerCapture(e.pointerId);
    });
    this.canvas.addEventListener("pointermove", (e) => {
      if (this.from !== undefined) {
        this.to = this.x(e);
        this.draw();
      } else this.tell(this.x(e), e.offsetY);
    });
    this.canvas.addEventListener("pointerup", (e) => {
      const a = this.from,
        b = this.x(e);
      this.from = this.to = undefined;
      if (Math.abs(b - a) > 4) this.show([this.time(Math.min(a, b)), this.time(Math.max(a, b))]);
      else this.draw();
    });
    this.canvas.addEventListener("dblclick", () => this.show(null));
    this.canvas.addEventListener("keydown", (e) => {
      const moves = {
        ArrowLeft: () => this.move(-0.2),
        ArrowRight: () => this.move(0.2),
        "+": () => this.scale(0.5),
        "=": () => this.scale(0.5),
        "-": () => this.scale(2),
        0: () => this.show(null),
        Escape: () => this.show(null),
      };
      if (moves[e.key]) {
        e.preventDefault();
        moves[e.key]();
      }
    });
    this.range = null;
    this.lanes = [];
  }
  update() {
    this.lanes = lanesOf(this.run);
    this.draw();
  }
  x(event) {
    return event.clientX - this.canvas.getBoundingClientRect().left;
  }
  get gutter() {
    return this.canvas.clientWidth < 500 ? 84 : 130;
  }
  get span() {
    return this.range ?? [this.run.begin, this.run.end || 1];
  }
  time(x) {
    const [a, b] = this.span;
    return a + ((Math.max(x, this.gutter) - this.gutter) / (this.canvas.clientWidth - this.gutter)) * (b - a);
  }
  show(range) {
    this.range = range;
    this.draw();
  }
  move(share) {
    const [a, b] = this.span,
      by = (b - a) * share;
    this.show([a + by, b + by]);
  }
  scale(factor) {
    const [a, b] = this.span,
      middle = (a + b) / 2,
      half = ((b - a) / 2) * factor;
    this.show(half * 2 >= this.run.end - this.run.begin ? null : [middle - half, middle + half]);
  }
  draw() {
    const width = this.canvas.clientWidth,
      height = this.lanes.length * ROW + AXIS;
    if (!width) return;
    const ratio = devicePixelRatio || 1,
      g = this.gutter,
      [a, b] = this.span,
      scale = (width - g) / (b - a);
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    const kinds = Object.keys(COLORS),
      colors = kinds.map((kind) => css(COLORS[kind])),
      soft = css("--soft"),
      line = css("--grid"),
      columns = Math.ceil(width - g),
      used = new Set();
    this.totals = [];
    this.lanes.forEach((lane, row) => {
      const shares = new Float32Array(columns * kinds.length),
        totals = {};
      for (const span of lane.spans) {
        const begin = Math.max(span[1], a),
          end = Math.min(span[1] + span[2], b);
        if (end < begin || span[1] > b) continue;
        const kind = kinds.indexOf(span[0]);
        used.add(span[0]);
        totals[span[0]] = (totals[span[0]] ?? 0) + (end - begin);
        const left = (begin - a) * scale,
          right = (end - a) * scale;
        for (let p = Math.floor(left); p < right && p < columns; p++)
          shares[p * kinds.length + kind] += Math.min(right, p + 1) - Math.max(left, p);
      }
      const top = row * ROW + 2,
        tall = ROW - 4;
      for (let p = 0; p < columns; p++) {
        let y = top + tall;
        for (let k = 0; k < kinds.length; k++) {
          const share = Math.min(1, shares[p * kinds.length + k]);
          if (share < 0.02) continue;
          ctx.fillStyle = colors[k];
          ctx.fillRect(g + p, y - share * tall, 1.05, share * tall);
          y -= share * tall;
        }
      }
      ctx.fillStyle = soft;
      ctx.fillText(lane.name.length > 17 && g < 100 ? lane.name.slice(0, 12) + "…" : lane.name, 2, top + tall / 2);
      ctx.fillStyle = line;
      ctx.fillRect(0, (row + 1) * ROW, width, 1);
      this.totals.push([lane.name, totals]);
    });
    const bad = new Set(faults(this.run));
    for (const mark of events(this.run))
      if (mark.at >= a && mark.at <= b) {
        ctx.fillStyle = css(bad.has(mark) ? "--k-away" : "--soft");
        ctx.fillRect(g + (mark.at - a) * scale - 0.75, 0, 1.5, this.lanes.length * ROW);
      }
    ctx.fillStyle = soft;
    ctx.textAlign = "center";
    const step = niceStep((b - a) / Math.max(2, (width - g) / 110));
    for (let t = Math.ceil(a / step) * step; t <= b; t += step) {
      const at = g + (t - a) * scale;
      ctx.fillRect(at, this.lanes.length * ROW, 1, 4);
      if (at < width - 20) ctx.fillText(clock(t, step), at, this.lanes.length * ROW + 13);
    }
    if (this.to !== undefined) {
      ctx.globalAlpha = 0.2;
      ctx.fillStyle = css("--focus");
      ctx.fillRect(Math.min(this.from, this.to), 0, Math.abs(this.to - this.from), this.lanes.length * ROW);
    }
    this.legend.replaceChildren(
      ...kinds
        .filter((kind) => used.has(kind))
        .map((kind) => el("span", {}, el("i", { style: `background:${css(COLORS[kind])}` }), MEANS[kind])),
    );
    const names = kinds.filter((kind) => used.has(kind));
    this.table.replaceChildren(
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, el("th", {}, "lane"), ...names.map((kind) => el("th", { class: "n" }, MEANS[kind])))),
        el(
          "tbody",
          {},
          ...this.totals.map(([name, totals]) =>
            el("tr", {}, el("td", {}, name), ...names.map((kind) => el("td", { class: "n" }, totals[kind] ? seconds(totals[kind]) : ""))),
          ),
        ),
      ),
    );
    this.canvas.setAttribute(
      "aria-label",
      `${this.lanes.length} lanes, ${clock(a, step)} to ${clock(b, step)} since the start; the table below has the same in numbers`,
    );
  }
  tell(x, y) {
    const lane = this.lanes[Math.floor(y / ROW)],
      t = this.time(x),
      slack = ((this.span[1] - this.span[0]) / this.canvas.clientWidth) * 1.5;
    if (!lane || x < this.gutter) {
      this.readout.replaceChildren();
      return;
    }
    const here = lane.spans.filter((s) => s[1] - slack <= t && t <= s[1] + s[2] + slack),
      mark = events(this.run).find((m) => Math.abs(m.at - t) < 2 * slack);
    const told = here
      .slice(0, 3)
      .map((s) =>
        el(
          "span",
          {},
          el("i", { style: `background:${css(COLORS[s[0]])}` }),
          `${MEANS[s[0]]}${s[3] === null ? "" : ` ${s[3]}`}: `,
          el("b", {}, seconds(s[2])),
          s[4] ? `, ${bytes(s[4])}` : "",
        ),
      );
    if (here.length > 3) told.push(el("span", { class: "soft" }, `and ${here.length - 3} more at this pixel`));
    if (mark) told.unshift(el("span", { class: faults(this.run).includes(mark) ? "missing" : "soft" }, ...markText(mark)));
    this.readout.replaceChildren(el("span", { class: "soft" }, `${lane.name} at ${clock(t, slack)}`), ...told);
  }
}
function niceStep(s) {
  for (const step of [
    1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400,
  ])
    if (step >= s) return step;
  return 172800 * 10 ** Math.max(0, Math.ceil(Math.log10(s / 172800))); // a clock was far off
}
function clock(time, step) {
  if (time < 0) return `−${clock(-time, step)}`;
  const t = step < 1 ? time : Math.floor(time + 1e-6),
    h = Math.floor(t / 3600),
    m = Math.floor((t % 3600) / 60),
    s = t % 60,
    digits = step < 1 ? Math.min(3, Math.ceil(-Math.log10(step))) : 0;
  return (h ? `${h}:${String(m).padStart(2, "0")}` : `${m}`) + ":" + s.toFixed(digits).padStart(digits ? 3 + digits : 2, "0");
}
function markText(mark) {
  const why = String(mark.why ?? mark.how ?? "").split("\n", 1)[0];
  const text =
    mark.what === "start"
      ? `started${mark.step ? ` at step ${mark.step}` : ""}`
      : mark.what === "end"
        ? `ended: ${why}`
        : mark.what === "lost"
          ? `${mark.who} lost: ${why}`
          : `${mark.what}: ${why}`;
  return shown(text.length > 400 ? text.slice(0, 400) + "…" : text);
}
