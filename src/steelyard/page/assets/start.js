// The form that starts an experiment: its fields come from the server, which takes them from the schema of the settings.

import { get, post } from "./api.js";
import { h } from "./dom.js";
import { runLink } from "./list.js";

function input(field, id) {
  if (field.type === "choice") {
    return h("select", { id, name: field.name }, field.choices.map((choice) => h("option", { value: choice, selected: choice === field.value }, choice)));
  }
  const number = field.type === "integer" || field.type === "number";
  const least = field.minimum ?? (field.type === "integer" && field.exclusiveMinimum !== undefined ? field.exclusiveMinimum + 1 : field.exclusiveMinimum);
  return h("input", {
    id,
    name: field.name,
    type: number ? "number" : "text",
    step: field.type === "integer" ? "1" : number ? "any" : null,
    min: number ? least : null,
    max: number && field.maximum !== undefined ? field.maximum : null,
    value: field.value === null || field.value === undefined ? null : String(field.value),
    required: number && field.value !== null,
    "aria-describedby": `${id}-help`,
  });
}

export async function openForm(place) {
  place.replaceChildren(h("p", { class: "soft", role: "status" }, "Reading…"));
  const recipes = await get("/api/recipes");
  const own = recipes.filter((one) => one.name.endsWith(".toml"));
  const chosen = own.length ? own[0].name : "quickstart";
  const select = h("select", { id: "recipe" }, recipes.map((one) => h("option", { value: one.name, selected: one.name === chosen }, one.name)));
  const about = h("p", { class: "soft" });
  const fields = h("div", { class: "fields" });
  const name = h("input", { id: "run-name", required: true, maxlength: 100, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", autocomplete: "off" });
  const problem = h("p", { class: "problem", role: "alert" });
  const go = h("button", { type: "submit", class: "strong" }, "Start");
  let known = [];

  const fill = async () => {
    about.textContent = recipes.find((one) => one.name === select.value)?.description ?? "";
    const stamp = new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-");
    name.value = `${select.value.replace(/\.toml$/, "")}-${stamp}`;
    known = await get("/api/form", { recipe: select.value });
    fields.replaceChildren(
      ...known.map((field, index) => {
        const id = `field-${index}`;
        return h("div", { class: "field" }, h("label", { for: id }, field.label), input(field, id), h("p", { class: "help", id: `${id}-help` }, field.help));
      }),
    );
  };

  const send = async (happening) => {
    happening.preventDefault();
    problem.textContent = "";
    go.disabled = true;
    const values = {};
    for (const field of known) {
      const given = form.elements.namedItem(field.name).value;
      const number = field.type === "integer" || field.type === "number";
      values[field.name] = number ? (given === "" ? null : Number(given)) : given;
    }
    try {
      const { run } = await post("/api/start", { recipe: select.value, name: name.value, fields: values });
      location.hash = runLink([run]);
    } catch (mistake) {
      problem.textContent = mistake.message;
      go.disabled = false;
    }
  };

  const form = h(
    "form",
    { onsubmit: send, class: "start" },
    h("div", { class: "field" }, h("label", { for: "recipe" }, "Recipe, or file in the folder of this page"), select, about),
    h("div", { class: "field" }, h("label", { for: "run-name" }, "Name of the run"), name, h("p", { class: "help" }, "Its folder gets this name.")),
    fields,
    problem,
    h("div", { class: "bar" }, go, h("a", { href: "#/", class: "button" }, "Cancel")),
  );
  select.addEventListener("change", fill);
  place.replaceChildren(h("div", {}, h("h1", {}, "Start a run"), form));
  await fill();
  select.focus();
}
