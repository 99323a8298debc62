/** Two slides side by side: each on its own until two places are marked on both, then they move together. */

import { WORDS } from "../words";
import type OpenSeadragon from "openseadragon";
import { button, el, openDialog, put, select } from "../dom";
import { inverse, applySimilarity, scaleOf, similarity, turnOf, type Point, type Similarity } from "../annotations/geometry";
import { Side, type SideListener } from "./side";
import { pairUp } from "../evidence/evidence";
import { placeAt } from "../evidence/overlay";
import { CompareFigures } from "../figures/exports";
import type { Run, SlideRow } from "../server/api";
import { Reconnection } from "../server/reconnection";
import { figureDialog } from "../slide/dialogs";
import { GammaFilter } from "../slide/image";
import { middleOf, show, showMiddle } from "../slide/viewport";
import { compareHash, parseCompare, type CompareLink } from "../state/address";
import { AddressBar } from "../state/links";
import type { ClipName, Display } from "../state/settings";
import { Store } from "../state/store";

type Points = readonly [readonly Point[], readonly Point[]];

/** The state of two slides side by side; what each of them shows is its own. */
export interface CompareState {
  /** Of each slide, the places that are marked; two on both link them. */
  points: Points;
  /** What was marked before, and how the second slide was turned: for undo. */
  before: readonly { points: Points; turn: number }[];
  /** Whether a click marks a place. */
  placing: boolean;
  active: 0 | 1;
}

const NONE: Points = [[], []];
const ODD = 0.1; // a size that differs from the slides' own scales by more is worth a word
const NEAR = 4; // level-0 pixels: two places as near as that are one

export class CompareView implements SideListener {
  readonly element = el("main", { class: "slide abreast", tabIndex: -1 });
  readonly store = new Store<CompareState>({ points: NONE, before: [], placing: false, active: 0 });
  readonly sides: [Side, Side];
  readonly link = new AddressBar(() => this.hash());
  readonly figures = new CompareFigures(this);
  /** Whether both slides are open. */
  ready = false;
  private leader: 0 | 1 = 0;
  private isClosed = false;
  private readonly bar = el("div", { class: "link-bar", role: "toolbar", ariaLabel: "Linking" });
  private readonly stages = el("div", { class: "panes two" });
  private readonly gamma = new GammaFilter();
  private readonly server = new Reconnection((text, problem) => this.say(text, problem), () => this.reload());

  constructor(
    readonly run: Run,
    rows: [Pick<SlideRow, "key" | "id">, Pick<SlideRow, "key" | "id">],
    readonly say: (text: string, problem?: boolean) => void,
    private readonly wanted: CompareLink | null,
  ) {
    this.sides = [new Side("A", rows[0], this), new Side("B", rows[1], this)];
    const { store } = this;
    store.on(["points"], () => this.sides.forEach((side, i) => side.pane && side.mark(store.state.points[i])));
    store.on(["placing"], () => this.arm());
    store.on(["points", "placing", "active"], () => this.drawBar());
    store.on(["points"], () => this.onMove());
    put(this.element, el("p", { class: "loading" }, "Opening the slides…"));
  }

  /** How the first slide lies on the second; null where they are not linked. */
  get linked(): Similarity | null {
    const [first, second] = this.store.state.points;
    return first.length === 2 && second.length === 2 ? similarity(first, second) : null;
  }

  get active(): Side {
    return this.sides[this.store.state.active];
  }

  async load(): Promise<void> {
    const problems = (await Promise.all(this.sides.map((side) => side.load()))).flat();
    if (this.isClosed) return;
    const [first, second] = this.sides.map((side) => side.info.id);
    const banner = problems.length ? el("div", { class: "problem banner", role: "alert" }, problems.join(" ")) : null;
    put(this.element, el("h1", { class: "hidden-text" }, `${first} and ${second}`), banner, this.bar, el("div", { class: "work" }, el("div", { class: "centre" }, this.stages)), this.gamma.element);
    this.sides.forEach((side, i) => side.build(this.stages, this.wanted?.choices[i] ?? {}));
    this.sides.forEach((side, i) => this.listen(side, i as 0 | 1));
    this.setDisplay(this.wanted?.view.display ?? {});
    this.onChoose();
    this.drawBar();
    await Promise.all(this.sides.map(({ pane }) => opened(pane.viewer)));
    if (!this.isClosed) this.restore();
  }

  private listen(side: Side, i: 0 | 1): void {
    const lead = () => {
      this.leader = i;
      this.store.set({ active: i });
    };
    for (const type of ["pointerenter", "pointerdown", "wheel", "focusin"]) side.pane.element.addEventListener(type, lead, { passive: true });
    side.pane.viewer.addHandler("update-viewport", () => this.leader === i && this.follow());
  }

  /** Brings back what a link says. */
  private restore(): void {
    const { wanted } = this;
    this.ready = true;
    if (!wanted) return this.onMove();
    const [first, second] = this.sides;
    for (const { pane } of this.sides) pane.leaveHome();
    if (wanted.view.area) show(first.pane.viewer, first.bounds, wanted.view.area, true);
    if (wanted.second) show(second.pane.viewer, second.bounds, wanted.second, true);
    this.turn(second, wanted.turn);
    this.store.set({ points: wanted.points });
    this.join();
  }

  // linking

  /** Marks a place on a slide: the two are linked when both have two. */
  onPlace(side: Side, [x, y]: Point): void {
    const i = this.sides.indexOf(side) as 0 | 1;
    const marked = this.store.state.points[i];
    if (marked.length === 2) return this.say(`Two places are marked on ${side.letter}; continue on the other slide, or undo.`, true);
    if (marked.some(([px, py]) => Math.hypot(px - x, py - y) < NEAR)) return this.say("The two places are too close together.", true);
    const point: Point = [Math.round(10 * x) / 10, Math.round(10 * y) / 10];
    const { points } = this.store.state;
    this.change(i === 0 ? [[...points[0], point], points[1]] : [points[0], [...points[1], point]]);
  }

  private change(points: Points): void {
    const { before, points: now } = this.store.state;
    this.store.set({ points, before: [...before, { points: now, turn: this.sides[1].display.rotation }] });
    if (this.linked) this.store.set({ placing: false });
    this.join();
  }

  /** Takes the last place back, and with it the link. */
  undo(): void {
    const { before } = this.store.state;
    const last = before[before.length - 1];
    if (!last) return;
    this.turn(this.sides[1], last.turn);
    this.store.set({ points: last.points, before: before.slice(0, -1) });
    this.join();
  }

  unlink(): void {
    if (this.store.state.points.some((each) => each.length)) this.change(NONE);
  }

  place(on = !this.store.state.placing): void {
    if (on && this.linked) return this.say("The slides are linked; undo or unlink to mark other places.");
    this.store.set({ placing: on });
  }

  /** Marks the place in the middle of the active slide: the keyboard's click. */
  placeMiddle(): void {
    if (this.store.state.placing) this.onPlace(this.active, this.active.middle);
  }

  /** Turns the slide that follows as the link says, and shows the same place. */
  private join(): void {
    const { linked } = this;
    if (linked) this.turn(this.sides[1], this.sides[0].display.rotation - turnOf(linked));
    this.follow();
    this.drawBar();
  }

  private follow(): void {
    const { linked, leader } = this;
    if (!linked || !this.ready) return;
    const [from, to] = [this.sides[leader], this.sides[1 - leader]];
    const map = leader === 0 ? linked : inverse(linked);
    const { centre, scale } = middleOf(from.pane.viewer, from.bounds);
    showMiddle(to.pane.viewer, to.bounds, { centre: applySimilarity(map, centre), scale: scale / scaleOf(map) });
  }

  /** Shows on the other slide where the pointer is on this one. */
  onHover(side: Side, event: MouseEvent | null): void {
    const { linked } = this;
    const first = side === this.sides[0];
    const other = this.sides[first ? 1 : 0];
    other.twin.hidden = !linked || !event;
    side.twin.hidden = true;
    if (!linked || !event) return;
    const box = side.pane.stage.getBoundingClientRect();
    const place = placeAt(side.pane.transform(), event.clientX - box.left, event.clientY - box.top);
    const [x, y] = applySimilarity(first ? linked : inverse(linked), place);
    const { bounds, pane } = other;
    const middle = pane.viewer.viewport.getCenter(true);
    Object.assign(middle, { x: (x - bounds.x) / bounds.width, y: (y - bounds.y) / bounds.width });
    const at = pane.viewer.viewport.viewportToViewerElementCoordinates(middle);
    Object.assign(other.twin.style, { left: `${at.x}px`, top: `${at.y}px` });
  }

  // what is shown

  setDisplay(change: Partial<Display>): void {
    for (const side of this.sides) side.store.set({ display: { ...side.display, ...change } });
    this.gamma.set(this.sides[0].display.gamma);
    if (this.ready) this.onMove();
    this.drawBar();
  }

  /** Each slide's evidence knows the other's: the two can have one scale. */
  onChoose(): void {
    pairUp(this.sides.map((side) => side.pane?.evidence ?? null));
    queueMicrotask(() => this.isClosed || this.repaint());
  }

  private turn(side: Side, degrees: number): void {
    side.store.set({ display: { ...side.display, rotation: ((degrees % 360) + 360) % 360 } });
  }

  /** Turns the active slide, or both where they are linked. */
  turnActive(degrees: number): void {
    for (const side of this.linked ? this.sides : [this.active]) this.turn(side, side.display.rotation + degrees);
    this.follow();
    this.onMove();
  }

  private arm(): void {
    const { placing } = this.store.state;
    this.element.classList.toggle("placing", placing);
    for (const side of this.sides) side.store.set({ tool: placing ? "point" : "move" });
  }

  private drawBar(): void {
    if (!this.sides.every((side) => side.info)) return;
    const { points, before, placing } = this.store.state;
    const { linked } = this;
    const { shown, opacity, shared, clip } = this.sides[0].display;
    const both = this.sides.every((side) => side.pane?.evidence);
    const scales = [{ value: "auto", text: "Auto range" }, { value: "max", text: "Max" }, { value: "cohort", text: "Cohort" }];
    const any = points.some((each) => each.length);
    const range = el("input", { type: "range", min: 0, max: 1, step: 0.02, value: opacity, ariaLabel: "Opacity of the evidence", name: "opacity", oninput: () => this.setOpacity(Number(range.value)) });
    put(
      this.bar,
      el("span", { class: linked ? "linked" : "muted", role: "status" }, this.linkText() ?? this.instruction()),
      el("span", { class: "space" }),
      !linked && button(placing ? "Stop marking" : "Mark places", () => this.place(), { class: placing ? "" : "primary", title: "Click on both slides, or Enter for the middle (P)", ariaPressed: String(placing), data: { action: "place" } }),
      button(WORDS.undo, () => this.undo(), { disabled: !before.length, title: "Remove the last place (U)", data: { action: "undo-place" } }),
      any && button(linked ? "Unlink" : WORDS.clear, () => this.unlink(), { title: "Remove all places (X)", data: { action: "unlink" } }),
      button("Evidence", () => this.setDisplay({ shown: !shown }), { ariaPressed: String(shown), title: "Show or hide the evidence (H)", data: { action: "evidence" } }),
      range,
      select("Scale of the colours", scales, typeof clip === "number" ? "" : clip, (v) => this.setDisplay({ clip: v as ClipName }), { name: "clip" }),
      both && button("Same scale", () => this.setDisplay({ shared: !shared }), { ariaPressed: String(shared), title: "One scale for both slides", data: { action: "same-scale" } }),
      button(WORDS.copyLink, () => void this.link.copy(this.say), { title: WORDS.copyLinkHint, data: { action: "copy-link" } }),
      button(WORDS.figure, () => this.askFigure(), { title: "Both slides in one figure, as PNG or SVG (E)", data: { action: "figure" } }),
    );
  }

  /** Asks how a figure of both slides is wanted. */
  askFigure(): void {
    this.link.write(); // the figure names its address
    openDialog(this.element, figureDialog((dpi, kind) => this.figures.save(dpi, kind)));
  }

  /** How the second slide lies; null where the two are not linked. */
  linkText(): string | null {
    const { linked } = this;
    return linked && linkText(linked, this.sides.map((side) => side.info.mpp));
  }

  /** The slider stays in the hand while it is moved. */
  private setOpacity(opacity: number): void {
    for (const side of this.sides) side.store.set({ display: { ...side.display, opacity } });
  }

  /** What to do next. */
  private instruction(): string {
    const [a, b] = this.store.state.points.map((each) => each.length);
    if (!this.store.state.placing) return a + b ? `Not linked: marked ${a} of 2 places on A and ${b} of 2 on B.` : "Not linked. Mark two places that both slides show to move the slides together.";
    const [letter, count] = a <= b && a < 2 ? ["A", a] : ["B", b];
    return a === b ? `Mark place ${count + 1} on ${letter}.` : `Mark the same place ${count + 1} on ${letter}.`;
  }

  // the address

  onMove(): void {
    if (this.ready) this.link.schedule();
  }

  private hash(): string | null {
    const slides = this.sides.map((side) => side.info?.id) as [string, string];
    const here = parseCompare(location.hash)?.slides;
    if (!this.ready || this.isClosed || here?.join("\n") !== slides.join("\n")) return null;
    return compareHash(slides, this.state());
  }

  /** What a link to this view carries. */
  state(): CompareLink {
    const [first, second] = this.sides;
    const { display } = first;
    const choice = (side: Side) => side.pane.evidence?.choice ?? {};
    return {
      view: { panes: [], display, area: first.pane.area(), panel: null, picked: null, layers: null },
      choices: [choice(first), choice(second)],
      points: this.store.state.points.map((each) => [...each]) as [Point[], Point[]],
      second: this.linked ? null : second.pane.area(),
      turn: this.linked ? 0 : second.display.rotation,
    };
  }

  onTileFailure(): void {
    this.server.check();
  }

  private reload(): void {
    for (const { pane } of this.sides) pane.viewer.world.resetItems();
  }

  repaint(): void {
    for (const side of this.sides) side.pane?.paint();
  }

  destroy(): void {
    this.isClosed = true;
    this.link.destroy();
    this.server.destroy();
    for (const side of this.sides) side.pane?.destroy();
  }
}

/** How B lies, and where its size is not what the slides' own scales say. */
function linkText(linked: Similarity, [first, second]: (number | null)[]): string {
  const turned = Math.round(10 * turnOf(linked)) / 10;
  const scale = scaleOf(linked);
  const meant = first && second ? first / second : null;
  const odd = meant !== null && Math.abs(Math.log(scale / meant)) > ODD ? ` (their microns per pixel give ${meant.toFixed(3)}: check the places)` : "";
  return `Linked: B is rotated by ${turned === 0 ? 0 : turned}° and ${scale.toFixed(3)} times as large in pixels${odd}.`;
}

function opened(viewer: OpenSeadragon.Viewer): Promise<void> {
  return new Promise((done) => (viewer.isOpen() ? done() : viewer.addOnceHandler("open", () => requestAnimationFrame(() => done()))));
}
