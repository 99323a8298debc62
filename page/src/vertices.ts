/** Changing an annotation's outline: corners are dragged, added on edges, and taken out. */

import type { Annotation } from "./annotations";
import type { Point, Polygon } from "./geometry";

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
