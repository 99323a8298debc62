/** What can be said of an annotation: its size, and the scores inside it. */

import { countPatches, formatNumber, formatPercent } from "../words";
import type { Annotation } from "./annotation";
import { area, lengthOf, patchesIn } from "./geometry";
import type { Evidence } from "../evidence/evidence";
import { Layout } from "../evidence/overlay";

/** A length in words: microns or millimetres where the slide's scale is known. */
export function lengthText(pixels: number, mpp: number | null): string {
  if (!mpp) return `${formatNumber(pixels)} px`;
  const microns = pixels * mpp;
  return microns >= 1000 ? `${formatNumber(microns / 1000, 4)} mm` : `${formatNumber(microns, 4)} µm`;
}

/** Area or length in words; nothing for a point. */
export function sizeText(note: Annotation, mpp: number | null): string {
  if (note.shape === "point") return "";
  if (note.shape === "line") return lengthText(lengthOf(note.polygons[0][0]), mpp);
  const size = note.polygons.reduce((sum, rings) => sum + rings.reduce((s, ring, i) => s + (i ? -1 : 1) * Math.abs(area(ring)), 0), 0);
  return mpp ? `${formatNumber((size * mpp * mpp) / 1e6)} mm²` : `${formatNumber(size)} px²`;
}

export interface InsideFacts {
  patches: number[];
  /** The sum of the scores inside, and their mean. */
  sum: number;
  mean: number;
  /** Shares of the slide's positive and of its negative relevance that lie inside; null where it has none. */
  positive: number | null;
  negative: number | null;
  /** The share of positive relevance over the share of patches: 1 is as much as anywhere. */
  density: number | null;
}

/** The scores of patches that lie inside by half or more. */
export function factsInside(note: Annotation, evidence: Evidence): InsideFacts | null {
  if (!evidence.scores.x || (note.shape ?? "area") !== "area") return null;
  const patches = patchesIn(Layout.of(evidence.scores), note.polygons);
  const { values } = evidence;
  const [all, inside] = [parts(values, values.keys()), parts(values, patches)];
  const positive = all.positive > 0 ? inside.positive / all.positive : null;
  const share = patches.length / values.length;
  return {
    patches,
    sum: inside.positive + inside.negative,
    mean: patches.length ? (inside.positive + inside.negative) / patches.length : 0,
    positive,
    negative: all.negative < 0 ? inside.negative / all.negative : null,
    density: positive !== null && share > 0 ? positive / share : null,
  };
}

function parts(values: Float32Array, patches: Iterable<number>): { positive: number; negative: number } {
  const sums = { positive: 0, negative: 0 };
  for (const i of patches) if (Number.isFinite(values[i])) sums[values[i] > 0 ? "positive" : "negative"] += values[i];
  return sums;
}

/** The facts as lines for a panel. */
export function factLines(facts: InsideFacts, signed: boolean): string[] {
  const percent = (value: number | null) => (value === null ? "–" : formatPercent(value));
  const lines = [`${countPatches(facts.patches.length)}, mean score ${formatNumber(facts.mean)}, sum ${formatNumber(facts.sum)}`];
  if (!signed) return lines;
  lines.push(`Contains ${percent(facts.positive)} of the evidence for and ${percent(facts.negative)} of the evidence against`);
  if (facts.density !== null) lines.push(`Evidence for is ${formatNumber(facts.density)} times as dense as in the whole slide`);
  return lines;
}
