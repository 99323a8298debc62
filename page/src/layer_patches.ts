/** Layers of whole patches: where there are scores, where their sign is not sure, which patches decide. */

import { counted, type Evidence } from "./evidence";
import { outline, type Polygon } from "./geometry";
import type { Layer, Scene } from "./layers";
import { windowOf, type Layout, type Transform } from "./overlay";

const outlines = new WeakMap<Layout, Polygon[]>();

function outlineOf(layout: Layout): Polygon[] {
  let found = outlines.get(layout);
  if (!found) outlines.set(layout, (found = outline(layout, layout.x.keys())));
  return found;
}

/** Where patches were scored: inside, no colour means a score near zero; outside, there is none. */
export const outlineLayer: Layer = {
  name: "outline",
  label: "Outline of the scored area",
  place: "marks",
  offers: () => true,
  legend: () => "Inside the line no colour means a score near zero; outside there is no score.",
  draw(context, { layout, transform: t, unit }) {
    context.beginPath();
    for (const ring of outlineOf(layout).flat()) {
      ring.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](t.x + x * t.scale, t.y + y * t.scale));
      context.closePath();
    }
    context.lineWidth = unit;
    context.strokeStyle = "rgba(115, 115, 115, .75)";
    context.stroke();
  },
};

/** The column beside the shown one that says how sure it is, best first. */
function besideOf({ column, scores, choice }: Evidence): { kind: string; values: Float32Array } | null {
  if (choice.against !== null || choice.minus) return null;
  for (const kind of ["stable", "standard error", "spread"]) {
    const place = scores.set.columns.findIndex((c) => c.beside === column.name && c.kind === kind);
    if (place >= 0) return { kind, values: scores.columns[place] };
  }
  return null;
}

/** 1 for each patch whose sign is not sure. */
export function unsure(evidence: Evidence): Uint8Array | null {
  const beside = evidence.signed ? besideOf(evidence) : null;
  if (!beside) return null;
  const reach = { stable: 0, "standard error": 3, spread: 1 }[beside.kind] ?? 0;
  return Uint8Array.from(evidence.values, (value, i) => Number(beside.kind === "stable" ? beside.values[i] === 0 : Math.abs(value) <= reach * beside.values[i]));
}

const RULES: Record<string, string> = {
  stable: "the method does not vouch for the sign",
  "standard error": "the score is within three standard errors of zero",
  spread: "the score is within one standard deviation of the models of zero",
};

export const unsureLayer: Layer = {
  name: "unsure",
  label: "Hatch where the sign is unsure",
  place: "marks",
  offers: (evidence) => evidence.signed && besideOf(evidence) !== null,
  legend(evidence) {
    const found = unsure(evidence);
    const count = found?.reduce((sum, one) => sum + one, 0) ?? 0;
    return `Hatched: ${RULES[besideOf(evidence)?.kind ?? "stable"]} (${counted(count, "patch", "patches")}).`;
  },
  draw(context, { evidence, layout, transform: t, unit }) {
    const found = unsure(evidence);
    if (!found) return;
    context.beginPath();
    for (const i of found.keys()) if (found[i]) rect(context, layout, i, t);
    context.fillStyle = hatch(context, unit);
    context.fill();
  },
};

function rect(context: CanvasRenderingContext2D, layout: Layout, i: number, t: Transform): void {
  const size = layout.edge * t.scale;
  const [x, y] = [t.x + layout.x[i] * t.scale, t.y + layout.y[i] * t.scale];
  const { left, top, right, bottom } = windowOf(context.canvas, t);
  if (x < right && y < bottom && x + size > left && y + size > top) context.rect(x, y, size, size);
}

function hatch(context: CanvasRenderingContext2D, unit: number): CanvasPattern {
  const size = Math.round(8 * unit);
  const tile = document.createElement("canvas");
  Object.assign(tile, { width: size, height: size });
  const lines = tile.getContext("2d")!;
  for (const [colour, width] of [["rgba(255,255,255,.7)", 2.4], ["rgba(20,20,20,.85)", 1.1]] as const) {
    lines.strokeStyle = colour;
    lines.lineWidth = width * unit;
    for (const shift of [-size, 0, size]) {
      lines.beginPath();
      lines.moveTo(shift, size);
      lines.lineTo(shift + size, 0);
      lines.stroke();
    }
  }
  return context.createPattern(tile, "repeat")!;
}

/** The smallest set of patches that decides, where the certificate is of this evidence's target and bag. */
export function decidingOf(evidence: Evidence): { instances: number[]; sentence: string } | null {
  const { certificate, n } = evidence.scores.set;
  const found = evidence.scores.set.deciding ?? certificate?.deciding;
  return found?.instances && found.n === n ? { instances: found.instances, sentence: found.sentence } : null;
}

export const decidingLayer: Layer = {
  name: "deciding",
  label: "The patches that decide",
  place: "marks",
  offers: (evidence) => decidingOf(evidence) !== null,
  legend: (evidence) => decidingOf(evidence)?.sentence ?? "",
  draw(context, { evidence, layout, transform: t, unit }: Scene) {
    context.beginPath();
    for (const i of decidingOf(evidence)?.instances ?? []) rect(context, layout, i, t);
    for (const [colour, width] of [["#fff", 4.5], ["#111", 2.5]] as const) {
      context.strokeStyle = colour;
      context.lineWidth = width * unit;
      context.stroke();
    }
  },
};
