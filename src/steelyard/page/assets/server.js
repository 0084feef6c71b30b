// The server of a federation: its runs and their queue, its nodes, and what each of them refused.

import { get, post } from "./api.js";
import { age, h, meta } from "./dom.js";
import { runLink } from "./list.js";

const EVERY = 2000;
const LOOKS = { running: "running", starting: "starting", queued: "starting", stopping: "stopped", interrupted: "stopped", finished: "finished", stopped: "stopped" };

const when = (moment) => (moment ? h("time", { datetime: moment, title: moment }, age(Date.parse(moment) / 1000)) : "never");

const some = (names) => names.slice(0, 4).join(", ") + (names.length > 4 ? ` and ${names.length - 4} more` : "");

function table(label, heads, rows) {
  const cells = (row) => row.map((cell, place) => h(place ? "td" : "th", { "data-heading": heads[place], scope: place ? null : "row" }, cell));
  const head = h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text))));
  const body = h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))));
  return h("div", { class: "scroll" }, h("table", { class: "stacking", "aria-label": label }, head, body));
}

export class ServerView {
  constructor(place) {
    this.message = h("p", { class: "problem", role: "alert" });
    this.head = h("div", { class: "head" });
    this.runs = h("div", { class: "runs-of-server" });
    this.nodes = h("div", { class: "nodes" });
    place.replaceChildren(this.head, this.runs, this.nodes);
  }

  async open() {
    await this.look();
    if (!this.ended) this.timer = setTimeout(() => this.open(), EVERY);
  }

  async look() {
    try {
      const found = await get("/api/server");
      const text = JSON.stringify(found);
      // A button that has the keyboard's focus is left alone while nothing changes.
      const held = text === this.text && document.activeElement?.closest?.("main button");
      if (!this.ended && !held) this.draw(found);
      this.text = text;
    } catch (problem) {
      this.message.textContent = problem.message;
    }
  }

  draw(found) {
    const there = found.nodes.filter((node) => node.status === "connected").length;
    const waiting = found.runs.filter((run) => run.status === "queued").length;
    const state = h("span", { class: `state ${found.served ? "finished" : "killed"}` }, found.served ? "serves" : "no server runs here");
    const facts = [`${there} of ${found.nodes.length} nodes connected`, waiting === 1 ? "1 run waits" : `${waiting} runs wait`];
    this.head.replaceChildren(
      h("h1", {}, "Server"),
      h("div", { class: "line" }, state, facts.map((fact) => h("span", { class: "rounds" }, fact)), h("code", {}, found.folder)),
      this.message,
    );
    this.runs.replaceChildren(h("h2", {}, "Runs"), this.runTable(found));
    this.nodes.replaceChildren(h("h2", {}, "Nodes"), this.nodeTable(found.nodes));
  }

  runTable(found) {
    if (!found.runs.length) return h("p", { class: "hint" }, "None yet. In a terminal: ", h("code", {}, `steelyard federate submit ${found.folder} experiment.toml`));
    const rows = found.runs.map((run) => [
      `${run.run}`,
      h("span", { class: `state ${LOOKS[run.status]}` }, run.status),
      `${run.round}/${run.rounds}`,
      run.shown ? h("a", { href: runLink([run.shown]) }, run.name) : run.name,
      when(run.submitted),
      h("span", { class: run.status === "finished" ? "soft" : "problem" }, run.line ?? ""),
      this.stopButton(run),
    ]);
    const drawn = table("Runs of the server", ["run", "state", "round", "name", "submitted", "how it ended", ""], rows);
    return h("div", {}, drawn, found.more ? h("p", { class: "hint" }, `and ${found.more} older ones`) : null);
  }

  stopButton(run) {
    if (!run.open || run.status === "stopping" || meta("read-only") === "true") return "";
    const act = async (happening) => {
      happening.target.disabled = true;
      this.message.textContent = "";
      try {
        await post("/api/server/stop", { run: run.run });
        await this.look();
      } catch (problem) {
        this.message.textContent = problem.message;
        happening.target.disabled = false;
      }
    };
    return h("button", { type: "button", "aria-label": `Stop run ${run.run}`, onclick: act }, "Stop");
  }

  nodeTable(nodes) {
    if (!nodes.length) return h("p", { class: "hint" }, "No key is registered.");
    const rows = nodes.map((node) => [
      node.name,
      h("span", { class: `state ${node.status === "connected" ? "finished" : "killed"}` }, node.status),
      when(node.last),
      node.clock === null ? "" : h("span", { class: node.clock ? "problem" : "" }, node.clock ? `${node.clock > 0 ? "+" : ""}${Math.round(node.clock)} s` : "right"),
      [node.steelyard, node.flower && `flwr ${node.flower}`].filter(Boolean).join(", "),
      some(node.clients),
      h("span", { class: "problem" }, node.refused ?? ""),
    ]);
    return table("Nodes of the server", ["node", "state", "last contact", "clock", "version", "clients", "refused last"], rows);
  }

  moved() {}

  redraw() {}

  end() {
    this.ended = true;
    clearTimeout(this.timer);
  }
}
