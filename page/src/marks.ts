/** What is drawn above the evidence: annotations, the selected region, patches that are looked at. */

import type { Annotation } from "./annotations";
import { boxOf, type Polygon } from "./geometry";
import type { Layout, Transform } from "./overlay";
import type { SlideState } from "./store";

/** What of the state is drawn here. */
export type Marks = Pick<SlideState, "annotations" | "focused" | "selection" | "draft" | "picked" | "hovered" | "similar">;

const FEW = 20; // annotations; of more, only those with room for it have a label

/** Draws the marks; `unit` is the width of a CSS pixel. */
export function drawMarks(context: CanvasRenderingContext2D, marks: Marks, t: Transform, layout: Layout | null, run: number, unit: number): void {
  const few = marks.annotations.length <= FEW;
  for (const note of marks.annotations) drawAnnotation(context, note, t, unit, note.id === marks.focused, few);
  if (marks.selection) drawSelection(context, marks.selection.polygons, t, unit);
  if (marks.draft) drawDraft(context, marks.draft, t, unit);
  if (!layout) return;
  if (marks.similar?.run === run) for (const i of marks.similar.indices) box(context, layout, i, t, unit, "#ffd400", 2);
  if (marks.hovered?.run === run) box(context, layout, marks.hovered.index, t, unit, "#111", 1.5);
  if (marks.picked?.run === run) box(context, layout, marks.picked.index, t, unit, "#00c2ff", 3);
}

function trace(context: CanvasRenderingContext2D, polygons: Polygon[], t: Transform): void {
  context.beginPath();
  for (const ring of polygons.flat()) {
    ring.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](t.x + x * t.scale, t.y + y * t.scale));
    context.closePath();
  }
}

function drawAnnotation(context: CanvasRenderingContext2D, note: Annotation, t: Transform, unit: number, focused: boolean, labelled: boolean): void {
  const colour = `rgb(${note.colour.join(",")})`;
  trace(context, note.polygons, t);
  stroke(context, "rgba(255,255,255,.85)", (focused ? 6 : 4) * unit);
  stroke(context, colour, (focused ? 3.5 : 2) * unit);
  const label = note.name || note.kind;
  context.font = `600 ${12 * unit}px system-ui, sans-serif`;
  const width = context.measureText(label).width;
  if (!labelled && !focused && boxOf(note.polygons).width * t.scale < 2 * (width + 10 * unit)) return;
  const [x, y] = note.polygons[0][0].reduce((top, point) => (point[1] < top[1] ? point : top));
  const [left, top] = [t.x + x * t.scale, t.y + y * t.scale - 20 * unit];
  context.fillStyle = colour;
  context.fillRect(left, top, width + 10 * unit, 18 * unit);
  context.fillStyle = luminance(note.colour) > 150 ? "#111" : "#fff";
  context.fillText(label, left + 5 * unit, top + 13 * unit);
}

function luminance([r, g, b]: [number, number, number]): number {
  return 0.3 * r + 0.59 * g + 0.11 * b;
}

function drawSelection(context: CanvasRenderingContext2D, polygons: Polygon[], t: Transform, unit: number): void {
  trace(context, polygons, t);
  context.fillStyle = "rgba(0, 110, 255, .10)";
  context.fill("evenodd");
  stroke(context, "#fff", 3.5 * unit);
  context.setLineDash([7 * unit, 5 * unit]);
  stroke(context, "#0057d9", 2 * unit);
  context.setLineDash([]);
}

function drawDraft(context: CanvasRenderingContext2D, draft: NonNullable<Marks["draft"]>, t: Transform, unit: number): void {
  context.beginPath();
  draft.points.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](t.x + x * t.scale, t.y + y * t.scale));
  if (draft.points.length === 1) context.lineTo(t.x + draft.points[0][0] * t.scale + 0.1, t.y + draft.points[0][1] * t.scale);
  if (draft.closed) context.closePath();
  if (draft.width) {
    Object.assign(context, { lineCap: "round", lineJoin: "round" });
    stroke(context, "rgba(0, 87, 217, .35)", draft.width * t.scale);
  } else {
    stroke(context, "#fff", 4 * unit);
    stroke(context, "#0057d9", 2 * unit);
  }
}

function box(context: CanvasRenderingContext2D, layout: Layout, i: number, t: Transform, unit: number, colour: string, width: number): void {
  const size = layout.edge * t.scale;
  const least = Math.max(size, 10 * unit); // small patches stay findable
  const [x, y] = [t.x + layout.x[i] * t.scale - (least - size) / 2, t.y + layout.y[i] * t.scale - (least - size) / 2];
  context.beginPath();
  context.rect(x, y, least, least);
  stroke(context, "rgba(255,255,255,.9)", (width + 2) * unit);
  stroke(context, colour, width * unit);
}

function stroke(context: CanvasRenderingContext2D, colour: string, width: number): void {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
}
