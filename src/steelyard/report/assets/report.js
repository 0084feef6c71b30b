// The report: figures of all rules, figures of the rule that the reader chooses, cards of clients, the weighing control.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const { make } = SteelyardControl;
  SteelyardFigures.use(data.themes);
  const percent = (value, digits = 1) => (value === null ? "–" : (100 * value).toFixed(digits) + " %");
  const state = { rule: data.main, search: "", sort: "interesting", shown: 12 };

  // Figures of all rules together.
  for (const holder of document.querySelectorAll("[data-figure]")) {
    const spec = data.figures[holder.dataset.figure];
    if (spec) place(holder, spec);
  }

  function place(holder, spec) {
    const note = holder.parentElement.querySelector(".note");
    if (note) note.textContent = (spec.usermeta && spec.usermeta.note) || "";
    SteelyardFigures.show(holder, spec);
  }

  // Figures of one rule; every chooser on the page chooses for all of them.
  function drawParts() {
    for (const holder of document.querySelectorAll("[data-part]")) {
      const spec = (data.parts[holder.dataset.part] || {})[state.rule];
      SteelyardFigures.clear(holder);
      if (spec) place(holder, spec);
      else {
        holder.replaceChildren(make("p", { class: "empty" }, data.empty[holder.dataset.part]));
        const note = holder.parentElement.querySelector(".note");
        if (note) note.textContent = "";
      }
    }
    for (const chooser of document.querySelectorAll("select.rule")) chooser.value = state.rule;
    drawCards();
  }
  for (const chooser of document.querySelectorAll("select.rule")) {
    chooser.addEventListener("change", () => { state.rule = chooser.value; drawParts(); });
  }

  for (const button of document.querySelectorAll("button.save")) {
    button.addEventListener("click", () => {
      const holder = button.closest("figure").querySelector("[data-figure], [data-part]");
      SteelyardFigures.save(holder, holder.dataset.figure || holder.dataset.part);
    });
  }

  // Cards of clients.
  const cards = document.getElementById("cards");
  const SORTS = {
    interesting: (a, b) => b.interest - a.interest,
    heaviest: (a, b) => b.share - a.share,
    lightest: (a, b) => a.share - b.share,
    "worst served": (a, b) => (a.score ?? 2) - (b.score ?? 2),
    "most excluded": (a, b) => b.failures.length - a.failures.length,
    name: (a, b) => (a.name < b.name ? -1 : 1),
  };

  function spark(values, rounds, last, zero) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 120 28");
    svg.setAttribute("class", "spark");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const known = values.filter((value) => value !== null);
    const high = Math.max(...known, 1e-9), low = zero ? 0 : Math.min(...known);
    const points = values.map((value, index) => value === null ? "" :
      `${(2 + 116 * (rounds[index] - 1) / Math.max(1, last - 1)).toFixed(1)},${(26 - 24 * (value - low) / ((high - low) || 1)).toFixed(1)}`);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", points.filter(Boolean).join(" "));
    svg.append(line);
    return svg;
  }

  // A score on few rows says little: its interval and the rows stand below it, and a mark where they rank nobody.
  function scoreFacts(client) {
    const written = (value) => value === null ? "?" : data.percent ? (100 * value).toFixed(0) : value.toPrecision(2);
    const shown = client.score === null ? "–" : data.percent ? percent(client.score) : client.score.toPrecision(3);
    const facts = [make("dt", { title: data.direction }, "its " + data.measure), make("dd", {}, shown)];
    const on = client.score_on;
    if (client.score === null || !on) return facts;
    const between = `${written(on.low)}–${written(on.high)}${data.percent ? " %" : ""}`;
    return [...facts, make("dt", { title: "95% confidence interval, from the test samples" }, "interval"), make("dd", {}, between),
      make("dt", {}, "test samples"), make("dd", on.too_few ? { title: "too few to rank" } : {}, on.rows + (on.too_few ? " (too few)" : ""))];
  }

  function card(client, last) {
    const title = make("h4", {}, client.flaws.length ? make("span", { class: "flag", title: "faulty (simulated)" }, "⚑ ") : "", client.name);
    const facts = make("dl", {},
      make("dt", {}, "of all weight"), make("dd", {}, percent(client.share)),
      ...scoreFacts(client),
      make("dt", {}, "selected"), make("dd", {}, client.asked + "×"),
      make("dt", {}, "samples"), make("dd", {}, client.samples === null ? "–" : String(client.samples)));
    const parts = [title, facts];
    if (client.weight.length > 1) parts.push(make("p", { class: "by" }, "weight, by round"), spark(client.weight, client.rounds, last, true));
    for (const flaw of client.flaws) parts.push(make("p", { class: "flaw" }, flaw));
    if (client.failures.length) {
      const [round, reason] = client.failures[0];
      const more = client.failures.length > 1 ? ` (${client.failures.length} times; first in round ${round})` : ` (round ${round})`;
      parts.push(make("p", { class: "failure" }, "excluded: " + reason + more));
    }
    const open = make("button", { type: "button", class: "open" }, "over the rounds");
    open.setAttribute("aria-expanded", "false");
    const node = make("article", { class: client.flaws.length ? "card flawed" : "card" }, ...parts, open);
    open.addEventListener("click", () => {
      const held = node.querySelector(".course");
      if (held) { SteelyardFigures.clear(held); held.remove(); node.classList.remove("wide"); open.setAttribute("aria-expanded", "false"); return; }
      const holder = make("div", { class: "course" });
      node.classList.add("wide");
      node.append(holder);
      open.setAttribute("aria-expanded", "true");
      SteelyardFigures.show(holder, course(client));
    });
    return node;
  }

  // The figure of one client is that of every other with other numbers.
  function course(client) {
    const group = data.clients[state.rule];
    const spec = structuredClone(group.template);
    const [weighed, served] = spec.vconcat.map((part) => part.data.name);
    spec.datasets[weighed] = [
      { what: "weight", round: client.rounds, value: client.weight },
      ...group.criteria.map((name, index) => ({ what: name, round: client.rounds, value: client.criteria[index] })),
    ];
    spec.datasets[served] = [{ what: data.measure, round: client.tested, value: client.scores }];
    spec.description = "Weight, criteria and score of " + client.name + " over the rounds.";
    return spec;
  }

  function drawCards() {
    if (!cards) return;
    const group = data.clients[state.rule];
    for (const held of cards.querySelectorAll(".course")) SteelyardFigures.clear(held);
    if (!group) { cards.replaceChildren(make("p", { class: "empty" }, "No client was selected under this rule.")); return; }
    const wanted = state.search.trim().toLowerCase();
    const found = group.clients.filter((client) => !wanted || client.name.toLowerCase().includes(wanted) ||
      client.flaws.some((flaw) => flaw.toLowerCase().includes(wanted)));
    const sorted = found.slice().sort(SORTS[state.sort]);
    cards.replaceChildren(...sorted.slice(0, state.shown).map((client) => card(client, group.last)));
    const count = document.getElementById("cards-count");
    const shown = Math.min(state.shown, sorted.length);
    count.textContent = found.length ? `${shown} of ${found.length} clients${wanted ? " found" : ""}. ${group.note}` :
      "No client of that name; clear the search to see all.";
    const more = document.getElementById("cards-more");
    more.hidden = shown >= sorted.length;
  }

  if (cards) {
    const search = document.getElementById("cards-search");
    search.addEventListener("input", () => { state.search = search.value; state.shown = 12; drawCards(); });
    const sort = document.getElementById("cards-sort");
    for (const name of Object.keys(SORTS)) sort.append(make("option", { value: name }, name));
    sort.addEventListener("change", () => { state.sort = sort.value; drawCards(); });
    document.getElementById("cards-more").addEventListener("click", () => { state.shown += 24; drawCards(); });
  }

  // The weighing control, whose beam tips with what flawed clients would weigh.
  const control = document.getElementById("reweigh");
  if (control && Object.keys(data.reweigh).length) {
    const sign = document.querySelector("#weigh-again .sign");
    SteelyardControl.mount(control, data.reweigh, (share, number) => { if (sign) tilt(sign, share, number); });
  }

  function tilt(sign, share, number) {
    const angle = share ? Math.max(-14, Math.min(14, 40 * (number - share.weight))) : 0;
    sign.classList.toggle("plain", !share);
    sign.querySelector(".beam").setAttribute("transform", `rotate(${angle} 70 28)`);
    sign.querySelector(".load").setAttribute("transform", `rotate(${-angle} 34 28)`);
  }

  drawParts();
  document.documentElement.dataset.ready = "yes";
})();
