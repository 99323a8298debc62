/** What the server or the exported folder holds, and how it is fetched. */

import type { Rgb } from "../colours";
import type { CohortScales } from "./cohort";

export interface SlideRow extends Answer {
  key: number;
  id: string;
  case: string | null;
  verdict: string | null;
  verdict_method: string | null;
  verdict_target: string | null;
  verdict_orders: number | null;
  /** Cases of the run, where the verdict is on all its maps. */
  verdict_cases: number | null;
  verdict_sentence: string | null;
  n: number | null;
  image: boolean;
  error: string | null;
}

export interface Run {
  name: string;
  version: string;
  live: boolean;
  whatif: boolean;
  similar: boolean;
  runs: { name: string; model: string | null }[];
  slides: SlideRow[];
  /** Slides of the folder that no run explains; they can stand beside one that has evidence. */
  others: { key: number; id: string }[];
  /** Whether the photographed labels of the glass are served. */
  labels: boolean;
  /** Methods, and the parts of the explained output, as readers know them. */
  methods: Record<string, string>;
  parts: Record<string, string>;
}

export interface Audit {
  output: number;
  instances: number;
  class_token: number;
  bias: number;
  epsilon: number;
  other: number;
  /** What a bag of baseline patches would get; files of early versions have neither. */
  baseline?: number;
  /** What stopped at constants that depend on the input. */
  cut?: number;
}

export interface Column {
  name: string;
  /** The column that this one stands beside: its spread, standard error, or whether its sign is stable. */
  beside: string | null;
  kind: string;
  method: string;
  target: string;
  signed: boolean;
  output: number | null;
  audit: Audit | null;
  /** How the scores were made: rule, baseline and the like, as the explanation records them. */
  made: [string, string][];
  /** Sentences that belong beside the scores. */
  warnings: string[];
  ends: [string, string];
}

export interface MethodCertificate {
  method: string;
  target: string;
  verdict: string;
  /** Random orders that the verdict is held against; files of earlier versions do not say. */
  orders?: number;
  sentence: string;
  aupc: number;
  srg: number;
  flipped: number | null;
  random_aupc: number;
  random_interval: [number, number];
  audit: Audit | null;
  morf?: number[];
  lerf?: number[];
}

/** The smallest set of patches that decides. */
export interface Deciding {
  instances: number[] | null;
  sentence: string;
  n: number;
  target: string;
  kind: string;
  /** How many sets are as small, with this one, and whether they are all counted. */
  equal?: number;
  all_equal?: boolean;
  /** Why the set is not to be taken for what decides. */
  caution?: string | null;
}

export interface Certificate {
  n: number;
  output?: number;
  mode?: string;
  /** What is explained: a probability, a value or a risk. */
  explained?: string;
  methods: MethodCertificate[];
  /** The smallest set of patches that decides, by their rows. */
  deciding?: Deciding | null;
  random_band: { mean: number[]; low: number[]; high: number[] };
}

/** What a model says of a slide, and whether it is right. */
export interface Answer {
  label: string | null;
  predicted: string | null;
  correct: boolean | null;
  probability: number | null;
}

export interface EvidenceSet extends Answer {
  run: number;
  /** Whether there are maps inside patches, and pairs that act together. */
  inside: boolean;
  pairs: boolean;
  /** Whether `xmil insight` has split the scores among concepts. */
  concepts: boolean;
  n: number;
  edge: number | null;
  placed: boolean;
  columns: Column[];
  classes: string[] | null;
  logits: number[] | null;
  probabilities: number[] | null;
  value: number | null;
  noun: string;
  sides: [string, string];
  certificate: Certificate | null;
  /** The verdicts over the run, and their cases, by method, for one class of this slide; in words that on one method. */
  cohort?: { verdicts: Record<string, string | undefined>; cases: Record<string, number | undefined>; method: string; target: string; sentence: string } | null;
  /** Found by the model while the slide was looked at. */
  deciding?: Deciding;
}

export interface SlideInfo extends Answer {
  key: number;
  id: string;
  case: string | null;
  error: string | null;
  image: { width: number; height: number; tile_size: number; overlap: number; levels: number; finest?: number; bounds?: [number, number, number, number] } | null;
  mpp: number | null;
  magnification: number | null;
  /** Classes of annotations that readers have added, with their colours. */
  kinds?: Record<string, Rgb>;
  sets: EvidenceSet[];
}

export interface WhatIf {
  labels: string[];
  before: number[];
  after: number[];
  probabilities: boolean;
  sentence: string | null;
  changed: boolean;
  logits_before: number[];
  logits_after: number[];
  n_left: number;
  seconds: number;
  note?: string | null;
}

export interface Neighbour {
  index: number;
  similarity: number;
}

/** The scores of one run on one slide: places where known, and a typed array for each column. */
export interface Scores {
  set: EvidenceSet;
  x: Int32Array | null;
  y: Int32Array | null;
  columns: Float32Array[];
  /** The cohort's scale of each method, once it was asked for. */
  cohort?: CohortScales["scales"];
}

export const getRun = (): Promise<Run> => json("api/run.json");
export const getSlide = (key: number): Promise<SlideInfo> => json(`api/slides/${key}/slide.json`);
/** The slide of a row: its number may have changed since the list was read, its name has not. */
export async function getSlideNamed(row: Pick<SlideRow, "key" | "id">): Promise<SlideInfo> {
  const answer = await getSlide(row.key).catch((error: Error) => error);
  if (!(answer instanceof Error) && answer.id === row.id) return answer;
  const again = (await getRun()).slides.find((slide) => slide.id === row.id);
  if (!again || again.key === row.key) throw answer instanceof Error ? answer : new Error(`There is no slide ${row.id} in this run.`);
  Object.assign(row, again);
  return getSlide(again.key);
}

export const labelUrl = (key: number): string => `api/slides/${key}/label.jpeg`;
export const thumbnailUrl = (key: number): string => `api/slides/${key}/thumbnail.jpeg`;
export const patchUrl = (key: number, run: number, i: number): string => `api/slides/${key}/patch-${run}-${i}.jpeg`;
export const tileUrl = (key: number, level: number, column: number, row: number): string =>
  `tiles/${key}/${level}/${column}_${row}.jpeg`;

async function getScores(key: number, set: EvidenceSet): Promise<Scores> {
  const response = await requireOk(await request(`api/slides/${key}/evidence-${set.run}.bin`));
  return parseScores(await response.arrayBuffer(), set);
}

/** Puts a slide's scores of all runs into a map; what is wrong with the slide or with them is given back. */
export async function fetchScores(info: SlideInfo, into: Map<number, Scores>): Promise<string[]> {
  const answers = await Promise.allSettled(info.sets.map((set) => getScores(info.key, set)));
  for (const answer of answers) if (answer.status === "fulfilled") into.set(answer.value.set.run, answer.value);
  const missing = answers.flatMap((answer) => (answer.status === "rejected" ? [(answer.reason as Error).message] : []));
  return [...(info.error ? [info.error] : []), ...missing];
}

/** Cuts the buffer: x0, y0 (int32, where placed), then one float32 array for each column. */
export function parseScores(buffer: ArrayBuffer, set: EvidenceSet): Scores {
  const { n, placed, columns } = set;
  const expected = 4 * n * ((placed ? 2 : 0) + columns.length);
  if (buffer.byteLength !== expected) throw new Error(`The evidence is incomplete (${buffer.byteLength} of ${expected} bytes).`);
  const first = placed ? 2 : 0;
  return {
    set,
    x: placed ? new Int32Array(buffer, 0, n) : null,
    y: placed ? new Int32Array(buffer, 4 * n, n) : null,
    columns: columns.map((_, i) => new Float32Array(buffer, 4 * n * (first + i), n)),
  };
}

/** Two patches, by row, and what they say together beyond what they say one by one. */
export interface Pair {
  first: number;
  second: number;
  value: number;
  sure: boolean;
}

export interface PairSets {
  sets: { target: string; warnings: string[]; pairs: Pair[] }[];
}

export interface InsideMap {
  patch: number;
  box: [number, number, number, number];
  values: number[];
  /** The largest value without its sign: where its colours end. */
  limit: number;
  score: number;
  spatial: number;
  constant: number;
  other: number;
}

export interface InsideMaps {
  method: string;
  target: string;
  encoder: string;
  warnings: string[];
  limit: number;
  height: number;
  width: number;
  maps: InsideMap[];
}

/** A concept: its name where it has one, what of the output goes through it, and its strongest patch on the slide. */
export interface Concept {
  concept: number;
  name: string | null;
  sum: number;
  patch: number;
}

/** The concepts of a slide, strongest first; what goes through them and the rest add up to the scores. */
export interface ConceptList {
  method: string;
  target: string;
  concepts: Concept[];
  total: number;
  rest: number;
}

export const getConcepts = (key: number, run: number): Promise<ConceptList> => json(`api/slides/${key}/concepts-${run}.json`);

/** What of each patch's score goes through a concept. */
export async function getConcept(key: number, run: number, concept: number): Promise<Float32Array> {
  return new Float32Array(await (await requireOk(await request(`api/slides/${key}/concept-${run}-${concept}.bin`))).arrayBuffer());
}

/** Patches of other slides like one; no neighbours while the index is being made. */
export interface Alike {
  done: number;
  of: number;
  neighbours: { key: number; index: number; similarity: number }[] | null;
}

export const getAlike = (key: number, run: number, i: number): Promise<Alike> => json(`api/slides/${key}/alike-${run}-${i}.json`);

/** The patches that decide, searched for by the model. */
export const getDeciding = (key: number, run: number): Promise<Deciding> => json(`api/slides/${key}/deciding-${run}.json`);

export const getPairs = (key: number, run: number): Promise<PairSets> => json(`api/slides/${key}/pairs-${run}.json`);
export const getInside = (key: number, run: number): Promise<InsideMaps> => json(`api/slides/${key}/inside-${run}.json`);

export async function getSimilar(key: number, run: number, i: number): Promise<Neighbour[]> {
  return (await json<{ neighbours: Neighbour[] }>(`api/slides/${key}/similar-${run}-${i}.json`)).neighbours;
}

/** Asks for the prediction without, or with only, the instances in the ranges. */
export async function postWhatIf(key: number, run: number, keep: [number, number][]): Promise<WhatIf> {
  const response = await request(`api/slides/${key}/whatif`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ run, keep }),
  });
  return (await requireOk(response)).json() as Promise<WhatIf>;
}

/** Scores of the patches that were kept, in the order of the bag, explained without the others. */
export interface LeftScores {
  n_left: number;
  seconds: number;
  columns: { target: string; scores: number[]; output: number; audit: Audit | null; warnings: string[] }[];
}

/** Asks for an explanation of the patches in the ranges alone. */
export async function postExplain(key: number, question: { run: number; keep: [number, number][]; method: string; targets: string[] }, signal: AbortSignal): Promise<LeftScores> {
  const response = await request(`api/slides/${key}/explain`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question), signal });
  return (await requireOk(response)).json() as Promise<LeftScores>;
}

/** What a reader has drawn on a slide, as the server keeps it. */
export interface StoredNotes {
  revision: number;
  features: unknown[];
  origin: [number, number] | null;
  readers: string[];
  writable: boolean;
}

const notesUrl = (key: number, reader: string) => `api/slides/${key}/annotations-${encodeURIComponent(reader)}.json`;

export const getNotes = (key: number, reader: string): Promise<StoredNotes> => json(notesUrl(key, reader));

const OUTLIVING = 30_000; // bytes: browsers let requests of up to 64 kB in all outlive the page

/** Keeps annotations drawn over a revision, also where the page is left meanwhile; a conflict gives what is there now. */
export async function postNotes(key: number, reader: string, revision: number, document: unknown): Promise<{ revision: number; conflict: StoredNotes | null }> {
  const body = JSON.stringify({ revision, document });
  const response = await request(notesUrl(key, reader), { method: "POST", headers: { "Content-Type": "application/json" }, body, keepalive: new Blob([body]).size < OUTLIVING });
  if (response.status === 409) return { revision, conflict: (await response.json()) as StoredNotes };
  return { revision: ((await (await requireOk(response)).json()) as { revision: number }).revision, conflict: null };
}

/** Names of concepts by their numbers, and classes of annotations with their colours. */
export interface Names {
  classes: Record<string, Rgb>;
  concepts: Record<string, string>;
}

/** Names something for all readers of a run. */
export async function postNames(run: number, names: Partial<Names>): Promise<void> {
  await requireOk(await request(`api/names-${run}.json`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(names) }));
}

export async function json<T>(url: string): Promise<T> {
  const response = await requireOk(await request(url));
  try {
    return (await response.json()) as T;
  } catch {
    throw new Error(`${url} is not valid JSON.`);
  }
}

/** The server does not answer at all: it is worth asking again. */
export class UnreachableError extends Error {}

async function request(url: string, init?: RequestInit): Promise<Response> {
  try {
    return await fetch(url, init);
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    throw new UnreachableError("The server cannot be reached. Is xmil view still running?");
  }
}

async function requireOk(response: Response): Promise<Response> {
  if (response.ok) return response;
  let message: unknown;
  try {
    message = ((await response.json()) as { error?: unknown }).error;
  } catch {
    message = undefined;
  }
  throw new Error(typeof message === "string" ? message : `The server answered ${response.status} ${response.statusText}.`);
}
