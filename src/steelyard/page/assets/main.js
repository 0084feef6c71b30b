// The page: which view the address names, and the stream that tells when something moved.

import { events } from "./api.js";
import { byId, h, meta } from "./dom.js";
import { drawList, ticked } from "./list.js";
import { RunView } from "./run.js";
import { ServerView } from "./server.js";
import { openForm } from "./start.js";

let runs = [];
let chosen = [];
let view = null;
let source = null;
let waiting = null;
let landed = true;

function connect() {
  source?.close();
  source = events(chosen);
  const link = byId("link");
  source.addEventListener("open", () => {
    link.textContent = "live";
    link.className = "link on";
  });
  source.addEventListener("error", () => {
    link.textContent = "not connected";
    link.className = "link off";
  });
  source.addEventListener("runs", (happening) => {
    runs = JSON.parse(happening.data);
    drawList(runs, chosen);
    if (waiting && runs.some((run) => run.name === waiting && run.rules.length)) route();
    else if (waiting) drawWaiting();
    if (!landed && !view) welcome();
  });
  source.addEventListener("moved", () => view?.moved());
}

function drawWaiting() {
  const run = runs.find((one) => one.name === waiting);
  const failed = run?.state === "failed";
  const missing = source.readyState === EventSource.OPEN && runs.length > 0 && !run;
  const notice = failed
    ? h("p", { class: "problem", role: "alert" }, run.problem)
    : missing
      ? h("p", { class: "hint", role: "status" }, "There is no run of this name here; the list shows those there are.")
      : h("p", { class: "hint", role: "status" }, "The run is about to start: reading and partitioning data. Its figures appear here by themselves.");
  byId("main").replaceChildren(h("div", { class: "notice" }, h("h1", {}, waiting), notice));
}

// Without a run in the address the newest one is shown; before there is one, what this page is for.
async function welcome() {
  const newest = runs.find((run) => run.rules.length);
  const words = newest ? "The newest run. Choose another" : "Weights, criteria and scores of every client: choose a run";
  const hint = h("p", { class: "soft" }, `${words} to see its figures, live while it runs. Tick two or more to compare them.`);
  const place = h("div", {});
  byId("main").replaceChildren(hint, place);
  landed = Boolean(newest);
  if (!newest) return;
  view = new RunView([newest.name], place);
  await view.open();
}

async function route() {
  view?.end();
  view = null;
  waiting = null;
  landed = true;
  const [, kind, rest] = location.hash.match(/^#\/(run|new|server)\/?(.*)$/) ?? [];
  const before = chosen.join("\n");
  chosen = kind === "run" && rest ? rest.split(",").map(decodeURIComponent) : [];
  document.body.dataset.view = kind ?? "list";
  document.title = chosen.length === 1 ? `${chosen[0]} · Steelyard` : "Steelyard";
  for (const name of chosen.length > 1 ? chosen : []) ticked.add(name);
  if (source === null || chosen.join("\n") !== before) connect();
  drawList(runs, chosen);
  if (kind === "new") {
    await openForm(byId("main"));
  } else if (kind === "server") {
    view = new ServerView(byId("main"));
    await view.open();
  } else if (chosen.length) {
    // A run that was only just asked for has no rounds yet, and the list may not have come.
    if (chosen.length === 1 && !runs.find((run) => run.name === chosen[0])?.rules.length) {
      waiting = chosen[0];
      drawWaiting();
    } else {
      view = new RunView(chosen, byId("main"));
      await view.open();
    }
    byId("main").focus({ preventScroll: true });
  } else {
    await welcome();
  }
}

function looks() {
  const kept = localStorage.getItem("look");
  if (kept) document.documentElement.dataset.look = kept;
  byId("look").addEventListener("click", () => {
    const dark = document.documentElement.dataset.look
      ? document.documentElement.dataset.look === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.look = dark ? "light" : "dark";
    localStorage.setItem("look", document.documentElement.dataset.look);
    view?.redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.redraw());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (Math.abs(innerWidth - width) < 40) return;
    width = innerWidth;
    view?.redraw();
  });
}

byId("root").textContent = meta("root");
if (meta("read-only") === "true") byId("new").hidden = true;
byId("server").hidden = meta("server") !== "true";
looks();
addEventListener("hashchange", route);
addEventListener("DOMContentLoaded", route);
if (document.readyState !== "loading") route();
