/** Drawing with the pointer: regions, lines, points, a ruler, and the corners of annotations. */

import type { Annotation, Shape } from "./annotation";
import { area, closed, lengthOf, outline, patchesNear, rectangle, type Point, type Polygon } from "./geometry";
import { placeAt, type Layout, type Transform } from "../evidence/overlay";
import type { SlideState, Store } from "../state/store";

export type Tool = "move" | "lasso" | "brush" | "rectangle" | "polygon" | "line" | "point" | "ruler" | "vertices";

export interface ToolHost {
  store: Store<SlideState>;
  region(polygons: Polygon[], patches: number[] | null): void;
  /** A line or a point was drawn. */
  onDraw(shape: Shape, points: Point[]): void;
  /** The annotation in focus has other corners. */
  onReshape(polygons: Polygon[], done: boolean): void;
  /** A length in level-0 pixels, in words. */
  describeLength(length: number): string;
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
  private grip: { corner: Corner; polygons: Polygon[]; from: Point; moved: boolean } | null = null;

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
    this.grip = null;
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
    if (this.tool === "point") return this.host.onDraw("point", [point]);
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
    if (this.grip) this.drag(point, false);
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
    const match = note && cornerAt(note, point, REACH / this.transform().scale);
    if (!match) return;
    this.layer.setPointerCapture(event.pointerId);
    this.active = true;
    this.grip = { ...match, from: point, moved: false };
  }

  /** Moves the corner that is held; a click alone changes nothing. */
  private drag([x, y]: Point, done: boolean): void {
    const { grip, focused: note } = this;
    if (!note || !grip) return;
    grip.moved ||= Math.hypot(x - grip.from[0], y - grip.from[1]) > 2 / this.transform().scale;
    if (grip.moved) this.host.onReshape(withCorner(note, grip.polygons, grip.corner, [Math.round(x), Math.round(y)]), done);
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
    if (this.grip) this.drag(this.place(event), true);
    if (this.grip || this.tool === "ruler") {
      this.active = false; // the ruler's line stays until the next one or Esc
      this.grip = null;
      return;
    }
    if (this.tool === "brush") this.brushStroke();
    else if (this.tool === "rectangle" && this.points.length > 1) this.complete(boxCorners(this.points));
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
    const match = note && cornerAt(note, this.place(event), REACH / this.transform().scale);
    if (note && match) this.host.onReshape(withoutCorner(note, match.corner), true);
    this.finish();
  }

  private complete(points: Point[]): void {
    if (this.tool === "line") {
      const line = points.filter((point, i) => !i || Math.hypot(point[0] - points[i - 1][0], point[1] - points[i - 1][1]) > 2 / this.transform().scale);
      this.cancel();
      if (line.length > 1) this.host.onDraw("line", line);
      return;
    }
    const ring = points.length > 2 ? closed(points, 0.8 / this.transform().scale) : [];
    this.cancel();
    const least = 16 / this.transform().scale ** 2; // smaller ones are slips of the hand
    if (ring.length > 3 && Math.abs(area(ring)) > least) this.host.region([[ring]], null);
  }

  private draft(points: Point[], closing: boolean): void {
    const width = this.tool === "brush" ? (2 * BRUSH) / this.transform().scale : 0;
    const text = this.tool === "ruler" || this.tool === "line" ? this.host.describeLength(lengthOf(points)) : "";
    this.host.store.set({ draft: { points: [...points], width, closed: closing, text } });
  }

  private place(event: MouseEvent): Point {
    const box = this.layer.getBoundingClientRect();
    return placeAt(this.transform(), event.clientX - box.left, event.clientY - box.top);
  }
}

function boxCorners(points: Point[]): Point[] {
  const [[x, y], [right, bottom]] = [points[0], points[points.length - 1]];
  return rectangle(x, y, right - x, bottom - y);
}

// Changing an annotation's outline: corners are dragged, added on edges, and taken out.

/** A corner: polygon, ring and place in the ring. */
export interface Corner {
  polygon: number;
  ring: number;
  index: number;
}

/** The corner within `reach` of a point, or a new one on the edge within it; null where there is neither. */
export function cornerAt(note: Annotation, at: Point, reach: number): { corner: Corner; polygons: Polygon[] } | null {
  const near = nearest(corners(note), at, reach);
  if (near) return { corner: near.corner, polygons: note.polygons };
  const edge = note.shape === "point" ? null : nearest(middles(note), at, reach);
  if (!edge) return null;
  const corner = { ...edge.corner, index: edge.corner.index + 1 };
  return { corner, polygons: changed(note.polygons, corner, (ring) => [...ring.slice(0, corner.index), at, ...ring.slice(corner.index)]) };
}

/** The polygons with a corner moved; the end of a closed ring goes along with its start. */
export function withCorner(note: Annotation, polygons: Polygon[], corner: Corner, to: Point): Polygon[] {
  return changed(polygons, corner, (ring) => {
    const last = ring.length - 1;
    const ends = note.shape === "area" && (corner.index === 0 || corner.index === last);
    return ring.map((point, i) => (i === corner.index || (ends && (i === 0 || i === last)) ? to : point));
  });
}

/** The polygons without a corner; as they were where too few would stay. */
export function withoutCorner(note: Annotation, corner: Corner): Polygon[] {
  const least = note.shape === "area" ? 5 : 3; // a triangle is four points with its end
  return changed(note.polygons, corner, (ring) => {
    if (ring.length < least) return ring;
    const rest = ring.filter((_, i) => i !== corner.index && (note.shape !== "area" || corner.index !== 0 || i !== ring.length - 1));
    return note.shape === "area" && corner.index === 0 ? [...rest, rest[0]] : rest;
  });
}

function changed(polygons: Polygon[], { polygon, ring }: Corner, change: (ring: Point[]) => Point[]): Polygon[] {
  return polygons.map((rings, p) => (p === polygon ? rings.map((each, r) => (r === ring ? change(each) : each)) : rings));
}

function* corners(note: Annotation): Generator<{ corner: Corner; point: Point }> {
  for (const [polygon, rings] of note.polygons.entries()) {
    for (const [ring, points] of rings.entries()) {
      const count = note.shape === "area" ? points.length - 1 : points.length;
      for (let index = 0; index < count; index++) yield { corner: { polygon, ring, index }, point: points[index] };
    }
  }
}

function* middles(note: Annotation): Generator<{ corner: Corner; point: Point }> {
  for (const [polygon, rings] of note.polygons.entries()) {
    for (const [ring, points] of rings.entries()) {
      for (let index = 0; index + 1 < points.length; index++) {
        const [a, b] = [points[index], points[index + 1]];
        yield { corner: { polygon, ring, index }, point: [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2] };
      }
    }
  }
}

function nearest(places: Iterable<{ corner: Corner; point: Point }>, [x, y]: Point, reach: number): { corner: Corner; point: Point } | null {
  let [best, least]: [{ corner: Corner; point: Point } | null, number] = [null, reach];
  for (const place of places) {
    const distance = Math.hypot(place.point[0] - x, place.point[1] - y);
    if (distance <= least) [best, least] = [place, distance];
  }
  return best;
}
