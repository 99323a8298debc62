/** Labels against predictions: counts that filter the list. */

import type { Run, SlideRow } from "./api";
import { button, el } from "./dom";

const MOST = 12; // classes that still make a table

/** The table of counts; `choose` gets a label and a prediction, empty strings where the chosen cell is pressed again. */
export function confusion(run: Run, chosen: { label: string; predicted: string }, choose: (label: string, predicted: string) => void): HTMLElement | null {
  const known = run.slides.filter((slide): slide is SlideRow & { label: string; predicted: string } => slide.label !== null && slide.predicted !== null);
  const classes = [...new Set(known.flatMap((slide) => [slide.label, slide.predicted]))].sort();
  if (classes.length < 2 || classes.length > MOST || !known.some((slide) => slide.correct !== null)) return null;
  const cell = (label: string, predicted: string) => {
    const count = known.filter((slide) => slide.label === label && slide.predicted === predicted).length;
    const on = chosen.label === label && chosen.predicted === predicted;
    const press = () => (on ? choose("", "") : choose(label, predicted));
    const said = `${count} slides of ${label} predicted ${predicted}`;
    return el("td", { class: label === predicted ? "agree" : "" }, button(String(count), press, { ariaPressed: String(on), ariaLabel: said, title: said, disabled: !count, data: { label, predicted } }));
  };
  const head = el("tr", {}, el("th", { scope: "col" }, "Label \\ prediction"), ...classes.map((name) => el("th", { scope: "col" }, name)));
  const rows = classes.map((label) => el("tr", {}, el("th", { scope: "row" }, label), ...classes.map((predicted) => cell(label, predicted))));
  return el("details", { class: "confusion" }, el("summary", {}, "Labels against predictions"), el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}
