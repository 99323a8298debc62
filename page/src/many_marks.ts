/** Thousands of annotations: paths made once, in cells of the slide, so that a moving view only strokes what it shows. */

import type { Annotation } from "./annotations";
import { boxOf } from "./geometry";
import { windowOf, type Transform } from "./overlay";
import type { Bounds } from "./viewport";

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
  const found = known.get(notes);
  if (found) return found;
  const boxes = notes.map((note) => boxOf(note.polygons));
  const [right, bottom] = boxes.reduce(([x, y], box) => [Math.max(x, box.x + box.width), Math.max(y, box.y + box.height)], [1, 1]);
  const size = Math.max(right, bottom) / ACROSS;
  const cells = new Map<string, Cell>();
  notes.forEach((note, i) => {
    const box = boxes[i];
    const colour = `rgb(${note.colour.join(",")})`;
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
  const seen = windowOf(context.canvas, t);
  const [left, top, right, bottom] = [(seen.left - t.x) / t.scale, (seen.top - t.y) / t.scale, (seen.right - t.x) / t.scale, (seen.bottom - t.y) / t.scale];
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
