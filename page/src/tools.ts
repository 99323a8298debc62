/** Drawing with the pointer: regions, lines, points, a ruler, and the corners of annotations. */

import type { Annotation, Shape } from "./annotations";
import { area, closed, lengthOf, outline, patchesNear, rectangle, type Point, type Polygon } from "./geometry";
import { placeAt, type Layout, type Transform } from "./overlay";
import type { SlideState, Store } from "./store";
import { cornerAt, withCorner, withoutCorner, type Corner } from "./vertices";

export type Tool = "move" | "lasso" | "brush" | "rectangle" | "polygon" | "line" | "point" | "ruler" | "vertices";

export interface ToolHost {
  store: Store<SlideState>;
  region(polygons: Polygon[], patches: number[] | null): void;
  /** A line or a point was drawn. */
  drawn(shape: Shape, points: Point[]): void;
  /** The annotation in focus has other corners. */
  reshaped(polygons: Polygon[], done: boolean): void;
  /** A length in level-0 pixels, in words. */
  measured(length: number): string;
}

const CLICKED: Tool[] = ["polygon", "line"]; // point by point; a double click or Enter ends them
const REACH = 10; // CSS pixels

const BRUSH = 22; // CSS pixels

/** Draws on one pane; the layer lets the wheel through, so zooming goes on. */
export class Drawing {
  tool: Tool = "move";
  private points: Point[] = [];
  private brushed = new Set<number>();
  private active = false;
  private held: { corner: Corner; polygons: Polygon[]; from: Point; moved: boolean } | null = null;

  constructor(
    private readonly layer: HTMLElement,
    private readonly host: ToolHost,
    private readonly transform: () => Transform,
    private readonly layout: () => Layout | null,
  ) {
    layer.addEventListener("pointerdown", (event) => this.down(event));
    layer.addEventListener("pointermove", (event) => this.move(event));
    layer.addEventListener("pointerup", (event) => this.up(event));
    layer.addEventListener("pointercancel", () => this.cancel());
    layer.addEventListener("dblclick", (event) => this.finishPolygon(event));
    for (const type of ["click", "pointerdown", "pointerup"]) layer.addEventListener(type, (event) => event.stopPropagation());
  }

  choose(tool: Tool): void {
    this.cancel();
    this.tool = tool;
    this.layer.classList.toggle("drawing", tool !== "move");
  }

  cancel(): void {
    this.active = false;
    this.held = null;
    this.points = [];
    this.brushed.clear();
    this.host.store.set({ draft: null });
  }

  /** Ends a polygon or a line that is being drawn; true where there was one. */
  finish(): boolean {
    if (!CLICKED.includes(this.tool) || !this.points.length) return false;
    this.complete(this.points);
    return true;
  }

  private down(event: PointerEvent): void {
    if (event.button !== 0) return;
    const point = this.place(event);
    if (this.tool === "point") return this.host.drawn("point", [point]);
    if (this.tool === "vertices") return this.grasp(event, point);
    if (CLICKED.includes(this.tool)) {
      this.active = true;
      this.points.push(point);
      this.draft(this.points, false);
      return;
    }
    this.layer.setPointerCapture(event.pointerId);
    this.active = true;
    this.points = [point];
    this.extend(point);
  }

  private move(event: PointerEvent): void {
    if (!this.active) return;
    event.stopPropagation();
    const point = this.place(event);
    if (this.held) this.drag(point, false);
    else if (CLICKED.includes(this.tool)) this.draft([...this.points, point], false);
    else this.extend(point);
  }

  private get focused(): Annotation | undefined {
    const { annotations, focused } = this.host.store.state;
    return annotations.find((note) => note.id === focused);
  }

  /** Takes hold of a corner, or of a new one on an edge. */
  private grasp(event: PointerEvent, point: Point): void {
    const note = this.focused;
    const found = note && cornerAt(note, point, REACH / this.transform().scale);
    if (!found) return;
    this.layer.setPointerCapture(event.pointerId);
    this.active = true;
    this.held = { ...found, from: point, moved: false };
  }

  /** Moves the corner that is held; a click alone changes nothing. */
  private drag([x, y]: Point, done: boolean): void {
    const { held, focused: note } = this;
    if (!note || !held) return;
    held.moved ||= Math.hypot(x - held.from[0], y - held.from[1]) > 2 / this.transform().scale;
    if (held.moved) this.host.reshaped(withCorner(note, held.polygons, held.corner, [Math.round(x), Math.round(y)]), done);
  }

  private extend(point: Point): void {
    if (this.tool === "ruler") {
      this.points = [this.points[0], point];
      return this.draft(this.points, false);
    }
    if (this.tool === "rectangle") {
      const [[x, y]] = this.points;
      this.points = [this.points[0]];
      this.draft(rectangle(x, y, point[0] - x, point[1] - y), true);
      this.points.push(point);
      return;
    }
    this.points.push(point);
    if (this.tool === "brush") this.sweep(point);
    this.draft(this.points, this.tool === "lasso");
  }

  private sweep([x, y]: Point): void {
    const layout = this.layout();
    if (layout) for (const i of patchesNear(layout, x, y, BRUSH / this.transform().scale)) this.brushed.add(i);
  }

  private up(event: PointerEvent): void {
    if (!this.active || CLICKED.includes(this.tool)) return;
    this.layer.releasePointerCapture(event.pointerId);
    if (this.held) this.drag(this.place(event), true);
    if (this.held || this.tool === "ruler") {
      this.active = false; // the ruler's line stays until the next one or Esc
      this.held = null;
      return;
    }
    if (this.tool === "brush") this.brushStroke();
    else if (this.tool === "rectangle" && this.points.length > 1) this.complete(corners(this.points));
    else this.complete(this.points);
  }

  private brushStroke(): void {
    const layout = this.layout();
    const patches = [...this.brushed].sort((a, b) => a - b);
    this.cancel();
    if (layout && patches.length) this.host.region(outline(layout, patches), patches);
  }

  private finishPolygon(event: MouseEvent): void {
    event.preventDefault();
    event.stopPropagation();
    const note = this.tool === "vertices" ? this.focused : undefined;
    const found = note && cornerAt(note, this.place(event), REACH / this.transform().scale);
    if (note && found) this.host.reshaped(withoutCorner(note, found.corner), true);
    this.finish();
  }

  private complete(points: Point[]): void {
    if (this.tool === "line") {
      const line = points.filter((point, i) => !i || Math.hypot(point[0] - points[i - 1][0], point[1] - points[i - 1][1]) > 2 / this.transform().scale);
      this.cancel();
      if (line.length > 1) this.host.drawn("line", line);
      return;
    }
    const ring = points.length > 2 ? closed(points, 0.8 / this.transform().scale) : [];
    this.cancel();
    const least = 16 / this.transform().scale ** 2; // smaller ones are slips of the hand
    if (ring.length > 3 && Math.abs(area(ring)) > least) this.host.region([[ring]], null);
  }

  private draft(points: Point[], closing: boolean): void {
    const width = this.tool === "brush" ? (2 * BRUSH) / this.transform().scale : 0;
    const text = this.tool === "ruler" || this.tool === "line" ? this.host.measured(lengthOf(points)) : "";
    this.host.store.set({ draft: { points: [...points], width, closed: closing, text } });
  }

  private place(event: MouseEvent): Point {
    const box = this.layer.getBoundingClientRect();
    return placeAt(this.transform(), event.clientX - box.left, event.clientY - box.top);
  }
}

function corners(points: Point[]): Point[] {
  const [[x, y], [right, bottom]] = [points[0], points[points.length - 1]];
  return rectangle(x, y, right - x, bottom - y);
}
