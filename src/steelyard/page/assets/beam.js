// Progress as a steelyard: the poise moves out along the beam as rounds are done.

const SPACE = "http://www.w3.org/2000/svg";

function part(name, attributes) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export function beam(run) {
  const known = Boolean(run.rounds);
  const share = known ? Math.min(1, run.round / run.rounds) : Number(run.state === "finished");
  const svg = part("svg", { viewBox: "0 0 300 27", class: `beam ${run.state}`, role: "img" });
  svg.setAttribute("aria-label", known ? `round ${run.round} of ${run.rounds}` : `round ${run.round}`);
  const at = 30 + 258 * share;
  svg.append(
    part("path", { class: "rod", d: "M6 8 H296" }),
    part("path", { class: "done", d: `M20 8 H${at.toFixed(1)}` }),
    part("path", { class: "thin", d: "M20 1.5 V8 M9 8 v5 m-2.6 3.4 a2.6 2.6 0 1 0 2.6 -3.4" }),
  );
  for (let notch = 0; notch <= 10; notch += 1) {
    const x = 30 + 25.8 * notch;
    svg.append(part("path", { class: "notch", d: `M${x} 8 v3` }));
  }
  const poise = part("path", { class: "load", d: "M-3.4 8 h6.8 l2.4 9 q-5.8 3.4 -11.6 0 z" });
  const hanger = part("path", { class: "thin", d: "M0 0 V8" });
  const group = part("g", { transform: `translate(${at.toFixed(1)} 8)` });
  group.append(hanger, poise);
  svg.append(group);
  return svg;
}
