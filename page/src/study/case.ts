/** One case of a study: the slide, what may be seen of it now, the regions drawn on it, and the form. */

import { button, el, put } from "../dom";
import { annotation, asFeature, fromFeature, identifier, type Annotation, type Shape } from "../annotations/annotation";
import type { Tool } from "../annotations/drawing";
import type { Point, Polygon } from "../annotations/geometry";
import type { Marks } from "../annotations/marks";
import { lengthText } from "../annotations/measures";
import { FAR, timesBeyond, type Evidence } from "../evidence/evidence";
import { LayerStore } from "../evidence/layers";
import { fetchScores, type Run, type Scores, type SlideInfo } from "../server/api";
import { Pane, type PaneHost } from "../slide/pane";
import { wholeBounds, type Bounds } from "../slide/viewport";
import type { Display } from "../state/settings";
import { initialState, Store, type SlideState } from "../state/store";
import { Form } from "./form";
import type { Entry, StudyCase } from "./server";

const PAUSE = 400; // milliseconds after the last change until a draft is kept
const IDLE = 60_000; // milliseconds without a hand on mouse or keyboard: the reader has left
const TOOLS: [Tool, string, string][] = [["move", "Move", "Esc"], ["rectangle", "Rectangle", "R"], ["lasso", "Lasso", "L"], ["polygon", "Polygon", "P"]];
const REGION = "Region";

export interface CaseListener {
  readonly version: string;
  keep(entry: Entry): void;
  say(text: string, problem?: boolean): void;
}

export class CaseView implements PaneHost {
  readonly element = el("main", { class: "reading", tabIndex: -1 });
  readonly store = new Store<SlideState>(initialState());
  readonly scores = new Map<number, Scores>();
  readonly removed: ReadonlyMap<number, Uint8Array> = new Map();
  readonly layers = new LayerStore(() => this.info, () => undefined, (text, problem) => this.say(text, problem));
  readonly form: Form;
  readonly run: Run;
  bounds: Bounds = { x: 0, y: 0, width: 1, height: 1 };
  pane: Pane | null = null;
  private readonly panes = el("div", { class: "panes" });
  private readonly tools = el("div", { class: "study-tools", role: "toolbar", ariaLabel: "Tools" });
  private readonly commitButton = button("Commit (Enter)", () => this.commit(), { class: "primary", data: { action: "commit" } });
  private readonly told = el("p", { role: "status", data: { shown: "label" } });
  private readonly hint = el("span", { class: "muted small", data: { shown: "missing" } }); // a disabled button has no tooltip on a touch screen
  private readonly foot = el("div", { class: "buttons commit" }, this.commitButton, this.hint);
  private readonly clock: Clock;
  private timer = 0;
  private goOn: (() => void) | null = null; // to the next case, once the label of this one is shown
  private committing = false; // until the server has the answers, or refuses them
  private closed = false;

  constructor(
    readonly open: StudyCase,
    private readonly owner: CaseListener,
  ) {
    this.run = { name: "", version: owner.version, live: true, whatif: false, similar: false, runs: [], slides: [], others: [], labels: false, methods: {}, parts: {} } as unknown as Run;
    this.form = new Form(open.questions, open.answers, () => this.onChange());
    this.clock = new Clock(open.seconds);
    const drawn = open.drawn.map(fromFeature).filter((note): note is Annotation => note !== null);
    this.store.set({ annotations: drawn, display: { ...this.display, shown: true } });
    this.store.on(["annotations", "draft"], () => this.pane?.drawMarks());
    this.store.on(["annotations"], () => this.onChange());
    this.store.on(["tool", "annotations", "display"], () => this.drawTools());
    this.store.on(["tool"], () => this.pane?.drawing.choose(this.store.state.tool));
    this.store.on(["display"], () => this.pane?.paint());
    this.store.on(["choices"], () => this.pane?.take());
  }

  get info(): SlideInfo {
    return this.open.info;
  }

  get display(): Display {
    return this.store.state.display;
  }

  get marks(): Marks {
    return this.store.state;
  }

  /** Shows the case; scores come where the stage has them. */
  async load(): Promise<void> {
    const problems = await fetchScores(this.info, this.scores);
    if (this.closed) return;
    this.bounds = wholeBounds(this.info, this.scores);
    put(this.element, el("div", { class: "stage-side" }, this.tools, this.panes), this.side());
    this.pane = new Pane(this, "A", {}, this.panes);
    this.pane.stage.ariaLabel = `${this.info.id}: drag or arrows to move, scroll or + and − to zoom`;
    this.drawTools();
    this.fitColours();
    this.refresh();
    for (const problem of problems) this.say(problem, true);
    this.element.focus({ preventScroll: true });
  }

  /** Colours end at the strongest score if it lies far beyond the whiskers: a reader cannot choose the scale. */
  private fitColours(): void {
    const evidence = this.pane?.evidence;
    if (evidence && timesBeyond(evidence, { base: evidence.smallest, limit: evidence.whisker }) > FAR) this.store.set({ display: { ...this.display, clip: "max" } });
  }

  private side(): HTMLElement {
    const { open } = this;
    const after = open.stage === "after";
    return el(
      "div",
      { class: "answers", role: "region", ariaLabel: "Answers" },
      el("h1", {}, this.info.id, open.practice && el("span", { class: "badge" }, "not counted")),
      after ? el("div", { class: "shown", role: "status" }, ...this.shown()) : el("p", { class: "muted" }, "Judge the tissue. You cannot change committed answers."),
      after && open.before && el("p", { class: "muted" }, `Your first answer: ${open.before.diagnosis}. Answer again with what you see now.`),
      open.regions !== "off" && !after && el("p", { class: "muted" }, open.regions === "required" ? "Mark the deciding region." : "Mark the deciding region, if you can."),
      this.form.element,
      this.told,
      this.foot,
    );
  }

  /** What the arm shows, in words. */
  private shown(): (HTMLElement | null)[] {
    const { prediction, info } = this.open;
    const chance = prediction?.probability == null ? "" : ` (${Math.round(100 * prediction.probability)} %)`;
    const [set] = info.sets;
    return [
      prediction && el("p", { data: { shown: "prediction" } }, "The model predicts ", el("strong", {}, prediction.name), chance, "."),
      set ? el("p", { data: { shown: "evidence" } }, set.columns[0].signed ? `The colours show the evidence for and against ${set.columns[0].target}.` : "The colours show how much each patch counts.", " H hides them.") : null,
    ];
  }

  private drawTools(): void {
    const { tool, annotations } = this.store.state;
    const chosen = TOOLS.map(([name, text, key]) => button(text, () => this.store.set({ tool: name }), { ariaPressed: String(tool === name), title: `${text} (${key})`, data: { tool: name } }));
    const hide = button(this.display.shown ? "Hide colours" : "Show colours", () => this.toggle(), { title: "Hide or show the colours (H)", data: { action: "colours" } });
    const fixed = this.open.regions === "off" || this.isFixed;
    put(
      this.tools,
      ...(fixed ? [] : chosen),
      fixed ? null : button("Undo region", () => this.undo(), { disabled: !annotations.length, title: "Remove the last region (U)", data: { action: "undo-region" } }),
      el("span", { class: "space" }),
      this.info.sets.length > 0 && hide,
      button("Whole slide", () => this.pane?.home(), { title: "Show the whole slide (0)" }),
    );
  }

  private toggle(): void {
    this.store.set({ display: { ...this.display, shown: !this.display.shown } });
  }

  private undo(): void {
    this.store.set({ annotations: this.store.state.annotations.slice(0, -1) });
  }

  private onChange(): void {
    if (this.isFixed) return;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      this.owner.keep(this.entry(false));
    }, PAUSE);
    this.refresh();
  }

  private refresh(): void {
    const { missing } = this.form;
    const unmarked = this.open.regions === "required" && this.open.stage === "before" && !this.store.state.annotations.length;
    this.commitButton.disabled = Boolean(missing) || unmarked || this.committing;
    this.commitButton.title = missing ? `Answer first: ${missing.text}` : unmarked ? "Mark the deciding region first" : "";
    this.hint.textContent = this.commitButton.title;
  }

  entry(commit: boolean): Entry {
    const { number, stage } = this.open;
    const regions = this.store.state.annotations.map((note) => asFeature(note, [0, 0]));
    return { id: identifier(), number, stage, answers: { ...this.form.answers }, regions, seconds: this.clock.seconds(), commit };
  }

  commit(): void {
    this.refresh();
    if (this.commitButton.disabled) return this.say(this.commitButton.title);
    clearTimeout(this.timer);
    this.timer = 0;
    this.store.set({ tool: "move" });
    this.fix(true);
    this.owner.keep(this.entry(true));
  }

  /** Answers that are on their way cannot be changed. */
  private fix(committing: boolean): void {
    this.committing = committing;
    this.form.element.inert = committing;
    this.drawTools();
    this.refresh();
  }

  private get isFixed(): boolean {
    return this.committing || this.answered;
  }

  /** Whether all is answered, and the label is shown until the reader goes on. */
  get answered(): boolean {
    return this.goOn !== null;
  }

  /** Shows the label beside the case, which stays until the reader goes on; nothing can be changed any more. */
  reveal(label: string, isLast: boolean, goOn: () => void): void {
    this.goOn = goOn;
    clearTimeout(this.timer); // of what was pressed while the answer was on its way
    this.timer = 0;
    this.clock.stop();
    this.form.element.inert = true;
    put(this.told, "The label of this case: ", el("strong", {}, label), ".");
    put(this.foot, button(isLast ? "Continue (Enter)" : "Next case (Enter)", goOn, { class: "primary", data: { action: "next" } }));
    this.store.set({ tool: "move" });
    this.drawTools();
    this.element.focus({ preventScroll: true });
  }

  /** The server refused: the reader can change and commit again. */
  reopen(): void {
    this.fix(false);
  }

  /** What is not kept yet, where the page is left; null where all is. */
  unsent(): Entry | null {
    return this.timer ? this.entry(false) : null;
  }

  /** Handles a key; false where it means nothing here. */
  key({ key: pressed, repeat }: KeyboardEvent): boolean {
    const key = pressed.length === 1 ? pressed.toLowerCase() : pressed;
    if (this.goOn && key === "Enter") {
      if (!repeat) this.goOn(); // a key held down since the commit does not skip the label
      return true;
    }
    if (this.isFixed && !LOOKING.has(key)) return false;
    if (key >= "1" && key <= "9") return this.form.press(Number(key));
    const tool = TOOLS.find(([, , name]) => name.toLowerCase() === key);
    if (tool && this.open.regions !== "off") this.store.set({ tool: tool[0] });
    else if (key === "Escape") this.store.set({ tool: "move" });
    else if (key === "Enter") this.pane?.drawing.finish() || this.commit();
    else if (key === "u") this.undo();
    else if (key === "h") this.toggle();
    else if (key === "0") this.pane?.home();
    else if (key === "+" || key === "=") this.pane?.viewer.viewport.zoomBy(1.6);
    else if (key === "-") this.pane?.viewer.viewport.zoomBy(1 / 1.6);
    else return ARROWS[key] ? this.pan(ARROWS[key]) : false;
    return true;
  }

  private pan([dx, dy]: [number, number]): boolean {
    const viewport = this.pane?.viewer.viewport;
    if (!viewport) return false;
    const [bounds, centre] = [viewport.getBounds(), viewport.getCenter()];
    centre.x += 0.15 * dx * bounds.width;
    centre.y += 0.15 * dy * bounds.height;
    viewport.panTo(centre);
    return true;
  }

  destroy(): void {
    this.closed = true;
    clearTimeout(this.timer);
    this.clock.stop();
    this.pane?.destroy();
  }

  // what the pane tells

  region(polygons: Polygon[]): void {
    if (this.isFixed) return;
    this.store.set({ annotations: [...this.store.state.annotations, annotation("", REGION, polygons)] });
  }

  present(evidence: Evidence): Evidence {
    return evidence;
  }

  describeLength(length: number): string {
    return lengthText(length, this.info.mpp);
  }

  onTileFailure(): void {
    this.say("Part of the slide cannot be read; trying again.", true);
  }

  say(text: string, problem?: boolean): void {
    this.owner.say(text, problem);
  }

  onDraw(_: Shape, __: Point[]): void {}
  onReshape(): void {}
  onChoose(): void {}
  onMove(): void {}
  onPaint(): void {}
  hover(): void {}
  pick(): void {}
}

const LOOKING = new Set(["h", "0", "+", "=", "-", "ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]); // keys that change no answer
const ARROWS: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Seconds that the page was looked at: not while it is hidden, nor long after the last sign of the reader. */
class Clock {
  private last = performance.now();
  private touched = performance.now();
  private readonly touch = (): void => {
    this.seconds();
    this.touched = performance.now();
  };

  constructor(private total: number) {
    for (const type of SIGNS) addEventListener(type, this.touch, { passive: true });
    document.addEventListener("visibilitychange", this.touch);
  }

  seconds(): number {
    const now = performance.now();
    const until = Math.min(now, this.touched + IDLE);
    if (document.visibilityState === "visible") this.total += Math.max(0, until - this.last) / 1000;
    this.last = now;
    return Math.round(10 * this.total) / 10;
  }

  stop(): void {
    for (const type of SIGNS) removeEventListener(type, this.touch);
    document.removeEventListener("visibilitychange", this.touch);
  }
}

const SIGNS = ["pointermove", "pointerdown", "keydown", "wheel"];
