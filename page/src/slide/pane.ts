/** One view of a slide: the image, the evidence above it, and what is marked on both. */

import type OpenSeadragon from "openseadragon";
import { el, put, select } from "../dom";
import { countPatches, methodName, WORDS } from "../words";
import { Drawing, type ToolHost } from "../annotations/drawing";
import { drawMarks, type Marks } from "../annotations/marks";
import { computeEvidence, nearestChoice, methodsOf, rangeOf, sameForAll, subtrahends, targetsOf, type Choice, type Evidence, type Minus } from "../evidence/evidence";
import { drawLayers, layerNotes, layersOn, type Layer, type LayerStore } from "../evidence/layers";
import { barLabel, colourBar, magnification, scaleBar } from "../evidence/legend";
import { Layout, Painting, placeAt, turn, type Transform } from "../evidence/overlay";
import { ScoreList } from "../evidence/patches";
import type { Run, Scores, SlideInfo } from "../server/api";
import { filterOf } from "./image";
import { openViewer, show, transformOf, type Bounds } from "./viewport";
import type { Display } from "../state/settings";

export interface PaneHost extends ToolHost {
  run: Run;
  info: SlideInfo;
  scores: Map<number, Scores>;
  bounds: Bounds;
  display: Display;
  marks: Marks;
  removed: ReadonlyMap<number, Uint8Array>;
  layers: LayerStore;
  onChoose(pane: Pane): void;
  hover(pane: Pane, index: number, event: MouseEvent | null): void;
  pick(pane: Pane, index: number): void;
  onPaint(pane: Pane, milliseconds: number): void;
  say(text: string, problem?: boolean): void;
  onTileFailure(pane: Pane): void;
  onMove(): void;
  /** The evidence as the state wants it: the run's own, or that of what a what-if left. */
  present(evidence: Evidence): Evidence;
  /** False while scores are on their way. */
  readonly loaded?: boolean;
  /** Which slide a pane shows, where it is not the page's one. */
  readonly title?: HTMLElement;
}

export class Pane {
  readonly element: HTMLElement;
  readonly stage = el("div", { class: "stage", tabIndex: 0, role: "application", ariaLabel: "Slide: drag to move, scroll to zoom" });
  readonly viewer: OpenSeadragon.Viewer;
  readonly drawing: Drawing;
  readonly overlay = el("canvas", { class: "evidence" });
  readonly marksCanvas = el("canvas", { class: "marks" });
  evidence: Evidence | null = null;
  private own: Evidence | null = null; // as the run has it
  private readonly head = el("div", { class: "pane-head" });
  private readonly note = el("div", { class: "pane-note", role: "status" });
  private readonly bar = el("div", { class: "colour-bar", role: "img" });
  private readonly ruler = el("div", { class: "ruler" });
  private readonly minimap = el("div", { class: "minimap" });
  private homed = true; // whether the whole slide is in view, and stays so where the window changes
  private leaving = false; // on the way to a part of it
  private size = { width: 0, height: 0 };
  private readonly map = el("canvas", { class: "evidence" });
  private readonly painting = new Painting();
  private readonly list = new ScoreList((i) => this.host.pick(this, i));
  /** Whether part of the image has been drawn. */
  pictured = false;
  private measured = 0;

  constructor(
    readonly host: PaneHost,
    readonly letter: "A" | "B",
    choice: Partial<Choice>,
    parent: HTMLElement,
  ) {
    this.element = el("section", { class: "pane", ariaLabel: `Pane ${letter}` }, host.title ?? null, this.head, this.note, this.stage, this.list.element, el("div", { class: "furniture" }, letter === "A" && !host.title ? el("div", { class: "minimap-place" }, this.minimap) : null, this.ruler, this.bar));
    this.element.classList.toggle("no-image", !host.info.image);
    parent.append(this.element); // OpenSeadragon measures its place when it opens
    this.viewer = openViewer(this.stage, host.info, host.bounds, this.minimap.isConnected ? this.minimap : null);
    const layer = el("div", { class: "tool-layer" });
    this.viewer.canvas.append(this.overlay, this.marksCanvas, layer);
    this.drawing = new Drawing(layer, host, () => this.transform(), () => this.layout());
    this.listen();
    this.choose(choice);
  }

  private listen(): void {
    const { viewer, stage } = this;
    viewer.addHandler("update-viewport", () => this.draw());
    viewer.addHandler("viewport-change", () => this.watchHome());
    viewer.addHandler("animation-finish", () => this.host.onMove());
    viewer.addHandler("resize", () => requestAnimationFrame(() => this.draw()));
    viewer.addHandler("open", () => {
      this.home(true);
      this.showImage();
      this.draw();
    });
    viewer.addHandler("tile-load-failed", () => this.host.onTileFailure(this));
    viewer.addOnceHandler("tile-drawn", () => requestAnimationFrame(() => this.showPicture()));
    viewer.addHandler("canvas-click", (event) => {
      if (event.quick && this.drawing.tool === "move") this.host.pick(this, this.patchAt(event.position.x, event.position.y));
    });
    stage.addEventListener("mousemove", (event) => {
      const box = stage.getBoundingClientRect();
      this.host.hover(this, this.patchAt(event.clientX - box.left, event.clientY - box.top), event);
    });
    stage.addEventListener("mouseleave", () => this.host.hover(this, -1, null));
    viewer.navigator?.element.append(this.map);
    viewer.navigator?.addHandler("update-viewport", () => this.drawMap());
  }

  /** Shows another run, method or class; what is not given stays. */
  choose(change: Partial<Choice>): void {
    const { scores: all, store } = this.host;
    const { choices } = store.state;
    const wanted = { ...choices[this.letter], ...change };
    const scores = all.get(wanted.run ?? -1) ?? [...all.values()][0];
    const choice = scores && nearestChoice(wanted, scores, scores.set.predicted, all);
    if (choice) store.set({ choices: { ...choices, [this.letter]: choice } });
    this.take();
  }

  /** Shows what the state says, where that is something else. */
  take(): void {
    const { choices } = this.host.store.state;
    const choice = choices[this.letter];
    if (choice && choice === this.own?.choice) return;
    this.own = choice ? computeEvidence(this.host.scores.get(choice.run)!, choice, this.host.scores) : null;
    this.evidence = this.own && this.host.present(this.own);
    this.host.onChoose(this);
    this.paint();
    this.drawHead();
  }

  /** Takes the map that fits the state now; true where it is another one. */
  renew(): boolean {
    const before = this.evidence;
    const now = this.own && this.host.present(this.own);
    if (now?.values === before?.values && now?.without === before?.without) return false;
    this.evidence = now;
    return true;
  }

  private showPicture(): void {
    this.pictured = true;
    this.host.onPaint(this, 0);
  }

  layout(): Layout | null {
    return this.evidence?.scores.x ? Layout.of(this.evidence.scores) : null;
  }

  /** Whether the tissue is grey: only below evidence. */
  get grey(): boolean {
    const { grey, shown } = this.host.display;
    return grey && shown && Boolean(this.evidence?.scores.x);
  }

  /** Colours the evidence anew and draws it; tells the host how long it took. */
  paint(): void {
    const began = performance.now();
    const { evidence, host } = this;
    this.overlay.style.opacity = this.map.style.opacity = String(host.display.shown ? host.display.opacity : 0);
    this.showImage();
    if (evidence?.scores.x) {
      this.painting.paint(evidence, host.display, host.removed.get(evidence.choice.run) ?? null);
      this.draw();
      this.drawMap();
    } else if (evidence) this.list.refresh(evidence, host.display, host.marks.picked?.index ?? -1);
    this.element.classList.toggle("unplaced", Boolean(evidence && !evidence.scores.x));
    put(this.bar, ...(evidence ? colourBar(evidence, host.display, rangeOf(evidence, host.display)) : []));
    this.bar.ariaLabel = evidence ? barLabel(evidence, rangeOf(evidence, host.display)) : "No evidence";
    this.drawNotes();
    host.onPaint(this, performance.now() - began);
  }

  drawNotes(): void {
    put(this.note, ...this.notes().map((text) => el("span", {}, text)));
  }

  /** What must be known to read the map: that it is not of the whole bag, or not of whole scores. */
  notes(): string[] {
    const { evidence, host } = this;
    if (!evidence || !host.display.shown) return [];
    const without = evidence.without ? [`Explained without ${countPatches(evidence.without)}`] : [];
    return [...without, ...layerNotes(evidence, host.store.state.layers, host.layers.of(evidence.choice.run), host.run.name)];
  }

  /** Applies what is set for the image: filters and rotation. */
  private showImage(): void {
    this.element.classList.toggle("grey", this.grey);
    for (const viewer of [this.viewer, this.viewer.navigator]) {
      const image = viewer?.drawer?.canvas as HTMLElement | undefined;
      if (image) image.style.filter = filterOf(this.host.display, this.grey);
    }
    if (this.viewer.isOpen() && this.viewer.viewport.getRotation() !== this.host.display.rotation) this.viewer.viewport.setRotation(this.host.display.rotation, true);
  }

  /** From level-0 pixels to pixels of the stage. */
  transform(ratio = 1): Transform {
    return transformOf(this.viewer, this.host.bounds, ratio);
  }

  /** Draws evidence and marks where the slide is now. */
  draw(): void {
    if (!this.viewer.isOpen()) return;
    const ratio = devicePixelRatio || 1;
    const t = this.transform(ratio);
    this.evidenceOn(cleared(this.overlay, this.stage, ratio), ratio);
    this.drawMarks();
    if (t.scale / ratio !== this.measured) {
      this.measured = t.scale / ratio;
      put(this.ruler, scaleBar(this.host.info, this.measured), magnification(this.host.info, this.measured));
    }
    this.host.onPaint(this, 0);
  }

  /** Draws the evidence on a canvas of the stage's size, times `unit`. */
  evidenceOn(context: CanvasRenderingContext2D, unit: number): void {
    const t = this.transform(unit);
    context.save();
    turn(context, t);
    if (this.evidence?.scores.x) this.painting.draw(context, t);
    this.drawLayers(context, "evidence", unit);
    context.restore();
  }

  /** Draws the layers that are on, and asks for what they lack. */
  drawLayers(context: CanvasRenderingContext2D, place: Layer["place"], unit: number): void {
    const { evidence, host } = this;
    const layout = this.layout();
    if (!evidence || !layout || !host.display.shown) return;
    const on = layersOn(evidence, host.store.state.layers);
    const { run } = evidence.choice;
    host.layers.want(on, run);
    drawLayers(context, place, on, { evidence, layout, display: host.display, data: host.layers.of(run), removed: host.removed.get(run) ?? null, transform: this.transform(unit), unit });
  }

  drawMarks(): void {
    if (!this.viewer.isOpen()) return;
    const ratio = devicePixelRatio || 1;
    const context = cleared(this.marksCanvas, this.stage, ratio);
    this.markOn(context, this.host.marks, ratio);
  }

  /** Draws layers and marks on a canvas of the stage's size; `unit` pixels are one of the screen's. */
  markOn(context: CanvasRenderingContext2D, marks: Marks, unit: number): void {
    const t = this.transform(unit);
    context.save();
    turn(context, t);
    this.drawLayers(context, "marks", unit);
    drawMarks(context, marks, t, this.layout(), this.evidence?.choice.run ?? -1, unit);
    context.restore();
  }

  private drawMap(): void {
    const { navigator } = this.viewer;
    if (!navigator?.isOpen() || !this.evidence?.scores.x) return;
    const context = cleared(this.map, navigator.element, devicePixelRatio || 1);
    const t = transformOf(navigator, this.host.bounds, devicePixelRatio || 1);
    context.save();
    turn(context, t);
    this.painting.draw(context, t);
    context.restore();
  }

  private patchAt(x: number, y: number): number {
    if (!this.viewer.isOpen()) return -1;
    return this.layout()?.at(...placeAt(this.transform(), x, y)) ?? -1;
  }

  /** The part of the slide that was scanned, where that is not all of it. */
  private get scanned(): Bounds | null {
    const [x, y, width, height] = this.host.info.image?.bounds ?? [0, 0, 0, 0];
    const part = width * height > 0 && width * height < 0.95 * this.host.bounds.width * this.host.bounds.height;
    return part ? { x, y, width, height } : null;
  }

  /** Shows the whole slide, or the part of it that was scanned. */
  home(immediately = false): void {
    if (!this.viewer.isOpen()) return;
    const { scanned } = this;
    if (scanned) show(this.viewer, this.host.bounds, scanned, immediately);
    else this.viewer.viewport.goHome(immediately);
  }

  /** Keeps the whole slide in view where it was when the window changes. */
  private watchHome(): void {
    if (!this.viewer.isOpen()) return;
    const { x: width, y: height } = this.viewer.viewport.getContainerSize();
    const whole = this.showsWhole();
    if (!whole) this.leaving = false;
    if (width === this.size.width && height === this.size.height) this.homed = whole && !this.leaving;
    else if (this.homed) this.home(true);
    this.size = { width, height };
  }

  /** Something else than the whole slide is about to be shown. */
  leaveHome(): void {
    this.homed = false;
    this.leaving = true;
  }

  /** Whether the view is of the whole slide. */
  showsWhole(): boolean {
    if (!this.viewer.isOpen()) return true;
    const { viewport } = this.viewer;
    const [whole, all] = [this.scanned ?? this.host.bounds, this.host.bounds.width];
    const [width, height] = [whole.width / all, whole.height / all];
    const zoom = this.scanned ? 1 / Math.max(width, height * viewport.getAspectRatio()) : viewport.getHomeZoom();
    const { x, y } = viewport.getCenter();
    const apart = Math.hypot(x - (whole.x - this.host.bounds.x) / all - width / 2, y - (whole.y - this.host.bounds.y) / all - height / 2);
    return Math.abs(viewport.getZoom() / zoom - 1) < 0.02 && apart < 0.02 * Math.max(width, height);
  }

  /** The level-0 rectangle in view. */
  area(): Bounds | null {
    if (!this.viewer.isOpen() || !this.stage.clientWidth) return null;
    const t = this.transform();
    return { x: -t.x / t.scale, y: -t.y / t.scale, width: this.stage.clientWidth / t.scale, height: this.stage.clientHeight / t.scale };
  }

  /** Goes to a patch, with some of its surroundings. */
  goTo(index: number): void {
    const layout = this.layout();
    if (!layout) return;
    const around = 4 * layout.edge;
    this.leaveHome();
    const [x, y] = [layout.x[index] - around, layout.y[index] - around];
    show(this.viewer, this.host.bounds, { x, y, width: 9 * layout.edge, height: 9 * layout.edge });
  }

  private drawHead(): void {
    const { evidence, host } = this;
    if (!evidence) return put(this.head, el("span", { class: "muted" }, host.loaded === false ? "Loading the evidence…" : "No evidence for this slide."));
    const { choice, scores } = evidence;
    const targets = targetsOf(scores, choice.method);
    const list = (values: string[]) => values.map((value) => ({ value, text: value }));
    const runs = [...host.scores.keys()].map((r) => ({ value: String(r), text: host.run.runs[r]?.name ?? `Run ${r + 1}` }));
    const shared = sameForAll(scores, choice.method);
    const others = shared ? [] : targets.filter((target) => target !== choice.target);
    put(
      this.head,
      evidence.column.warnings.length > 0 && el("span", { class: "warned", title: evidence.column.warnings.join(" "), role: "img", ariaLabel: "Warning" }, "⚠"),
      el("span", { class: "pane-letter", ariaHidden: "true" }, this.letter),
      runs.length > 1 && field(WORDS.run, select(WORDS.run, runs, String(choice.run), (v) => this.choose({ run: Number(v) }), { name: "run" })),
      field(WORDS.method, select(WORDS.method, methodsOf(scores).map((value) => ({ value, text: methodName(value) })), choice.method, (v) => this.choose({ method: v }), { name: "method" })),
      shared ? el("span", { class: "field muted", title: "This method shows how much a patch counts, not which class it supports" }, "weight of each patch, for no class") : field(WORDS.evidenceFor, select(WORDS.evidenceFor, list(targets), choice.target, (v) => this.choose({ target: v, against: null, classChosen: true }), { name: "target" })),
      others.length > 0 &&
        field("Compare with class", select("Compare with class", [{ value: "", text: "–" }, ...list(others)], choice.against ?? "", (v) => this.choose({ against: v || null, minus: null }), { name: "against" })),
      this.minusField(),
    );
  }

  /** The map that is taken off, where there is another one over these patches. */
  private minusField(): HTMLElement | null {
    const { evidence, host } = this;
    const others = evidence ? subtrahends(evidence.choice, evidence.scores, host.scores) : [];
    if (!evidence || !others.length) return null;
    const { minus } = evidence.choice;
    const text = (each: Minus) => `${host.scores.size > 1 ? `${host.run.runs[each.run]?.name ?? each.run} · ` : ""}${methodName(each.method)}: ${each.target}`;
    const place = minus ? others.findIndex((each) => text(each) === text(minus)) : -1;
    const options = [{ value: "-1", text: "–" }, ...others.map((each, i) => ({ value: String(i), text: text(each) }))];
    return field("Subtract map", select("Subtract map", options, String(place), (v) => this.choose({ minus: others[Number(v)] ?? null, against: null }), { name: "minus" }));
  }

  destroy(): void {
    const { world } = this.viewer;
    for (let i = 0; i < world.getItemCount(); i++) Object.assign(world.getItemAt(i), { _onTileLoad: () => undefined }); // late tiles are no news
    this.viewer.destroy();
    this.element.remove();
  }
}

function field(label: string, control: HTMLElement): HTMLElement {
  return el("label", { class: "field" }, el("span", {}, label), control);
}

/** An empty canvas as large as an element, in device pixels. */
function cleared(canvas: HTMLCanvasElement, like: HTMLElement, ratio: number): CanvasRenderingContext2D {
  const [width, height] = [Math.round(like.clientWidth * ratio), Math.round(like.clientHeight * ratio)];
  const context = canvas.getContext("2d")!;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  else context.clearRect(0, 0, width, height);
  return context;
}
