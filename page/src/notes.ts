/** The list of annotations of a slide: name, class, area; import and export. */

import { annotation, KINDS, originOf, readGeoJson, type Annotation, type Found } from "./annotations";
import { button, el, put, select } from "./dom";
import { counted, shown } from "./evidence";
import { area, boxOf, patchesIn } from "./geometry";
import { readerName, setReader } from "./keeping";
import type { SlideView } from "./slide";
import type { Bounds } from "./viewport";

const MOST_ROWS = 100;

export class NotesPanel {
  readonly element = el("div", { class: "panel-body" });
  private kind = "Tumor";
  private readonly before: Annotation[][] = []; // for undo

  constructor(private readonly view: SlideView) {}

  private get notes(): Annotation[] {
    return this.view.marks.annotations;
  }

  /** Makes the selected region an annotation. */
  add(): void {
    const { selection } = this.view;
    if (!selection) return;
    const note = annotation("", this.kind, selection.polygons);
    this.view.clearSelection();
    this.change([...this.notes, note], note.id);
    this.element.querySelector<HTMLInputElement>(`[data-note="${note.id}"] input`)?.focus();
  }

  async import(file: File): Promise<void> {
    try {
      const found = await readGeoJson(file, originOf(this.view.info));
      const known = new Set(this.notes.map((note) => note.id));
      this.change([...this.notes, ...found.notes.filter((note) => !known.has(note.id))], null);
      this.tell(file.name, found);
    } catch (error) {
      this.view.say((error as Error).message, true);
    }
  }

  /** Says what was read, and warns where it does not seem to be of this slide. */
  private tell(file: string, { notes, skipped, slide }: Found): void {
    const { info, bounds } = this.view;
    const left = skipped ? `; ${skipped === 1 ? "1 feature that is no polygon" : `${skipped} features that are no polygons`} left out` : "";
    const outside = notes.filter((note) => !touches(boxOf(note.polygons), bounds)).length;
    const other = slide !== null && slide !== info.id ? ` ${file} is of the slide ${slide}; this is ${info.id}.` : "";
    const beyond = outside ? ` ${outside.toLocaleString("en")} of them ${outside === 1 ? "lies" : "lie"} outside this slide.` : "";
    this.view.say(`${counted(notes.length, "annotation")} read${left}.${other}${beyond}`, Boolean(other || beyond));
  }

  private change(notes: Annotation[], focused: string | null): void {
    this.before.push(this.notes);
    this.set(notes, focused);
  }

  /** Takes the last change back. */
  undo(): void {
    const notes = this.before.pop();
    if (notes) this.set(notes, null);
  }

  private set(notes: Annotation[], focused: string | null): void {
    this.view.marks.annotations = notes;
    this.view.marks.focused = focused;
    this.view.keeping.keep(notes);
    this.view.redraw();
    this.refresh();
  }

  private keep(): void {
    this.view.keeping.keep(this.notes);
    this.view.redraw();
  }

  /** Annotations that another window has drawn are there now. */
  merged(): void {
    this.view.marks.annotations = this.view.keeping.notes;
    this.view.redraw();
    this.refresh();
  }

  refresh(): void {
    const { view } = this;
    const file = el("input", { type: "file", accept: ".geojson,.json", hidden: true, ariaLabel: "GeoJSON file" });
    file.addEventListener("change", () => file.files?.[0] && void this.import(file.files[0]));
    const kinds = [...new Set([...KINDS.map((k) => k.name), this.kind])].map((name) => ({ value: name, text: name }));
    put(
      this.element,
      el(
        "section",
        { class: "block" },
        el("p", {}, view.selection ? "Keep the selected region as:" : "Draw a region with the lasso (L), rectangle (R), polygon (P) or brush (B), then keep it as an annotation."),
        el("div", { class: "buttons" }, select("Class of the annotation", kinds, this.kind, (v) => (this.kind = v)), button("Add annotation", () => this.add(), { disabled: !view.selection, class: "primary", data: { action: "annotate" } })),
      ),
      el("section", { class: "block" }, el("h2", {}, `Annotations (${this.notes.length})`), ...this.notes.slice(0, MOST_ROWS).map((note) => this.row(note)), this.notes.length > MOST_ROWS && el("p", { class: "muted" }, `… and ${(this.notes.length - MOST_ROWS).toLocaleString("en")} more on the slide.`), this.notes.length > 1 && this.clearing()),
      el(
        "section",
        { class: "block" },
        el("h2", {}, "Files"),
        el(
          "div",
          { class: "buttons" },
          button("Export annotations", () => view.exports.annotations(), { disabled: !this.notes.length, data: { action: "export-annotations" } }),
          button("Export shown patches", () => view.exports.patches(), { disabled: !view.active?.layout(), data: { action: "export-patches" } }),
          button("Import", () => file.click(), { data: { action: "import" } }),
          button("Undo", () => this.undo(), { disabled: !this.before.length, data: { action: "undo-note" } }),
          file,
        ),
        el("p", { class: "muted small" }, `GeoJSON as QuPath reads and writes it. ${view.keeping.shared ? "Annotations are kept with the run, under the reader's name." : "Annotations stay in this browser."}`),
        view.keeping.shared && this.reader(),
      ),
    );
  }

  private reader(): HTMLElement {
    const name = el("input", { type: "text", value: readerName(), name: "reader", ariaLabel: "Reader", maxLength: 40, pattern: "[A-Za-z0-9_-]+" });
    name.addEventListener("change", () => {
      if (setReader(name.value)) location.reload();
      else this.view.say("A reader's name has letters, digits, - or _.", true);
    });
    const others = this.view.keeping.readers.filter((other) => other !== readerName());
    return el("label", { class: "row" }, "Reader", name, others.length > 0 && el("span", { class: "muted small" }, `also: ${others.join(", ")}`));
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
    const name = el("input", { type: "text", value: note.name, placeholder: "Name", ariaLabel: "Name of the annotation", maxLength: 200 });
    name.addEventListener("input", () => {
      note.name = name.value;
      this.keep();
    });
    const colour = `rgb(${note.colour.join(",")})`;
    return el(
      "div",
      { class: `note-row ${note.id === this.view.marks.focused ? "current" : ""}`, data: { note: note.id } },
      el("span", { class: "dot", style: { background: colour } }),
      el("div", { class: "note-main" }, name, el("span", { class: "muted small" }, this.about(note))),
      button("Go", () => this.go(note), { class: "small-button", ariaLabel: `Go to ${note.name || note.kind}` }),
      button("Delete", () => this.change(this.notes.filter((other) => other !== note), null), { class: "small-button", ariaLabel: `Delete ${note.name || note.kind}`, data: { action: "delete-note" } }),
    );
  }

  private about(note: Annotation): string {
    const { view } = this;
    const size = note.polygons.reduce((sum, rings) => sum + rings.reduce((s, ring, i) => s + (i ? -1 : 1) * Math.abs(area(ring)), 0), 0);
    const layout = view.active?.layout();
    const inside = layout ? ` · ${counted(patchesIn(layout, note.polygons).length, "patch", "patches")}` : "";
    const { mpp } = view.info;
    const text = mpp ? `${shown((size * mpp * mpp) / 1e6)} mm²` : `${shown(size)} px²`;
    return `${note.kind} · ${text}${inside}`;
  }

  private go(note: Annotation): void {
    this.view.marks.focused = note.id;
    const box = boxOf(note.polygons);
    const margin = 0.3 * Math.max(box.width, box.height);
    this.view.showArea({ x: box.x - margin, y: box.y - margin, width: box.width + 2 * margin, height: box.height + 2 * margin });
    this.view.redraw();
  }
}

function touches(a: Bounds, b: Bounds): boolean {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}
