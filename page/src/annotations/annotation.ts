/** Named regions, lines and points, written and read as QuPath's GeoJSON. */

import { colourOf, type Rgb } from "../colours";
import { area, translated, type Point, type Polygon, type Ring } from "./geometry";
import type { SlideInfo } from "../server/api";

/** Lines and points are kept as one open ring. */
export type Shape = "area" | "line" | "point";

export interface Annotation {
  id: string;
  name: string;
  kind: string;
  colour: Rgb;
  shape: Shape;
  comment: string;
  polygons: Polygon[];
  /** What else a file says of it, as QuPath's lock, measurements and metadata: written back as it was read. */
  rest?: Record<string, unknown>;
}

export interface Feature {
  type: "Feature";
  id?: string;
  geometry: { type: string; coordinates: unknown };
  properties: Record<string, unknown>;
}

const MOST_BYTES = 50_000_000;

export function annotation(name: string, kind: string, polygons: Polygon[], shape: Shape = "area"): Annotation {
  return { id: identifier(), name, kind, colour: colourOf(kind), shape, comment: "", polygons };
}

/** What two annotations that say the same have in common, whatever their ids. */
export function contentOf({ name, kind, shape, comment, polygons, rest }: Annotation): string {
  return JSON.stringify([...(rest?.isLocked ? ["locked"] : []), name, kind, shape ?? "area", comment ?? "", polygons.map((rings) => rings.map((ring) => ring.map((point) => point.map(Math.round))))]);
}

export function identifier(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 15) | 64;
  bytes[8] = (bytes[8] & 63) | 128;
  const digits = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return [digits.slice(0, 8), digits.slice(8, 12), digits.slice(12, 16), digits.slice(16, 20), digits.slice(20)].join("-");
}

/** The corner that QuPath counts from, in level-0 pixels: that of the scanned area. */
export function originOf(info: SlideInfo): Point {
  const [x, y] = info.image?.bounds ?? [0, 0];
  return [x, y];
}

/** An annotation as QuPath reads it, counted from `origin`. */
export function asFeature(note: Annotation, origin: Point): Feature {
  return {
    type: "Feature",
    id: note.id,
    geometry: geometryOf(translated(note.polygons, [-origin[0], -origin[1]]), note.shape),
    properties: {
      objectType: "annotation",
      isLocked: false,
      ...note.rest,
      name: note.name,
      classification: { name: note.kind, color: note.colour },
      ...(note.comment ? { comment: note.comment } : {}),
    },
  };
}

/** A patch with its scores as a tile of QuPath. */
export function patchFeature(ring: Ring, colour: number[], measurements: Record<string, number>): Feature {
  return {
    type: "Feature",
    id: identifier(),
    geometry: { type: "Polygon", coordinates: [ring] },
    properties: { objectType: "tile", color: colour, measurements },
  };
}

function geometryOf(polygons: Polygon[], shape: Shape = "area"): Feature["geometry"] {
  if (shape === "point") return { type: "Point", coordinates: polygons[0][0][0] };
  if (shape === "line") return { type: "LineString", coordinates: polygons[0][0] };
  return polygons.length === 1
    ? { type: "Polygon", coordinates: polygons[0] }
    : { type: "MultiPolygon", coordinates: polygons };
}

/** GeoJSON of all features; our own member says of which slide they are and where they count from. */
export function asGeoJson(features: Feature[], slide: string, origin: Point, version: string): Blob {
  const text = JSON.stringify({ type: "FeatureCollection", xmil: { version, slide, origin, level: 0 }, features });
  return new Blob([text], { type: "application/geo+json" });
}

/** What a file held: annotations in level-0 pixels, how many features could not be used, and the slide it names. */
export interface ImportedNotes {
  notes: Annotation[];
  skipped: number;
  slide: string | null;
}

/** Annotations from a GeoJSON file, which counts from the origin it names or from the one that QuPath uses. */
export async function readGeoJson(file: File, origin: Point): Promise<ImportedNotes> {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than 50 MB.`);
  let content: unknown;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not valid JSON.`);
  }
  const features = featuresOf(content);
  if (!features) throw new Error(`${file.name} contains no GeoJSON features.`);
  const notes = features.map(fromFeature).filter((note): note is Annotation => note !== null);
  const { origin: named, slide } = headOf(content);
  for (const note of notes) note.polygons = translated(note.polygons, named ?? origin);
  return { notes, skipped: features.length - notes.length, slide };
}

/** Where our own member says that the file counts from, and its slide. */
function headOf(content: unknown): { origin: Point | null; slide: string | null } {
  const head = (content as { xmil?: { origin?: unknown; slide?: unknown } } | null)?.xmil;
  const slide = text(head?.slide);
  return { origin: isPoint(head?.origin) ? [head.origin[0], head.origin[1]] : null, slide: slide || null };
}

function featuresOf(content: unknown): unknown[] | null {
  if (Array.isArray(content)) return content;
  const parsed = content as { type?: unknown; features?: unknown } | null;
  if (parsed?.type === "Feature") return [parsed];
  return Array.isArray(parsed?.features) ? parsed.features : null;
}

/** An annotation from a GeoJSON feature; its own id where it has one. */
export function fromFeature(feature: unknown): Annotation | null {
  const { geometry, properties, id } = (feature ?? {}) as { id?: unknown; geometry?: { type?: unknown; coordinates?: unknown }; properties?: Record<string, unknown> };
  const [polygons, shape] = shapeOf(geometry?.type, geometry?.coordinates);
  if (!polygons.length || polygons.some((p) => p === null)) return null;
  const kind = properties?.classification as { name?: unknown; names?: unknown; color?: unknown } | undefined;
  const named = typeof kind?.name === "string" ? kind.name : Array.isArray(kind?.names) ? kind.names.join(": ") : "Other";
  const note = annotation(text(properties?.name), text(named) || "Other", polygons as Polygon[], shape);
  note.comment = text(properties?.comment);
  const { name: _, classification: __, comment: ___, ...rest } = properties ?? {};
  if (Object.keys(rest).length) note.rest = rest;
  if (typeof id === "string" && id.length <= 100) note.id = id;
  const colour = kind?.color ?? properties?.color;
  if (Array.isArray(colour) && colour.length >= 3 && colour.every((c) => Number.isFinite(c))) note.colour = colour.slice(0, 3) as Annotation["colour"];
  return note;
}

function text(value: unknown): string {
  return typeof value === "string" ? value.slice(0, 500) : "";
}

function shapeOf(type: unknown, coordinates: unknown): [(Polygon | null)[], Shape] {
  const list = Array.isArray(coordinates) ? coordinates : [];
  if (type === "Point") return [isPoint(coordinates) ? [[[[coordinates[0], coordinates[1]]]]] : [], "point"];
  if (type === "LineString") return [list.length > 1 && list.every(isPoint) ? [[list.map(([x, y]): Point => [x, y])]] : [], "line"];
  const parsed = type === "Polygon" ? [coordinates] : type === "MultiPolygon" ? list : [];
  return [parsed.map(polygon), "area"];
}

function polygon(coordinates: unknown): Polygon | null {
  if (!Array.isArray(coordinates) || !coordinates.length) return null;
  const rings = coordinates.map((ring): Ring | null =>
    Array.isArray(ring) && ring.length >= 4 && ring.every(isPoint) ? ring.map(([x, y]): Point => [x, y]) : null,
  );
  return rings.some((ring) => ring === null) || area(rings[0]!) === 0 ? null : (rings as Polygon);
}

function isPoint(value: unknown): value is Point {
  return Array.isArray(value) && value.length >= 2 && Number.isFinite(value[0]) && Number.isFinite(value[1]);
}
