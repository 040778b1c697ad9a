// Times beside what the plan expected, tokens by engine, faults, and how much of the GPUs was used.
"use strict";
// A step's times, medians of all steps, beside the plan's.
const SPLIT = [
  ["time/step_s", "a step", "step_s", "--k-serve"],
  ["time/train_s", "training", "train_s", "--k-train"],
  ["time/generate_s", "generation", "generate_s", "--k-gen"],
  ["time/reward_s", "scoring", null, "--k-eval"],
  ["time/sync_s", "weight write", "sync_s", "--k-write"],
  ["time/sync_pause_s", "engines paused", null, "--k-pause"],
  ["time/trainer_wait_s", "trainer waits", null, "--k-waitb"],
  ["time/generator_wait_s", "engines wait", null, "--k-waite"],
  ["time/save_s", "saving holds up", null, "--k-save"],
];
// High-water marks, beside the plan's marks_gib.
const MARKS = [
  ["trainer", "trainer rank 0", "--k-train"],
  ["engine", "a worker of an engine", "--k-gen"],
  ["gpu_in_use", "the GPU of rank 0, all processes", "--k-serve"],
];
// A table of [name, measured, planned, color]; `text` writes a value.
function besidePlan(rows, text) {
  const most = Math.max(...rows.map((row) => Math.max(row[1], row[2] ?? 0)), 1e-9),
    planned = rows.some((row) => row[2] !== undefined);
  const body = rows.map(([name, measured, expected, color]) =>
    el(
      "tr",
      {},
      el("td", {}, name),
      el("td", { class: "n num" }, text(measured)),
      planned ? el("td", { class: "n num" }, expected === undefined ? "" : text(expected)) : null,
      el(
        "td",
        { style: "width:45%" },
        el(
          "div",
          { class: "meter" },
          el("i", { style: `width:${(100 * measured) / most}%;background:var(${color})` }),
          expected === undefined ? null : el("u", { style: `left:${(100 * expected) / most}%`, title: "as planned" }),
        ),
      ),
    ),
  );
  return el(
    "table",
    { class: "splits" },
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", {}, ""),
        el("th", { class: "n" }, "measured"),
        planned ? el("th", { class: "n" }, "planned") : null,
        el("th", {}, ""),
      ),
    ),
    el("tbody", {}, ...body),
  );
}
function splitTable(run) {
  const plan = run.expected ?? {},
    rows = SPLIT.map(([key, name, planned, color]) => [
      name,
      median(run.metrics[key] ?? []),
      planned ? plan[planned] : undefined,
      color,
    ]).filter((row) => !Number.isNaN(row[1]));
  const trainer = median(run.metrics["time/trainer_wait_s"] ?? []),
    generator = median(run.metrics["time/generator_wait_s"] ?? []),
    step = median(run.metrics["time/step_s"] ?? []),
    [scores, generates] = ["reward", "generate"].map((name) => median(run.metrics[`time/${name}_s`] ?? []));
  const binds = Number.isNaN(trainer + generator)
    ? ""
    : Math.abs(trainer - generator) < 0.1 * step
      ? "Measured: neither side waits much longer than the other."
      : trainer > generator
        ? `Measured: ${scores > generates ? "scoring" : "generation"} binds; the trainer waits longer than the engines do.`
        : "Measured: training binds; the engines wait longer than the trainer does.";
  const told = plan.problem
    ? el("p", { class: "soft" }, "The plan cannot tell: ", ...shown(plan.problem))
    : plan.binding
      ? el("p", {}, "Planned to bind: ", el("b", {}, ...shown(plan.binding)), `, on ${plan.gpu}.`)
      : el("p", { class: "soft" }, "This run's files have no prediction of the plan.");
  return el(
    "section",
    { class: "card", "aria-label": "a step's times" },
    el("h3", {}, "A step, and what it was planned to take"),
    el("p", { class: "why" }, "Medians over all steps. Sides overlap, so parts do not add up. The black tick is megarl plan's prediction."),
    besidePlan(rows, seconds),
    el("p", {}, binds),
    told,
  );
}
function memoryTable(run) {
  const plan = run.expected?.marks_gib ?? {},
    rows = MARKS.map(([side, name, color]) => [
      name,
      (run.metrics[`memory/${side}_gib`] ?? []).reduce((most, gib) => Math.max(most, gib ?? -Infinity), -Infinity),
      plan[side],
      color,
    ]).filter((row) => Number.isFinite(row[1]));
  if (!rows.length) return null;
  return el(
    "section",
    { class: "card", "aria-label": "memory" },
    el("h3", {}, "Memory, and what was planned"),
    el("p", { class: "why" }, "The most that was held. On a GPU, torch's memory of a side. The black tick is megarl plan's prediction for the fullest rank."),
    besidePlan(rows, (gib) => bytes(gib * 2 ** 30)),
  );
}
function engineTable(run) {
  const tokens = run.engine_tokens,
    usual = [...tokens].sort((a, b) => a - b)[tokens.length >> 1],
    most = Math.max(...tokens);
  if (tokens.length < 2 || !most) return null;
  return el(
    "section",
    { class: "card", "aria-label": "engines" },
    el("h3", {}, "Tokens by engine"),
    el("p", { class: "why" }, "Of all finished requests; a slow engine stands out beside its peers."),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el(
          "tbody",
          {},
          ...tokens.map((count, index) =>
            el(
              "tr",
              {},
              el("td", {}, `engine ${index}`),
              el("td", { class: "n num" }, brief(count)),
              el("td", { class: "n num" }, `${brief((100 * count) / usual, 3)} %`),
              el(
                "td",
                { style: "width:50%" },
                el("div", { class: "meter" }, el("i", { style: `width:${(100 * count) / most}%;background:var(--k-gen)` })),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}
function faultTable(run) {
  const marks = events(run),
    unasked = new Set(faults(run));
  return el(
    "section",
    { class: "card faults", "aria-label": "faults and restarts" },
    el("h3", {}, "Faults and restarts"),
    !marks.length
      ? el("p", { class: "soft" }, run.marks.length ? "None." : "None in the trace.")
      : el(
          "div",
          { class: "scroll" },
          el(
            "table",
            {},
            el("thead", {}, el("tr", {}, el("th", {}, "at"), el("th", { class: "n" }, "step"), el("th", {}, "what"))),
            el(
              "tbody",
              {},
              ...marks.map((mark) =>
                el(
                  "tr",
                  {},
                  el("td", { class: "num" }, clock(mark.at, 1)),
                  el("td", { class: "n num" }, String(run.stepAt(mark.at))),
                  el("td", unasked.has(mark) ? {} : { class: "soft" }, ...markText(mark)),
                ),
              ),
            ),
          ),
        ),
  );
}
// Model FLOPs of the policy's optimizer steps over what the trainer's GPUs could have done meanwhile.
function mfu(run) {
  const peak = run.expected?.peak_flops,
    ranks = run.expected?.trainer_ranks,
    flops = run.metrics["flops/policy"],
    train = run.metrics["time/train_s"];
  return peak && ranks && flops && train ? flops.map((f, i) => (f === null || !train[i] ? null : f / (train[i] * ranks * peak))) : null;
}
