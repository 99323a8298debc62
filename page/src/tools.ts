/** Drawing regions with the pointer: lasso, brush, rectangle, polygon. */

import { area, closed, outline, patchesNear, rectangle, type Point, type Polygon } from "./geometry";
import type { Layout, Transform } from "./overlay";
import type { SlideState, Store } from "./store";

export type Tool = "move" | "lasso" | "brush" | "rectangle" | "polygon";

export interface ToolHost {
  store: Store<SlideState>;
  region(polygons: Polygon[], patches: number[] | null): void;
}

const BRUSH = 22; // CSS pixels

/** Draws on one pane; the layer lets the wheel through, so zooming goes on. */
export class Drawing {
  tool: Tool = "move";
  private points: Point[] = [];
  private brushed = new Set<number>();
  private active = false;

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
    this.points = [];
    this.brushed.clear();
    this.host.store.set({ draft: null });
  }

  /** Ends a polygon that is being drawn; true where there was one. */
  finish(): boolean {
    if (this.tool !== "polygon" || !this.points.length) return false;
    this.complete(this.points);
    return true;
  }

  private down(event: PointerEvent): void {
    if (event.button !== 0) return;
    const point = this.place(event);
    if (this.tool === "polygon") {
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
    if (this.tool === "polygon") this.draft([...this.points, point], false);
    else this.extend(point);
  }

  private extend(point: Point): void {
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
    if (!this.active || this.tool === "polygon") return;
    this.layer.releasePointerCapture(event.pointerId);
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
    this.finish();
  }

  private complete(points: Point[]): void {
    const ring = points.length > 2 ? closed(points, 0.8 / this.transform().scale) : [];
    this.cancel();
    const least = 16 / this.transform().scale ** 2; // smaller ones are slips of the hand
    if (ring.length > 3 && Math.abs(area(ring)) > least) this.host.region([[ring]], null);
  }

  private draft(points: Point[], closing: boolean): void {
    const width = this.tool === "brush" ? (2 * BRUSH) / this.transform().scale : 0;
    this.host.store.set({ draft: { points: [...points], width, closed: closing } });
  }

  private place(event: MouseEvent): Point {
    const box = this.layer.getBoundingClientRect();
    const t = this.transform();
    return [(event.clientX - box.left - t.x) / t.scale, (event.clientY - box.top - t.y) / t.scale];
  }
}

function corners(points: Point[]): Point[] {
  const [[x, y], [right, bottom]] = [points[0], points[points.length - 1]];
  return rectangle(x, y, right - x, bottom - y);
}
