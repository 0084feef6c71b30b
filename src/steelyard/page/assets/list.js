// The list of runs: state, progress, accuracy; a tick takes a run into a comparison.

import { beam } from "./beam.js";
import { age, byId, h, meta, score, size } from "./dom.js";

const SIGNS = { running: "▶", starting: "…", finished: "✓", stopped: "‖", killed: "✕", failed: "✕", unreadable: "!", unknown: "?" };
const WORDS = {
  running: "is running",
  starting: "about to start",
  finished: "finished",
  stopped: "stopped; can be resumed",
  killed: "killed; can be resumed",
  failed: "did not start",
  unreadable: "cannot be read",
  unknown: "written on another machine",
};

export const ticked = new Set();

export function stateOf(run) {
  const sign = h("span", { "aria-hidden": "true" }, SIGNS[run.state] ?? "?");
  return h("span", { class: `state ${run.state}`, title: WORDS[run.state] ?? "" }, sign, ` ${run.state}`);
}

export const runLink = (names) => `#/run/${names.map(encodeURIComponent).join(",")}`;

export function drawList(runs, chosen) {
  const list = byId("list");
  const focused = document.activeElement?.closest?.("li")?.dataset.run;
  const wasBox = document.activeElement?.matches?.("input");
  for (const name of [...ticked]) if (!runs.some((run) => run.name === name)) ticked.delete(name);
  list.replaceChildren(...runs.map((run) => entry(run, chosen)));
  if (focused !== undefined) {
    const again = [...list.children].find((item) => item.dataset.run === focused);
    again?.querySelector(wasBox ? "input" : "a")?.focus({ preventScroll: true });
  }
  drawEmpty(runs);
  drawTicked();
}

function entry(run, chosen) {
  const readable = !["starting", "failed", "unreadable"].includes(run.state) || run.rules.length > 0;
  const box = h("input", {
    type: "checkbox",
    checked: ticked.has(run.name),
    disabled: !readable,
    "aria-label": `compare ${run.name}`,
    onchange: (happening) => {
      if (happening.target.checked) ticked.add(run.name);
      else ticked.delete(run.name);
      drawTicked();
    },
  });
  const several = new Set(run.rules.map((line) => line.rule)).size > 1;
  const rounds = run.rounds ? `${run.round}/${run.rounds}` : `${run.round}`;
  const link = h(
    "a",
    { href: runLink([run.name]), class: "run", "aria-current": chosen.includes(run.name) ? "true" : null },
    h("span", { class: "name" }, run.name),
    beam(run),
    h(
      "span",
      { class: "facts" },
      stateOf(run),
      h("span", {}, `${rounds} rounds`),
      run.accuracy === null ? null : h("span", {}, `${several ? `${run.rules[0].rule} ` : ""}${score(run.accuracy, run.measure)}`),
      h("span", { class: "soft" }, age(run.changed)),
      run.bytes ? h("span", { class: "soft" }, size(run.bytes)) : null,
    ),
    run.problem ? h("span", { class: "problem" }, run.problem) : null,
    run.ended ? h("span", { class: "problem" }, run.ended) : null,
  );
  const item = h("li", {}, box, link);
  item.dataset.run = run.name;
  return item;
}

function drawEmpty(runs) {
  const none = byId("none");
  none.hidden = runs.length > 0;
  if (runs.length) return;
  const by = meta("read-only") === "true" ? "" : " with “Start a run”, or";
  none.replaceChildren(
    `No run in ${meta("root")} yet. Start one${by} in a terminal: `,
    h("code", {}, `steelyard run quickstart --out ${meta("root")}/first`),
  );
}

export function drawTicked() {
  const bar = byId("ticked");
  const names = [...ticked];
  bar.hidden = names.length === 0;
  const ready = names.length > 1;
  bar.replaceChildren(
    ready
      ? h("a", { class: "button strong", href: runLink(names) }, `Compare ${names.length} runs`)
      : h("span", { class: "soft" }, "Tick another run to compare."),
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        onclick: () => {
          ticked.clear();
          for (const box of byId("list").querySelectorAll("input")) box.checked = false;
          drawTicked();
        },
      },
      "Untick all",
    ),
  );
}
