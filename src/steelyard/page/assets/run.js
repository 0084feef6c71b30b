// One run, or several side by side: what happened in a table, then the figures, growing while the run goes on.

import { download, get, post } from "./api.js";
import { beam } from "./beam.js";
import { h, meta, score } from "./dom.js";
import { Figure } from "./figure.js";
import { stateOf } from "./list.js";

export class RunView {
  constructor(names, place) {
    this.names = names;
    this.place = place;
    this.figures = [];
    this.choice = { rule: null, seed: null, client: null };
    this.head = h("div", { class: "head" });
    this.table = h("div", { class: "scroll" });
    this.controls = h("div", { class: "controls" });
    this.shared = h("section", { "aria-label": "Figures of all rules" });
    this.single = h("section", { "aria-label": "Figures of one rule" });
    this.again = h("div", { class: "again", hidden: true });
    this.details = h("section", { class: "about" });
    this.watcher = new IntersectionObserver((seen) => seen.forEach((one) => this.sighted(one)), { rootMargin: "400px" });
  }

  async open() {
    this.place.replaceChildren(h("p", { class: "soft", role: "status" }, "Reading…"));
    try {
      this.found = await get("/api/view", { run: this.names });
    } catch (problem) {
      this.place.replaceChildren(h("p", { class: "problem" }, problem.message));
      return;
    }
    const first = this.found.parts[0];
    this.choice.rule = first?.label ?? null;
    this.choice.seed = first?.seed ?? null;
    this.place.replaceChildren(this.head, this.table, this.shared, this.controls, this.single, this.again, this.details);
    this.drawHead();
    this.drawTable();
    this.drawControls();
    this.drawDetails();
    this.makeFigures();
  }

  makeFigures() {
    for (const kind of this.found.figures) {
      const question = () => ({ run: this.names, ...(kind.of === "view" ? {} : this.asked(kind)) });
      const figure = new Figure(kind, question, this.found.theme, (one) => this.watcher.observe(one.element));
      figure.element.figure = figure;
      this.figures.push(figure);
      (kind.of === "view" ? this.shared : this.single).append(figure.element);
    }
    this.renew().then(() => this.drawAgain()).then(() => this.fill());
  }

  // What is not in sight is drawn one by one while nothing else is to do: a picture of the whole page has all figures.
  async fill() {
    const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 300));
    for (const figure of this.figures) {
      await new Promise((work) => idle(work));
      if (this.ended) return;
      if (!figure.pending) continue;
      figure.pending = false;
      await figure.show();
    }
  }

  // Weighing again needs the raw criteria, which may be long: they come after the figures.
  async drawAgain() {
    if (this.names.length > 1 || this.ended) return;
    const data = await get("/api/reweigh", { run: this.names });
    if (!Object.keys(data).length || this.ended) return;
    const control = h("div", { id: "reweigh" });
    const hint = "The run stores the raw criteria of every update, so you can try another rule on them at once. Choose a score, and order the criteria with the arrows or by dragging.";
    this.again.replaceChildren(h("h2", {}, "Try another rule, without training"), h("p", { class: "soft" }, hint), control);
    this.again.hidden = false;
    SteelyardControl.mount(control, data);
  }

  asked(kind) {
    const { rule, seed, client } = this.choice;
    return kind.of === "client" ? { rule, seed, client } : { rule, seed };
  }

  sighted(one) {
    one.target.figure.sighted(one.isIntersecting);
  }

  async renew(which = () => true) {
    const waiting = this.figures.filter((figure) => which(figure) && (figure.kind.of !== "client" || this.choice.client));
    const work = async () => {
      for (let figure = waiting.shift(); figure; figure = waiting.shift()) await figure.renew();
    };
    // Two at a time: while one is drawn here, the other is made by the server.
    await Promise.all([work(), work()]);
  }

  async moved() {
    if (!this.found) return;
    // Rounds may come faster than figures can be drawn: while one look is under way, one more is kept in mind.
    if (this.looking) {
      this.once = true;
      return;
    }
    this.looking = true;
    try {
      do {
        this.once = false;
        this.found = await get("/api/view", { run: this.names });
        this.drawHead();
        this.drawTable();
        await this.renew();
      } while (this.once && !this.ended);
    } finally {
      this.looking = false;
    }
  }

  drawHead() {
    const runs = this.found.runs;
    const title = runs.length === 1 ? runs[0].name : `${runs.length} runs compared`;
    const lines = runs.map((run) => {
      const rounds = run.rounds ? `round ${run.round} of ${run.rounds}` : `round ${run.round}`;
      const named = runs.length > 1 ? h("strong", {}, run.label) : null;
      return h("div", { class: "line" }, named, stateOf(run), h("span", { class: "rounds" }, rounds), beam(run), this.verbs(run));
    });
    // A run that is over names in its headline the rules that ended early; one that goes on names them here.
    const ends = runs.flatMap((run) => [run.problem, this.found.headline.length ? "" : run.ended]).filter(Boolean);
    const problems = ends.map((line) => h("p", { class: "problem" }, line));
    this.message ??= h("p", { class: "problem", role: "alert" });
    const said = this.found.headline.map((line) => h("p", { class: "headline" }, line));
    this.head.replaceChildren(h("h1", {}, title), ...lines, ...said, ...problems, this.message);
  }

  verbs(run) {
    if (meta("read-only") === "true" || run.flower) return null;
    const verb = { running: ["Stop", "/api/stop"], stopped: ["Resume", "/api/resume"], killed: ["Resume", "/api/resume"] }[run.state];
    if (!verb) return null;
    const act = async (happening) => {
      happening.target.disabled = true;
      this.message.textContent = "";
      try {
        await post(verb[1], { run: run.name });
      } catch (problem) {
        this.message.textContent = problem.message;
        happening.target.disabled = false;
      }
    };
    return h("button", { type: "button", onclick: act }, verb[0]);
  }

  drawTable() {
    const { rows, measure, table } = this.found;
    if (table) return this.drawDecided(table);
    const server = rows.some((row) => row.server !== null && row.server !== undefined);
    const tests = rows.some((row) => row.tests > 0);
    const seeds = rows.some((row) => row.seeds > 1);
    const rounds = new Set(rows.map((row) => row.round)).size > 1;
    const head = ["rule", rounds && "round", seeds && "seeds", `${measure} on the clients`, server && `accuracy on ${this.found.server_rows}`, "excluded", tests && "testing rounds"];
    const names = head.filter(Boolean);
    const body = rows.map((row) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, row.rule),
        ...[rounds && row.round, seeds && row.seeds, score(row.accuracy, measure), server && score(row.server, "accuracy"), row.left_out, tests && row.tests]
          .filter((cell) => cell !== false)
          .map((cell, index) => h("td", { "data-heading": names[index + 1] }, cell)),
      ),
    );
    const heads = names.map((text) => h("th", { scope: "col" }, text));
    this.table.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body)));
    if (rows.every((row) => row.accuracy === null)) {
      this.table.append(h("p", { class: "hint" }, "Nothing is measured yet; figures appear after the first round."));
    }
  }

  drawDecided(table) {
    const heads = h("tr", {}, table.headings.map((text) => h("th", { scope: "col" }, text)));
    const body = table.rows.map(([rule, ...cells]) => h("tr", {}, h("th", { scope: "row" }, rule), cells.map((cell, index) => h("td", { "data-heading": table.headings[index + 1] }, cell))));
    this.table.replaceChildren(h("table", {}, h("caption", {}, table.title), h("thead", {}, heads), h("tbody", {}, body)), h("p", { class: "hint" }, table.note));
  }

  drawControls() {
    const parts = this.found.parts;
    const choose = (name, options, label) =>
      h(
        "label",
        {},
        `${label} `,
        h(
          "select",
          {
            onchange: (happening) => {
              this.choice[name] = happening.target.value;
              this.renew((figure) => figure.kind.of !== "view");
            },
          },
          options.map((option) => h("option", { value: option, selected: String(option) === String(this.choice[name] ?? "") }, option === "" ? "none chosen" : option)),
        ),
      );
    const seeds = [...new Set(parts.map((part) => part.seed))];
    const children = [h("h2", {}, "One rule in detail")];
    if (this.found.labels.length > 1) children.push(choose("rule", this.found.labels, "Rule"));
    if (seeds.length > 1) children.push(choose("seed", seeds, "Seed"));
    if (this.found.clients.length) {
      const options = ["", ...this.found.clients];
      children.push(choose("client", options, "Client"));
      if (this.found.more_clients) children.push(h("span", { class: "soft" }, `and ${this.found.more_clients} more clients`));
    }
    this.controls.replaceChildren(...children);
  }

  drawDetails() {
    const blocks = this.found.runs.map((run) => {
      const text = h("pre", {});
      const fill = async (happening) => {
        if (!happening.target.open || text.textContent) return;
        try {
          text.textContent = await get("/api/experiment", { run: run.name });
        } catch (problem) {
          text.textContent = problem.message;
        }
      };
      return h("details", { ontoggle: fill }, h("summary", {}, `Experiment of ${run.label}`), text);
    });
    const models = this.found.runs.filter((run) => run.state === "finished").map((run) => {
      const told = h("span", { class: "soft", role: "status" });
      const take = async () => {
        told.textContent = " Taking it out of the run…";
        try {
          await download("/api/model", { run: run.name }, `${run.name.split("/").pop()}-model.zip`);
          told.textContent = "";
        } catch (problem) {
          told.textContent = ` ${problem.message}`;
        }
      };
      return h("p", {}, h("button", { type: "button", onclick: take }, `Download the model of ${run.label}`), told);
    });
    const versions = Object.entries(this.found.versions).map(([name, value]) => `${name} ${value}`);
    const notes = this.found.notes.map((note) => h("p", { class: "soft" }, note));
    this.details.replaceChildren(...models, ...blocks, ...notes, h("p", { class: "soft" }, versions.join(" · ")));
  }

  async redraw() {
    for (const figure of this.figures) await figure.again();
  }

  end() {
    this.ended = true;
    this.watcher.disconnect();
    this.figures.forEach((figure) => figure.end());
  }
}
