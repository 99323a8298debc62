/** Concepts: in place of the scores, the part of them that goes through one concept of `xmil insight`. */

import { LAST, rgbaTable } from "../colours";
import { formatNumber, formatPercent } from "../words";
import type { Evidence } from "./evidence";
import type { Layer, LayerData } from "./layers";
import { Painting, windowOf } from "./overlay";
import { getConcept, getConcepts, getInside, type InsideMap, type InsideMaps } from "../server/api";

/** The concept that is chosen, else the strongest; null where the concepts are of another map. */
function conceptOf(evidence: Evidence, { concepts }: LayerData, chosen: string): { concept: number; sum: number } | null {
  const { method, target } = evidence.choice;
  if (!concepts || concepts.method !== method || concepts.target !== target) return null;
  return concepts.concepts.find(({ concept }) => String(concept) === chosen) ?? concepts.concepts[0] ?? null;
}

function strongest({ concepts }: LayerData, chosen: string): number | null {
  return (concepts?.concepts.find(({ concept }) => String(concept) === chosen) ?? concepts?.concepts[0])?.concept ?? null;
}

const paintings = new WeakMap<Float32Array, { painting: Painting; of: string; removed: Uint8Array | null }>();

export const conceptsLayer: Layer = {
  name: "concepts",
  label: "One concept's part of the scores",
  place: "evidence",
  lacks(data, chosen) {
    const concept = strongest(data, chosen);
    if (!data.concepts) return "concepts";
    return concept === null || data.concept.has(concept) ? null : `concept-${concept}`;
  },
  async fetch(slide, run, data, chosen) {
    data.concepts ??= await getConcepts(slide, run);
    const concept = strongest(data, chosen);
    if (concept !== null) data.concept.set(concept, await getConcept(slide, run, concept));
  },
  choices: ({ concepts }) => concepts?.concepts.map(({ concept, sum }) => ({ value: String(concept), text: `Concept ${concept}: ${formatNumber(sum)} of ${formatNumber(concepts.total)}` })) ?? [],
  offers: ({ scores, choice }) => scores.set.concepts && choice.against === null && !choice.minus,
  legend(evidence, data, chosen) {
    if (!data.concepts) return "Fetching the concepts…";
    const chosenConcept = conceptOf(evidence, data, chosen);
    if (!chosenConcept) return `The concepts are of ${data.concepts.method} for ${data.concepts.target}.`;
    return `In the colours of the scores, in place of them: what of each score goes through concept ${chosenConcept.concept}. Over the slide ${formatNumber(chosenConcept.sum)} of ${formatNumber(data.concepts.total)}; through no concept: ${formatNumber(data.concepts.rest)}.`;
  },
  note(evidence, data, chosen) {
    const chosenConcept = conceptOf(evidence, data, chosen);
    return chosenConcept && data.concept.has(chosenConcept.concept) ? `Only what goes through concept ${chosenConcept.concept}` : null;
  },
  draw(context, { evidence, display, data, chosen, removed, transform: t }) {
    const chosenConcept = conceptOf(evidence, data, chosen);
    const values = chosenConcept ? data.concept.get(chosenConcept.concept) : undefined;
    if (!values || values.length !== evidence.values.length) return;
    const of = JSON.stringify(display);
    let cached = paintings.get(values);
    if (cached?.of !== of || cached.removed !== removed) {
      cached = { painting: cached?.painting ?? new Painting(), of, removed };
      cached.painting.paint({ ...evidence, values }, display, removed);
      paintings.set(values, cached);
    }
    const { left, top, right, bottom } = windowOf(context.canvas, t);
    context.clearRect(left, top, right - left, bottom - top);
    cached.painting.draw(context, t);
  },
};

// Maps inside patches: zoomed in, the places that a patch's score goes to.

const NEAR = 120; // CSS pixels along a patch's edge, from which on its inside is drawn

/** The maps, where they are of the evidence that is shown. */
export function insideOf(evidence: Evidence, { inside }: LayerData): InsideMaps | null {
  const { method, target, against, minus } = evidence.choice;
  return inside && !minus && method === "lrp" && inside.target === target && against === null ? inside : null;
}

/** What part of a patch's score has a place inside it, in a line. */
export function insideLine(inside: InsideMaps, patch: number): string | null {
  const map = inside.maps.find((each) => each.patch === patch);
  if (!map || !map.score) return null;
  const share = (part: number) => formatPercent(part / map.score, 0);
  return `Inside (${inside.method}, ${inside.encoder}): ${share(map.spatial)} of the score has a place, ${share(map.constant)} constant; colours to ±${formatNumber(map.limit)}.`;
}

const pictures = new WeakMap<InsideMap, { palette: string; canvas: HTMLCanvasElement }>();

/** One pixel per place of the map, in the signed colours. */
function picture(map: InsideMap, inside: InsideMaps, palette: string): HTMLCanvasElement {
  const known = pictures.get(map);
  if (known?.palette === palette) return known.canvas;
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: inside.width, height: inside.height });
  const image = new ImageData(inside.width, inside.height);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = rgbaTable(palette, true, true);
  map.values.forEach((value, i) => (pixels[i] = colours[Math.round((LAST / 2) * (1 + Math.max(-1, Math.min(1, value / (map.limit || 1)))))]));
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  pictures.set(map, { palette, canvas });
  return canvas;
}

export const insideLayer: Layer = {
  name: "inside",
  label: "Inside patches (zoom in)",
  place: "evidence",
  lacks: (data) => (data.inside ? null : "inside"),
  fetch: async (slide, run, data) => void (data.inside = await getInside(slide, run)),
  offers: (evidence) => evidence.scores.set.inside && evidence.choice.method === "lrp" && evidence.choice.against === null && !evidence.choice.minus,
  legend(evidence, data) {
    const inside = insideOf(evidence, data);
    if (!data.inside) return "Fetching the maps…";
    if (!inside) return `The maps are of the evidence for ${data.inside.target}.`;
    return `${inside.maps.length} patches with a map of the places their score goes to (${inside.method}). Each map's colours end at its own largest value, at most ±${formatNumber(inside.limit)}: they tell where in a patch, its score how much.`;
  },
  draw(context, { evidence, display, data, transform: t, unit }) {
    const inside = insideOf(evidence, data);
    if (!inside) return;
    const { left, top, right, bottom } = windowOf(context.canvas, t);
    for (const map of inside.maps) {
      const [x0, y0, x1, y1] = map.box;
      const [x, y, w, h] = [t.x + x0 * t.scale, t.y + y0 * t.scale, (x1 - x0) * t.scale, (y1 - y0) * t.scale];
      if (w < NEAR * unit || x > right || y > bottom || x + w < left || y + h < top) continue;
      context.clearRect(x, y, w, h); // in place of the patch's one colour
      context.imageSmoothingEnabled = true;
      context.drawImage(picture(map, inside, display.palette), x, y, w, h);
    }
  },
};
