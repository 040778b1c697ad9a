// The page: its tabs, what stands above them, and following a run that is still going on.
"use strict";
const TABS = [
  ["learning", "Is it learning?"],
  ["right", "Is it right?"],
  ["time", "Where does the time go?"],
  ["weights", "Do weights arrive?"],
  ["samples", "What does it write?"],
];
let panels = {},
  table,
  view_,
  timelines = [];
function runChips() {
  return el(
    "div",
    { class: "runs", role: "group", "aria-label": "runs" },
    ...view.runs.map((run) =>
      el(
        "button",
        {
          class: "run",
          type: "button",
          "aria-pressed": String(run.visible),
          title: plain(run.path),
          onclick: () => {
            run.visible = !run.visible;
            refresh();
          },
        },
        el("span", { class: "dot", style: `background:${run.color}` }),
        el("span", {}, ...shown(run.name)),
        el(
          "span",
          { class: "soft" },
          [
            run.settings["algorithm.name"],
            run.settings["async.capacity"] === undefined ? "" : `capacity ${run.settings["async.capacity"] ?? "unbounded"}`,
          ]
            .filter(Boolean)
            .join(", "),
        ),
      ),
    ),
  );
}
function tools() {
  const label = el("span", { class: "num" }, "0");
  return el(
    "div",
    { class: "tools" },
    el(
      "label",
      {},
      "smoothing",
      el("input", {
        type: "range",
        min: "0",
        max: "0.99",
        step: "0.01",
        value: "0",
        "aria-label": "smoothing",
        id: "smoothing",
        oninput: (e) => {
          view.smoothing = Number(e.target.value);
          label.textContent = String(view.smoothing);
          redraw();
        },
      }),
      label,
    ),
    el(
      "label",
      {},
      "axis",
      el(
        "select",
        {
          id: "axis",
          onchange: (e) => {
            view.axis = e.target.value;
            view.range = null;
            redraw();
          },
        },
        ...Object.entries(AXES).map(([value, text]) => el("option", { value }, text)),
      ),
    ),
    el("button", { type: "button", id: "unzoom", disabled: true, onclick: () => zoom(null) }, "show all"),
    el("span", { class: "soft" }, "drag over a curve to zoom; double-click: all"),
  );
}
function build() {
  const panel = (name, title, lead, ...content) =>
    (panels[name] = el(
      "section",
      { id: `panel-${name}`, role: "tabpanel", "aria-labelledby": `tab-${name}`, hidden: true },
      el("h2", {}, title),
      el("p", { class: "lead" }, lead),
      ...content,
    ));
  table = new SampleTable((run, index) => view_.open(run, index));
  view_ = new SampleView(table);
  const main = $("main");
  main.append(
    panel(
      "learning",
      TABS[0][1],
      "Reward and held-out scores, and what goes wrong first when a run stops learning.",
      (facts = el("div")),
      grid(LEARNING),
      ...more(),
    ),
    panel("right", TABS[1][1], "Trainer and engines should compute the same, on data that is not too old.", grid(RIGHT)),
    panel("time", TABS[2][1], "Each side waits for the other; what is slower binds.", (timeTop = el("div")), grid(TIME)),
    panel(
      "weights",
      TABS[3][1],
      "Each trainer rank writes straight into the engines; hashes of both ends are compared after every update.",
      grid(WEIGHTS),
      (weightsTop = el("div")),
    ),
    panel(
      "samples",
      TABS[4][1],
      "Samples that the run has kept (observe.rollouts_per_step groups a step).",
      (samplePick = el("div", { class: "tools" })),
      el("div", { class: "split" }, table.node, view_.node),
    ),
  );
  const nav = $("nav");
  for (const [name, title] of TABS)
    nav.append(
      el(
        "button",
        { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => choose(name) },
        title,
      ),
    );
  nav.addEventListener("keydown", (e) => {
    const at = TABS.findIndex(([name]) => name === view.tab),
      to = { ArrowRight: at + 1, ArrowLeft: at - 1 }[e.key];
    if (to !== undefined) {
      choose(TABS[(to + TABS.length) % TABS.length][0]);
      $(`#tab-${view.tab}`).focus();
    }
  });
  addEventListener(
    "resize",
    debounce(() => {
      redraw();
      for (const t of timelines) t.draw();
      table.paint();
    }),
  );
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => refresh());
  addEventListener("hashchange", () => choose(location.hash.slice(1), false));
}
let facts, timeTop, weightsTop, samplePick;
function debounce(action) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, 120);
  };
}
function choose(name, keep = true) {
  const found = TABS.some(([tab]) => tab === name) ? name : "learning";
  view.tab = found;
  for (const [tab] of TABS) {
    panels[tab].hidden = tab !== found;
    const button = $(`#tab-${tab}`);
    button.setAttribute("aria-selected", String(tab === found));
    button.tabIndex = tab === found ? 0 : -1;
    if (tab === found) button.scrollIntoView({ inline: "nearest", block: "nearest" });
  }
  $("#tools").hidden = found === "samples";
  if (keep && location.hash.slice(1) !== found) history.replaceState(null, "", `#${found}`);
  show();
}
function show() {
  // what the tab in view needs
  if (view.tab === "time") {
    for (const t of timelines) t.update();
  }
  if (view.tab === "samples") table.apply();
  redraw();
}
function refresh() {
  shortNames(view.runs.map((run) => plain(run.name))).forEach((name, i) => {
    view.runs[i].short = name;
  });
  $("#top").replaceChildren(runChips(), advisories(), skipped());
  facts.replaceChildren(summary());
  fillGrids();
  fillNames();
  const open = view.runs.filter((run) => run.visible),
    title = (run) => (open.length > 1 ? el("h3", { style: "margin:.8rem 0 .4rem" }, ...shown(run.name)) : "");
  timelines = timelines.filter((t) => open.includes(t.run));
  for (const run of open) if (!timelines.some((t) => t.run === run)) timelines.push(new Timeline(run));
  timeTop.replaceChildren(
    ...open.flatMap((run) => [
      title(run),
      timelines.find((t) => t.run === run).node,
      el("div", { class: "grid wide" }, splitTable(run), memoryTable(run) ?? "", engineTable(run) ?? "", faultTable(run)),
    ]),
  );
  weightsTop.replaceChildren(...open.flatMap((run) => [title(run), pairTable(run), updateTable(run)]));
  const choices = view.runs.filter((run) => run.count);
  samplePick.replaceChildren(
    ...(choices.length > 1
      ? choices.map((run) =>
          el(
            "button",
            {
              type: "button",
              "aria-pressed": String(run === table.run),
              onclick: () => {
                table.use(run);
                refresh();
              },
            },
            ...shown(run.name),
          ),
        )
      : choices.length
        ? []
        : [el("p", { class: "soft" }, "This run has kept no samples in a form that the page reads (rollouts/samples.jsonl).")]),
  );
  if (!table.run || !view.runs.includes(table.run)) table.use(choices[0] ?? view.runs[0]);
  show();
}
function follow(live) {
  const state = $("#live");
  let number = 0,
    failures = 0;
  state.textContent = "following";
  state.classList.add("on");
  const ask = async () => {
    try {
      const answer = await fetch(`new?token=${encodeURIComponent(live.token)}&page=${live.page}&number=${number}`, { cache: "no-store" });
      if (answer.status === 409) {
        location.reload();
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const found = await answer.json();
      number++;
      failures = 0;
      state.textContent = `following; ${new Date().toLocaleTimeString()}`;
      state.classList.add("on");
      const fresh = found.filter(
        (each) => each.afresh || each.steps.length || Object.keys(each.lanes).length || each.marks.length || each.samples.chunks.length,
      );
      found.forEach((each, i) => view.runs[i].absorb(each));
      if (fresh.length) {
        const chosen = table.selected,
          scroll = table.body.scrollTop;
        refresh();
        table.selected = chosen;
        table.body.scrollTop = scroll;
      }
    } catch (error) {
      failures++;
      state.textContent = `not reached (${error.message}); tried again`;
      state.classList.remove("on");
    }
    setTimeout(ask, failures ? 5000 : live.every_ms);
  };
  setTimeout(ask, live.every_ms);
}
async function start() {
  const sources = [...document.querySelectorAll("script.run")],
    live = JSON.parse($("#live-data").textContent);
  view.runs = await Promise.all(
    sources.map(async (source, i) => {
      const run = new Run(i);
      run.absorb(await inflate(source.textContent));
      source.remove();
      return run;
    }),
  );
  $("#tools").append(tools());
  build();
  refresh();
  choose(location.hash.slice(1));
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  if (live) follow(live);
}
start().catch((error) => {
  $("#top").replaceChildren(
    el(
      "p",
      { class: "missing" },
      `The page could not be made: ${error.message}. It needs a browser of 2023 or later (DecompressionStream).`,
    ),
  );
  throw error;
});
