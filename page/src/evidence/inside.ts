/** Inside patches: where in a patch its score comes from, from the maps of `xmil inside`. */

import { LAST, rgbaTable } from "../colours";
import { countPatches, formatNumber, formatPercent, methodName } from "../words";
import type { Evidence } from "./evidence";
import type { Layer, LayerData } from "./layers";
import { windowOf } from "./overlay";
import { getInside, type InsideMap, type InsideMaps } from "../server/api";

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
  return `Inside the patch (${methodName(inside.method)}, ${inside.encoder}): ${share(map.spatial)} of the score has a position, ${share(map.constant)} is constant; full colour at ±${formatNumber(map.limit)}.`;
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
    if (!data.inside) return "Loading the maps…";
    if (!inside) return `The maps inside patches belong to the evidence for ${data.inside.target}.`;
    return `${countPatches(inside.maps.length)} with a map of where in the patch the score comes from (${methodName(inside.method)}). Each map has its own scale, up to ±${formatNumber(inside.limit)}: colours say where in a patch, the patch's score says how much.`;
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
