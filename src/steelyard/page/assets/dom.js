// Making elements: text is only ever set as text, so that no name from a run can become markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list" && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const byId = (id) => document.getElementById(id);

export const meta = (name) => document.querySelector(`meta[name="${name}"]`)?.content ?? "";

export function score(value, measure) {
  if (value === null || value === undefined) return "–";
  if (measure === "accuracy" && value >= 0 && value <= 1) return `${(100 * value).toFixed(2)} %`;
  return Number(value).toPrecision(4);
}

export function age(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (passed >= length) return `${Math.floor(passed / length)} ${unit} ago`;
  }
  return "just now";
}

export function size(bytes) {
  for (const [unit, length] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= length) return `${Number((bytes / length).toPrecision(3))} ${unit}`;
  }
  return `${bytes} B`;
}
