// Weight updates: every one with its audit, and who sends how much to whom.
"use strict";
const UPDATES_SHOWN = 400;
function updatesOf(run) {
  const version = run.metrics["weights/version"] ?? [],
    row = new Map(version.map((v, i) => [v, i])),
    spans = { "write weights": {}, "wait for engines": {} }; // kind → version → lane → its spans
  for (const [lane, found] of Object.entries(run.lanes))
    if (lane.startsWith("trainer.")) for (const s of found) if (spans[s[0]]) (((spans[s[0]][s[3]] ??= {})[lane] ??= []).push(s));
  const known = (v, key) => (row.has(v) ? run.metrics[key]?.[row.get(v)] : null) ?? null;
  // The slowest rank's. A resumed run makes versions again, so of each rank the span counts that is nearest to the pause.
  const slowest = (kind, p) => {
    const near = (some) => some.reduce((a, b) => (Math.abs(b[1] - p.at) < Math.abs(a[1] - p.at) ? b : a))[2];
    const ranks = Object.values(spans[kind][p.version] ?? {});
    return ranks.length ? Math.max(...ranks.map(near)) : null;
  };
  return run.pauses.map((p) => ({
    version: p.version,
    at: p.at,
    pause: p.pause_s,
    write: slowest("write weights", p),
    wait: slowest("wait for engines", p),
    bytes: p.bytes ?? known(p.version, "sync/bytes"),
    audited: p.audited ?? (known(p.version, "sync/audit_ok") === null ? null : known(p.version, "sync/audit_ok") === 1),
    engines: p.engines ?? null,
  }));
}
function audits(run) {
  const column = (run.metrics["sync/audit_ok"] ?? []).filter((v) => v !== null);
  return [column.filter((v) => v === 1).length, column.length];
}
function updateTable(run) {
  const all = updatesOf(run),
    shown_ = all.slice(-UPDATES_SHOWN).reverse();
  const head = [
    ["version", 1],
    ["at", 0],
    ["bytes", 1],
    ["wait", 1],
    ["write", 1],
    ["pause", 1],
    ["audit", 0],
    ["engines", 0],
  ];
  return el(
    "section",
    { class: "card updates", "aria-label": "weight updates" },
    el("h3", {}, "Every update"),
    el(
      "p",
      { class: "why" },
      "Write: the slowest trainer rank. Pause: from the first engine's stop to the last one's start. ",
      all.length > UPDATES_SHOWN ? `The last ${UPDATES_SHOWN} of ${all.length}; metrics.jsonl and the trace have all.` : "",
    ),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...head.map(([name, n]) => el("th", { class: n ? "n" : null }, name)))),
        el(
          "tbody",
          {},
          ...shown_.map((u) =>
            el(
              "tr",
              {},
              el("td", { class: "n num" }, String(u.version)),
              el("td", { class: "num" }, clock(u.at, 1)),
              el("td", { class: "n num" }, u.bytes === null ? "–" : bytes(u.bytes)),
              el("td", { class: "n num" }, seconds(u.wait)),
              el("td", { class: "n num" }, seconds(u.write)),
              el("td", { class: "n num" }, seconds(u.pause)),
              el("td", {}, u.audited === null ? "–" : u.audited ? "equal bit for bit" : "not audited"),
              el("td", {}, u.engines ? (u.engines.length > 8 ? `${u.engines.length}` : u.engines.join(", ")) : "–"),
            ),
          ),
        ),
      ),
    ),
  );
}
function pairTable(run) {
  const trainers = Object.keys(run.pairs).sort((a, b) => Number(a.split(".")[1]) - Number(b.split(".")[1])),
    card = el("section", { class: "card heat", "aria-label": "who sends how much to whom" }, el("h3", {}, "Who sends how much to whom"));
  if (!trainers.length)
    return (card.append(el("p", { class: "soft" }, "This run's trace does not say it; runs of a newer MegaRL do.")), card);
  const engines = [...new Set(trainers.flatMap((t) => run.pairs[t].map((pair) => pair[0])))].sort((a, b) => a - b),
    most = Math.max(...trainers.flatMap((t) => run.pairs[t].map((pair) => pair[1])));
  const sums = trainers.map((t) => run.pairs[t].reduce((sum, pair) => sum + pair[1], 0)),
    cols = engines.slice(0, 64);
  card.append(
    el(
      "p",
      { class: "why" },
      "Bytes of one whole update from each trainer rank (rows) to each generator rank (columns), by the map in force last. ",
      "With weights.delta less is sent; the table of updates has what was.",
    ),
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, el("th", {}, ""), ...cols.map((g) => el("th", {}, `gen ${g}`)), el("th", {}, "sum"))),
      el(
        "tbody",
        {},
        ...trainers.map((t, i) => {
          const to = new Map(run.pairs[t]);
          return el(
            "tr",
            {},
            el("th", {}, t),
            ...cols.map((g) =>
              el(
                "td",
                { class: "num", style: to.has(g) ? `background:rgba(var(--cold), ${(0.12 + 0.6 * (to.get(g) / most)).toFixed(2)})` : "" },
                to.has(g) ? bytes(to.get(g)) : "",
              ),
            ),
            el("td", { class: "num" }, bytes(sums[i])),
          );
        }),
      ),
    ),
    engines.length > cols.length ? el("p", { class: "soft" }, `The first ${cols.length} of ${engines.length} generator ranks.`) : "",
  );
  return card;
}
