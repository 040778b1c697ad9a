// One sample in full: its turns, and its tokens coloured by what the trainer knew of them.
"use strict";
const MODES = { text: "text", diff: "log-prob difference", ratio: "ratio", advantage: "advantage", version: "version" };
const TELLS = {
  diff: "log π − log μ: the trainer's log-probability minus that of the engine that sampled the token",
  ratio: "π/μ; red above 1, blue below",
  advantage: "red above 0, blue below",
  version: "weights that sampled the token",
};
class SampleView {
  constructor(table) {
    this.table = table;
    this.mode = "text";
    this.node = el(
      "section",
      { class: "card sample", "aria-label": "one sample" },
      el("p", { class: "soft" }, "Choose a sample in the table."),
    );
  }
  async open(run, index) {
    Object.assign(this, { run, index });
    const data = run.index_,
      chunk = data.chunk[index];
    if (chunk < 0) {
      this.node.replaceChildren(
        el("p", { class: "soft" }, "The text of this step is not in the page, which would be too large; --text-mib raises the limit."),
      );
      return;
    }
    try {
      const group = await run.group(chunk, data.place[index]);
      if (this.run !== run || this.index !== index) return;
      this.group = group;
      this.sample = group.samples[data.sample[index]];
      this.draw();
    } catch (error) {
      this.node.replaceChildren(el("p", { class: "missing" }, `This sample cannot be shown: ${error.message}`));
    }
  }
  draw() {
    const { group, sample, run, index } = this,
      data = run.index_,
      first = index - data.sample[index];
    const fact = (name, value) => el("span", {}, el("span", { class: "soft" }, `${name} `), el("b", { class: "num" }, ...shown(value)));
    const facts = [
      fact("step", String(group.step)),
      fact("prompt", String(group.ordinal)),
      fact("reward", exact(sample.reward)),
      fact("tokens", String(sample.tokens)),
      fact("turns", String(sample.turns)),
      fact("end", sample.finish_reason || "–"),
      fact("age", String(data.age[index] ?? "–")),
      ...Object.entries(sample.parts).map(([name, value]) => fact(name, exact(value))),
      ...(sample.turn_rewards.length
        ? [fact("rewards of turns", sample.turn_rewards.map(([, value]) => exact(value)).join(" "))]
        : []),
    ];
    const siblings = group.samples.map((other, n) =>
      el(
        "button",
        { type: "button", "aria-pressed": String(n === data.sample[index]), onclick: () => this.table.choose(first + n) },
        `${n}: ${brief(other.reward)}`,
      ),
    );
    const modes = Object.entries(MODES).map(([mode, name]) =>
      el(
        "button",
        {
          type: "button",
          role: "radio",
          "aria-checked": String(mode === this.mode),
          disabled: mode !== "text" && !sample.numbers,
          onclick: () => {
            this.mode = mode;
            this.draw();
            $(`[data-mode="${mode}"]`, this.node)?.focus();
          },
          "data-mode": mode,
        },
        name,
      ),
    );
    const response = this.mode === "text" || !sample.numbers ? this.plainText() : this.coloured();
    this.node.replaceChildren(
      el("div", { class: "readout" }, ...facts),
      group.dropped ? el("p", { class: "soft" }, "Dropped by dynamic sampling: all rewards of the group are equal.") : "",
      ...sample.failed.map((f) =>
        el("p", { class: "missing" }, ...shown(`${/^rollout\./.test(f.part) ? "the episode" : "scoring"} failed${f.part ? ` (${f.part})` : ""}: ${f.kind}: ${f.reason}`)),
      ),
      el("div", { class: "who" }, "all samples of this prompt, by reward"),
      el("div", { class: "picks" }, ...siblings),
      el("div", { class: "who" }, `prompt, ${group.prompt_tokens} tokens`),
      el("div", { class: "text", dir: "auto" }, ...shown(group.prompt)),
      el("div", { class: "who" }, "reference answer"),
      el("div", { class: "text", dir: "auto" }, ...shown(group.answer)),
      el("div", { class: "picks", role: "radiogroup", "aria-label": "colour tokens by" }, ...modes),
      sample.numbers
        ? ""
        : el(
            "p",
            { class: "soft" },
            "No numbers of its tokens: it was not trained on, since its group's rewards are all equal or it was dropped; ",
            "or the run is of an older MegaRL.",
          ),
      ...response,
    );
  }
  parts() {
    // the policy's and the environment's text, in turn
    const { text, environment } = this.sample,
      points = [...text],
      found = [];
    let end = 0;
    for (const [start, stop] of environment) {
      if (start > end) found.push(["policy", points.slice(end, start).join("")]);
      found.push(["env", points.slice(start, stop).join("")]);
      end = stop;
    }
    if (end < points.length || !found.length) found.push(["policy", points.slice(end).join("")]);
    return found;
  }
  plainText() {
    return this.parts().flatMap(([who, text]) => [
      el("div", { class: "who" }, who === "env" ? "environment" : "policy"),
      el("div", { class: `text ${who}`, dir: "auto" }, ...shown(text)),
    ]);
  }
  coloured() {
    const { pieces, positions, diff, mu, advantage } = this.sample.numbers,
      count = Math.min(pieces.length, TOKENS_SHOWN),
      versions = this.sample.versions.flatMap(([version, n]) => new Array(n).fill(version));
    const of = {
      diff: (i) => diff[i],
      ratio: (i) => (diff[i] === null ? null : Math.exp(diff[i])),
      advantage: (i) => (Array.isArray(advantage) ? advantage[i] : advantage),
      version: (i) => versions[i],
    }[this.mode];
    const centred = (v) => (this.mode === "ratio" ? Math.log(v) : v),
      values = Array.from({ length: count }, (_, i) => of(i)),
      sizes = values
        .filter((v) => v !== null && v !== undefined)
        .map((v) => Math.abs(centred(v)))
        .sort((a, b) => a - b);
    const most = sizes.length ? Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], sizes[sizes.length - 1] / 20, 1e-12) : 1,
      distinct = [...new Set(values)].sort((a, b) => a - b);
    const paint = (v) => {
      if (v === null || v === undefined) return "";
      if (this.mode === "version") {
        const nth = distinct.indexOf(v),
          strength = 0.14 + (0.4 * (nth + 1)) / distinct.length;
        return `background:rgba(var(--${nth % 2 ? "hot" : "cold"}), ${strength.toFixed(2)})`;
      }
      const share = centred(v) / most;
      return `background:rgba(var(--${share > 0 ? "hot" : "cold"}), ${Math.min(0.75, Math.abs(share) * 0.75).toFixed(3)})`;
    };
    const readout = el(
        "div",
        { class: "readout num", "aria-live": "polite" },
        el("span", { class: "soft" }, "Point at a token, or use the arrow keys."),
      ),
      spans = [],
      blocks = [],
      texts = this.parts().filter(([who]) => who === "env");
    const begins = new Set(); // tokens that the environment has written something before
    let at = 0,
      before = this.group.prompt_tokens,
      block = null;
    for (const [first, tokens] of positions) {
      if (first !== before) begins.add(at);
      at += tokens;
      before = first + tokens;
    }
    for (let i = 0; i < count; i++) {
      if (begins.has(i) && texts.length) {
        blocks.push(el("div", { class: "who" }, "environment"), el("div", { class: "text env", dir: "auto" }, ...shown(texts.shift()[1])));
        block = null;
      }
      if (!block) {
        block = el("div", {
          class: "text policy tokens",
          dir: "auto",
          tabindex: "0",
          role: "group",
          "aria-label": "tokens; arrow keys move from one to the next",
        });
        blocks.push(el("div", { class: "who" }, "policy"), block);
      }
      const span = el("span", { class: "tok", style: paint(values[i]) }, ...shown(pieces[i]));
      span.number = i;
      spans.push(span);
      block.append(span);
    }
    for (const [, text] of texts)
      blocks.push(el("div", { class: "who" }, "environment"), el("div", { class: "text env", dir: "auto" }, ...shown(text)));
    let on = null;
    const tell = (i) => {
      if (!spans[i]) return;
      on?.classList.remove("on");
      on = spans[i];
      on.classList.add("on");
      const cell = (name, value) => el("span", {}, `${name} `, el("b", {}, value));
      readout.replaceChildren(
        cell("token", `${i + 1} of ${pieces.length}`),
        cell("", `“${plain(pieces[i])}”`),
        cell("log μ", exact(mu[i])),
        cell("difference", exact(diff[i])),
        cell("ratio", diff[i] === null ? "–" : exact(Math.exp(diff[i]))),
        cell("advantage", exact(Array.isArray(advantage) ? advantage[i] : advantage)),
        cell("version", String(versions[i] ?? "–")),
      );
    };
    for (const node of blocks)
      if (node.classList.contains("tokens")) {
        node.addEventListener("pointerover", (e) => {
          const i = e.target.closest?.(".tok")?.number;
          if (i !== undefined) tell(i);
        });
        node.addEventListener("keydown", (e) => {
          const by = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
          if (by) {
            e.preventDefault();
            tell(on ? Math.max(0, Math.min(count - 1, on.number + by)) : 0);
          }
        });
      }
    const ends = this.mode === "ratio" ? [Math.exp(-most), Math.exp(most)] : [-most, most];
    const ramp =
      this.mode === "version"
        ? el(
            "span",
            {},
            distinct.length === 1 ? `all by version ${distinct[0]}` : `versions ${distinct[0]} to ${distinct[distinct.length - 1]}`,
          )
        : el(
            "span",
            { style: "display:inline-flex;gap:.5rem;align-items:center" },
            brief(ends[0], 3),
            el("span", {
              class: "ramp",
              style: "background:linear-gradient(90deg, rgba(var(--cold), .75), transparent, rgba(var(--hot), .75))",
            }),
            brief(ends[1], 3),
          );
    return [
      el("p", { class: "who" }, TELLS[this.mode]),
      el("div", { class: "readout" }, ramp),
      readout,
      ...blocks,
      pieces.length > count ? el("p", { class: "soft" }, `The first ${count} of ${pieces.length} tokens.`) : "",
    ];
  }
}
