/** What is drawn above the evidence: annotations, the selected region, patches that are looked at. */

import { BRUSHED, INK, PAPER, PICKED, rgb, SELECTED, SELECTED_FILL, SIMILAR, type Rgb, white } from "../colours";
import type { Annotation } from "./annotation";
import { boxOf, type Point, type Polygon } from "./geometry";
import { windowOf, type Layout, type Transform } from "../evidence/overlay";
import type { Bounds } from "../slide/viewport";
import type { SlideState } from "../state/store";

/** What of the state is drawn here. */
export type Marks = Pick<SlideState, "annotations" | "others" | "focused" | "selection" | "draft" | "picked" | "hovered" | "similar" | "tool">;

const MANY = 1000; // annotations; more are drawn with thin lines
const FEW = 20; // annotations; of more, only those with room for it have a label

/** Draws the marks; `unit` is the width of a CSS pixel. */
export function drawMarks(context: CanvasRenderingContext2D, marks: Marks, t: Transform, layout: Layout | null, run: number, unit: number): void {
  for (const [reader, notes] of marks.others) drawOthers(context, reader, notes, t, unit);
  if (marks.annotations.length > MANY) drawThousands(context, marks, t, unit);
  else drawAnnotations(context, marks, t, unit);
  const edited = marks.tool === "vertices" ? marks.annotations.find((note) => note.id === marks.focused) : undefined;
  if (edited) drawHandles(context, edited, t, unit);
  if (marks.selection) drawSelection(context, marks.selection.polygons, t, unit);
  if (marks.draft) drawDraft(context, marks.draft, t, unit);
  if (!layout) return;
  if (marks.similar?.run === run) for (const i of marks.similar.indices) box(context, layout, i, t, unit, SIMILAR, 2);
  if (marks.hovered?.run === run) box(context, layout, marks.hovered.index, t, unit, INK, 1.5);
  if (marks.picked?.run === run) box(context, layout, marks.picked.index, t, unit, PICKED, 3);
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
    const colour = rgb(note.colour);
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

/** What another reader has drawn: dashed, with the reader's name. */
function drawOthers(context: CanvasRenderingContext2D, reader: string, notes: readonly Annotation[], t: Transform, unit: number): void {
  for (const note of notes) {
    context.setLineDash([6 * unit, 4 * unit]);
    strokeShapes(context, [note], t, unit, rgb(note.colour), 2);
    context.setLineDash([]);
    drawLabel(context, { ...note, name: `${reader}: ${note.name || note.kind}` }, t, unit, rgb(note.colour), notes.length <= FEW);
  }
}

/** Of thousands, the one in focus is drawn in full, and large ones have labels. */
function drawThousands(context: CanvasRenderingContext2D, marks: Marks, t: Transform, unit: number): void {
  const large = drawMany(context, marks.annotations, t, unit);
  for (const note of large) drawLabel(context, note, t, unit, rgb(note.colour), false);
  const focused = marks.annotations.find((note) => note.id === marks.focused);
  if (!focused) return;
  strokeShapes(context, [focused], t, unit, rgb(focused.colour), 3.5);
  drawLabel(context, focused, t, unit, rgb(focused.colour), true);
}

function strokeShapes(context: CanvasRenderingContext2D, notes: Annotation[], t: Transform, unit: number, colour: string, width: number): void {
  if (!notes.length) return;
  context.beginPath();
  for (const note of notes) {
    if (note.shape === "point") cross(context, note.polygons[0][0][0], t, unit);
    else trace(context, note.polygons, t, note.shape === "line");
  }
  stroke(context, white(0.85), (width + 2.2) * unit);
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
    context.fillStyle = luminance(note.colour) > 150 ? INK : PAPER;
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
    context.fillStyle = PAPER;
    context.fill();
    stroke(context, SELECTED, 2 * unit);
  }
}

function luminance([r, g, b]: Rgb): number {
  return 0.3 * r + 0.59 * g + 0.11 * b;
}

function drawSelection(context: CanvasRenderingContext2D, polygons: Polygon[], t: Transform, unit: number): void {
  context.beginPath();
  trace(context, polygons, t);
  context.fillStyle = SELECTED_FILL;
  context.fill("evenodd");
  stroke(context, PAPER, 3.5 * unit);
  context.setLineDash([7 * unit, 5 * unit]);
  stroke(context, SELECTED, 2 * unit);
  context.setLineDash([]);
}

function drawDraft(context: CanvasRenderingContext2D, draft: NonNullable<Marks["draft"]>, t: Transform, unit: number): void {
  context.beginPath();
  draft.points.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](t.x + x * t.scale, t.y + y * t.scale));
  if (draft.points.length === 1) context.lineTo(t.x + draft.points[0][0] * t.scale + 0.1, t.y + draft.points[0][1] * t.scale);
  if (draft.closed) context.closePath();
  if (draft.width) {
    Object.assign(context, { lineCap: "round", lineJoin: "round" });
    stroke(context, BRUSHED, draft.width * t.scale);
  } else {
    stroke(context, PAPER, 4 * unit);
    stroke(context, SELECTED, 2 * unit);
  }
  if (draft.text) drawText(context, draft.text, draft.points[draft.points.length - 1], t, unit);
}

/** A length beside the end of a line. */
function drawText(context: CanvasRenderingContext2D, text: string, place: Point, t: Transform, unit: number): void {
  context.font = `600 ${13 * unit}px system-ui, sans-serif`;
  const width = context.measureText(text).width;
  upright(context, place, t, () => {
    context.fillStyle = white(0.92);
    context.fillRect(10 * unit, 6 * unit, width + 10 * unit, 20 * unit);
    context.fillStyle = INK;
    context.fillText(text, 15 * unit, 20 * unit);
  });
}

function box(context: CanvasRenderingContext2D, layout: Layout, i: number, t: Transform, unit: number, colour: string, width: number): void {
  const size = layout.edge * t.scale;
  const least = Math.max(size, 10 * unit); // small patches stay findable
  const [x, y] = [t.x + layout.x[i] * t.scale - (least - size) / 2, t.y + layout.y[i] * t.scale - (least - size) / 2];
  context.beginPath();
  context.rect(x, y, least, least);
  stroke(context, white(0.9), (width + 2) * unit);
  stroke(context, colour, width * unit);
}

function stroke(context: CanvasRenderingContext2D, colour: string, width: number): void {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
}

// Thousands of annotations: paths made once, in cells of the slide, so that a moving view only strokes what it shows.

const ACROSS = 24; // cells along the slide
const SMALL = 6; // CSS pixels, below which an annotation is a dot

interface Cell {
  colour: string;
  path: Path2D;
  bounds: { left: number; top: number; right: number; bottom: number };
  largest: number;
  notes: Annotation[];
  boxes: Bounds[];
}

const known = new WeakMap<readonly Annotation[], Cell[]>();

function cellsOf(notes: readonly Annotation[]): Cell[] {
  const cached = known.get(notes);
  if (cached) return cached;
  const boxes = notes.map((note) => boxOf(note.polygons));
  const [right, bottom] = boxes.reduce(([x, y], box) => [Math.max(x, box.x + box.width), Math.max(y, box.y + box.height)], [1, 1]);
  const size = Math.max(right, bottom) / ACROSS;
  const cells = new Map<string, Cell>();
  notes.forEach((note, i) => {
    const box = boxes[i];
    const colour = rgb(note.colour);
    const key = `${colour} ${Math.floor(box.x / size)} ${Math.floor(box.y / size)}`;
    let cell = cells.get(key);
    if (!cell) cells.set(key, (cell = { colour, path: new Path2D(), bounds: { left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity }, largest: 0, notes: [], boxes: [] }));
    join(cell, note, box);
  });
  const all = [...cells.values()];
  known.set(notes, all);
  return all;
}

function join(cell: Cell, note: Annotation, box: Bounds): void {
  const { path, bounds } = cell;
  for (const ring of note.polygons.flat()) {
    ring.forEach(([x, y], i) => path[i ? "lineTo" : "moveTo"](x, y));
    if ((note.shape ?? "area") === "area") path.closePath();
  }
  bounds.left = Math.min(bounds.left, box.x);
  bounds.top = Math.min(bounds.top, box.y);
  bounds.right = Math.max(bounds.right, box.x + box.width);
  bounds.bottom = Math.max(bounds.bottom, box.y + box.height);
  cell.largest = Math.max(cell.largest, box.width, box.height);
  cell.notes.push(note);
  cell.boxes.push(box);
}

/** Draws with thin lines, or dots; gives the annotations of cells in view that are large enough for a label. */
export function drawMany(context: CanvasRenderingContext2D, notes: readonly Annotation[], t: Transform, unit: number): Annotation[] {
  const visible = windowOf(context.canvas, t);
  const [left, top, right, bottom] = [(visible.left - t.x) / t.scale, (visible.top - t.y) / t.scale, (visible.right - t.x) / t.scale, (visible.bottom - t.y) / t.scale];
  const large: Annotation[] = [];
  context.save();
  context.translate(t.x, t.y);
  context.scale(t.scale, t.scale);
  context.lineWidth = 1 / t.scale; // a hairline, which canvases draw many times faster
  const least = (2 * unit) / t.scale;
  for (const cell of cellsOf(notes)) {
    if (cell.bounds.left > right || cell.bounds.top > bottom || cell.bounds.right < left || cell.bounds.bottom < top) continue;
    if (cell.largest * t.scale < SMALL * unit) {
      context.fillStyle = cell.colour;
      for (const box of cell.boxes) context.fillRect(box.x, box.y, Math.max(box.width, least), Math.max(box.height, least));
      continue;
    }
    context.strokeStyle = cell.colour;
    context.stroke(cell.path);
    if (cell.largest * t.scale > 80 * unit) large.push(...cell.notes);
  }
  context.restore();
  return large;
}
