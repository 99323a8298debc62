/** What is shown of the scores: a column or a difference of two, its scale, ranks and histogram. */

import { type Column, type Scores } from "../server/api";
import { getScales } from "../server/cohort";
import type { Display } from "../state/settings";

/** The choice of a pane: a run, a method, an explained class, and a class it is set against. */
export interface Choice {
  run: number;
  method: string;
  target: string;
  against: string | null;
  /** Another map that is taken off: another method, class or run on the same patches. */
  minus: Minus | null;
  /** Whether the reader chose the class: only then it goes along to a slide that is predicted otherwise. */
  classChosen?: boolean;
}

export type Minus = Pick<Choice, "run" | "method" | "target">;

/** One score for each instance as a pane shows it. */
export interface Evidence extends Extent {
  choice: Choice;
  scores: Scores;
  values: Float32Array;
  signed: boolean;
  column: Column;
  /** How many patches were taken out before it was explained; 0 is the run's own map. */
  without: number;
  /** What stands in place of the scores: a concept's part of them. */
  part?: string;
  /** What the other pane or slide shows: the two can have one scale. */
  partner?: Evidence | null;
}

/** Maps made without some patches, by target; patches that were taken out have no score. */
export interface LeftMaps {
  without: number;
  targets: ReadonlyMap<string, { values: Float32Array; output: number; audit: Column["audit"]; warnings: string[] }>;
}

/** The evidence as it is without the patches that were taken out, where that map was made. */
export function withoutPatches(evidence: Evidence, maps: LeftMaps | undefined): Evidence {
  const { target, against, minus } = evidence.choice;
  const [first, second] = [maps?.targets.get(target), maps?.targets.get(against ?? target)];
  if (!maps || !first || !second || minus || evidence.column.kind !== "scores") return evidence;
  const values = against === null ? first.values : difference(first.values, second.values);
  const column = { ...evidence.column, output: first.output, audit: first.audit, warnings: first.warnings };
  return { ...evidence, values, column, without: maps.without, ...scaleOf(values, evidence.signed) };
}

export function methodsOf(scores: Scores): string[] {
  return [...new Set(scores.set.columns.filter((column) => column.kind !== "stable").map((column) => column.method))];
}

export function targetsOf(scores: Scores, method: string): string[] {
  return scores.set.columns.filter((column) => column.method === method).map((column) => column.target);
}

/** The nearest choice that the scores hold: method and target are kept where they exist. */
export function nearestChoice(wanted: Partial<Choice>, scores: Scores, preferred: string | null, all: ReadonlyMap<number, Scores>): Choice | null {
  const methods = methodsOf(scores);
  if (!methods.length) return null;
  const method = wanted.method !== undefined && methods.includes(wanted.method) ? wanted.method : methods[0];
  const targets = targetsOf(scores, method);
  const target = [wanted.target, preferred, targets[0]].find((t) => t != null && targets.includes(t)) as string;
  const against = wanted.against != null && wanted.against !== target && targets.includes(wanted.against);
  const chosen = wanted.classChosen && target === wanted.target ? { classChosen: true } : {};
  const choice = { run: scores.set.run, method, target, against: against ? wanted.against! : null, minus: null, ...chosen };
  const { minus } = wanted;
  const fits = minus && !against && subtrahends(choice, scores, all).some((each) => same(each, minus));
  return { ...choice, minus: fits ? minus : null };
}

/** What a second pane starts with: the same of another run, else another method, else another class. */
export function nextChoice(evidence: Evidence | null, all: ReadonlyMap<number, Scores>): Partial<Choice> {
  if (!evidence) return {};
  const other = [...all.keys()].find((run) => run !== evidence.choice.run);
  if (other !== undefined) return { ...evidence.choice, run: other };
  const { columns } = evidence.scores.set;
  const { method, target } = evidence.choice;
  const column = columns.find((c) => c.method !== method && c.target === target) ?? columns.find((c) => c.method !== method || c.target !== target);
  return column ? { ...evidence.choice, method: column.method, target: column.target } : evidence.choice;
}

const same = (a: Minus, b: Minus): boolean => a.run === b.run && a.method === b.method && a.target === b.target;

/** What can be taken off a choice: every other column over the same patches. */
export function subtrahends(choice: Choice, scores: Scores, all: ReadonlyMap<number, Scores>): Minus[] {
  const alike = [...all.values()].filter((other) => other === scores || samePlaces(other, scores));
  const columns = alike.flatMap(({ set }) => set.columns.filter((c) => c.kind === "scores").map((c) => ({ run: set.run, method: c.method, target: c.target })));
  return columns.filter((column) => !same(column, choice));
}

function samePlaces(a: Scores, b: Scores): boolean {
  if (a.set.n !== b.set.n || !a.x || !b.x) return false;
  return a.x.every((x, i) => x === b.x![i]) && a.y!.every((y, i) => y === b.y![i]);
}

/** The scores of a choice; a contrast is the difference of two columns, of two maps each in units of its scale. */
export function computeEvidence(scores: Scores, choice: Choice, all: ReadonlyMap<number, Scores>): Evidence {
  const { minus } = choice;
  if (minus) {
    const [a, b] = [computeEvidence(scores, { ...choice, minus: null }, all), computeEvidence(all.get(minus.run)!, { ...minus, against: null, minus: null }, all)];
    const values = difference(inScale(a), inScale(b));
    return { ...a, choice, values, signed: true, column: { ...a.column, audit: null, warnings: [...a.column.warnings, ...b.column.warnings] }, ...scaleOf(values, true) };
  }
  const { columns } = scores.set;
  const find = (target: string) => columns.findIndex((c) => c.method === choice.method && c.target === target);
  const first = find(choice.target);
  const second = choice.against === null ? -1 : find(choice.against);
  const values = second < 0 ? scores.columns[first] : difference(scores.columns[first], scores.columns[second]);
  const signed = columns[first].signed || second >= 0;
  return { choice, scores, values, signed, column: columns[first], without: 0, ...scaleOf(values, signed) };
}

/** Scores over the range of their colours, so that maps of different units can be compared. */
function inScale({ values, smallest, whisker }: Evidence): Float32Array {
  return values.map((value) => (value - smallest) / (whisker - smallest || 1));
}

function difference(a: Float32Array, b: Float32Array): Float32Array {
  const result = new Float32Array(a.length);
  for (let i = 0; i < a.length; i++) result[i] = a[i] - b[i];
  return result;
}

const FLAT = 0.1;

/** Whether a method gives every class the same scores, as attention does: there is no class to set against. */
export function sameForAll(scores: Scores, method: string): boolean {
  const places = scores.set.columns.flatMap((column, i) => (column.method === method ? [i] : []));
  if (places.length < 2 || scores.set.columns[places[0]].signed) return places.length > 0 && !scores.set.columns[places[0]].signed;
  const first = scores.columns[places[0]];
  return places.every((i) => scores.columns[i].every((value, k) => value === first[k]));
}

/** Where colours start and end; `base` is zero for signed scores, whose colours reach as far to both sides. */
export interface Range {
  base: number;
  limit: number;
}

/** Times the end of the scale: from there on weak scores look like the strongest, and the page says so. */
export const FAR = 5;

/** The scale of the whole cohort for this method; null where the scores are not the method's own, or it has not come yet. */
export function cohortRange({ choice, column, scores, signed }: Evidence): Range | null {
  const scale = choice.against === null && !choice.minus && column.kind === "scores" ? scores.cohort?.[choice.method] : undefined;
  return scale ? { base: signed ? 0 : scale.low, limit: scale.high } : null;
}

function ownRange(evidence: Evidence, { clip }: Display): Range {
  const { smallest: base, largest, whisker } = evidence;
  if (clip === "cohort") return cohortRange(evidence) ?? { base, limit: whisker };
  if (clip === "auto") return { base, limit: whisker };
  return { base, limit: clip === "max" ? largest : base + Math.max(clip, 1e-3) * (largest - base) };
}

/** Where the colours of evidence start and end, alone or together with its partner. */
export function rangeOf(evidence: Evidence, display: Display): Range {
  const own = ownRange(evidence, display);
  const { partner } = evidence;
  if (!display.shared || !partner || partner.signed !== evidence.signed) return own;
  const other = ownRange(partner, display);
  return { base: Math.min(own.base, other.base), limit: Math.max(own.limit, other.limit) };
}

/** How many times as far as the end of the scale the strongest score lies. */
export function timesBeyond({ signed, lowest, highest }: Evidence, { base, limit }: Range): number {
  const farthest = signed ? Math.max(Math.abs(lowest), Math.abs(highest)) : highest - base;
  return limit > base ? farthest / (limit - base) : 1;
}

/** Tells the evidence of two panes of each other's. */
export function pairUp([a = null, b = null]: (Evidence | null)[]): void {
  if (a) a.partner = b;
  if (b) b.partner = a;
}

/** Puts the cohort's scales beside scores that lack them; true where there are new ones. */
export async function fetchCohort(all: ReadonlyMap<number, Scores>): Promise<boolean> {
  const lacking = [...all.values()].filter((scores) => !scores.cohort);
  await Promise.all(lacking.map(async (scores) => (scores.cohort = (await getScales(scores.set.run)).scales)));
  return lacking.length > 0;
}

interface Extent {
  lowest: number;
  highest: number;
  /** The score farthest from where the colours start. */
  largest: number;
  /** Where the colours start: zero for signed scores, else the lower whisker. */
  smallest: number;
  /** Where colours saturate by default: the last score within 1.5 IQR of the quartiles, as a box plot draws. */
  whisker: number;
}

function scaleOf(values: Float32Array, signed: boolean): Extent {
  const sorted = Float32Array.from(values.filter(Number.isFinite)).sort();
  if (!sorted.length) return { lowest: 0, highest: 0, largest: 1, smallest: 0, whisker: 1 };
  const [first, last] = [sorted[0], sorted[sorted.length - 1]];
  const ends = { lowest: first, highest: last };
  let [low, high] = whiskers(sorted);
  if (!(low < high)) [low, high] = [first, last];
  if (!signed && last > 0 && first >= 0 && last - low < FLAT * last) low = 0; // hardly different: they must look so
  if (!signed) return { ...ends, largest: last > low ? last : low + 1, smallest: low, whisker: high > low ? high : low + 1 };
  const largest = Math.max(Math.abs(first), Math.abs(last)) || 1;
  return { ...ends, largest, smallest: 0, whisker: Math.max(Math.abs(low), Math.abs(high)) || largest };
}

function whiskers(sorted: Float32Array): [number, number] {
  const [q1, q3] = [quantile(sorted, 0.25), quantile(sorted, 0.75)];
  const reach = 1.5 * (q3 - q1);
  const low = sorted[lowerBound(sorted, q1 - reach)];
  const high = sorted[Math.max(0, upperBound(sorted, q3 + reach) - 1)];
  return [Math.min(low, q1), Math.max(high, q3)];
}

export function quantile(sorted: Float32Array, q: number): number {
  const place = q * (sorted.length - 1);
  const i = Math.floor(place);
  const next = Math.min(i + 1, sorted.length - 1);
  return sorted[i] + (place - i) * (sorted[next] - sorted[i]);
}

export function lowerBound(sorted: Float32Array, value: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return Math.min(low, sorted.length - 1);
}

export function upperBound(sorted: Float32Array, value: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The place of an instance from the highest score (1); equal scores share the better one. */
export function rank(values: Float32Array, i: number): number {
  let higher = 0;
  for (const value of values) if (value > values[i]) higher++;
  return higher + 1;
}

/** The share of the other instances with a lower score, in percent. */
export function percentile(values: Float32Array, i: number): number {
  let lower = 0;
  for (const value of values) if (value < values[i]) lower++;
  return values.length < 2 ? 100 : (100 * lower) / (values.length - 1);
}

/** The instances with the highest scores times `sign`, highest first; with a sign only those that have it. */
export function top(values: Float32Array, count: number, sign: 1 | -1, signed: boolean): number[] {
  const best: number[] = [];
  for (let i = 0; i < values.length; i++) {
    const value = sign * values[i];
    if (Number.isNaN(value) || (signed && value <= 0)) continue;
    if (best.length === count && value <= sign * values[best[count - 1]]) continue;
    let place = best.length;
    while (place > 0 && value > sign * values[best[place - 1]]) place--;
    best.splice(place, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}

/** How many scores fall into each of `bins` equal parts from `low` to `high`. */
export function histogram(values: Float32Array, low: number, high: number, bins: number): Uint32Array {
  const counts = new Uint32Array(bins);
  const factor = bins / (high - low || 1);
  for (const value of values) {
    if (Number.isFinite(value)) counts[Math.max(0, Math.min(bins - 1, Math.floor((value - low) * factor)))]++;
  }
  return counts;
}
