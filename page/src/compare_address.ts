/** The address of two slides side by side: how each is shown, where, and the places that link them. */

import { choiceIn, fromQuery, toQuery, type ViewState } from "./address";
import type { Choice } from "./evidence";
import type { Point } from "./geometry";
import type { Bounds } from "./viewport";

export interface CompareAddress {
  slides: [string, string];
  state: CompareLink | null;
}

export interface CompareLink {
  view: ViewState;
  /** Run, method and class of each; nothing of a slide without evidence. */
  choices: [Partial<Choice>, Partial<Choice>];
  /** Of each slide, up to two places. */
  points: [Point[], Point[]];
  /** What the second shows, where the two are not linked. */
  second: Bounds | null;
  /** Degrees by which the second is turned, where the two are not linked. */
  turn: number;
}

export function compareHash([first, second]: [string, string], state: CompareLink | null): string {
  const query = new URLSearchParams(state ? toQuery({ ...state.view, panes: state.choices }) : "");
  if (state?.points.some((each) => each.length)) query.set("points", state.points.map((each) => each.flat().map((v) => Math.round(v * 10) / 10).join(",")).join(";"));
  if (state?.second) query.set("second", [state.second.x, state.second.y, state.second.width, state.second.height].map(Math.round).join(","));
  if (state?.turn) query.set("second.turn", String(state.turn));
  return `#/compare/${encodeURIComponent(first)}/${encodeURIComponent(second)}${query.size ? `?${query.toString()}` : ""}`;
}

export function parseCompare(hash: string): CompareAddress | null {
  const found = /^#\/compare\/([^/?]+)\/([^/?]+)(?:\?(.*))?$/.exec(hash);
  if (!found) return null;
  try {
    const slides: [string, string] = [decodeURIComponent(found[1]), decodeURIComponent(found[2])];
    return { slides, state: found[3] ? linkIn(new URLSearchParams(found[3])) : null };
  } catch {
    return null; // not an address that was made here
  }
}

function linkIn(query: URLSearchParams): CompareLink {
  const [first, second] = (query.get("points") ?? "").split(";");
  const turn = Number(query.get("second.turn"));
  return { view: fromQuery(query), choices: [choiceIn(query, "a"), choiceIn(query, "b")], points: [pointsIn(first), pointsIn(second)], second: areaIn(query.get("second")), turn: Number.isFinite(turn) ? turn : 0 };
}

function pointsIn(text: string | undefined): Point[] {
  const values = (text ?? "").split(",").filter(Boolean).map(Number);
  if (values.length % 2 || values.length > 4 || !values.every(Number.isFinite)) return [];
  return values.flatMap((x, i): Point[] => (i % 2 ? [] : [[x, values[i + 1]]]));
}

function areaIn(text: string | null): Bounds | null {
  const [x, y, width, height] = (text ?? "").split(",").map(Number);
  return [x, y, width, height].every(Number.isFinite) && width > 0 && height > 0 ? { x, y, width, height } : null;
}
