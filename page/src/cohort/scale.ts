/** What red means over the cohort: one chosen class, on one scale, in the list and on the wall. */

import { PALETTES } from "../colours";
import { el, select, svg } from "../dom";
import { plainBar } from "../evidence/legend";
import { FAR } from "../evidence/evidence";
import type { CohortScale, ColumnName } from "../server/cohort";
import type { ViewState } from "../state/address";
import type { PageState, PageStore } from "../state/page";
import { initialDisplay } from "../state/settings";
import { formatNumber, methodName } from "../words";

/** The column that was looked at last, else the last class of the first method. */
export function columnOf(columns: readonly ColumnName[], { carried }: PageState): number {
  const pane = carried?.panes[0];
  const last = pane?.run ? -1 : columns.findIndex(({ method, target }) => method === pane?.method && target === pane?.target);
  return last >= 0 ? last : columns.findLastIndex(({ method }) => method === columns[0]?.method);
}

/** How a slide shows what the list shows of it. */
export function stateFor({ method, target }: ColumnName): ViewState {
  return { panes: [{ run: 0, method, target }], display: { clip: "cohort" }, area: null, panel: null, picked: null, layers: null };
}

/** Chooses the class of the list, of the wall and of the slides that are opened from them. */
export function chooseColumn(page: PageStore, column: ColumnName): void {
  const { carried } = page.state;
  const shown = stateFor(column);
  const state = { ...shown, panes: shown.panes.map((pane) => ({ ...pane, classChosen: true })) };
  page.set({ carried: carried ? { ...carried, panes: state.panes, display: { ...carried.display, ...state.display } } : state });
}

export function columnChooser(label: string, columns: readonly ColumnName[], column: number, choose: (value: string) => void): HTMLElement {
  const options = columns.map(({ method, target }, i) => ({ value: String(i), text: `${methodName(method)}: evidence for ${target}` }));
  return el("label", { class: "field" }, el("span", {}, label), select("Evidence", options, String(column), choose, { name: "column" }));
}

/** The colours that were chosen last, for the list and the wall too. */
export function chosenPalette({ carried }: PageState): string {
  return carried?.display.palette ?? initialDisplay().palette;
}

/** A filter, in the page from then on, that gives small grey maps the colours of a palette. */
export function paletteFilter(id: string): string {
  const name = `small-map-${id}`;
  if (!document.getElementById(name)) {
    const { diverging } = PALETTES.find((palette) => palette.id === id) ?? PALETTES[0];
    const channels = ["R", "G", "B"].map((letter, c) => svg(`feFunc${letter}`, { type: "table", tableValues: diverging.map((stop) => (stop[c] / 255).toFixed(4)).join(" ") }));
    const filter = svg("filter", { id: name, "color-interpolation-filters": "sRGB" }, svg("feComponentTransfer", {}, ...channels));
    document.body.append(svg("svg", { width: 0, height: 0, "aria-hidden": "true", class: "hidden-text" }, filter));
  }
  return `url(#${name})`;
}

/** The legend of all small maps and frames. */
export function cohortBar(palette: string, { ends }: ColumnName, { high, lowest, highest }: CohortScale): HTMLElement {
  const ticks = [`${lowest < -high ? "≤ " : ""}${formatNumber(-high)}`, "0", `${highest > high ? "≥ " : ""}${formatNumber(high)}`];
  const times = Math.max(-lowest, highest) / high;
  const warning = times > FAR ? el("div", { class: "bar-warning" }, `⚠ Strongest score: ${formatNumber(times, 2)} times this scale`) : null;
  return el("div", { class: "colour-bar cohort-bar", role: "img", ariaLabel: `Colours: from ${ticks[0]} (${ends[0]}) to ${ticks[2]} (${ends[1]}), one scale for all slides` }, ...plainBar(palette, true, ends, ticks), warning);
}
