// What each tab shows of the metrics, and what stands above: figures, advice, what was left out.
"use strict";
const LEARNING = [
  ["Reward", "mean over the step's samples", [["reward/mean", ""]]],
  ["Evaluation", "held-out sets", evaluations],
  ["Entropy", "of the policy, nats a token", [["entropy/mean", ""]]],
  ["KL to the reference", "where the algorithm has one", [["kl/mean", ""]]],
  ["Gradient norm", "before clipping", [["grad_norm", ""]], { log: true }],
  ["Loss", "", [["loss", ""]]],
  ["Response length", "tokens, mean", [["response_tokens/mean", ""]]],
  ["Truncated", "share of responses that reached max_tokens", [["truncated_fraction", ""]]],
  ["Groups without signal", "share whose rewards are all equal", [["zero_advantage_fraction", ""]]],
  ["Learning rate", "", [["learning_rate", ""]]],
  ["Critic: loss", "", [["value/loss", ""]]],
  ["Critic: explained variance", "of the returns; 1 is best, 0 no better than their mean", [["value/explained_variance", ""]]],
  [
    "Critic: values",
    "mean; dashed: the returns",
    [
      ["value/mean", "values"],
      ["returns", "returns"],
    ],
  ],
  ["Critic: gradient norm", "before clipping", [["value/grad_norm", ""]], { log: true }],
  ["Reward by source", "of data.train.sources, with what was dropped", () => ofSources("reward")],
  ["Prompts by source", "that a step trained on", () => ofSources("prompts")],
  ["Response length by source", "tokens, mean", () => ofSources("response_tokens/mean")],
  ["Truncated by source", "share of responses that reached their max_tokens", () => ofSources("truncated_fraction")],
  ["Turns by source", "mean", () => ofSources("turns/mean")],
  ["Prompts at rest", "left out of the step by the curriculum", [["prompts/rested", ""]]],
];
const RIGHT = [
  [
    "Log-prob difference, probes",
    "trainer against engines, at equal weights; mean and largest",
    [
      ["logprob/abs_diff_mean", ""],
      ["logprob/abs_diff_max", "largest"],
    ],
    { log: true },
  ],
  [
    "Log-prob difference, training tokens",
    "between the trainer's policy and what sampled the tokens",
    [["agreement/abs_diff_mean", ""]],
    { log: true },
  ],
  ["Ratio π/μ", "mean over tokens", [["is_ratio/mean", ""]]],
  ["Clipped share", "of tokens whose ratio was cut", [["is_ratio/clipped_fraction", ""]]],
  ["Effective sample size", "share of the tokens' number that the ratios leave", [["agreement/ess", ""]]],
  ["KL(μ‖π)", "estimate k3 over training tokens", [["agreement/kl_k3", ""]], { log: true }],
  [
    "Staleness",
    "weight versions behind; dashed: the oldest",
    [
      ["staleness/mean", ""],
      ["staleness/max", "max"],
    ],
  ],
  ["Groups rejected as too old", "", [["staleness/rejected", ""]]],
  ["Tokens masked as too old", "share of the policy's tokens", [["staleness/masked_fraction", ""]]],
  ["Further passes", "over a batch, while the next one was not there", [["idle/updates", ""]]],
  ["Responses sampled", "for a prompt; rollout.n of them are trained on", [["idle/samples", ""]]],
  ["Scoring failed", "share of samples", [["reward/failed_fraction", ""]]],
  ["Scoring failed by source", "share of samples", () => ofSources("reward/failed_fraction")],
  ["Episodes failed", "share of the episodes of programs and environments", [["rollout/failed_fraction", ""]]],
  ["Episodes failed by source", "share of episodes", () => ofSources("rollout/failed_fraction")],
];
const TIME = [
  ["Step time", "seconds", [["time/step_s", ""]], { warms: true }],
  ["Tokens a second", "that the policy wrote", [["tokens_per_s", ""]]],
  ["Samples a second", "", [["samples_per_s", ""]]],
  ["MFU", "of the trainer's GPUs while training; model FLOPs of the optimizer steps", [["flops/policy", ""]], { derive: mfu }],
  [
    "Waits",
    "seconds; the trainer, dashed the engines",
    [
      ["time/trainer_wait_s", "trainer"],
      ["time/generator_wait_s", "engines"],
    ],
    { warms: true },
  ],
  [
    "Training and generation",
    "seconds; dashed: generation",
    [
      ["time/train_s", "train"],
      ["time/generate_s", "generate"],
    ],
    { warms: true },
  ],
  ["Scoring", "seconds that rollouts waited for scores, beside decoding", [["time/reward_s", ""]], { warms: true }],
  [
    "Memory",
    "GiB, the most so far of trainer rank 0; dashed: a worker of an engine",
    [
      ["memory/trainer_gib", "trainer"],
      ["memory/engine_gib", "engine"],
    ],
  ],
  ["Queue", "finished groups that wait for a later step", [["prompts/buffered", ""]]],
];
const WEIGHTS = [
  ["Pause", "seconds that engines stood still", [["time/sync_pause_s", ""]]],
  ["Write", "seconds on trainer rank 0", [["time/sync_s", ""]]],
  ["Bytes of an update", "written by all trainer ranks", [["sync/bytes", ""]]],
  ["Changed share", "with weights.delta", [["sync/changed_fraction", ""]]],
];
function evaluations() {
  return [...new Set(view.runs.flatMap((run) => Object.keys(run.metrics)))]
    .filter((key) => /^eval\/.*(pass@\d+|avg@\d+|reward\/mean)$/.test(key))
    .sort((a, b) => a.includes("reward") - b.includes("reward"))
    .slice(0, 4)
    .map((key) => [key, key.slice(5)]);
}
function ofSources(what) {
  return [...new Set(view.runs.flatMap((run) => Object.keys(run.metrics)))]
    .filter((key) => key.startsWith("source/") && key.slice(7).split("/").slice(1).join("/") === what)
    .sort()
    .slice(0, 8)
    .map((key) => [key, plain(key.slice(7, -what.length - 1))]);
}
const grids = [];
function grid(charts) {
  grids.push({ node: el("div", { class: "grid" }), charts, made: new Map() });
  return grids[grids.length - 1].node;
}
// Makes the charts of metrics that have come since.
function fillGrids() {
  for (const { node, charts, made } of grids) {
    const before = made.size;
    for (const [title, why, named, options] of charts) {
      const keys = typeof named === "function" ? named() : named,
        known = view.runs.some((run) => keys.some(([key]) => run.metrics[key])) && (!options?.derive || view.runs.some(options.derive));
      if (made.has(title)) made.get(title).keys = keys;
      else if (known) made.set(title, new Chart(title, why, keys, options));
    }
    if (made.size > before) node.replaceChildren(...charts.filter(([title]) => made.has(title)).map(([title]) => made.get(title).node));
  }
}
let fillNames;
function more() {
  // any other metric, by name
  const place = el("div", { class: "grid" }),
    list = el("datalist", { id: "metrics" }),
    count = el("span", { class: "soft" });
  let keys = [];
  fillNames = () => {
    keys = [...new Set(view.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
    list.replaceChildren(...keys.map((key) => el("option", { value: key })));
    count.textContent = `${keys.length} in metrics.jsonl`;
  };
  const input = el("input", {
    type: "text",
    list: "metrics",
    placeholder: "a metric, such as reward/std",
    "aria-label": "another metric",
    style: "min-width:min(22rem, 100%)",
  });
  const add = () => {
    if (keys.includes(input.value)) {
      place.prepend(new Chart(plain(input.value), "", [[input.value, ""]]).node);
      input.value = "";
    }
  };
  input.addEventListener("change", add);
  return [
    el("h2", {}, "Any other metric"),
    el(
      "div",
      { class: "tools" },
      input,
      el("button", { type: "button", onclick: add }, "show"),
      count,
    ),
    list,
    place,
  ];
}
function summary() {
  const facts = [],
    run = view.runs.find((r) => r.visible) ?? view.runs[0],
    several = view.runs.filter((r) => r.visible).length > 1;
  const fact = (name, value, bad) => facts.push(el("div", { class: `fact${bad ? " bad" : ""}` }, el("b", {}, value), el("span", {}, name)));
  fact(`steps${run.settings.max_steps ? ` of ${run.settings.max_steps}` : ""}`, brief(run.steps.length));
  fact("reward, last 10 steps", brief(mean((run.metrics["reward/mean"] ?? []).slice(-10))));
  const evals = evaluations();
  if (evals.length) fact(`held-out ${plain(evals[0][1])}, ${heldOutOf(run, evals[0][0])}`, brief(run.last(evals[0][0])));
  fact("a step, median", seconds(median(run.metrics["time/step_s"] ?? [])));
  fact("tokens a second, median", brief(Math.round(median(run.metrics.tokens_per_s ?? []))));
  const [good, all] = audits(run);
  if (all) fact("updates audited equal", `${good} of ${all}`, good < all);
  fact("faults and restarts", String(faults(run).length), faults(run).length > 0);
  fact("samples kept", brief(run.count));
  return el(
    "div",
    {},
    several ? el("p", { class: "soft" }, "Figures of ", ...shown(run.name), "; curves of all runs.") : "",
    el("div", { class: "facts" }, ...facts),
  );
}
// Which weights the last held-out score is of: it may be older than the run's last step.
function heldOutOf(run, key) {
  const at = (run.metrics[key] ?? []).findLastIndex((v) => v !== null),
    version = run.metrics["eval/version"]?.[at],
    steps = run.steps.length ? run.steps[run.steps.length - 1] + 1 : 0;
  if (version === null || version === undefined) return "last";
  return version === 0 ? "before training" : version === steps ? "of the last weights" : `after ${version} of ${steps} steps`;
}
function mean(values) {
  const some = values.filter((v) => v !== null && v !== undefined);
  return some.length ? some.reduce((a, b) => a + b, 0) / some.length : NaN;
}
function advisories() {
  const told = view.runs
    .filter((run) => run.visible)
    .flatMap((run) =>
      run.advisories.map((text) => el("li", {}, ...(view.runs.length > 1 ? [el("b", {}, ...shown(run.name)), ": "] : []), ...shown(text))),
    );
  return told.length
    ? el("div", { class: "told", role: "status" }, el("b", {}, "Look at this"), el("ul", {}, ...told))
    : el("p", { class: "quiet" }, "Nothing stands out.");
}
function skipped() {
  const lines = view.runs.flatMap((run) => [
    ...Object.entries(run.skipped).map(
      ([file, n]) => `${run.name}/${file}: ${n} ${n === 1 ? "line" : "lines"} damaged or half-written, left out`,
    ),
    ...(run.out_of_order ? [`${run.name}/metrics.jsonl: ${run.out_of_order} lines out of order, left out`] : []),
    ...(run.ranks[1] > run.ranks[0] ? [`${run.name}: the trace of ${run.ranks[0]} of ${run.ranks[1]} trainer ranks`] : []),
  ]);
  return lines.length ? el("ul", { class: "missing skipped" }, ...lines.map((line) => el("li", {}, ...shown(line)))) : "";
}
