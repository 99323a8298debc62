/** One patch closely: its picture, its scores under all methods, and the patches most like it. */

import { css, rgbTable } from "../colours";
import { button, el, put } from "../dom";
import { formatNumber, methodName, WORDS } from "../words";
import { percentile, rank, sameForAll, type Evidence } from "./evidence";
import type { LayerStore } from "./layers";
import { Layout } from "./overlay";
import { patchButton, patchPicture } from "./patches";
import { insideLine, insideOf } from "./inside";
import { getAlike, getSimilar, patchUrl, type Run, type SlideInfo } from "../server/api";
import type { Pane } from "../slide/pane";
import { slideHash } from "../state/address";
import type { Display } from "../state/settings";
import type { SlideState, Store } from "../state/store";

/** What the panel needs of the page. */
export interface InspectorHost {
  readonly run: Run;
  readonly info: SlideInfo;
  readonly display: Display;
  readonly store: Store<SlideState>;
  readonly layers: LayerStore;
  jump(pane: Pane, index: number): void;
}

/** Score, rank and percentile in a line. */
export function summary(evidence: Evidence, index: number): string {
  const values = evidence.without ? evidence.values.filter(Number.isFinite) : evidence.values;
  if (evidence.without) return leftSummary(evidence, values, index);
  return `score ${formatNumber(values[index])} · rank ${rank(values, index).toLocaleString("en")} of ${values.length.toLocaleString("en")} · percentile ${percentile(values, index).toFixed(1)}`;
}

/** The same among the patches that are left. */
function leftSummary(evidence: Evidence, left: Float32Array, index: number): string {
  const value = evidence.values[index];
  if (Number.isNaN(value)) return "removed by what-if: no score in this map";
  const [higher, lower] = [left.filter((other) => other > value).length, left.filter((other) => other < value).length];
  return `score ${formatNumber(value)} · rank ${(higher + 1).toLocaleString("en")} of the ${left.length.toLocaleString("en")} left · percentile ${((100 * lower) / Math.max(1, left.length - 1)).toFixed(1)}`;
}

export class Inspector {
  readonly element = el("div", { class: "panel-body" });
  private lastTicket = 0;

  constructor(private readonly view: InspectorHost) {
    this.empty();
  }

  /** Answers that are still awaited come too late. */
  forget(): void {
    this.lastTicket++;
  }

  private empty(): void {
    this.forget();
    put(this.element, el("p", { class: "muted" }, "Click a patch on the slide to see it at full resolution, with its scores."));
  }

  /** Shows a patch of a pane's run. */
  open(pane: Pane, index: number): void {
    const { evidence } = pane;
    if (!evidence || index < 0) return this.empty();
    const { info, run } = this.view;
    const similar = el("section", { class: "block" });
    put(
      this.element,
      el("h2", { class: "patch-title" }, `Patch ${index}`),
      patchPicture(info, evidence, index, run.live),
      el("p", { class: "numbers" }, summary(evidence, index)),
      el("p", { class: "muted small" }, this.place(evidence, index)),
      this.inside(evidence, index),
      evidence.scores.x && button("Go to the patch", () => this.view.jump(pane, index), { class: "small-button" }),
      el("section", { class: "block" }, el("h2", {}, "Scores by all methods"), this.scores(evidence, index)),
      similar,
      run.live && run.similar && run.slides.length > 1 && this.elsewhere(evidence, index),
    );
    if (run.live && run.similar) void this.fetchSimilar(pane, evidence, index, similar);
  }

  /** How much of the score has a place inside the patch, where there is a map. */
  private inside(evidence: Evidence, index: number): HTMLElement | null {
    const maps = insideOf(evidence, this.view.layers.of(evidence.choice.run));
    const line = maps && insideLine(maps, index);
    return line ? el("p", { class: "small inside" }, line) : null;
  }

  private place(evidence: Evidence, index: number): string {
    if (!evidence.scores.x) return "The features have no coordinates, so the position of this patch is unknown.";
    const layout = Layout.of(evidence.scores);
    const { mpp } = this.view.info;
    const size = mpp ? `${layout.edge} px (${formatNumber(layout.edge * mpp)} µm)` : `${layout.edge} px`;
    return `x ${layout.x[index]}, y ${layout.y[index]}, edge ${size} at level 0`;
  }

  private scores(evidence: Evidence, index: number): HTMLElement {
    const { set, columns } = evidence.scores;
    const rows = set.columns.flatMap((column, c) => {
      if (column.kind === "stable") return []; // whether a sign is sure: no score
      const values = columns[c];
      const forAll = sameForAll(evidence.scores, column.method);
      if (forAll && set.columns.findIndex(({ method }) => method === column.method) !== c) return []; // one row for all classes
      const here = column.method === evidence.choice.method && (forAll || column.target === evidence.choice.target) && evidence.choice.against === null;
      const target = forAll ? "no class" : column.target;
      return el(
        "tr",
        { class: here ? "current" : "" },
        el("td", { title: methodName(column.method) }, methodName(column.method)),
        el("td", { title: target }, target),
        el("td", { class: "number" }, formatNumber(values[index])),
        el("td", { class: "number" }, rank(values, index).toLocaleString("en")),
        el("td", {}, this.bar(values, index, column.signed)),
      );
    });
    const head = [WORDS.method, "For", "Score", "Rank", "Percentile"].map((text) => el("th", { scope: "col" }, text));
    return el("table", { class: "scores" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  }

  private bar(values: Float32Array, index: number, signed: boolean): HTMLElement {
    const share = percentile(values, index);
    const colours = rgbTable(this.view.display.palette, signed);
    const entry = signed ? (values[index] >= 0 ? 224 : 32) : 128;
    const fill = el("span", { class: "fill", style: { width: `${share}%`, background: css(colours, entry) } });
    return el("span", { class: "percentile" }, el("span", { class: "track" }, fill), el("span", { class: "number" }, share.toFixed(0)));
  }

  /** Looks for similar patches in all other slides, when asked. */
  private elsewhere(evidence: Evidence, index: number): HTMLElement {
    const home = el("section", { class: "block alike" });
    const look = button("Search all slides", () => void this.fetchAlike(evidence, index, home), { class: "small-button", data: { action: "alike" } });
    put(home, el("h2", {}, "Similar patches in other slides"), look);
    return home;
  }

  private async fetchAlike(evidence: Evidence, index: number, home: HTMLElement): Promise<void> {
    const { info, run } = this.view;
    const title = () => el("h2", {}, "Similar patches in other slides");
    try {
      for (;;) {
        const answer = await getAlike(info.key, evidence.choice.run, index);
        if (!home.isConnected) return;
        if (answer.neighbours) return put(home, title(), el("div", { class: "gallery" }, ...answer.neighbours.map((n) => this.link(n, evidence, run))), el("p", { class: "muted small" }, "Number: similarity of the features (cosine, 1 is the same)."));
        put(home, title(), el("p", { class: "muted", role: "status" }, `Reading the features of ${answer.of} slides: ${answer.done} done…`));
        await new Promise((done) => setTimeout(done, 700));
      }
    } catch (error) {
      if (home.isConnected) put(home, title(), el("p", { class: "muted" }, (error as Error).message));
    }
  }

  private link({ key, index, similarity }: { key: number; index: number; similarity: number }, evidence: Evidence, run: Run): HTMLElement {
    const slide = run.slides.find((row) => row.key === key);
    const state = { panes: [evidence.choice], display: {}, area: null, panel: "patch", picked: index, layers: null };
    const label = `Patch ${index} of ${slide?.id ?? key}, similarity ${similarity.toFixed(2)}`;
    const picture = slide?.image ? el("img", { src: patchUrl(key, evidence.choice.run, index), alt: "", width: 72, height: 72 }) : el("span", { class: "swatch" }, String(index));
    return el("a", { href: slideHash(slide?.id ?? "", state), class: "patch-button", title: label, ariaLabel: label, data: { key, index } }, picture, el("span", { class: "caption" }, similarity.toFixed(2)));
  }

  private async fetchSimilar(pane: Pane, evidence: Evidence, index: number, home: HTMLElement): Promise<void> {
    const ticket = ++this.lastTicket;
    const { info, display } = this.view;
    put(home, el("h2", {}, "Similar patches in this slide"), el("p", { class: "muted" }, "Searching…"));
    try {
      const neighbours = (await getSimilar(info.key, evidence.choice.run, index)).filter((n) => n.index !== index);
      if (ticket !== this.lastTicket) return;
      const buttons = neighbours.map((n) => patchButton(info, evidence, n.index, display, n.similarity.toFixed(2), (i) => this.view.jump(pane, i)));
      put(home, el("h2", {}, "Similar patches in this slide"), el("div", { class: "gallery" }, ...buttons), el("p", { class: "muted small" }, "Number: similarity of the features (cosine, 1 is the same). Frame: colour of the patch's own score."));
      this.view.store.set({ similar: { run: evidence.choice.run, indices: neighbours.map((n) => n.index) } });
    } catch (error) {
      if (ticket === this.lastTicket) put(home, el("h2", {}, "Similar patches in this slide"), el("p", { class: "muted" }, (error as Error).message));
    }
  }
}
