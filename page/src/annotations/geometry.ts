/** Polygons on the slide, in level-0 pixels, shaped as in GeoJSON: polygons, rings, points. */

import type { Layout } from "../evidence/overlay";

export type Point = [number, number];
export type Ring = Point[];
export type Polygon = Ring[];

/** Whether a point lies inside a polygon, holes left out. */
export function inside(polygon: Polygon, x: number, y: number): boolean {
  let odd = false;
  for (const ring of polygon) {
    for (let i = 0, j = ring.length - 1; i < ring.length; j = i++) {
      const [xi, yi] = ring[i];
      const [xj, yj] = ring[j];
      if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) odd = !odd;
    }
  }
  return odd;
}

/** The patches of which at least half lies in the polygons, as `xmil evaluate` marks them. */
export function patchesIn(layout: Layout, polygons: Polygon[]): number[] {
  const boxes = polygons.map((polygon) => boxOf([polygon]));
  const { edge } = layout;
  const result: number[] = [];
  for (let i = 0; i < layout.x.length; i++) {
    const [x, y] = [layout.x[i], layout.y[i]];
    const near = polygons.filter((_, k) => x + edge > boxes[k].x && y + edge > boxes[k].y && x < boxes[k].x + boxes[k].width && y < boxes[k].y + boxes[k].height);
    if (near.length && coveredShare(near, x, y, edge) >= 0.5 - 5e-10) result.push(i); // the last digits of a sum do not decide
  }
  return result;
}

type Line = [number, number, number, number];

/** The share of a square that lies in polygons; where they overlap it counts once. */
export function coveredShare(polygons: Polygon[], left: number, top: number, edge: number): number {
  const shapes: Line[][] = [];
  for (const polygon of polygons) {
    const lines = polygon.flatMap((ring) => ring.map(([x, y], i): Line => [(ring.at(i - 1)![0] - left) / edge, (ring.at(i - 1)![1] - top) / edge, (x - left) / edge, (y - top) / edge]));
    const here = lines.filter(([x1, y1, x2, y2]) => Math.max(y1, y2) > 0 && Math.min(y1, y2) < 1 && Math.min(x1, x2) < 1);
    if (here.some(enters)) shapes.push(here);
    else if (inside(polygon, left + edge / 2, top + edge / 2)) return 1;
  }
  const heights = cuts(shapes.flat().filter(enters));
  let sum = 0;
  for (let i = 1; i < heights.length; i++) sum += (heights[i] - heights[i - 1]) * coveredLength(shapes, (heights[i] + heights[i - 1]) / 2);
  return sum;
}

const enters = ([x1, , x2]: Line): boolean => Math.max(x1, x2) > 0;
const slope = ([x1, y1, x2, y2]: Line): number => (x2 - x1) / (y2 - y1);

/** The heights in the unit square at which a line begins, ends, meets another, enters or leaves: in between all borders are straight. */
function cuts(lines: Line[]): number[] {
  const found = new Set([0, 1]);
  const add = (y: number) => y > 0 && y < 1 && found.add(y);
  const [slopes, bases] = [lines.map(slope), lines.map((line) => line[0] - slope(line) * line[1])];
  lines.forEach(([, y1, , y2], i) => {
    for (const y of [y1, y2, -bases[i] / slopes[i], (1 - bases[i]) / slopes[i]]) add(y);
    for (let j = 0; j < i; j++) add((bases[j] - bases[i]) / (slopes[i] - slopes[j]));
  });
  return [...found].sort((a, b) => a - b);
}

/** How much of the unit square's width lies in shapes at a height. */
function coveredLength(shapes: Line[][], y: number): number {
  const spans = shapes.flatMap((lines) => {
    const x = lines.filter(([, y1, , y2]) => y1 > y !== y2 > y).map((line) => Math.min(1, Math.max(0, line[0] + (y - line[1]) * slope(line)))).sort((a, b) => a - b);
    return x.flatMap((from, i): Point[] => (i % 2 ? [] : [[from, x[i + 1] ?? 1]])); // lines beyond the right edge were left out
  });
  let [sum, reached] = [0, 0];
  for (const [from, to] of spans.sort((a, b) => a[0] - b[0])) {
    sum += Math.max(0, to - Math.max(from, reached));
    reached = Math.max(reached, to);
  }
  return sum;
}

/** The patches that a disc touches. */
export function patchesNear(layout: Layout, x: number, y: number, radius: number): number[] {
  const result: number[] = [];
  for (let i = 0; i < layout.x.length; i++) {
    const dx = x - Math.max(layout.x[i], Math.min(x, layout.x[i] + layout.edge));
    const dy = y - Math.max(layout.y[i], Math.min(y, layout.y[i] + layout.edge));
    if (dx * dx + dy * dy <= radius * radius) result.push(i);
  }
  return result;
}

/** The box around polygons. */
export function boxOf(polygons: Polygon[]): { x: number; y: number; width: number; height: number } {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const [x, y] of polygons.flat(2) as Point[]) {
    left = Math.min(left, x);
    top = Math.min(top, y);
    right = Math.max(right, x);
    bottom = Math.max(bottom, y);
  }
  return { x: left, y: top, width: right - left, height: bottom - top };
}

/** Polygons shifted by a vector. */
export function translated(polygons: Polygon[], [x, y]: Point): Polygon[] {
  return polygons.map((rings) => rings.map((ring) => ring.map((point): Point => [point[0] + x, point[1] + y])));
}

/** The area of a ring, signed by its direction. */
export function area(ring: Ring): number {
  let sum = 0;
  for (let i = 0, j = ring.length - 1; i < ring.length; j = i++) sum += ring[j][0] * ring[i][1] - ring[i][0] * ring[j][1];
  return sum / 2;
}

/** How long a line through points is. */
export function lengthOf(points: Point[]): number {
  return points.reduce((sum, [x, y], i) => sum + (i ? Math.hypot(x - points[i - 1][0], y - points[i - 1][1]) : 0), 0);
}

/** A hand-drawn ring with fewer points (Douglas and Peucker), closed. */
export function closed(points: Point[], tolerance: number): Ring {
  const ring = simplified(points, tolerance).map(([x, y]): Point => [Math.round(x), Math.round(y)]);
  const [first, last] = [ring[0], ring[ring.length - 1]];
  if (first[0] !== last[0] || first[1] !== last[1]) ring.push([first[0], first[1]]);
  return ring;
}

function simplified(points: Point[], tolerance: number): Point[] {
  const keep = new Uint8Array(points.length);
  keep[0] = keep[points.length - 1] = 1;
  const spans: [number, number][] = [[0, points.length - 1]];
  for (let span = spans.pop(); span; span = spans.pop()) {
    const [a, b] = span;
    let [farthest, most] = [-1, tolerance];
    for (let i = a + 1; i < b; i++) {
      const d = distance(points[i], points[a], points[b]);
      if (d > most) [farthest, most] = [i, d];
    }
    if (farthest > 0) {
      keep[farthest] = 1;
      spans.push([a, farthest], [farthest, b]);
    }
  }
  return points.filter((_, i) => keep[i]);
}

function distance(p: Point, a: Point, b: Point): number {
  const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
  const length = Math.hypot(dx, dy);
  if (length === 0) return Math.hypot(p[0] - a[0], p[1] - a[1]);
  return Math.abs(dy * p[0] - dx * p[1] + b[0] * a[1] - b[1] * a[0]) / length;
}

/** The outline of patches as polygons with holes; box by box where they share no grid. */
export function outline(layout: Layout, patches: Iterable<number>): Polygon[] {
  const { grid, edge } = layout;
  if (!grid) return [...patches].map((i) => [rectangle(layout.x[i], layout.y[i], edge, edge)]);
  const width = grid.width + 2; // a margin of one empty cell on each side
  const filled = new Uint8Array(width * (grid.height + 2));
  for (const i of patches) {
    const [column, row] = [grid.first[i] % grid.width, Math.floor(grid.first[i] / grid.width)];
    for (let r = 0; r < grid.span; r++) filled.fill(1, (row + 1 + r) * width + column + 1, (row + 1 + r) * width + column + 1 + grid.span);
  }
  const place = (corner: number): Point => [grid.x0 + ((corner % width) - 1) * grid.cell, grid.y0 + (Math.floor(corner / width) - 1) * grid.cell];
  return nested(rings(filled, width).map((ring) => ring.map(place)));
}

export function rectangle(x: number, y: number, width: number, height: number): Ring {
  return [[x, y], [x + width, y], [x + width, y + height], [x, y + height], [x, y]];
}

/** Closed walks around filled cells, as corner numbers, the filled side on the right. */
function rings(filled: Uint8Array, width: number): number[][] {
  const steps = new Map<number, number[]>();
  const add = (from: number, to: number) => steps.set(from, [...(steps.get(from) ?? []), to]);
  for (let c = width; c < filled.length - width; c++) {
    if (!filled[c]) continue;
    if (!filled[c - width]) add(c, c + 1);
    if (!filled[c + 1]) add(c + 1, c + width + 1);
    if (!filled[c + width]) add(c + width + 1, c + width);
    if (!filled[c - 1]) add(c + width, c);
  }
  const result: number[][] = [];
  for (const start of steps.keys()) while (steps.get(start)?.length) result.push(...simple(walk(steps, start)));
  return result;
}

/** A walk cut where it comes back to a corner, so that no ring touches itself. */
function simple(corners: number[]): number[][] {
  const result: number[][] = [];
  const path: number[] = [];
  const places = new Map<number, number>();
  for (const corner of corners) {
    const place = places.get(corner);
    if (place !== undefined) {
      const loop = path.splice(place);
      for (const passed of loop) places.delete(passed);
      result.push([...loop, corner]);
    }
    places.set(corner, path.length);
    path.push(corner);
  }
  return result;
}

/** Follows edges back to the start; where two cells meet at a corner it turns right, to part them. */
function walk(steps: Map<number, number[]>, start: number): number[] {
  const ring = [start];
  let [corner, direction] = [start, 0];
  do {
    const choices = steps.get(corner)!;
    const right = choices.length > 1 ? choices.findIndex((to) => turn(direction, to - corner) > 0) : 0;
    const [next] = choices.splice(Math.max(0, right), 1);
    if (next - corner !== direction) ring.push(next);
    else ring[ring.length - 1] = next;
    [direction, corner] = [next - corner, next];
  } while (corner !== start);
  return ring;
}

/** Positive for a right turn on the screen; steps are +-1 (along a row) or +-width (down or up). */
function turn(from: number, to: number): number {
  const unit = (step: number): Point => (Math.abs(step) === 1 ? [step, 0] : [0, Math.sign(step)]);
  const [a, b] = [unit(from), unit(to)];
  return a[0] * b[1] - a[1] * b[0];
}

/** Outer rings (clockwise on the screen) with the holes that lie in them. */
function nested(all: Ring[]): Polygon[] {
  const outer = all.filter((ring) => area(ring) > 0).map((ring): Polygon => [ring]);
  for (const hole of all.filter((ring) => area(ring) < 0)) {
    const [x, y] = hole[0];
    const [nx, ny] = hole[1];
    // a point just inside the hole's own edge, on its filled side
    const [mx, my] = [(x + nx) / 2 - Math.sign(ny - y) * 0.5, (y + ny) / 2 + Math.sign(nx - x) * 0.5];
    const home = outer.filter((polygon) => inside([polygon[0]], mx, my)).sort((a, b) => area(a[0]) - area(b[0]))[0];
    home?.push(hole);
  }
  return outer;
}

// One slide laid over another: shift, scale and rotation from two places that both show.

/** (x, y) goes to (a x - b y + x0, b x + a y + y0), in level-0 pixels of both slides. */
export interface Similarity {
  a: number;
  b: number;
  x0: number;
  y0: number;
}

/** The similarity that takes two places to two others; null where two of them are one. */
export function similarity([p, q]: readonly Point[], [s, t]: readonly Point[]): Similarity | null {
  const [dx, dy, ex, ey] = [q[0] - p[0], q[1] - p[1], t[0] - s[0], t[1] - s[1]];
  const size = dx * dx + dy * dy;
  const [a, b] = [(ex * dx + ey * dy) / size, (ey * dx - ex * dy) / size];
  if (!Number.isFinite(a + b) || Math.hypot(a, b) < 1e-9) return null;
  return { a, b, x0: s[0] - a * p[0] + b * p[1], y0: s[1] - b * p[0] - a * p[1] };
}

export function applySimilarity({ a, b, x0, y0 }: Similarity, [x, y]: Point): Point {
  return [a * x - b * y + x0, b * x + a * y + y0];
}

export function inverse({ a, b, x0, y0 }: Similarity): Similarity {
  const size = a * a + b * b;
  return { a: a / size, b: -b / size, x0: -(a * x0 + b * y0) / size, y0: (b * x0 - a * y0) / size };
}

/** How much larger things are in the second slide. */
export function scaleOf({ a, b }: Similarity): number {
  return Math.hypot(a, b);
}

/** By how many degrees the second slide is turned, clockwise. */
export function turnOf({ a, b }: Similarity): number {
  return (Math.atan2(b, a) * 180) / Math.PI;
}
