/** The panel of a slide's annotations: draw, name, class, comment, corners; import and export. */

import { colourOf, KINDS, rgb } from "../colours";
import { button, el, put, select } from "../dom";
import { countPatches, plural, WORDS } from "../words";
import { annotation, contentOf, originOf, readGeoJson, type Annotation, type ImportedNotes, type Shape } from "./annotation";
import type { Tool } from "./drawing";
import { boxOf, patchesIn, type Point, type Polygon } from "./geometry";
import { factLines, factsInside, sizeText } from "./measures";
import { askKind, askReader, typedIn } from "./readers";
import { asReader, givenReader, type AnnotationStorage } from "./storage";
import type { Evidence } from "../evidence/evidence";
import type { Layout } from "../evidence/overlay";
import type { Run, SlideInfo } from "../server/api";
import type { PanelName } from "../slide/panels";
import type { Bounds } from "../slide/viewport";
import { ownKinds } from "../state/names";
import type { SlideState, Store } from "../state/store";

/** What the panel needs of the page. */
export interface NotesHost {
  readonly element: HTMLElement;
  readonly run: Run;
  readonly info: SlideInfo;
  readonly bounds: Bounds;
  readonly store: Store<SlideState>;
  readonly storage: AnnotationStorage;
  readonly exports: { annotations(): void; patches(): void };
  readonly active: { evidence: Evidence | null; layout(): Layout | null } | null;
  readonly whatif: { apply(patches: number[], action: "remove" | "keep"): Promise<void> };
  show(panel: PanelName): void;
  showArea(area: Bounds): void;
  choose(tool: Tool): void;
  redraw(): void;
  focusSlide(): void;
  say(text: string, problem?: boolean): void;
}

const MOST_ROWS = 100; // drawn at once
const FEW = 10; // annotations that need no search
const MOST_STEPS = 100; // that can be undone

export class NotesPanel {
  readonly element = el("div", { class: "panel-body" });
  private search = "";
  private length = MOST_ROWS;
  private kind = "Tumor";
  private before: (readonly Annotation[])[] = []; // for undo

  constructor(private readonly view: NotesHost) {}

  private get notes(): readonly Annotation[] {
    return this.view.store.state.annotations;
  }

  /** The classes that readers have added to those of the page. */
  private get kinds(): ReturnType<typeof ownKinds> {
    return ownKinds(this.view.run.name, this.view.info.kinds);
  }

  private get focused(): string | null {
    return this.view.store.state.focused;
  }

  /** Makes the selected region an annotation. */
  add(): void {
    this.asReader(() => {
      const { selection } = this.view.store.state;
      if (!selection) return;
      this.view.store.set({ selection: null });
      this.append(this.note(selection.polygons));
    });
  }

  /** Adds a line or a point. */
  draw(shape: Shape, points: Point[]): void {
    this.asReader(() => this.append(this.note([[points]], shape)));
  }

  private note(polygons: Polygon[], shape: Shape = "area"): Annotation {
    return { ...annotation("", this.kind, polygons, shape), colour: colourOf(this.kind, this.kinds) };
  }

  /** Does something under the reader's name, which is asked for before the first annotation. */
  private asReader(work: () => void): void {
    const { view } = this;
    if (!view.storage.shared || givenReader() !== null) return work();
    void askReader(view.element, view.storage.readers).then(async (name) => {
      if (name === null) return view.focusSlide();
      if (await this.openAs(name)) work();
    });
  }

  /** Goes on as another reader; a name that the server refuses is not in force. */
  private async openAs(name: string): Promise<boolean> {
    const { view } = this;
    try {
      await view.storage.openAs(name);
    } catch (error) {
      view.say((error as Error).message, true);
      return false;
    }
    this.before = [];
    const others = new Map(view.store.state.others);
    others.delete(name);
    view.store.set({ annotations: [...view.storage.notes], focused: null, others });
    return true;
  }

  private append(note: Annotation): void {
    this.change([...this.notes, note], note.id);
    this.view.focusSlide(); // the next region, or a key, comes next
  }

  /** Goes to the name of the annotation in focus. */
  rename(): void {
    this.element.querySelector<HTMLInputElement>(`[data-note="${CSS.escape(this.focused ?? "")}"] input`)?.focus();
  }

  /** Gives the annotation in focus other corners; one step of undo for each drag. */
  reshape(polygons: Polygon[], done: boolean): void {
    const change = (note: Annotation) => (note.id === this.focused ? { ...note, polygons } : note);
    if (!this.dragging) this.remember();
    this.dragging = !done;
    this.view.store.set({ annotations: this.notes.map(change) });
    if (done) this.keep();
  }
  private dragging = false;

  import(file: File): void {
    this.asReader(() => void this.read(file));
  }

  private async read(file: File): Promise<void> {
    try {
      const imported = await readGeoJson(file, originOf(this.view.info));
      const [ids, contents] = [new Set(this.notes.map((note) => note.id)), new Set(this.notes.map(contentOf))];
      const fresh = imported.notes.filter((note) => !ids.has(note.id) && !contents.has(contentOf(note)));
      this.change([...this.notes, ...fresh], null);
      this.tell(file.name, imported, imported.notes.length - fresh.length);
    } catch (error) {
      this.view.say((error as Error).message, true);
    }
  }

  /** Says what was read, and warns where it does not seem to be of this slide. */
  private tell(file: string, { notes, skipped, slide }: ImportedNotes, known: number): void {
    const { info, bounds } = this.view;
    const left = skipped ? `; ${skipped === 1 ? "1 feature that is not a polygon, line or point" : `${skipped} features that are not polygons, lines or points`} left out` : "";
    const twice = known ? `; ${known.toLocaleString("en")} known already` : "";
    const outside = notes.filter((note) => !touches(boxOf(note.polygons), bounds)).length;
    const other = slide !== null && slide !== info.id ? ` ${file} belongs to slide ${slide}; this is ${info.id}.` : "";
    const beyond = outside ? ` ${outside.toLocaleString("en")} of them ${outside === 1 ? "lies" : "lie"} outside this slide.` : "";
    this.view.say(`${plural(notes.length, "annotation")} read${left}${twice}.${other}${beyond}`, Boolean(other || beyond));
  }

  private remember(): void {
    this.before = [...this.before.slice(1 - MOST_STEPS), this.notes.map((note) => ({ ...note }))];
  }

  private change(notes: readonly Annotation[], focused: string | null): void {
    this.remember();
    this.set(notes, focused);
  }

  /** Changes one annotation. */
  private edit(note: Annotation, change: Partial<Annotation>): void {
    this.change(this.notes.map((other) => (other.id === note.id ? { ...other, ...change } : other)), this.focused);
  }

  /** Takes the last change back. */
  undo(): void {
    const notes = this.before.pop();
    if (notes) this.set(notes, notes.some((note) => note.id === this.focused) ? this.focused : null);
  }

  private set(notes: readonly Annotation[], focused: string | null): void {
    this.view.store.set({ annotations: notes, focused });
    this.view.storage.keep([...notes]);
  }

  private keep(): void {
    this.view.storage.keep([...this.notes]);
    this.view.redraw();
  }

  /** Annotations that another window has drawn are there now. */
  takeMerged(): void {
    this.view.store.set({ annotations: [...this.view.storage.notes] });
  }

  refresh(): void {
    const back = typedIn(this.element);
    this.fill();
    back();
  }

  private fill(): void {
    const { notes } = this;
    const matches = this.matching();
    const rows = matches.slice(0, this.length).map((note) => this.row(note));
    const more = () => {
      this.length += MOST_ROWS;
      this.refresh();
    };
    put(
      this.element,
      this.drawing(),
      el(
        "section",
        { class: "block" },
        el("h2", {}, matches.length < notes.length ? `Annotations (${matches.length.toLocaleString("en")} of ${notes.length.toLocaleString("en")})` : `Annotations (${notes.length.toLocaleString("en")})`),
        notes.length > FEW || this.search ? this.searchField() : null,
        ...rows,
        matches.length > this.length && button(WORDS.showMore, more, { data: { action: "more-notes" } }),
        notes.length > 1 && this.clearing(),
      ),
      this.files(),
      this.view.storage.shared && this.reader(),
    );
  }

  private matching(): readonly Annotation[] {
    const needle = this.search.trim().toLowerCase();
    return needle ? this.notes.filter(({ name, kind, comment }) => `${name} ${kind} ${comment}`.toLowerCase().includes(needle)) : this.notes;
  }

  private searchField(): HTMLElement {
    const field = el("input", { type: "search", name: "search-notes", placeholder: "Search name, class and comment", ariaLabel: "Search annotations", value: this.search });
    field.addEventListener("input", () => {
      this.search = field.value;
      this.length = MOST_ROWS;
      this.refresh();
    });
    return field;
  }

  /** The classes there are, and the way to one of one's own. */
  private kindSelect(label: string, kind: string, choose: (kind: string) => void, props: { name: string }): HTMLElement {
    const names = [...new Set([...KINDS, ...this.kinds, ...this.notes.map((note) => ({ name: note.kind })), { name: kind }].map(({ name }) => name))];
    const options = [...names.map((name) => ({ value: `=${name}`, text: name })), { value: "new", text: "New class…" }];
    const change = async (value: string) => {
      const chosen = value === "new" ? await askKind(this.view.element, this.view) : value.slice(1);
      if (chosen !== null) choose(chosen);
      this.refresh();
    };
    return select(label, options, `=${kind}`, (value) => void change(value), props);
  }

  private drawing(): HTMLElement {
    const { selection } = this.view.store.state;
    const text = selection ? "Save the selected region as:" : "Draw a region with the lasso (L), rectangle (R), polygon (P) or brush (B), then press A to save it; the tool stays active. Lines (D) and points (I) are saved at once.";
    const kind = this.kindSelect("Class of the annotation", this.kind, (v) => (this.kind = v), { name: "kind" });
    const add = button("Add annotation", () => this.add(), { disabled: !selection, class: "primary", data: { action: "annotate" } });
    const undo = button(WORDS.undo, () => this.undo(), { data: { action: "undo-note" } });
    return el("section", { class: "block" }, el("p", {}, text), el("div", { class: "buttons" }, kind, add, undo));
  }

  private files(): HTMLElement {
    const { view } = this;
    const file = el("input", { type: "file", accept: ".geojson,.json", hidden: true, ariaLabel: "GeoJSON file" });
    file.addEventListener("change", () => file.files?.[0] && this.import(file.files[0]));
    return el(
      "section",
      { class: "block" },
      el("h2", {}, "Files"),
      el(
        "div",
        { class: "buttons" },
        button("Export annotations", () => view.exports.annotations(), { disabled: !this.notes.length, data: { action: "export-annotations" } }),
        button("Export shown patches", () => view.exports.patches(), { disabled: !view.active?.layout(), data: { action: "export-patches" } }),
        button("Import", () => file.click(), { data: { action: "import" } }),
        file,
      ),
      el("p", { class: "muted small" }, `GeoJSON, which QuPath reads and writes. ${view.storage.shared ? "Annotations are saved with the run, under your name." : "Annotations stay in this browser: export them to keep them."}`),
    );
  }

  /** Who reads here, and whose regions are shown beside. */
  private reader(): HTMLElement {
    const { view } = this;
    const name = el("input", { type: "text", value: givenReader() ?? "", placeholder: "not set", name: "reader", ariaLabel: "Reader", maxLength: 60 });
    name.addEventListener("change", () => {
      const reader = asReader(name.value);
      if (reader === null) view.say("A reader's name must have 1 to 40 letters, digits, - or _.", true);
      const before = givenReader() ?? "";
      name.value = before; // until it is in force
      if (reader !== null && reader !== before) void this.openAs(reader).then(() => this.refresh());
    });
    const others = view.storage.readers.filter((other) => other !== view.storage.reader);
    const boxes = others.map((other) => {
      const box = el("input", { type: "checkbox", checked: view.store.state.others.has(other), name: "other-reader", data: { reader: other }, onchange: () => void this.showOther(other, box.checked) });
      return el("label", { class: "row check" }, box, other);
    });
    return el(
      "section",
      { class: "block readers" },
      el("h2", {}, "Readers"),
      el("label", { class: "row" }, "Your name", name),
      boxes.length > 0 && el("p", { class: "muted small" }, "Show the regions of (dashed, read-only):"),
      ...boxes,
    );
  }

  private async showOther(reader: string, on: boolean): Promise<void> {
    const { store, storage, say } = this.view;
    const others = new Map(store.state.others);
    others.delete(reader);
    try {
      if (on) others.set(reader, await storage.of(reader));
    } catch (error) {
      say((error as Error).message, true);
    }
    store.set({ others });
  }

  /** Deletes all annotations when it is pressed twice. */
  private clearing(): HTMLElement {
    const clear = button("Delete all", () => {
      if (clear.textContent !== "Delete all") return this.change([], null);
      clear.textContent = `Delete all ${this.notes.length.toLocaleString("en")}?`;
    }, { class: "small-button", data: { action: "delete-all" } });
    return el("div", { class: "buttons" }, clear);
  }

  private row(note: Annotation): HTMLElement {
    const current = note.id === this.focused;
    const title = note.name || note.kind;
    const layout = (note.shape ?? "area") === "area" ? this.view.active?.layout() : null;
    const inside = layout ? countPatches(patchesIn(layout, note.polygons).length) : "";
    const size = [sizeText(note, this.view.info.mpp), inside].filter(Boolean).join(" · ");
    return el(
      "div",
      { class: `note-row ${current ? "current" : ""}`, data: { note: note.id } },
      el("span", { class: "dot", style: { background: rgb(note.colour) } }),
      el("div", { class: "note-main" }, this.field(note, "name", "input", "Name"), el("span", { class: "muted small" }, [note.kind, size].filter(Boolean).join(" · "))),
      button("Go", () => this.go(note), { class: "small-button", ariaLabel: `Go to ${title}`, data: { action: "go-note" } }),
      button("Delete", () => this.change(this.notes.filter((other) => other.id !== note.id), null), { class: "small-button", ariaLabel: `Delete ${title}`, data: { action: "delete-note" } }),
      current && this.details(note),
    );
  }

  /** A text of the annotation, kept with every key; what was there before the first one can be brought back. */
  private field(note: Annotation, key: "name" | "comment", tag: "input" | "textarea", label: string): HTMLElement {
    const props = { value: note[key] ?? "", placeholder: label, ariaLabel: `${label} of the annotation`, maxLength: key === "name" ? 200 : 500 };
    const node = el(tag, tag === "input" ? { type: "text", ...props } : { rows: 2, ...props });
    let fresh = true;
    node.addEventListener("input", () => {
      if (fresh) this.remember();
      fresh = false;
      const current = this.notes.find((other) => other.id === note.id);
      if (current) current[key] = node.value;
      this.keep();
    });
    return node;
  }

  /** What only the annotation in focus shows: class, comment, scores inside, and what can be done with it. */
  private details(note: Annotation): HTMLElement {
    const { view } = this;
    const evidence = view.active?.evidence;
    const facts = evidence ? factsInside(note, evidence) : null;
    const ask = (action: "remove" | "keep") => {
      view.show("whatif");
      void view.whatif.apply(facts!.patches, action);
    };
    const kind = this.kindSelect("Class of this annotation", note.kind, (v) => this.edit(note, { kind: v, colour: this.notes.find((other) => other.kind === v)?.colour ?? colourOf(v, this.kinds) }), { name: "note-kind" });
    const locked = Boolean(note.rest?.isLocked);
    const lock = el("input", { type: "checkbox", checked: locked, name: "locked", onchange: () => this.edit(note, { rest: { ...note.rest, isLocked: !locked } }) });
    const editing = view.store.state.tool === "vertices";
    return el(
      "div",
      { class: "note-details" },
      kind,
      this.field(note, "comment", "textarea", "Comment"),
      el("label", { class: "row check", title: "Corners cannot be edited, also in QuPath" }, lock, "Locked"),
      ...(facts && evidence ? factLines(facts, evidence.signed).map((line) => el("p", { class: "small" }, line)) : []),
      el(
        "div",
        { class: "buttons" },
        button("Edit corners", () => view.choose(editing ? "move" : "vertices"), { class: "small-button", disabled: locked, ariaPressed: String(editing), title: "Drag corners; drag the middle of an edge to add one; double-click one to remove it", data: { action: "edit-corners" } }),
        view.run.whatif && facts && button("Predict without this", () => ask("remove"), { class: "small-button", disabled: !facts.patches.length, data: { action: "note-remove" } }),
        view.run.whatif && facts && button("Predict from only this", () => ask("keep"), { class: "small-button", disabled: !facts.patches.length, data: { action: "note-keep" } }),
      ),
    );
  }

  private go(note: Annotation): void {
    this.view.store.set({ focused: note.id });
    const box = boxOf(note.polygons);
    const margin = Math.max(0.3 * Math.max(box.width, box.height), 100);
    this.view.showArea({ x: box.x - margin, y: box.y - margin, width: box.width + 2 * margin, height: box.height + 2 * margin });
  }
}

function touches(a: Bounds, b: Bounds): boolean {
  return a.x <= b.x + b.width && b.x <= a.x + a.width && a.y <= b.y + b.height && b.y <= a.y + a.height;
}
