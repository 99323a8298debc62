/** A slide with its evidence: one or two panes, the panels beside them, and what links them. */

import { el, openDialog, put } from "../dom";
import type { Shape } from "../annotations/annotation";
import type { Tool } from "../annotations/drawing";
import { outline, patchesIn, type Point, type Polygon } from "../annotations/geometry";
import type { Marks } from "../annotations/marks";
import { lengthText } from "../annotations/measures";
import { NotesPanel } from "../annotations/panel";
import { AnnotationStorage, readNotes } from "../annotations/storage";
import { CertificatePanel } from "../evidence/certificate";
import { Controls } from "../evidence/controls";
import { fetchCohort, nextChoice, pairUp, type Choice, type Evidence } from "../evidence/evidence";
import { Inspector, summary } from "../evidence/inspector";
import { INITIAL_LAYERS, LayerStore, replaced } from "../evidence/layers";
import { drawnPatches } from "../evidence/overlay";
import { WhatIfPanel } from "../evidence/whatif";
import { Exports } from "../figures/exports";
import { fetchScores, getSlideNamed, type Run, type Scores, type SlideInfo, type SlideRow } from "../server/api";
import { Reconnection } from "../server/reconnection";
import { otherSlideDialog, figureDialog } from "./dialogs";
import { SelectionBar, slideHead, toolBar } from "./head";
import { GammaFilter } from "./image";
import { Pane, type PaneHost } from "./pane";
import { PANELS, Panels, Tip, type PanelName } from "./panels";
import { show, together, wholeBounds, type Bounds } from "./viewport";
import type { ViewState } from "../state/address";
import { Linking, restoreView } from "../state/links";
import type { PageStore } from "../state/page";
import { keepDisplay, type Display } from "../state/settings";
import { initialState, Store, type SlideState } from "../state/store";

export class SlideView implements PaneHost {
  readonly element = el("main", { class: "slide" });
  readonly scores = new Map<number, Scores>();
  readonly store = new Store<SlideState>(initialState());
  readonly panes: Pane[] = [];
  readonly layers = new LayerStore(() => this.info, () => this.arrived(), (text, problem) => this.say(text, problem));
  readonly exports = new Exports(this);
  bounds: Bounds = { x: 0, y: 0, width: 1, height: 1 };
  info!: SlideInfo;
  storage!: AnnotationStorage;
  readonly began = performance.now();
  firstPaint: number | null = null;
  repaints: number[] = [];
  private readonly stages = el("div", { class: "panes" });
  private readonly head = el("div", { class: "slide-head" });
  private readonly tools = el("div", { class: "tools", role: "toolbar", ariaLabel: "Tools" });
  private readonly tip = new Tip();
  private readonly controls = new Controls(this);
  private readonly inspector = new Inspector(this);
  private readonly certificate = new CertificatePanel(this);
  readonly whatif = new WhatIfPanel(this);
  readonly notes = new NotesPanel(this);
  private readonly bar = new SelectionBar(this);
  private readonly panels = new Panels(
    {
      evidence: this.controls,
      certificate: this.certificate,
      whatif: this.whatif,
      notes: this.notes,
      patch: { element: this.inspector.element, refresh: () => this.active && this.inspector.open(this.active, this.pickedIn(this.active)) },
    },
    (name) => this.show(name),
  );
  loaded = false; // whether scores have come, or are known not to
  private isClosed = false;
  private readonly banner = el("div", {});
  private readonly gamma = new GammaFilter();
  readonly link: Linking;
  private readonly server = new Reconnection((text, problem) => this.say(text, problem), () => this.reload());

  constructor(
    readonly run: Run,
    readonly row: SlideRow,
    readonly say: (text: string, problem?: boolean) => void,
    readonly page: PageStore,
    readonly wanted: ViewState | null = null,
  ) {
    this.link = new Linking(this, page);
    const start = wanted ?? page.state.carried;
    this.store.set({ display: { ...this.display, ...start?.display }, layers: start?.layers ?? INITIAL_LAYERS });
    this.listen();
    put(this.element, el("p", { class: "loading" }, "Opening the slide…"));
  }

  get active(): Pane | null {
    return this.panes[this.store.state.active] ?? null;
  }

  get display(): Display {
    return this.store.state.display;
  }

  get marks(): Marks {
    return this.store.state;
  }

  get removed(): ReadonlyMap<number, Uint8Array> {
    return this.store.state.removed;
  }

  get tool(): Tool {
    return this.store.state.tool;
  }

  /** What is drawn anew when a part of the state changes. */
  private listen(): void {
    const { store } = this;
    store.on(["removed", "left", "showLeft"], () => this.renew());
    store.on(["display"], () => this.repaint());
    store.on(["display"], () => {
      this.gamma.set(this.display.gamma);
      keepDisplay(this.display);
      this.wantCohort();
      if (store.state.panel === "evidence") this.controls.refreshNumbers();
    });
    store.on(["removed"], () => this.drawHead());
    store.on(["selection", "annotations", "others", "focused", "draft", "picked", "hovered", "similar"], () => this.redraw());
    store.on(["selection"], () => this.bar.refresh());
    store.on(["selection", "annotations", "others", "focused", "tool"], () => ["whatif", "notes"].includes(store.state.panel) && this.panels.refresh());
    store.on(["layers"], () => this.arrived());
    store.on(["choices"], () => this.panes.forEach((pane) => pane.take()));
    store.on(["active"], () => this.showActive());
    store.on(["tool"], () => {
      for (const pane of this.panes) pane.drawing.choose(this.tool);
      put(this.tools, ...toolBar(this));
    });
    store.on(["display", "panel", "picked", "layers", "selection", "removed", "left", "showLeft"], () => this.onMove());
  }

  /** Fetches the slide and shows it; what is damaged becomes a message and the rest goes on. */
  async load(): Promise<void> {
    const { run, row } = this;
    const early = { key: row.key, notes: run.live ? readNotes(row.key) : null };
    this.info = await getSlideNamed(row);
    this.storage = new AnnotationStorage(run.live, run.name, run.version, this.info, this.say, () => this.notes.takeMerged());
    const noted = this.storage.load(this.info.key === early.key ? early.notes : null);
    const scored = fetchScores(this.info, this.scores);
    if (this.info.image && !this.isClosed) this.openImage();
    const [problems] = await Promise.all([scored, noted]);
    if (!this.isClosed) this.build(problems);
  }

  /** The image comes while the scores are still on their way. */
  private openImage(): void {
    this.bounds = wholeBounds(this.info, this.scores);
    const work = el("div", { class: "work" }, this.tools, el("div", { class: "centre" }, this.stages, this.bar.element), this.panels.element);
    put(this.element, this.head, this.banner, work, this.tip.element, this.gamma.element);
    this.gamma.set(this.display.gamma);
    put(this.tools, ...toolBar(this));
    this.drawHead();
    this.addPane({});
  }

  private build(problems: string[]): void {
    this.loaded = true;
    this.wantCohort();
    this.store.set({ annotations: [...this.storage.notes] });
    if (!this.panes.length) this.openImage();
    if (problems.length) put(this.banner, el("div", { class: "problem banner", role: "alert" }, problems.join(" ")));
    const state = this.wanted ?? this.page.state.carried;
    const [first, second] = state?.panes ?? [];
    this.panes[0].choose(first ?? {});
    if (second) this.split(true, second);
    const panel = PANELS.find(([name]) => name === this.wanted?.panel)?.[0] ?? "evidence";
    this.show(panel);
    this.drawHead();
    if (this.wanted) restoreView(this, this.wanted);
  }

  /** Something that the address tells of has changed. */
  onMove(): void {
    this.link.schedule();
  }

  /** Asks how a figure is wanted. */
  askFigure(): void {
    openDialog(this.element, figureDialog((dpi, kind) => this.exports.figures(dpi, kind)));
  }

  /** Asks which slide is wanted beside this one. */
  askOtherSlide(): void {
    openDialog(this.element, otherSlideDialog(this.run, this.row, this.link.state()));
  }

  present(evidence: Evidence): Evidence {
    const shown = this.whatif.left.present(evidence);
    return replaced(shown, this.store.state.layers, this.layers.of(shown.choice.run));
  }

  /** Other patches are taken out, or another map is there: panes show what fits now. */
  private renew(always = false): void {
    const others = this.panes.filter((pane) => pane.renew());
    this.pair();
    this.repaint();
    if (others.length || always) this.panels.refresh();
  }

  onTileFailure(): void {
    this.server.check();
  }

  private addPane(choice: Parameters<Pane["choose"]>[0]): void {
    const pane = new Pane(this, this.panes.length ? "B" : "A", choice, this.stages);
    this.panes.push(pane);
    this.pair();
    pane.drawing.choose(this.tool);
    pane.element.addEventListener("pointerdown", () => this.activate(pane), true);
    if (this.panes.length === 1) this.showActive();
  }

  /** Shows one pane or two that move together; the second starts with the next method, class or run. */
  split(two: boolean, choice: Partial<Choice> | null = null): void {
    if (two === this.panes.length > 1) return;
    if (two) {
      this.addPane(choice ?? nextChoice(this.panes[0].evidence, this.scores));
      this.panes[1].viewer.addOnceHandler("open", () => together(this.panes[0], this.panes[1]));
    } else {
      this.panes.pop()?.destroy();
      this.pair();
      this.store.set({ active: 0, choices: { A: this.store.state.choices.A } });
    }
    this.stages.classList.toggle("two", two);
    this.showActive();
    this.onMove();
  }

  /** Tells each pane's evidence of the other's: the two can share a scale. */
  private pair(): void {
    pairUp(this.panes.map((pane) => pane.evidence));
    if (this.display.shared) queueMicrotask(() => this.repaint());
  }

  /** The cohort's scale is asked for when it is chosen. */
  private wantCohort(): void {
    if (this.display.clip === "cohort") fetchCohort(this.scores).then((fresh) => fresh && !this.isClosed && this.renew(true), (error: Error) => this.say(error.message, true));
  }

  private activate(pane: Pane): void {
    this.store.set({ active: this.panes.indexOf(pane) });
  }

  private showActive(): void {
    for (const each of this.panes) each.element.classList.toggle("active", each === this.active && this.panes.length > 1);
    this.drawHead();
    this.panels.refresh();
  }

  // what panes tell

  onChoose(pane: Pane): void {
    this.pair();
    this.leave();
    queueMicrotask(() => pane === this.active && this.showActive());
    this.onMove();
  }

  onPaint(_: Pane, milliseconds: number): void {
    if (milliseconds) this.repaints.push(milliseconds);
    const pane = this.panes[0];
    const drawn = pane?.viewer.isOpen() && (pane.pictured || !this.info.image) && (pane.evidence || !this.scores.size);
    if (this.firstPaint === null && drawn && this.loaded) this.firstPaint = performance.now() - this.began;
  }

  private leave(): void {
    this.tip.hide();
    this.store.set({ hovered: null });
  }

  hover(pane: Pane, index: number, event: MouseEvent | null): void {
    const run = pane.evidence?.choice.run ?? -1;
    const changed = (this.marks.hovered?.index ?? -1) !== index;
    if (changed) this.store.set({ hovered: index < 0 ? null : { run, index } });
    if (index < 0 || !event || !pane.evidence) return this.tip.hide();
    this.tip.show(event, changed ? { title: `Patch ${index}`, line: summary(pane.evidence, index) } : null);
  }

  pick(pane: Pane, index: number): void {
    this.store.set({ picked: index < 0 ? null : { run: pane.evidence!.choice.run, index }, similar: null });
    this.inspector.forget();
    if (index >= 0 && !["notes", "whatif"].includes(this.store.state.panel)) this.show("patch"); // work in progress stays
    this.inspector.open(pane, index);
    if (!pane.layout()) pane.paint();
  }

  jump(pane: Pane, index: number): void {
    pane.goTo(index);
    this.pick(pane, index);
  }

  region(polygons: Polygon[], patches: number[] | null): void {
    const layout = this.active?.layout();
    const selection = { polygons, patches: patches ?? (layout ? patchesIn(layout, polygons) : []) };
    this.store.set({ selection }); // the tool stays: one region after another
  }

  /** Selects what threshold and sign leave. */
  selectShown(): void {
    if (this.active) this.select(this.visible(this.active));
  }

  /** Selects patches of the active pane, with their outline. */
  select(patches: number[]): void {
    const layout = this.active?.layout();
    const polygons = layout ? outline(layout, patches) : [];
    this.store.set({ selection: patches.length ? { polygons, patches } : null });
  }

  onDraw(shape: Shape, points: Point[]): void {
    this.show("notes");
    this.notes.draw(shape, points.map(([x, y]): Point => [Math.round(x), Math.round(y)]));
  }

  onReshape(polygons: Polygon[], done: boolean): void {
    this.notes.reshape(polygons, done);
  }

  describeLength(length: number): string {
    return lengthText(length, this.info.mpp);
  }

  /** The patches of a pane that are drawn and not removed. */
  visible(pane: Pane): number[] {
    return pane.evidence ? drawnPatches(pane.evidence, this.display, this.removed.get(pane.evidence.choice.run)) : [];
  }

  // what controls ask

  setDisplay(change: Partial<Display>): void {
    this.store.set({ display: { ...this.display, ...change } });
    if ("palette" in change || "clip" in change || "shared" in change) this.controls.refreshGallery();
  }

  /** What layers show has changed: switched on or off, or come from the server. */
  private arrived(): void {
    this.renew();
    for (const pane of this.panes) {
      pane.draw();
      pane.drawNotes();
    }
    if (this.store.state.panel === "evidence") this.controls.refreshNumbers();
  }

  repaint(): void {
    for (const pane of this.panes) pane.paint();
  }

  redraw(): void {
    for (const pane of this.panes) pane.drawMarks();
  }

  /** Asks for the image's tiles again. */
  private reload(): void {
    for (const pane of this.panes) pane.viewer.world.resetItems();
  }

  focusSlide(): void {
    this.active?.stage.focus({ preventScroll: true });
  }

  showArea(area: Bounds): void {
    this.active?.leaveHome();
    if (this.active?.viewer.isOpen()) show(this.active.viewer, this.bounds, area);
  }

  choose(tool: Tool): void {
    for (const pane of this.panes) pane.drawing.cancel();
    this.store.set({ tool });
  }

  show(name: PanelName, focus = false): void {
    this.leave();
    if (name !== "patch") {
      this.store.set({ similar: null });
      this.inspector.forget();
    }
    this.store.set({ panel: name });
    this.panels.show(name, focus);
  }

  private pickedIn(pane: Pane): number {
    const { picked } = this.marks;
    return picked && picked.run === pane.evidence?.choice.run ? picked.index : -1;
  }

  drawHead(): void {
    put(this.head, ...slideHead(this));
  }

  destroy(): void {
    this.link.destroy();
    this.whatif.left.destroy();
    this.isClosed = true;
    this.storage?.destroy();
    this.server.destroy();
    while (this.panes.length) this.panes.pop()!.destroy();
  }
}
