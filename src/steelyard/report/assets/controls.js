// The control that weighs a run's updates again: choose the score, move the criteria, see who would have counted.
"use strict";
const SteelyardControl = (() => {
  const SCORES = {
    prioritized: "prioritized",
    mean: "mean",
    "weighted-mean": "weighted mean",
    owa: "ordered weighted average",
    product: "product",
    power: "power of the product",
  };

  function make(tag, properties, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties || {})) {
      if (name === "class") node.className = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name in node && name !== "list") node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  function choice(name, options, value, change) {
    const select = make("select", { onchange: () => change(select.value) });
    for (const [key, words] of Object.entries(options)) select.append(make("option", { value: key }, words));
    select.value = value;
    return make("label", {}, name + " ", select);
  }

  // data: {label: {criteria, normalise, clients: [{name, flaws}], rounds: [{round, clients, raw, weights}], note}}
  function mount(root, data, after) {
    const labels = Object.keys(data);
    const first = labels.reduce((a, b) => (data[b].criteria.length > data[a].criteria.length ? b : a), labels[0]);
    const state = {};

    function reset(label) {
      const part = data[label];
      Object.assign(state, {
        label, score: "prioritized", normalise: part.normalise, quantifier: "most", power: 2,
        items: part.order.map((column) => ({ column, name: part.criteria[column], on: true, weight: 1 })),
      });
    }
    reset(first);

    const form = make("div", { class: "control" });
    const list = make("ol", { class: "order" });
    const bars = make("div", { class: "bars" });
    const said = make("p", { class: "outcome", role: "status" });
    let dragged = null;

    function rule() {
      const used = state.items.filter((item) => item.on);
      return {
        score: state.score, normalise: state.normalise, quantifier: state.quantifier, power: state.power,
        order: used.map((item) => item.column), weights: used.map((item) => item.weight),
      };
    }

    function move(from, to, focus) {
      if (to < 0 || to >= state.items.length) return;
      state.items.splice(to, 0, ...state.items.splice(from, 1));
      drawList();
      update();
      if (focus !== undefined) list.children[to].querySelectorAll("button")[focus].focus();
    }

    function drawList() {
      const ordered = state.score === "prioritized";
      list.replaceChildren(...state.items.map((item, index) => {
        const box = make("input", { type: "checkbox", checked: item.on, onchange: () => {
          item.on = box.checked;
          if (!state.items.some((other) => other.on)) { item.on = true; box.checked = true; }
          update();
        } });
        const parts = [make("span", { class: "grip", "aria-hidden": "true" }, "⠿"), make("label", {}, box, " " + item.name)];
        if (state.score === "weighted-mean") {
          const number = make("input", { type: "number", min: 0, step: 0.1, value: item.weight, oninput: () => {
            item.weight = Math.max(0, Number(number.value) || 0);
            update();
          } });
          number.setAttribute("aria-label", "weight of " + item.name);
          parts.push(number);
        }
        if (ordered) {
          const up = make("button", { type: "button", onclick: () => move(index, index - 1, 0) }, "↑");
          const down = make("button", { type: "button", onclick: () => move(index, index + 1, 1) }, "↓");
          up.setAttribute("aria-label", "move " + item.name + " up");
          down.setAttribute("aria-label", "move " + item.name + " down");
          up.disabled = index === 0;
          down.disabled = index === state.items.length - 1;
          parts.push(make("span", { class: "moves" }, up, down));
        }
        const row = make("li", { draggable: ordered, class: ordered ? "movable" : "" }, ...parts);
        row.dataset.criterion = item.name;
        row.addEventListener("dragstart", (event) => {
          dragged = index;
          event.dataTransfer.effectAllowed = "move";
          event.dataTransfer.setData("text/plain", item.name);
        });
        row.addEventListener("dragover", (event) => { if (dragged !== null) event.preventDefault(); });
        row.addEventListener("drop", (event) => { event.preventDefault(); if (dragged !== null) move(dragged, index); dragged = null; });
        row.addEventListener("dragend", () => { dragged = null; });
        return row;
      }));
    }

    function drawForm() {
      const rules = Object.fromEntries(labels.map((label) => [label, label]));
      const parts = [
        choice("updates of", rules, state.label, (value) => { reset(value); drawForm(); update(); }),
        choice("score", SCORES, state.score, (value) => { state.score = value; drawForm(); update(); }),
        choice("normalised by", { share: "share: sums to 1", max: "max: the best has 1", rank: "rank" }, state.normalise,
          (value) => { state.normalise = value; update(); }),
      ];
      if (state.score === "owa") {
        const names = Object.fromEntries(Object.keys(SteelyardWeigh.QUANTIFIERS).map((name) => [name, name.replaceAll("-", " ")]));
        parts.push(choice("quantifier", names, state.quantifier, (value) => { state.quantifier = value; update(); }));
      }
      if (state.score === "power") {
        const number = make("input", { type: "number", min: 0.1, step: 0.1, value: state.power, oninput: () => {
          if (Number(number.value) > 0) { state.power = Number(number.value); update(); }
        } });
        parts.push(make("label", {}, "exponent ", number));
      }
      form.replaceChildren(...parts);
      drawList();
    }

    const percent = (value) => (100 * value).toFixed(1) + " %";

    function update() {
      const part = data[state.label];
      const found = SteelyardWeigh.reweigh(part, rule()).filter((row) => row.recorded + row.weight > 0);
      root.result = found;
      const flawed = found.filter((row) => row.flaws.length);
      const total = (rows, name) => rows.reduce((sum, row) => sum + row[name], 0);
      const rows = found.slice().sort((a, b) => b.weight - a.weight || (a.name < b.name ? -1 : 1));
      const most = Math.max(...rows.map((row) => Math.max(row.weight, row.recorded)), 1e-9);
      const kept = rows.length <= 30 ? rows : [...rows.slice(0, 20), ...rows.slice(-5)];
      const lines = kept.map((row) => {
        const bar = make("span", { class: "bar" }, make("i", { class: "new" }), make("i", { class: "old" }));
        bar.children[0].style.width = (100 * row.weight / most) + "%";
        bar.children[1].style.left = (100 * row.recorded / most) + "%";
        return make("div", { class: row.flaws.length ? "line flawed" : "line", title: row.flaws.join(", ") },
          make("span", { class: "who" }, (row.flaws.length ? "⚑ " : "") + row.name), bar,
          make("span", { class: "much" }, percent(row.weight)), make("span", { class: "was" }, "was " + percent(row.recorded)));
      });
      if (kept.length < rows.length) {
        lines.splice(20, 0, make("p", { class: "note" }, `${rows.length - kept.length} clients between these are not shown.`));
      }
      bars.replaceChildren(...lines);
      const share = flawed.length ? { recorded: total(flawed, "recorded"), weight: total(flawed, "weight") } : null;
      said.textContent = share
        ? `Faulty clients: ${percent(share.weight)} of all weight under this rule, ${percent(share.recorded)} as recorded.`
        : `${rows.length} clients over ${part.rounds.length} rounds.`;
      if (after) after(share, flawed.length / Math.max(1, rows.length));
    }

    const label = make("p", { class: "note" });
    label.textContent = "The weights that this rule would have given these updates. No model was trained with them. " +
      "Bar: under this rule; tick: as recorded. " + (Object.values(data)[0].note || "");
    root.replaceChildren(form, list, said, bars, label);
    drawForm();
    update();
  }

  return { mount, make };
})();
