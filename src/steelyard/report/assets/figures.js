// Showing Vega-Lite figures: as wide as their column, in the reader's light or dark, drawn when they come into sight.
"use strict";
const SteelyardFigures = (() => {
  const shown = new Map(); // element -> {spec, view}
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  let themes = { light: {}, dark: {} };
  let printing = false;

  const dark = () => scheme.matches && !printing;

  // Give a figure the width of its column: one view takes it all, views below each other too, a row of small ones breaks.
  function fit(spec, width) {
    const made = structuredClone(spec);
    if (made.facet) {
      const rows = Object.values(made.datasets || {}).flat();
      const panels = new Set(rows.map((row) => row[made.facet.field])).size || 1;
      const columns = Math.max(1, Math.min(made.columns || 3, panels, Math.floor(width / 240)));
      made.columns = columns;
      made.spec.width = Math.min(480, Math.max(140, Math.floor((width - 70) / columns - 30)));
    } else if (made.vconcat) {
      for (const part of made.vconcat) part.width = Math.max(120, width - 140);
    } else {
      made.width = width;
      made.autosize = { type: "fit-x", contains: "padding" };
    }
    return made;
  }

  function config(given, width) {
    const theme = structuredClone(given);
    theme.legend.columns = Math.max(1, Math.floor(width / 170));
    if (width < 480) theme.axis.labelLimit = 96;
    return theme;
  }

  // Draw a figure in the room that it has. The interpreter (ast) evaluates nothing: no right to run code from text is needed.
  function draw(element, given, width, theme, isDark) {
    const spec = fit(given, width);
    strip(spec, width);
    return vegaEmbed(element, spec, {
      mode: "vega-lite", actions: false, ast: true, renderer: heavy(spec) ? "canvas" : "svg", config: config(theme, width),
      tooltip: { theme: isDark ? "dark" : "light" },
    });
  }

  async function render(element) {
    const entry = shown.get(element);
    if (!entry || !entry.spec) return;
    const width = Math.floor(element.clientWidth);
    if (width <= 0) return;
    entry.width = width;
    const result = await draw(element, entry.spec, width, dark() ? themes.dark : themes.light, dark());
    if (entry.result) entry.result.finalize();
    entry.result = result;
    element.dataset.drawn = "yes";
  }

  // The columns of a legend follow the width, so what the figure itself says of them gives way.
  function strip(spec, width) {
    const columns = Math.max(1, Math.floor(width / 170));
    const walk = (node) => {
      if (!node || typeof node !== "object") return;
      if (node.legend && node.legend.columns) node.legend.columns = columns;
      for (const [name, inner] of Object.entries(node)) if (name !== "datasets" && name !== "data") walk(inner);
    };
    walk(spec);
  }

  // Thousands of cells are drawn as one picture: as many elements would hold the page up.
  function heavy(spec) {
    const cells = (row) => Math.max(1, ...Object.values(row).map((value) => (Array.isArray(value) ? value.length : 1)));
    return Object.values(spec.datasets || {}).flat().reduce((total, row) => total + cells(row), 0) > 2500;
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      render(entry.target);
    }
  }, { rootMargin: "300px" });

  // Show a figure in an element, now or when it comes into sight; a second call replaces the first.
  function show(element, spec) {
    const entry = shown.get(element) || {};
    entry.spec = spec;
    shown.set(element, entry);
    if (entry.result) render(element);
    else { watcher.observe(element); waiting.push(element); idle(fill); }
  }

  // What is not in sight is drawn one by one while nothing else is to do: a picture of the whole page has all figures.
  const waiting = [];
  const idle = window.requestIdleCallback || ((work) => setTimeout(work, 300));
  async function fill() {
    const element = waiting.shift();
    if (!element) return;
    watcher.unobserve(element);
    if (shown.has(element) && !shown.get(element).result) await render(element);
    idle(fill);
  }

  function clear(element) {
    const entry = shown.get(element);
    if (entry && entry.result) entry.result.finalize();
    shown.delete(element);
    element.replaceChildren();
    delete element.dataset.drawn;
  }

  function again() { for (const [element, entry] of shown) if (entry.result) render(element); }

  let timer = 0;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      for (const [element, entry] of shown) {
        if (entry.result && Math.abs(element.clientWidth - entry.width) > 2) render(element);
      }
    }, 150);
  });
  scheme.addEventListener("change", again);
  window.addEventListener("beforeprint", () => { printing = true; for (const element of shown.keys()) render(element); });
  window.addEventListener("afterprint", () => { printing = false; again(); });

  async function save(element, name) {
    const entry = shown.get(element);
    if (!entry || !entry.result) return;
    const url = await entry.result.view.toImageURL("svg");
    const link = document.createElement("a");
    link.href = url;
    link.download = name + ".svg";
    link.click();
  }

  return { show, clear, save, draw, use: (given) => { themes = given; } };
})();
