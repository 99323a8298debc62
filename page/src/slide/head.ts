/** The line above a slide, the tools beside it, and what can be done with a selection. */

import { button, el, put, svg } from "../dom";
import { countPatches, formatNumber, formatPercent, WORDS } from "../words";
import type { Tool } from "../annotations/drawing";
import { correctLabel } from "../cohort/list";
import { rowVerdict, shownVerdict } from "../evidence/certificate";
import type { Run, SlideInfo, SlideRow } from "../server/api";
import type { Pane } from "./pane";
import type { PanelName } from "./panels";
import { slideHash } from "../state/address";
import type { Linking } from "../state/links";
import { listedSlides, type PageStore } from "../state/page";
import type { SlideState, Store } from "../state/store";

const TOOLS: [Tool, string, string, string][] = [
  ["move", "Move", "V", "M12 3v18M3 12h18M12 3l-3 3m3-3 3 3M12 21l-3-3m3 3 3-3M3 12l3-3m-3 3 3 3M21 12l-3-3m3 3-3 3"],
  ["lasso", "Lasso", "L", "M8 16.5C4.5 15.5 3 13.3 3 11c0-3.9 4-7 9-7s9 3.1 9 7-4 7-9 7c-1.4 0-2.7-.2-4-.6zm0 0a2 2 0 1 0-2 2c1.5 0 1.5 2.5-.5 2.5"],
  ["brush", "Brush", "B", "M20 4 10.5 13.500M8 14c-2 0-3 1.5-3 3.5 0 1-.7 1.7-2 2 3.5 1.7 8 .8 8-2.5 0-1.7-1.3-3-3-3z"],
  ["rectangle", "Rectangle", "R", "M4 6h16v12H4z"],
  ["line", "Line (double-click to finish)", "D", "M4 20 10 8l5 6 5-10"],
  ["point", "Point", "I", "M12 4v16M4 12h16M12 12m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0"],
  ["ruler", "Ruler", "K", "M3 16 16 3l5 5L8 21zM7 12l2 2M10 9l2 2M13 6l2 2"],
  ["polygon", "Polygon (double-click to finish)", "P", "M12 3.5 21 10l-3.5 10h-11L3 10z"],
];

/** What the tools work on. */
export interface ToolBarHost {
  readonly tool: Tool;
  readonly active: Pane | null;
  choose(tool: Tool): void;
}

export function toolBar(view: ToolBarHost): HTMLElement[] {
  const tools = TOOLS.map(([tool, name, key, path]) => {
    const node = button("", () => view.choose(tool), { title: `${name} (${key})`, ariaLabel: name, ariaPressed: String(view.tool === tool), data: { tool } });
    node.append(icon(path));
    return node;
  });
  const zoom = (factor: number, name: string, path: string) => {
    const node = button("", () => zoomBy(view, factor), { title: name, ariaLabel: name });
    node.append(icon(path));
    return node;
  };
  const home = button("", () => goHome(view), { title: "Whole slide (0)", ariaLabel: "Whole slide" });
  home.append(icon("M4 9V4h5M20 9V4h-5M4 15v5h5M20 15v5h-5"));
  return [...tools, el("hr", {}), zoom(1.6, "Zoom in (+)", "M12 5v14M5 12h14"), zoom(1 / 1.6, "Zoom out (−)", "M5 12h14"), home];
}

export function zoomBy(view: { readonly active: Pane | null }, factor: number): void {
  const viewer = view.active?.viewer;
  if (viewer?.isOpen()) viewer.viewport.zoomBy(factor).applyConstraints();
}

export function goHome(view: { readonly active: Pane | null }): void {
  view.active?.home();
}

function icon(path: string): SVGElement {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: path }));
}

/** What the line above a slide tells of, and what its buttons do. */
export interface HeadHost extends StepHost {
  readonly info: SlideInfo;
  readonly panes: readonly Pane[];
  readonly active: Pane | null;
  readonly whatif: { summary(run: number): string | null };
  readonly exports: { picture(): void };
  split(two: boolean): void;
  askFigure(): void;
  askOtherSlide(): void;
}

/** Where previous and next lead. */
export interface StepHost {
  readonly run: Run;
  readonly row: SlideRow;
  readonly page: PageStore;
  readonly link: Linking;
}

/** Name, label, prediction, verdict; neighbours; panes; exports. */
export function slideHead(view: HeadHost): HTMLElement[] {
  const { info, run } = view;
  const row = run.slides.find((slide) => slide.key === info.key);
  const two = view.panes.length > 1;
  const whatIf = view.whatif.summary(view.active?.evidence?.choice.run ?? 0);
  const evidence = view.active?.evidence;
  const verdict = evidence ? shownVerdict(evidence) : row?.verdict ? rowVerdict(row) : null; // the row's until the scores are there, so that nothing moves
  const set = evidence?.scores.set;
  const { label, predicted, correct, probability } = set ?? info; // of the model whose map is shown
  const value = predicted === null ? (set ?? info.sets[0])?.value ?? null : null;
  const fact = (name: string, ...value: (Node | string)[]) => el("span", { class: "fact" }, el("span", { class: "fact-name" }, name), el("span", {}, ...value));
  return [
    el("h1", { title: info.id }, info.id),
    el(
      "div",
      { class: "facts" },
      whatIf !== null ? fact("What if", whatIf) : null,
      predicted !== null ? fact(WORDS.prediction, predicted, probability !== null ? ` ${formatPercent(probability, 0)}` : "") : null,
      value !== null ? fact((set ?? info.sets[0]).noun, formatNumber(value)) : null,
      whatIf === null && verdict ? fact("Map", verdict) : null,
      label !== null ? fact(WORDS.label, label) : null,
      correct !== null && whatIf === null ? correctLabel(correct) : null,
      info.case && info.case !== info.id ? fact("Case", info.case) : null,
    ),
    el(
      "div",
      { class: "head-buttons" },
      step(view, -1),
      step(view, 1),
      button(two ? "One pane" : "Two panes", () => view.split(!two), { title: "Two methods, classes or runs side by side (S)", ariaPressed: String(two), data: { action: "split" } }),
      button("Compare slides…", () => view.askOtherSlide(), { title: `${WORDS.compareSlides} (W)`, data: { action: "beside" } }),
      button(WORDS.copyLink, () => void view.link.copy(), { title: WORDS.copyLinkHint, data: { action: "copy-link" } }),
      button(WORDS.figure, () => view.askFigure(), { title: "At a chosen resolution, as PNG or SVG", data: { action: "figure" } }),
      button("Save picture", () => view.exports.picture(), { title: "The view as PNG (E)", data: { action: "picture" } }),
    ),
  ];
}

/** The slide before or after this one in the list as it is filtered and sorted, or in the run. */
export function neighbour(view: StepHost, step: number): SlideRow | undefined {
  const find = (slides: SlideRow[]) => slides.findIndex((slide) => slide.id === view.row.id);
  const listed = listedSlides(view.run, view.page.state.list);
  const slides = find(listed) >= 0 ? listed : view.run.slides;
  return slides[find(slides) + step];
}

/** Goes to another slide; what is shown of it stays as it was. */
export function goTo(view: StepHost, slide: SlideRow | undefined): void {
  if (slide) location.hash = slideHash(slide.id, view.link.nextState());
}

function step(view: StepHost, by: 1 | -1): HTMLElement {
  const slide = neighbour(view, by);
  const name = by < 0 ? "Previous slide" : "Next slide";
  return button(by < 0 ? "‹" : "›", () => goTo(view, slide), { disabled: !slide, ariaLabel: name, title: `${name} (${by < 0 ? "[" : "]"})`, class: "step" });
}

/** What can be done with a selection. */
export interface SelectionHost {
  readonly run: Run;
  readonly store: Store<SlideState>;
  readonly whatif: { apply(patches: number[], action: "remove" | "keep"): Promise<void> };
  readonly notes: { add(): void };
  show(panel: PanelName): void;
}

/** Appears while a region is selected. */
export class SelectionBar {
  readonly element = el("div", { class: "selection-bar", role: "toolbar", ariaLabel: "Selected region", hidden: true });

  constructor(private readonly view: SelectionHost) {}

  refresh(): void {
    const { view } = this;
    const { selection } = view.store.state;
    this.element.hidden = !selection;
    if (!selection) return;
    const count = selection.patches.length;
    const ask = (action: "remove" | "keep") => {
      view.show("whatif");
      void view.whatif.apply(selection.patches, action);
    };
    put(
      this.element,
      el("span", {}, `${countPatches(count)} selected`),
      view.run.whatif && button(WORDS.remove, () => ask("remove"), { class: "primary", disabled: !count, title: "What would the model predict without them?" }),
      view.run.whatif && button(WORDS.keepOnly, () => ask("keep"), { disabled: !count, title: "What would the model predict from only these?" }),
      selection.polygons.length > 0 && button("Annotate", () => this.annotate(), { title: "Save as an annotation (A)" }),
      button(WORDS.clear, () => view.store.set({ selection: null }), { title: "Esc" }),
    );
  }

  private annotate(): void {
    this.view.show("notes");
    this.view.notes.add();
  }
}
