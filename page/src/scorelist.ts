/** Scores without places: a list from the highest to the lowest. */

import { button, el, put } from "./dom";
import { shown, type Evidence } from "./evidence";
import { indices } from "./overlay";
import { css, table } from "./palette";
import type { Display } from "./settings";

const PAGE = 200;

export class ScoreList {
  readonly element = el("div", { class: "score-list" });
  private length = PAGE;

  constructor(private readonly pick: (index: number) => void) {}

  refresh(evidence: Evidence, display: Display, picked: number): void {
    const { values } = evidence;
    const entries = indices(evidence, display);
    const colours = table(display.palette, evidence.signed);
    const order = Array.from(values.keys())
      .filter((i) => entries[i] >= 0)
      .sort((a, b) => values[b] - values[a]);
    const rows = order.slice(0, this.length).map((i, place) => {
      const width = (100 * Math.abs(values[i])) / evidence.largest;
      const fill = el("span", { class: "fill", style: { width: `${width}%`, background: css(colours, entries[i]) } });
      const open = button(`Patch ${i}`, () => this.pick(i), { class: "link" });
      return el("tr", { class: i === picked ? "current" : "", data: { index: i } }, el("td", { class: "number" }, String(place + 1)), el("td", {}, open), el("td", { class: "number" }, shown(values[i])), el("td", { class: "wide" }, el("span", { class: "track" }, fill)));
    });
    const head = ["Rank", "Patch", "Score", ""].map((text) => el("th", { scope: "col", class: text === "Rank" || text === "Score" ? "number" : "" }, text));
    put(
      this.element,
      el("p", { class: "muted" }, "The features hold no coordinates, so the scores cannot be placed on the slide."),
      el("table", { class: "scores" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)),
      order.length > this.length &&
        button("Show more", () => {
          this.length += PAGE;
          this.refresh(evidence, display, picked);
        }),
    );
  }
}
