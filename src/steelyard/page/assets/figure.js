// One figure: asked for when it is in sight, asked for again when its run moved on, fitted to the width there is.

import { get } from "./api.js";
import { h } from "./dom.js";

export const isDark = () => {
  const chosen = document.documentElement.dataset.look;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

export class Figure {
  constructor(kind, question, themes, inSight) {
    this.kind = kind;
    this.question = question;
    this.themes = themes;
    this.stale = true;
    this.busy = false;
    this.inSight = false;
    this.box = h("div", { class: "drawing" });
    this.note = h("p", { class: "note" });
    this.element = h(
      "figure",
      { class: `figure ${kind.name}`, hidden: true },
      h("figcaption", {}, h("h3", {}, kind.title), h("p", { class: "soft" }, kind.caption)),
      this.box,
      this.note,
    );
    this.element.dataset.kind = kind.name;
    inSight(this);
  }

  async renew() {
    this.stale = true;
    if (this.busy) return;
    this.busy = true;
    try {
      while (this.stale && (this.inSight || this.element.hidden)) {
        this.stale = false;
        await this.draw(await get("/api/figure", { ...this.question(), kind: this.kind.name }));
      }
    } catch (problem) {
      this.element.hidden = false;
      this.note.textContent = `This figure could not be drawn: ${problem.message}`;
    } finally {
      this.busy = false;
    }
  }

  async draw(found) {
    if (found.spec === null) {
      this.element.hidden = true;
      return;
    }
    this.element.hidden = false;
    this.found = found;
    // What is asked for tells whether there is something to show; drawing it waits until somebody can see it.
    this.pending = !this.inSight;
    if (this.inSight) await this.show();
  }

  async sighted(inSight) {
    this.inSight = inSight;
    if (!inSight) return;
    if (this.pending) {
      this.pending = false;
      await this.show();
    }
    if (this.stale) await this.renew();
  }

  async show() {
    const { spec, note, description } = this.found;
    const room = Math.floor(this.box.clientWidth) || 640;
    const fresh = h("div", {});
    const theme = isDark() ? this.themes.dark : this.themes.light;
    const drawn = await SteelyardFigures.draw(fresh, spec, room, theme, isDark());
    this.view?.finalize();
    this.view = drawn.view;
    this.box.replaceChildren(fresh);
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", description);
    this.note.textContent = note;
    this.element.dataset.drawn = String(Number(this.element.dataset.drawn ?? 0) + 1);
  }

  async again() {
    if (this.found?.spec && !this.pending) await this.show();
  }

  end() {
    this.view?.finalize();
  }
}
