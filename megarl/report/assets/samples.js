// What the model writes: a table over all samples, of which only the rows in view exist, and one sample in full.
"use strict";
const COLUMNS = [
  ["step", "step", "step"],
  ["ordinal", "prompt", "number of the prompt"],
  ["sample", "nr", "number within the group"],
  ["reward", "reward", "reward"],
  ["tokens", "length", "tokens of the response"],
  ["age", "age", "steps since the oldest token was sampled"],
  ["spread", "spread", "standard deviation of the rewards within the group"],
  ["finish", "end", "why it ended"],
  ["begins", "response", "how the response begins"],
];
const ROW_HEIGHT = 28,
  TOKENS_SHOWN = 20000;
const RANGES = ["step", "reward", "tokens", "age", "spread"];
class SampleTable {
  constructor(open) {
    this.open = open;
    this.sort = ["step", -1];
    this.selected = null;
    this.order = [];
    this.filters = Object.fromEntries(RANGES.map((key) => [key, [null, null]]));
    this.finish = "";
    this.only = "";
    this.count = el("p", { class: "soft", "aria-live": "polite" });
    this.heads = el("div", { class: "line heads", role: "row" });
    this.space = el("div", { role: "presentation" });
    this.body = el("div", { class: "rows", tabindex: "0", role: "grid", "aria-label": "samples; arrow keys choose one" }, this.space);
    const cols = "3.5rem 4rem 1.3rem 3.9rem 3.9rem 2.6rem 4.1rem 3.1rem minmax(8rem, 1fr)";
    this.node = el(
      "div",
      { style: `--cols:${cols}` },
      this.controls(),
      this.count,
      el("div", { style: "overflow-x:auto" }, el("div", { style: "min-width:39.5rem" }, this.heads, this.body)),
    );
    this.body.addEventListener("scroll", () => this.paint());
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.rows = new Map();
  }
  controls() {
    const grid = el("div", { class: "filters" });
    for (const key of RANGES) {
      const name = COLUMNS.find((c) => c[0] === key)[1],
        box = (side) =>
          el("input", {
            type: "number",
            step: "any",
            placeholder: side ? "at most" : "at least",
            "aria-label": `${name} ${side ? "at most" : "at least"}`,
            "data-filter": `${key}-${side}`,
            oninput: (e) => {
              this.filters[key][side] = e.target.value === "" ? null : Number(e.target.value);
              this.apply();
            },
          });
      grid.append(el("span", { class: "soft" }, name), box(0), box(1));
    }
    this.finishes = el(
      "select",
      {
        "aria-label": "why it ended",
        onchange: (e) => {
          this.finish = e.target.value;
          this.apply();
        },
      },
      el("option", { value: "" }, "any end"),
    );
    const only = el(
      "select",
      {
        "aria-label": "which samples",
        onchange: (e) => {
          this.only = e.target.value;
          this.apply();
        },
      },
      ...[
        ["", "all samples"],
        ["failed", "failed: episodes and scores"],
        ["dropped", "dropped by dynamic sampling"],
      ].map(([value, text]) => el("option", { value }, text)),
    );
    grid.append(el("span", { class: "soft" }, "only"), this.finishes, only);
    return el("details", {}, el("summary", {}, "filter"), grid);
  }
  use(run) {
    this.run = run;
    const known = new Set([...this.finishes.options].map((o) => o.value));
    for (const value of new Set(run.index_?.finish ?? []))
      if (!known.has(value)) this.finishes.append(el("option", { value }, plain(value)));
    this.apply();
  }
  apply() {
    const data = this.run.index_,
      kept = [];
    if (data) {
      const tests = RANGES.filter((key) => this.filters[key].some((v) => v !== null)).map((key) => [
        data[key],
        ...this.filters[key].map((v, side) => v ?? (side ? Infinity : -Infinity)),
      ]);
      next: for (let i = 0; i < data.step.length; i++) {
        for (const [column, low, high] of tests) if (!(column[i] !== null && column[i] >= low && column[i] <= high)) continue next;
        if ((this.finish && data.finish[i] !== this.finish) || (this.only && !data[this.only][i])) continue;
        kept.push(i);
      }
      const column = data[this.sort[0]],
        sign = this.sort[1],
        rank = (v) => (v === null ? -Infinity * sign : v);
      kept.sort(
        typeof column[0] === "string"
          ? (a, b) => sign * (column[a] < column[b] ? -1 : column[a] > column[b] ? 1 : 0) || a - b
          : (a, b) => sign * (rank(column[a]) - rank(column[b])) || a - b,
      );
    }
    this.order = kept;
    this.count.textContent =
      `${kept.length.toLocaleString("en-US")} of ${this.run.count.toLocaleString("en-US")} samples` +
      (this.run.every > 1 ? `; the page has the texts of every ${this.run.every}th step (--text-mib)` : "");
    this.heads.replaceChildren(
      ...COLUMNS.map(([key, name, title]) =>
        el(
          "div",
          { role: "columnheader", "aria-sort": this.sort[0] === key ? (this.sort[1] > 0 ? "ascending" : "descending") : null },
          el(
            "button",
            {
              type: "button",
              title,
              onclick: () => {
                this.sort = [key, this.sort[0] === key ? -this.sort[1] : key === "finish" || key === "begins" ? 1 : -1];
                this.apply();
              },
            },
            name,
          ),
        ),
      ),
    );
    this.space.style.height = `${kept.length * ROW_HEIGHT}px`;
    this.body.setAttribute("aria-rowcount", String(kept.length));
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.paint();
  }
  paint() {
    const data = this.run?.index_,
      first = Math.max(0, Math.floor(this.body.scrollTop / ROW_HEIGHT) - 8),
      last = Math.min(this.order.length, first + Math.ceil((this.body.clientHeight || 600) / ROW_HEIGHT) + 16);
    for (const [at, row] of this.rows)
      if (at < first || at >= last) {
        row.remove();
        this.rows.delete(at);
      }
    for (let at = first; at < last; at++)
      if (!this.rows.has(at)) {
        const i = this.order[at];
        const cells = COLUMNS.map(([key]) =>
          el(
            "span",
            { role: "gridcell", class: key === "begins" ? "begins" : null },
            key === "finish" || key === "begins"
              ? plain(data[key][i])
              : key === "reward" || key === "spread"
                ? brief(data[key][i], 4)
                : String(data[key][i] ?? "–"),
          ),
        );
        if (data.failed[i]) cells[3].append(" !");
        const row = el(
          "div",
          {
            class: "line",
            role: "row",
            id: `row-${i}`,
            "aria-rowindex": String(at + 1),
            "aria-selected": String(i === this.selected),
            style: `top:${at * ROW_HEIGHT}px`,
            onclick: () => this.select(at),
          },
          ...cells,
        );
        this.rows.set(at, row);
        this.space.append(row);
      }
  }
  select(at) {
    if (at < 0 || at >= this.order.length) return;
    this.at = at;
    this.selected = this.order[at];
    const top = at * ROW_HEIGHT;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + ROW_HEIGHT > this.body.scrollTop + this.body.clientHeight)
      this.body.scrollTop = top + ROW_HEIGHT - this.body.clientHeight;
    this.paint();
    for (const row of this.rows.values()) row.setAttribute("aria-selected", String(row.id === `row-${this.selected}`));
    this.body.setAttribute("aria-activedescendant", `row-${this.selected}`);
    this.open(this.run, this.selected);
  }
  choose(index) {
    const at = this.order.indexOf(index);
    if (at >= 0) this.select(at);
    else {
      this.selected = index;
      this.open(this.run, index);
    }
  }
  key(event) {
    const page = Math.floor(this.body.clientHeight / ROW_HEIGHT),
      at = this.at ?? -1;
    const to = {
      ArrowDown: at + 1,
      ArrowUp: Math.max(0, at - 1),
      PageDown: Math.min(this.order.length - 1, at + page),
      PageUp: Math.max(0, at - page),
      Home: 0,
      End: this.order.length - 1,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.select(to);
    }
  }
}
