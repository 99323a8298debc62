/** Layers of whole patches: where there are scores, where their sign is not sure, which patches decide. */

import { colourNames, css, HATCH, INK, LAST, PAPER, rgbTable, SCORED_OUTLINE, white } from "../colours";
import { countPatches, plural } from "../words";
import { outline, type Polygon } from "../annotations/geometry";
import type { Evidence } from "./evidence";
import type { Layer, LayerData, Scene } from "./layers";
import { windowOf, type Layout, type Transform } from "./overlay";
import { getPairs, type Deciding, type Pair } from "../server/api";

const outlines = new WeakMap<Layout, Polygon[]>();

function outlineOf(layout: Layout): Polygon[] {
  let polygons = outlines.get(layout);
  if (!polygons) outlines.set(layout, (polygons = outline(layout, layout.x.keys())));
  return polygons;
}

/** Where patches were scored: inside, no colour means a score near zero (of signed scores); outside, there is none. */
export const outlineLayer: Layer = {
  name: "outline",
  label: "Outline of the scored area",
  place: "marks",
  offers: () => true,
  legend: (evidence, _, __, ___, display) => (evidence.signed && display.fade ? "Inside the line, no colour means a score near zero; outside it, there are no scores." : "Inside the line, every patch has a score; outside it, there are no scores."),
  draw(context, { layout, transform: t, unit }) {
    context.beginPath();
    for (const ring of outlineOf(layout).flat()) {
      ring.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](t.x + x * t.scale, t.y + y * t.scale));
      context.closePath();
    }
    context.lineWidth = unit;
    context.strokeStyle = SCORED_OUTLINE;
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
  stable: "the sign is uncertain",
  "standard error": "the score is within three standard errors of zero",
  spread: "the score is less than one standard deviation over the models away from zero",
};

export const unsureLayer: Layer = {
  name: "unsure",
  label: "Hatch patches with an uncertain sign",
  place: "marks",
  offers: (evidence) => evidence.signed && besideOf(evidence) !== null,
  legend(evidence) {
    const mask = unsure(evidence);
    const count = mask?.reduce((sum, one) => sum + one, 0) ?? 0;
    return `Hatched: ${RULES[besideOf(evidence)?.kind ?? "stable"]} (${countPatches(count)}).`;
  },
  draw(context, { evidence, layout, transform: t, unit }) {
    const mask = unsure(evidence);
    if (!mask) return;
    context.beginPath();
    for (const i of mask.keys()) if (mask[i]) rect(context, layout, i, t);
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
  for (const [colour, width] of [[white(0.7), 2.4], [HATCH, 1.1]] as const) {
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
export function decidingOf(evidence: Evidence): (Deciding & { instances: number[] }) | null {
  const { certificate, n } = evidence.scores.set;
  const deciding = evidence.scores.set.deciding ?? certificate?.deciding;
  return deciding?.instances && deciding.n === n ? { ...deciding, instances: deciding.instances } : null;
}

/** The set in a few words: one of several equally small ones is not called the one that decides. */
export function decidingWords({ instances, equal = 1, all_equal: all }: Deciding & { instances: number[] }): string {
  const size = countPatches(instances.length);
  if (equal > 1) return `the strongest of ${all ? "" : "at least "}${plural(equal, "set")} of ${size}`;
  return all ? `the only set of ${size} that changes the prediction` : `a smallest set (${size})`;
}

export const decidingLayer: Layer = {
  name: "deciding",
  label: "Smallest set that changes the prediction",
  place: "marks",
  offers: (evidence) => decidingOf(evidence) !== null,
  legend: (evidence) => decidingOf(evidence)?.sentence ?? "",
  draw(context, { evidence, layout, transform: t, unit }: Scene) {
    context.beginPath();
    for (const i of decidingOf(evidence)?.instances ?? []) rect(context, layout, i, t);
    for (const [colour, width] of [[PAPER, 4.5], [INK, 2.5]] as const) {
      context.strokeStyle = colour;
      context.lineWidth = width * unit;
      context.stroke();
    }
  },
};

// Interactions: lines between patches that say more, or less, together than one by one.

const MOST = 60; // lines that can still be told apart

/** The strongest pairs of a target, and how many there are. */
function pairsOf(evidence: Evidence, data: LayerData): { pairs: Pair[]; of: number } {
  const all = data.pairs?.sets.find((each) => each.target === evidence.choice.target)?.pairs ?? [];
  const ordered = [...all].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  return { pairs: ordered.slice(0, MOST), of: all.length };
}

export const pairsLayer: Layer = {
  name: "pairs",
  label: "Interacting pairs",
  place: "marks",
  lacks: (data) => (data.pairs ? null : "pairs"),
  fetch: async (slide, run, data) => void (data.pairs = await getPairs(slide, run)),
  offers: (evidence) => evidence.scores.set.pairs && evidence.choice.against === null && !evidence.choice.minus,
  legend(evidence, data, _, __, { palette }) {
    if (!data.pairs) return "Loading the pairs…";
    const { pairs, of } = pairsOf(evidence, data);
    const { target } = evidence.choice;
    if (!of) return `No pairs were computed for ${target}.`;
    const sure = pairs.filter((pair) => pair.sure).length;
    const [less, more] = colourNames(palette);
    const which = of > pairs.length ? `The strongest ${pairs.length} of ${plural(of, "pair")}` : `All ${plural(of, "pair")}`;
    return `${which} for ${target}; ${sure} lie beyond three standard errors (full lines, the others are dotted). ${more}: the two patches together support ${target} more than separately; ${less.toLowerCase()}: less. Wider is stronger.`;
  },
  draw(context, { evidence, layout, display, data, transform: t, unit }) {
    const { pairs } = pairsOf(evidence, data);
    const most = Math.max(1e-30, ...pairs.map((pair) => Math.abs(pair.value)));
    const colours = rgbTable(display.palette, true);
    const centre = (i: number) => [t.x + (layout.x[i] + layout.edge / 2) * t.scale, t.y + (layout.y[i] + layout.edge / 2) * t.scale] as const;
    context.lineCap = "round";
    for (const { first, second, value, sure } of [...pairs].reverse()) {
      const width = (1 + (4 * Math.abs(value)) / most) * unit;
      context.setLineDash(sure ? [] : [2 * unit, 5 * unit]);
      for (const [colour, extra] of [[white(0.85), 2 * unit], [css(colours, value > 0 ? LAST : 0), 0]] as const) {
        context.beginPath();
        context.moveTo(...centre(first));
        context.lineTo(...centre(second));
        context.strokeStyle = colour;
        context.lineWidth = width + extra;
        context.stroke();
      }
    }
  },
};
