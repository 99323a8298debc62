/** The address is the state: which slide is shown, and how. A link shows the same to whoever opens it. */

import type { Point } from "../annotations/geometry";
import { PALETTES } from "../colours";
import type { Choice, Minus } from "../evidence/evidence";
import { INITIAL_LAYERS, LAYERS, nameOf } from "../evidence/layers";
import type { Bounds } from "../slide/viewport";
import { CLIP_NAMES, type Display } from "./settings";

/** What of a slide's view a link carries. */
export interface ViewState {
  panes: Partial<Choice>[];
  display: Partial<Display>;
  area: Bounds | null;
  panel: string | null;
  picked: number | null;
  /** The layers that are on; null is what a slide starts with. */
  layers: readonly string[] | null;
  /** The patches that are selected, by row. */
  selected?: number[] | null;
  /** By run, the patches that a what-if has taken out. */
  removed?: [number, number[]][];
  /** Whether the maps are of what is left. */
  left?: boolean;
}

export interface Address {
  slide: string;
  state: ViewState | null;
}

const IMAGE = ["brightness", "contrast", "gamma"] as const;

const SIGNS = ["both", "positive", "negative"];

/** The address of a slide, with the state where there is one. */
export function slideHash(slide: string, state: ViewState | null = null): string {
  const query = state ? toQuery(state) : "";
  return `#/slide/${encodeURIComponent(slide)}${query && `?${query}`}`;
}

/** What an address names; null for the list of slides. */
export function parseHash(hash: string): Address | null {
  const match = /^#\/slide\/([^?]+)(?:\?(.*))?$/.exec(hash);
  if (!match) return null;
  try {
    return { slide: decodeURIComponent(match[1]), state: match[2] ? fromQuery(new URLSearchParams(match[2])) : null };
  } catch {
    return null; // not an address that was made here
  }
}

/** The state for another slide: how it is shown goes along, places on this slide do not. */
export function carryOver(state: ViewState): ViewState {
  return { ...state, area: null, picked: null, selected: null, removed: [], left: false };
}

export function toQuery(state: ViewState): string {
  const query = new URLSearchParams();
  state.panes.forEach((pane, i) => {
    const letter = "ab"[i];
    if (pane.run) query.set(`${letter}.run`, String(pane.run));
    if (pane.method !== undefined) query.set(`${letter}.method`, pane.method);
    if (pane.target !== undefined) query.set(`${letter}.class`, pane.target);
    if (pane.against != null) query.set(`${letter}.against`, pane.against);
    if (pane.minus) query.set(`${letter}.minus`, JSON.stringify([pane.minus.run, pane.minus.method, pane.minus.target]));
  });
  const { threshold, clip, shared, sign, shown, palette, opacity, fade, grey } = state.display;
  if (threshold) query.set("threshold", String(rounded(threshold)));
  if (clip !== undefined && clip !== "auto") query.set("clip", typeof clip === "number" ? String(rounded(clip)) : clip);
  if (shared) query.set("scale", "shared");
  if (palette !== undefined && opacity !== undefined) query.set("look", [palette, rounded(opacity), fade ? "fade" : "full", grey ? "grey" : "stained"].join(","));
  if (sign && sign !== "both") query.set("sign", sign);
  if (shown === false) query.set("hidden", "1");
  for (const name of IMAGE) if ((state.display[name] ?? 1) !== 1) query.set(name, String(rounded(state.display[name]!)));
  if (state.display.rotation) query.set("turn", String(state.display.rotation));
  if (state.area) query.set("area", [state.area.x, state.area.y, state.area.width, state.area.height].map(Math.round).join(","));
  if (state.panel && state.panel !== "evidence") query.set("panel", state.panel);
  if (state.layers && state.layers.join() !== INITIAL_LAYERS.join()) query.set("layers", state.layers.join(","));
  if (state.picked !== null) query.set("patch", String(state.picked));
  const selected = state.selected?.length ? rowsText(state.selected) : null;
  if (selected !== null) query.set("selected", selected);
  for (const [run, rows] of state.removed ?? []) {
    const text = rowsText(rows);
    if (rows.length && text !== null) query.append("without", `${run}~${text}`);
  }
  if (state.left && query.has("without")) query.set("explained", "left");
  return query.toString();
}

export function fromQuery(query: URLSearchParams): ViewState {
  const panes = ["a", "b"].filter((letter) => query.has(`${letter}.method`)).map((letter) => choiceIn(query, letter));
  const sign = query.get("sign");
  const area = (query.get("area") ?? "").split(",").map(Number);
  return {
    panes,
    display: {
      threshold: share(query.get("threshold")) ?? 0,
      clip: clipIn(query.get("clip")),
      shared: query.get("scale") === "shared",
      ...lookIn(query.get("look")),
      sign: (SIGNS.includes(sign ?? "") ? sign : "both") as Display["sign"],
      shown: query.get("hidden") !== "1",
      ...Object.fromEntries(IMAGE.map((name) => [name, Math.min(4, Math.max(0.25, Number(query.get(name) ?? 1) || 1))])),
      rotation: (whole(query.get("turn")) ?? 0) % 360,
    },
    area: area.length === 4 && area.every(Number.isFinite) && area[2] > 0 && area[3] > 0 ? { x: area[0], y: area[1], width: area[2], height: area[3] } : null,
    panel: query.get("panel"),
    picked: whole(query.get("patch")),
    layers: query.has("layers") ? query.get("layers")!.split(",").filter((entry) => LAYERS.some((layer) => layer.name === nameOf(entry))) : null,
    selected: rowsIn(query.get("selected") ?? ""),
    removed: query.getAll("without").flatMap(removedIn),
    left: query.get("explained") === "left",
  };
}

export function choiceIn(query: URLSearchParams, letter: string): Partial<Choice> {
  const get = (name: string) => query.get(`${letter}.${name}`) ?? undefined;
  return { run: whole(get("run") ?? null) ?? 0, method: get("method"), target: get("class"), against: get("against") ?? null, minus: minusIn(get("minus")) };
}

function removedIn(text: string): [number, number[]][] {
  const [, run, rows] = /^(\d{1,3})~(.*)$/.exec(text) ?? [];
  const indices = rowsIn(rows ?? "");
  return indices?.length ? [[Number(run), indices]] : [];
}

function minusIn(text: string | undefined): Minus | null {
  try {
    const [run, method, target] = JSON.parse(text ?? "null") as unknown[];
    return Number.isInteger(run) && typeof method === "string" && typeof target === "string" ? { run: run as number, method, target } : null;
  } catch {
    return null;
  }
}

function clipIn(text: string | null): Display["clip"] {
  return CLIP_NAMES.find((name) => name === text) ?? share(text) ?? "auto";
}

/** Palette, opacity, fading and grey tissue, all four or, where a link names none, the reader's own. */
function lookIn(text: string | null): Partial<Display> {
  const [id, opacity, fade, grey] = (text ?? "").split(",");
  const palette = PALETTES.find((each) => each.id === id)?.id;
  const [strength, known] = [share(opacity || null), ["fade", "full"].includes(fade) && ["grey", "stained"].includes(grey)];
  return palette !== undefined && strength !== null && known ? { palette, opacity: strength, fade: fade === "fade", grey: grey === "grey" } : {};
}

function share(text: string | null): number | null {
  const value = text === null ? NaN : Number(text);
  return Number.isFinite(value) ? Math.max(0, Math.min(1, value)) : null;
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
}

function rounded(value: number): number {
  return Math.round(value * 1e4) / 1e4;
}

// The address of two slides side by side: how each is shown, where, and the places that link them.

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
  const match = /^#\/compare\/([^/?]+)\/([^/?]+)(?:\?(.*))?$/.exec(hash);
  if (!match) return null;
  try {
    const slides: [string, string] = [decodeURIComponent(match[1]), decodeURIComponent(match[2])];
    return { slides, state: match[3] ? linkIn(new URLSearchParams(match[3])) : null };
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

// Sets of patches as ranges: for questions to the server, and in few letters for links.

const MOST = 6000; // letters that a link may spend on a set of patches

/** Gaps and lengths in turn, in base 36; null where a link would become too long. */
export function rowsText(rows: Iterable<number>): string | null {
  const parts: number[] = [];
  let end = 0;
  for (const row of [...rows].sort((a, b) => a - b)) {
    if (parts.length && row === end) parts[parts.length - 1]++;
    else if (row >= end) parts.push(row - end, 1);
    end = row + 1;
  }
  const text = parts.map((part) => part.toString(36)).join(".");
  return text.length > MOST ? null : text;
}

/** The patches of a text; null where it was not made here or has more than a slide can. */
export function rowsIn(text: string, most = 10_000_000): number[] | null {
  if (!/^[0-9a-z]{1,6}(\.[0-9a-z]{1,6})*$/.test(text)) return null;
  const parts = text.split(".").map((part) => parseInt(part, 36));
  const rows: number[] = [];
  let at = 0;
  for (let i = 0; i + 1 < parts.length; i += 2) {
    at += parts[i];
    if (at + parts[i + 1] > most) return null;
    for (let k = 0; k < parts[i + 1]; k++) rows.push(at++);
  }
  return parts.length % 2 ? null : rows;
}

/** The patches that are marked. */
export function rowsOf(mask: Uint8Array): number[] {
  const rows: number[] = [];
  mask.forEach((one, i) => one && rows.push(i));
  return rows;
}
