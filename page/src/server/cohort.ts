/** What is known over all slides: scales of colours, strongest patches, small maps. */

import { json } from "./api";

/** Where the colours of each method end over all slides, and its lowest and highest score. */
export interface CohortScales {
  slides: number;
  scales: Record<string, CohortScale>;
}

export interface CohortScale {
  low: number;
  high: number;
  lowest: number;
  highest: number;
}

/** A patch on the wall of the cohort. */
export interface WallPatch {
  key: number;
  index: number;
  score: number;
}

export interface Wall {
  method: string;
  target: string;
  slides: number;
  groups: { label: string | null; correct: boolean | null; supporting: WallPatch[]; refuting: WallPatch[] }[];
}

/** The signed methods and targets of a run; walls and small pictures are asked for by their number. */
export interface ColumnName {
  method: string;
  target: string;
  /** What the lowest and the highest colour mean. */
  ends: [string, string];
}
export const getColumns = async (run: number): Promise<ColumnName[]> => (await json<{ columns: ColumnName[] }>(`api/columns-${run}.json`)).columns;
const scales = new Map<number, Promise<CohortScales>>();
/** The scales of a run, read once: the server goes over all slides for them. */
export function getScales(run: number): Promise<CohortScales> {
  let answer = scales.get(run);
  if (!answer) scales.set(run, (answer = json(`api/scales-${run}.json`)));
  answer.catch(() => scales.delete(run)); // asked again the next time
  return answer;
}
export const getWall = (run: number, column: number): Promise<Wall> => json(`api/wall-${run}-${column}.json`);
export const smallUrl = (key: number, run: number, column: number): string => `api/slides/${key}/small-${run}-${column}.png`;

/** A reader's regions on a slide against one map; `chance` is the share of the patches inside. */
export interface AgreementRow {
  slide_id: string;
  case_id: string;
  reader: string;
  class: string;
  method: string;
  target: string;
  patches: number;
  marked: number;
  auroc: number;
  dice: number;
  pointing: number;
  chance: number;
}

export interface Agreement {
  rows: AgreementRow[];
  summary: { class: string; method: string; target: string; measure: string; mean: number; low: number | null; high: number | null; chance: number; p: number | null; n: number; slides: number; cases: number }[];
  left_out: string[];
}

export const getAgreement = (run: number): Promise<Agreement> => json(`api/agreement-${run}.json`);
