/** What is drawn above the evidence: annotations, the selected region, patches that are looked at. */

import type { Annotation } from "./annotations";
import { boxOf, type Point, type Polygon } from "./geometry";
import { drawMany } from "./many_marks";
import { windowOf, type Layout, type Transform } from "./overlay";
import type { SlideState } from "./store";
import type { Bounds } from "./viewport";

/** What of the state is drawn here. */
export type Marks = Pick<SlideState, "annotations" | "focused" | "selection" | "draft" | "picked" | "hovered" | "similar" | "tool">;

const MANY = 1000; // annotations; more are drawn with thin lines
const FEW = 20; // annotations; of more, only those with room for it have a label

/** Draws the marks; `unit` is the width of a CSS pixel. */
export function drawMarks(context: CanvasRenderingContext2D, marks: Marks, t: Transform, layout: Layout | null, run: number, unit: number): void {
  if (marks.annotations.length > MANY) drawThousands(context, marks, t, unit);
  else drawAnnotations(context, marks, t, unit);
  const edited = marks.tool === "vertices" ? marks.annotations.find((note) => note.id === marks.focused) : undefined;
  if (edited) drawHandles(context, edited, t, unit);
  if (marks.selection) drawSelection(context, marks.selection.polygons, t, unit);
  if (marks.draft) drawDraft(context, marks.draft, t, unit);
  if (!layout) return;
  if (marks.similar?.run === run) for (const i of marks.similar.indices) box(context, layout, i, t, unit, "#ffd400", 2);
  if (marks.hovered?.run === run) box(context, layout, marks.hovered.index, t, unit, "#111", 1.5);
  if (marks.picked?.run === run) box(context, layout, marks.picked.index, t, unit, "#00c2ff", 3);
}

function trace(context: CanvasRenderingContext2D, polygons: Polygon[], t: Transform, open = false): void {
  for (const ring of polygons.flat()) {
    ring.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](t.x + x * t.scale, t.y + y * t.scale));
    if (!open) context.closePath();
  }
}

const boxes = new WeakMap<Polygon[], Bounds>();

function boxFor(note: Annotation): Bounds {
  let box = boxes.get(note.polygons);
  if (!box) boxes.set(note.polygons, (box = boxOf(note.polygons)));
  return box;
}

/** Annotations in view, by colour: few strokes for many of them; those of a few pixels are dots. */
function drawAnnotations(context: CanvasRenderingContext2D, marks: Marks, t: Transform, unit: number): void {
  const { left, top, right, bottom } = windowOf(context.canvas, t);
  const groups = new Map<string, { dots: Bounds[]; shapes: Annotation[] }>();
  for (const note of marks.annotations) {
    const box = boxFor(note);
    const [x, y, w, h] = [t.x + box.x * t.scale, t.y + box.y * t.scale, box.width * t.scale, box.height * t.scale];
    if (x > right || y > bottom || x + w < left || y + h < top) continue;
    const colour = `rgb(${note.colour.join(",")})`;
    let group = groups.get(colour);
    if (!group) groups.set(colour, (group = { dots: [], shapes: [] }));
    if (note.shape !== "point" && note.id !== marks.focused && Math.max(w, h) < 6 * unit) group.dots.push({ x, y, width: w, height: h });
    else group.shapes.push(note);
  }
  const few = marks.annotations.length <= FEW;
  for (const [colour, { dots, shapes }] of groups) {
    context.fillStyle = colour;
    for (const { x, y, width: w, height: h } of dots) context.fillRect(x, y, Math.max(w, 2 * unit), Math.max(h, 2 * unit));
    strokeShapes(context, shapes.filter((note) => note.id !== marks.focused), t, unit, colour, 2);
    strokeShapes(context, shapes.filter((note) => note.id === marks.focused), t, unit, colour, 3.5);
    for (const note of shapes) drawLabel(context, note, t, unit, colour, few || note.id === marks.focused);
  }
}

/** Of thousands, the one in focus is drawn in full, and large ones have labels. */
function drawThousands(context: CanvasRenderingContext2D, marks: Marks, t: Transform, unit: number): void {
  const large = drawMany(context, marks.annotations, t, unit);
  const colour = (note: Annotation) => `rgb(${note.colour.join(",")})`;
  for (const note of large) drawLabel(context, note, t, unit, colour(note), false);
  const focused = marks.annotations.find((note) => note.id === marks.focused);
  if (!focused) return;
  strokeShapes(context, [focused], t, unit, colour(focused), 3.5);
  drawLabel(context, focused, t, unit, colour(focused), true);
}

function strokeShapes(context: CanvasRenderingContext2D, notes: Annotation[], t: Transform, unit: number, colour: string, width: number): void {
  if (!notes.length) return;
  context.beginPath();
  for (const note of notes) {
    if (note.shape === "point") cross(context, note.polygons[0][0][0], t, unit);
    else trace(context, note.polygons, t, note.shape === "line");
  }
  stroke(context, "rgba(255,255,255,.85)", (width + 2.2) * unit);
  stroke(context, colour, width * unit);
}

function cross(context: CanvasRenderingContext2D, [px, py]: Point, t: Transform, unit: number): void {
  const [x, y, arm] = [t.x + px * t.scale, t.y + py * t.scale, 7 * unit];
  context.moveTo(x - arm, y);
  context.lineTo(x + arm, y);
  context.moveTo(x, y - arm);
  context.lineTo(x, y + arm);
}

/** The name beside an annotation; where there are many, only beside those with room for it. */
function drawLabel(context: CanvasRenderingContext2D, note: Annotation, t: Transform, unit: number, colour: string, always: boolean): void {
  const room = boxFor(note).width * t.scale;
  if (!always && room < 40 * unit) return;
  const label = note.name || note.kind;
  context.font = `600 ${12 * unit}px system-ui, sans-serif`;
  const width = context.measureText(label).width;
  if (!always && room < 2 * (width + 10 * unit)) return;
  const height = ([x, y]: Point) => x * Math.sin(t.angle) + y * Math.cos(t.angle); // on the screen, however the slide is turned
  const top = note.polygons[0][0].reduce((best, point) => (height(point) < height(best) ? point : best));
  upright(context, top, t, () => {
    context.fillStyle = colour;
    context.fillRect(0, -20 * unit, width + 10 * unit, 18 * unit);
    context.fillStyle = luminance(note.colour) > 150 ? "#111" : "#fff";
    context.fillText(label, 5 * unit, -7 * unit);
  });
}

/** Draws from a place of the slide on, level with the screen. */
function upright(context: CanvasRenderingContext2D, [x, y]: Point, t: Transform, draw: () => void): void {
  context.save();
  context.translate(t.x + x * t.scale, t.y + y * t.scale);
  context.rotate(-t.angle);
  draw();
  context.restore();
}

/** Handles on the corners of the annotation whose shape is being edited. */
function drawHandles(context: CanvasRenderingContext2D, note: Annotation, t: Transform, unit: number): void {
  const size = 8 * unit;
  for (const [x, y] of note.polygons.flat(2) as Point[]) {
    context.beginPath();
    context.rect(t.x + x * t.scale - size / 2, t.y + y * t.scale - size / 2, size, size);
    context.fillStyle = "#fff";
    context.fill();
    stroke(context, "#0057d9", 2 * unit);
  }
}

function luminance([r, g, b]: [number, number, number]): number {
  return 0.3 * r + 0.59 * g + 0.11 * b;
}

function drawSelection(context: CanvasRenderingContext2D, polygons: Polygon[], t: Transform, unit: number): void {
  context.beginPath();
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
  if (draft.text) drawText(context, draft.text, draft.points[draft.points.length - 1], t, unit);
}

/** A length beside the end of a line. */
function drawText(context: CanvasRenderingContext2D, text: string, place: Point, t: Transform, unit: number): void {
  context.font = `600 ${13 * unit}px system-ui, sans-serif`;
  const width = context.measureText(text).width;
  upright(context, place, t, () => {
    context.fillStyle = "rgba(255, 255, 255, .92)";
    context.fillRect(10 * unit, 6 * unit, width + 10 * unit, 20 * unit);
    context.fillStyle = "#111";
    context.fillText(text, 15 * unit, 20 * unit);
  });
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
