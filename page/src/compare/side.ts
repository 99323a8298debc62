/** One of two slides that are compared: its evidence, its pane, and what is marked on it. */

import { PLACE } from "../colours";
import { el, put } from "../dom";
import { annotation } from "../annotations/annotation";
import type { Point } from "../annotations/geometry";
import type { Marks } from "../annotations/marks";
import { lengthText } from "../annotations/measures";
import { fetchCohort, type Choice, type Evidence } from "../evidence/evidence";
import { INITIAL_LAYERS, LayerStore, replaced } from "../evidence/layers";
import { fetchScores, getSlideNamed, type Run, type Scores, type SlideInfo, type SlideRow } from "../server/api";
import { Pane, type PaneHost } from "../slide/pane";
import { middleOf, wholeBounds, type Bounds } from "../slide/viewport";
import { slideHash } from "../state/address";
import type { Display } from "../state/settings";
import { initialState, Store, type SlideState } from "../state/store";

/** What is told of a side. */
export interface SideListener {
  readonly run: Run;
  onPlace(side: Side, point: Point): void;
  onHover(side: Side, event: MouseEvent | null): void;
  onMove(): void;
  /** It shows other evidence, or has its cohort's scale. */
  onChoose(): void;
  onTileFailure(): void;
  say(text: string, problem?: boolean): void;
}

export class Side implements PaneHost {
  readonly store = new Store<SlideState>(initialState());
  readonly scores = new Map<number, Scores>();
  readonly removed: ReadonlyMap<number, Uint8Array> = new Map();
  readonly layers = new LayerStore(() => this.info, () => this.pane.draw(), (text, problem) => this.say(text, problem));
  readonly title = el("div", { class: "pane-title" });
  readonly twin = el("div", { class: "twin", hidden: true, ariaHidden: "true" });
  bounds: Bounds = { x: 0, y: 0, width: 1, height: 1 };
  info!: SlideInfo;
  pane!: Pane;

  constructor(
    readonly letter: "A" | "B",
    private readonly row: Pick<SlideRow, "key" | "id">,
    private readonly owner: SideListener,
  ) {
    this.store.on(["display"], () => {
      this.wantCohort();
      this.pane?.paint();
    });
    this.store.on(["choices"], () => this.pane?.take());
    this.store.on(["tool"], () => this.pane.drawing.choose(this.store.state.tool));
    this.store.on(["annotations", "draft"], () => this.pane?.drawMarks());
  }

  get run(): Run {
    return this.owner.run;
  }

  get display(): Display {
    return this.store.state.display;
  }

  get marks(): Marks {
    return this.store.state;
  }

  /** Fetches the slide; what is wrong with it is given back. */
  async load(): Promise<string[]> {
    this.info = await getSlideNamed(this.row);
    const problems = await fetchScores(this.info, this.scores);
    this.bounds = wholeBounds(this.info, this.scores);
    this.wantCohort();
    return problems;
  }

  private wantCohort(): void {
    if (this.display.clip !== "cohort" || !this.scores.size) return;
    fetchCohort(this.scores).then((fresh) => fresh && this.owner.onChoose(), (error: Error) => this.say(error.message, true));
  }

  build(parent: HTMLElement, choice: Partial<Choice>): void {
    this.store.set({ layers: INITIAL_LAYERS });
    this.pane = new Pane(this, this.letter, choice, parent);
    this.drawTitle();
    this.pane.stage.append(el("div", { class: "aim", ariaHidden: "true" }), this.twin);
    this.pane.stage.ariaLabel = `${this.letter}, ${this.info.id}: drag or arrows to move, scroll or + and − to zoom`;
  }

  /** The slide, and what the model whose map is shown says of it. */
  private drawTitle(): void {
    const { id, sets } = this.info;
    const { label, predicted } = this.pane.evidence?.scores.set ?? this.info;
    const facts = [label !== null && `label ${label}`, predicted !== null && `predicted ${predicted}`].filter(Boolean).join(" · ");
    put(this.title, el("span", { class: "pane-letter" }, this.letter), sets.length ? el("a", { href: slideHash(id), title: "Open this slide alone" }, id) : el("strong", {}, id), el("span", { class: "muted small" }, facts));
  }

  /** Shows the places that are marked. */
  mark(points: readonly Point[]): void {
    this.store.set({ annotations: points.map((point, i) => ({ ...annotation(`${i + 1}`, "Region*", [[[point]]], "point"), colour: PLACE })) });
  }

  /** The place in the middle of the view. */
  get middle(): Point {
    return middleOf(this.pane.viewer, this.bounds).centre;
  }

  // what the pane tells

  present(evidence: Evidence): Evidence {
    return replaced(evidence, this.store.state.layers, this.layers.of(evidence.choice.run));
  }

  onChoose(): void {
    if (this.pane) this.drawTitle();
    this.owner.onChoose();
    this.owner.onMove();
  }

  hover(_: Pane, __: number, event: MouseEvent | null): void {
    this.owner.onHover(this, event);
  }

  onDraw(_: string, points: Point[]): void {
    this.owner.onPlace(this, points[0]);
  }

  describeLength(length: number): string {
    return lengthText(length, this.info.mpp);
  }

  onMove(): void {
    this.owner.onMove();
  }

  onTileFailure(): void {
    this.owner.onTileFailure();
  }

  say(text: string, problem?: boolean): void {
    this.owner.say(text, problem);
  }

  pick(): void {} // there is no panel to look at a patch in
  onPaint(): void {}
  region(): void {}
  onReshape(): void {}
}
