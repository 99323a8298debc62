/** What the study's server tells a reader, and how answers reach it. */

import type { Feature } from "../annotations/annotation";
import { UnreachableError, type SlideInfo } from "../server/api";

export interface Question {
  id: string;
  text: string;
  kind: "choice" | "scale" | "yes-no" | "text";
  options: string[];
  steps: number;
  required: boolean;
}

export type Answers = Record<string, string | number>;

/** The case that is open; what is hidden is not in it. */
export interface StudyCase {
  number: number;
  stage: "before" | "after";
  practice: boolean;
  questions: Question[];
  regions: "off" | "optional" | "required";
  answers: Answers;
  drawn: Feature[];
  seconds: number;
  before: Answers | null;
  prediction: { name: string; probability: number | null } | null;
  info: SlideInfo;
}

export interface Line {
  number: number;
  practice: boolean;
  part: number;
  done: boolean;
  seconds: number | null;
}

export interface StudyState {
  title: string;
  version: string;
  reader: string | null;
  /** When the study was made: its name in this browser. */
  made: string;
  revision: number;
  /** The id of the last entry that the server has stored. */
  entry: string | null;
  worklist: Line[];
  parts: number;
  opens: string | null;
  case: StudyCase | null;
  /** The label of the case that was just finished, where the study shows it. */
  label?: string | null;
}

export interface Entry {
  id: string;
  number: number;
  stage: string;
  answers: Answers;
  regions: Feature[];
  seconds: number;
  commit: boolean;
}

/** Another window of this reader went on. */
export class StaleError extends Error {}

/** The server has read the request and refuses it: asking again would not help. */
export class RefusedError extends Error {}

export const getState = (): Promise<StudyState> => ask("api/state.json");
export const enter = (code: string): Promise<StudyState> => ask("api/enter", { code });
export const postEntry = (entry: Entry, revision: number, leaving = false): Promise<StudyState> => ask("api/answer", { ...entry, revision }, leaving);

async function ask(url: string, body?: unknown, keepalive = false): Promise<StudyState> {
  let response: Response;
  try {
    response = await fetch(url, body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), keepalive });
  } catch {
    throw new UnreachableError("The server cannot be reached.");
  }
  const content = (await response.json().catch(() => null)) as (StudyState & { error?: string }) | null; // null where the server ended while it answered
  if (response.ok && content) return content;
  const message = content?.error ?? `The server answered ${response.status}.`;
  if (response.ok || response.status >= 500) throw new UnreachableError(message);
  throw response.status === 409 ? new StaleError(message) : new RefusedError(message);
}
