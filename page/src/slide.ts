/** A slide with its evidence: one or two panes, the panels beside them, and what links them. */

import type { ViewState } from "./address";
import { getScores, getSlideNamed, type Run, type Scores, type SlideInfo, type SlideRow } from "./api";
import { CertificatePanel } from "./certificate";
import type { Shape } from "./annotations";
import { Controls } from "./controls";
import { el, put } from "./dom";
import type { Choice } from "./evidence";
import { Exports } from "./exports";
import { figureDialog } from "./figure_dialog";
import { outline, patchesIn, type Point, type Polygon } from "./geometry";
import { GammaFilter } from "./image_settings";
import { Inspector, summary } from "./inspector";
import { Keeping } from "./keeping";
import { INITIAL_LAYERS, LayerStore } from "./layers";
import { Linking, remembered } from "./linking";
import type { Marks } from "./marks";
import { NotesPanel } from "./notes";
import { indices, Layout } from "./overlay";
import { Pane, type PaneHost } from "./pane";
import { PANELS, Panels, type PanelName } from "./panels";
import { lengthText } from "./note_facts";
import { Reconnection } from "./reconnection";
import { keepDisplay, type Display } from "./settings";
import { slideHead, SelectionBar, toolBar } from "./slidebar";
import { initialState, Store, type Selection, type SlideState } from "./store";
import type { Tool } from "./tools";
import { canvasBounds, show, together, type Bounds } from "./viewport";
import { WhatIfPanel } from "./whatif";

export class SlideView implements PaneHost {
  readonly element = el("main", { class: "slide" });
  readonly scores = new Map<number, Scores>();
  readonly store = new Store<SlideState>(initialState());
  readonly panes: Pane[] = [];
  readonly layers = new LayerStore(() => this.info, () => this.arrived(), (text, problem) => this.say(text, problem));
  readonly exports = new Exports(this);
  bounds: Bounds = { x: 0, y: 0, width: 1, height: 1 };
  info!: SlideInfo;
  keeping!: Keeping;
  active: Pane | null = null;
  readonly began = performance.now();
  firstPaint: number | null = null;
  repaints: number[] = [];
  private readonly stages = el("div", { class: "panes" });
  private readonly head = el("div", { class: "slide-head" });
  private readonly tools = el("div", { class: "tools", role: "toolbar", ariaLabel: "Tools" });
  private readonly tip = el("div", { class: "tip", role: "tooltip", hidden: true });
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
  private gone = false;

  private readonly gamma = new GammaFilter();
  readonly link = new Linking(this);
  private readonly server = new Reconnection((text, problem) => this.say(text, problem), () => this.reload());

  constructor(
    readonly run: Run,
    readonly row: SlideRow,
    readonly say: (text: string, problem?: boolean) => void,
    private readonly wanted: ViewState | null = null,
  ) {
    const start = wanted ?? remembered();
    this.store.set({ display: { ...this.display, ...start?.display }, layers: start?.layers ?? INITIAL_LAYERS });
    this.listen();
    put(this.element, el("p", { class: "loading" }, "Opening the slide…"));
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

  get selection(): Selection | null {
    return this.store.state.selection;
  }

  get tool(): Tool {
    return this.store.state.tool;
  }

  /** What is drawn anew when a part of the state changes. */
  private listen(): void {
    const { store } = this;
    store.on(["display", "removed"], () => this.repaint());
    store.on(["display"], () => {
      this.gamma.set(this.display.gamma);
      keepDisplay(this.display);
      if (store.state.panel === "evidence") this.controls.refreshNumbers();
    });
    store.on(["removed"], () => this.drawHead());
    store.on(["selection", "annotations", "focused", "draft", "picked", "hovered", "similar"], () => this.redraw());
    store.on(["selection"], () => this.bar.refresh());
    store.on(["selection", "annotations", "focused", "tool"], () => ["whatif", "notes"].includes(store.state.panel) && this.panels.refresh());
    store.on(["layers"], () => this.arrived());
    store.on(["tool"], () => {
      for (const pane of this.panes) pane.drawing.choose(this.tool);
      put(this.tools, ...toolBar(this));
    });
    store.on(["display", "panel", "picked", "layers"], () => this.moved());
  }

  /** Fetches the slide and shows it; what is damaged becomes a message and the rest goes on. */
  async load(): Promise<void> {
    this.info = await getSlideNamed(this.row);
    const answers = await Promise.allSettled(this.info.sets.map((set) => getScores(this.info.key, set)));
    const problems = this.info.error ? [this.info.error] : [];
    for (const answer of answers) {
      if (answer.status === "fulfilled") this.scores.set(answer.value.set.run, answer.value);
      else problems.push((answer.reason as Error).message);
    }
    this.keeping = new Keeping(this.run.live, this.run.name, this.run.version, this.info, this.say, () => this.notes.merged());
    await this.keeping.load();
    this.store.set({ annotations: [...this.keeping.notes] });
    this.bounds = this.whole();
    if (!this.gone) this.build(problems);
  }

  private whole(): Bounds {
    const placed = [...this.scores.values()].filter((scores) => scores.x && scores.set.n).map(Layout.of);
    if (!placed.length) return canvasBounds(this.info, null, 0);
    const x = Math.min(...placed.map((l) => l.bounds.x));
    const y = Math.min(...placed.map((l) => l.bounds.y));
    const width = Math.max(...placed.map((l) => l.bounds.x + l.bounds.width)) - x;
    const height = Math.max(...placed.map((l) => l.bounds.y + l.bounds.height)) - y;
    return canvasBounds(this.info, { x, y, width, height }, placed[0].edge);
  }

  private build(problems: string[]): void {
    const problem = problems.length ? el("div", { class: "problem banner", role: "alert" }, problems.join(" ")) : null;
    const work = el("div", { class: "work" }, this.tools, el("div", { class: "centre" }, this.stages, this.bar.element), this.panels.element);
    put(this.element, this.head, problem, work, this.tip, this.gamma.element);
    this.gamma.set(this.display.gamma);
    put(this.tools, ...toolBar(this));
    this.drawHead();
    const state = this.wanted ?? remembered();
    const [first, second] = state?.panes ?? [];
    this.addPane(first ?? {});
    if (second) this.split(true, second);
    const panel = PANELS.find(([name]) => name === this.wanted?.panel)?.[0] ?? "evidence";
    this.show(panel);
    this.drawHead();
    if (this.wanted) this.restore(this.wanted);
  }

  /** Places that a link names: the area in view, the patch that is looked at. */
  private restore({ area, picked }: ViewState): void {
    const pane = this.panes[0];
    if (area) pane.viewer.addOnceHandler("open", () => requestAnimationFrame(() => show(pane.viewer, this.bounds, area, true)));
    const n = pane.evidence?.scores.set.n ?? 0;
    if (picked !== null && picked < n) this.pick(pane, picked);
  }

  /** Something that the address tells of has changed. */
  moved(): void {
    this.link.moved();
  }

  /** Asks how a figure is wanted. */
  askFigure(): void {
    const dialog = figureDialog(this);
    dialog.addEventListener("close", () => dialog.remove());
    this.element.append(dialog);
    dialog.showModal();
  }

  tileFailed(): void {
    this.server.missed();
  }

  private addPane(choice: Parameters<Pane["choose"]>[0]): void {
    const pane = new Pane(this, this.panes.length ? "B" : "A", choice, this.stages);
    this.panes.push(pane);
    pane.drawing.choose(this.tool);
    pane.element.addEventListener("pointerdown", () => this.activate(pane), true);
    if (this.panes.length === 1) this.activate(pane);
  }

  /** Shows one pane or two that move together; the second starts with the next method, class or run. */
  split(two: boolean, choice: Partial<Choice> | null = null): void {
    if (two === this.panes.length > 1) return;
    const { viewport } = this.panes[0].viewer;
    const whole = viewport && viewport.getZoom() < 1.05 * viewport.getHomeZoom();
    if (two) {
      this.addPane(choice ?? this.next());
      this.panes[1].viewer.addOnceHandler("open", () => together(this.panes[0], this.panes[1]));
    } else {
      this.panes.pop()?.destroy();
      this.activate(this.panes[0]);
    }
    this.stages.classList.toggle("two", two);
    if (whole) setTimeout(() => this.panes[0]?.home(true), 120);
    this.drawHead();
    this.moved();
  }

  private next(): Parameters<Pane["choose"]>[0] {
    const evidence = this.panes[0].evidence;
    if (!evidence) return {};
    const other = [...this.scores.keys()].find((run) => run !== evidence.choice.run);
    if (other !== undefined) return { ...evidence.choice, run: other };
    const columns = evidence.scores.set.columns;
    const { method, target } = evidence.choice;
    const column = columns.find((c) => c.method !== method && c.target === target) ?? columns.find((c) => c.method !== method || c.target !== target);
    return column ? { ...evidence.choice, method: column.method, target: column.target } : evidence.choice;
  }

  private activate(pane: Pane): void {
    if (this.active === pane) return;
    this.active = pane;
    for (const each of this.panes) each.element.classList.toggle("active", each === pane && this.panes.length > 1);
    this.drawHead();
    this.refresh();
  }

  // what panes tell

  chosen(pane: Pane): void {
    this.leave();
    if (this.active === null || this.active === pane) this.active = pane;
    queueMicrotask(() => pane === this.active && this.refresh());
    this.moved();
  }

  painted(_: Pane, milliseconds: number): void {
    if (milliseconds) this.repaints.push(milliseconds);
    const pane = this.panes[0];
    const drawn = pane?.viewer.isOpen() && (pane.pictured || !this.info.image) && (pane.evidence || !this.scores.size);
    if (this.firstPaint === null && drawn) this.firstPaint = performance.now() - this.began;
  }

  private leave(): void {
    this.tip.hidden = true;
    this.store.set({ hovered: null });
  }

  hover(pane: Pane, index: number, event: MouseEvent | null): void {
    const run = pane.evidence?.choice.run ?? -1;
    const changed = (this.marks.hovered?.index ?? -1) !== index;
    if (changed) this.store.set({ hovered: index < 0 ? null : { run, index } });
    this.tip.hidden = index < 0 || !event;
    if (index < 0 || !event || !pane.evidence) return;
    if (changed) put(this.tip, el("strong", {}, `Patch ${index}`), ` ${summary(pane.evidence, index)}`);
    const left = Math.min(event.clientX + 16, innerWidth - this.tip.offsetWidth - 8);
    const top = event.clientY + 22 + this.tip.offsetHeight > innerHeight ? event.clientY - this.tip.offsetHeight - 12 : event.clientY + 18;
    Object.assign(this.tip.style, { left: `${left}px`, top: `${top}px` });
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
    this.store.set({ selection, tool: "move" });
  }

  /** Selects what threshold and sign leave. */
  selectShown(): void {
    const pane = this.active;
    if (!pane) return;
    this.select(this.visible(pane));
  }

  /** Selects patches of the active pane, with their outline. */
  select(patches: number[]): void {
    const layout = this.active?.layout();
    const polygons = layout ? outline(layout, patches) : [];
    this.store.set({ selection: patches.length ? { polygons, patches } : null });
  }

  drawn(shape: Shape, points: Point[]): void {
    this.show("notes");
    this.notes.draw(shape, points.map(([x, y]): Point => [Math.round(x), Math.round(y)]));
  }

  reshaped(polygons: Polygon[], done: boolean): void {
    this.notes.reshape(polygons, done);
  }

  measured(length: number): string {
    return lengthText(length, this.info.mpp);
  }

  clearSelection(): void {
    this.store.set({ selection: null });
  }

  /** The patches of a pane that are drawn and not removed. */
  visible(pane: Pane): number[] {
    if (!pane.evidence) return [];
    const removed = this.removed.get(pane.evidence.choice.run);
    const found: number[] = [];
    indices(pane.evidence, this.display).forEach((entry, i) => entry >= 0 && !removed?.[i] && found.push(i));
    return found;
  }

  // what controls ask

  setDisplay(change: Partial<Display>): void {
    this.store.set({ display: { ...this.display, ...change } });
    if ("palette" in change || "clip" in change) this.controls.refreshGallery();
  }

  /** What layers show has changed: switched on or off, or come from the server. */
  private arrived(): void {
    for (const pane of this.panes) pane.draw();
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

  showArea(area: Bounds): void {
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

  private refresh(): void {
    this.panels.refresh();
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
    this.gone = true;
    this.keeping?.destroy();
    this.server.destroy();
    while (this.panes.length) this.panes.pop()!.destroy();
  }
}
