/** Evidence as an image: one pixel for each cell of the patches' grid, or boxes where they share none. */

import { LAST, REMOVED, rgbaTable } from "../colours";
import { rangeOf, type Evidence } from "./evidence";
import type { Scores } from "../server/api";
import type { Display } from "../state/settings";

const MOST_CELLS = 6_000_000;

/** From level-0 pixels to the pixels of a canvas: scaled and shifted, then turned by `angle` about a centre. */
export interface Transform {
  x: number;
  y: number;
  scale: number;
  angle: number;
  centre: [number, number];
}

/** Turns a context, so that what is drawn without the angle lies right. */
export function turn(context: CanvasRenderingContext2D, { angle, centre: [x, y] }: Transform): void {
  if (!angle) return;
  context.translate(x, y);
  context.rotate(angle);
  context.translate(-x, -y);
}

/** The level-0 place of a pixel of the canvas. */
export function placeAt(t: Transform, px: number, py: number): [number, number] {
  const [dx, dy] = [px - t.centre[0], py - t.centre[1]];
  const [cos, sin] = [Math.cos(-t.angle), Math.sin(-t.angle)];
  return [(t.centre[0] + dx * cos - dy * sin - t.x) / t.scale, (t.centre[1] + dx * sin + dy * cos - t.y) / t.scale];
}

/** The part of the plane before turning that the canvas shows. */
export function windowOf({ width, height }: { width: number; height: number }, t: Transform): { left: number; top: number; right: number; bottom: number } {
  if (!t.angle) return { left: 0, top: 0, right: width, bottom: height };
  const [cos, sin] = [Math.abs(Math.cos(t.angle)), Math.abs(Math.sin(t.angle))];
  const [x, y] = [(width * cos + height * sin) / 2, (width * sin + height * cos) / 2];
  return { left: t.centre[0] - x, top: t.centre[1] - y, right: t.centre[0] + x, bottom: t.centre[1] + y };
}

/** The grid the patches lie on: `cell` level-0 pixels wide, each patch `span` cells. */
export interface Grid {
  cell: number;
  span: number;
  x0: number;
  y0: number;
  width: number;
  height: number;
  first: Uint32Array;
  owner: Int32Array;
}

const layouts = new WeakMap<Scores, Layout>();

/** Where the patches of a set of scores are. */
export class Layout {
  readonly edge: number;
  readonly grid: Grid | null;
  readonly x: Int32Array;
  readonly y: Int32Array;
  readonly bounds: { x: number; y: number; width: number; height: number };

  private constructor(scores: Scores) {
    this.edge = scores.set.edge || 256;
    this.x = scores.x ?? new Int32Array(0);
    this.y = scores.y ?? new Int32Array(0);
    this.bounds = extent(this.x, this.y, this.edge);
    this.grid = gridOf(this.x, this.y, this.edge, this.bounds);
  }

  static of(scores: Scores): Layout {
    let layout = layouts.get(scores);
    if (!layout) layouts.set(scores, (layout = new Layout(scores)));
    return layout;
  }

  /** The patch at a place on the slide, or -1. */
  at(x: number, y: number): number {
    const { grid, edge } = this;
    if (grid) {
      const column = Math.floor((x - grid.x0) / grid.cell);
      const row = Math.floor((y - grid.y0) / grid.cell);
      return column < 0 || row < 0 || column >= grid.width || row >= grid.height ? -1 : grid.owner[row * grid.width + column];
    }
    for (let i = this.x.length - 1; i >= 0; i--) {
      if (x >= this.x[i] && y >= this.y[i] && x < this.x[i] + edge && y < this.y[i] + edge) return i;
    }
    return -1;
  }
}

function extent(x: Int32Array, y: Int32Array, edge: number) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (let i = 0; i < x.length; i++) {
    left = Math.min(left, x[i]);
    top = Math.min(top, y[i]);
    right = Math.max(right, x[i]);
    bottom = Math.max(bottom, y[i]);
  }
  return x.length
    ? { x: left, y: top, width: right - left + edge, height: bottom - top + edge }
    : { x: 0, y: 0, width: edge, height: edge };
}

function gridOf(x: Int32Array, y: Int32Array, edge: number, bounds: { x: number; y: number; width: number; height: number }): Grid | null {
  let cell = edge;
  for (let i = 0; i < x.length && cell > 1; i++) cell = gcd(gcd(cell, x[i] - bounds.x), y[i] - bounds.y);
  const [width, height, span] = [bounds.width / cell, bounds.height / cell, edge / cell];
  if (width * height > MOST_CELLS || x.length * span * span > 4 * MOST_CELLS) return null;
  const first = new Uint32Array(x.length);
  const owner = new Int32Array(width * height).fill(-1);
  for (let i = 0; i < x.length; i++) {
    first[i] = ((y[i] - bounds.y) / cell) * width + (x[i] - bounds.x) / cell;
    for (let r = 0; r < span; r++) owner.fill(i, first[i] + r * width, first[i] + r * width + span);
  }
  return { cell, span, x0: bounds.x, y0: bounds.y, width, height, first, owner };
}

function gcd(a: number, b: number): number {
  while (b) [a, b] = [b, a % b];
  return Math.abs(a);
}

/** The palette's entry of each score, or -1 where it is not drawn. */
export function paletteEntries(evidence: Evidence, display: Display, values: Float32Array = evidence.values): Int16Array {
  const { signed } = evidence;
  const { base, limit } = rangeOf(evidence, display);
  const span = limit - base || 1;
  const least = display.threshold * span;
  const result = new Int16Array(values.length);
  for (let i = 0; i < values.length; i++) {
    const value = signed ? values[i] : Math.max(0, values[i] - base); // NaN stays NaN and is not drawn
    const size = Math.abs(value);
    const out = !(size >= least) || (signed && ((display.sign === "positive" && value <= 0) || (display.sign === "negative" && value >= 0)));
    const share = Math.max(-1, Math.min(1, value / span));
    result[i] = out ? -1 : Math.round(LAST * (signed ? (1 + share) / 2 : Math.max(0, share)));
  }
  return result;
}

/** The patches that are drawn and not removed. */
export function drawnPatches(evidence: Evidence, display: Display, removed: Uint8Array | undefined): number[] {
  const patches: number[] = [];
  paletteEntries(evidence, display).forEach((entry, i) => entry >= 0 && !removed?.[i] && patches.push(i));
  return patches;
}

/** The mean score of the patches that cover each cell, as the heatmap paints overlaps; NaN where there is none. */
export function cellMeans(grid: Grid, values: Float32Array, removed: Uint8Array | null): Float32Array {
  const [sums, counts] = [new Float64Array(grid.width * grid.height), new Uint16Array(grid.width * grid.height)];
  for (let i = 0; i < values.length; i++) {
    if (removed?.[i] || !Number.isFinite(values[i])) continue;
    for (let r = 0; r < grid.span; r++) {
      const start = grid.first[i] + r * grid.width;
      for (let c = start; c < start + grid.span; c++) {
        sums[c] += values[i];
        counts[c]++;
      }
    }
  }
  return Float32Array.from(sums, (sum, c) => (counts[c] ? sum / counts[c] : NaN));
}

/** The cells that some patch still covers. */
function covered(grid: Grid, removed: Uint8Array): Uint8Array {
  const cells = new Uint8Array(grid.width * grid.height);
  for (let i = 0; i < removed.length; i++) {
    if (removed[i]) continue;
    for (let r = 0; r < grid.span; r++) cells.fill(1, grid.first[i] + r * grid.width, grid.first[i] + r * grid.width + grid.span);
  }
  return cells;
}

/** Evidence coloured once, drawn at every zoom. */
export class Painting {
  private readonly canvas = document.createElement("canvas");
  private boxes: Map<number, number[]> | null = null;
  private colours: Uint32Array = new Uint32Array(LAST + 1);
  private layout: Layout | null = null;

  /** Colours the evidence anew; removed instances are grey. */
  paint(evidence: Evidence, display: Display, removed: Uint8Array | null): void {
    this.layout = Layout.of(evidence.scores);
    this.colours = rgbaTable(display.palette, evidence.signed, display.fade);
    const entries = paletteEntries(evidence, display);
    const { grid } = this.layout;
    if (grid && grid.span > 1) this.paintCells(grid, paletteEntries(evidence, display, cellMeans(grid, evidence.values, removed)), null, removed);
    else if (grid) this.paintCells(grid, entries, removed, null);
    else this.sortBoxes(entries, removed);
  }

  /** One colour per patch, or, where patches overlap, one per cell; cells whose patches are all removed are grey. */
  private paintCells(grid: Grid, entries: Int16Array, removed: Uint8Array | null, removedPatches: Uint8Array | null): void {
    const { canvas } = this;
    this.boxes = null;
    if (canvas.width !== grid.width || canvas.height !== grid.height) Object.assign(canvas, { width: grid.width, height: grid.height });
    const context = canvas.getContext("2d")!;
    const image = new ImageData(grid.width, grid.height);
    const pixels = new Uint32Array(image.data.buffer);
    const colour = (i: number) => (removed?.[i] ? REMOVED : entries[i] < 0 ? 0 : this.colours[entries[i]]);
    if (grid.span === 1) for (let i = 0; i < entries.length; i++) pixels[grid.first[i]] = colour(i);
    else {
      const left = removedPatches ? covered(grid, removedPatches) : null;
      for (let c = 0; c < pixels.length; c++) if (grid.owner[c] >= 0) pixels[c] = left && !left[c] ? REMOVED : colour(c);
    }
    context.putImageData(image, 0, 0);
  }

  private sortBoxes(entries: Int16Array, removed: Uint8Array | null): void {
    this.boxes = new Map();
    for (let i = 0; i < entries.length; i++) {
      const word = removed?.[i] ? REMOVED : entries[i] < 0 ? 0 : this.colours[entries[i]];
      if (!word) continue;
      const box = this.boxes.get(word);
      if (box) box.push(i);
      else this.boxes.set(word, [i]);
    }
  }

  /** Draws what lies within the canvas of a context. */
  draw(context: CanvasRenderingContext2D, transform: Transform): void {
    if (!this.layout) return;
    if (this.boxes) this.drawBoxes(context, transform, this.layout);
    else if (this.layout.grid) this.drawCells(context, transform, this.layout.grid);
  }

  private drawCells(context: CanvasRenderingContext2D, t: Transform, grid: Grid): void {
    const visible = windowOf(context.canvas, t);
    const size = grid.cell * t.scale;
    const [x, y] = [t.x + grid.x0 * t.scale, t.y + grid.y0 * t.scale];
    const left = Math.max(0, Math.floor((visible.left - x) / size));
    const top = Math.max(0, Math.floor((visible.top - y) / size));
    const right = Math.min(grid.width, Math.ceil((visible.right - x) / size));
    const bottom = Math.min(grid.height, Math.ceil((visible.bottom - y) / size));
    if (right <= left || bottom <= top) return;
    context.imageSmoothingEnabled = size < 1;
    const [w, h] = [right - left, bottom - top];
    context.drawImage(this.canvas, left, top, w, h, x + left * size, y + top * size, w * size, h * size);
  }

  private drawBoxes(context: CanvasRenderingContext2D, t: Transform, layout: Layout): void {
    const { left, top, right, bottom } = windowOf(context.canvas, t);
    const size = layout.edge * t.scale;
    for (const [word, instances] of this.boxes!) {
      context.fillStyle = `rgba(${word & 255}, ${(word >> 8) & 255}, ${(word >> 16) & 255}, ${(word >>> 24) / 255})`;
      for (const i of instances) {
        const [x, y] = [t.x + layout.x[i] * t.scale, t.y + layout.y[i] * t.scale];
        if (x < right && y < bottom && x + size > left && y + size > top) context.fillRect(x, y, size, size);
      }
    }
  }
}
