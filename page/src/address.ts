/** The address is the state: which slide is shown, and how. A link shows the same to whoever opens it. */

import type { Choice, Minus } from "./evidence";
import { INITIAL_LAYERS, LAYERS, nameOf } from "./layers";
import { rowsIn, rowsText } from "./row_ranges";
import type { Display } from "./settings";
import type { Bounds } from "./viewport";

/** What of a slide's view a link carries. */
export interface ViewState {
  panes: Partial<Choice>[];
  display: Partial<Pick<Display, "threshold" | "clip" | "sign" | "shown" | ImageSetting>>;
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
type ImageSetting = (typeof IMAGE)[number] | "rotation";

const SIGNS = ["both", "positive", "negative"];

/** The address of a slide, with the state where there is one. */
export function slideHash(slide: string, state: ViewState | null = null): string {
  const query = state ? toQuery(state) : "";
  return `#/slide/${encodeURIComponent(slide)}${query && `?${query}`}`;
}

/** What an address names; null for the list of slides. */
export function parseHash(hash: string): Address | null {
  const found = /^#\/slide\/([^?]+)(?:\?(.*))?$/.exec(hash);
  if (!found) return null;
  try {
    return { slide: decodeURIComponent(found[1]), state: found[2] ? fromQuery(new URLSearchParams(found[2])) : null };
  } catch {
    return null; // not an address that was made here
  }
}

/** The state for another slide: how it is shown goes along, places on this slide do not. */
export function carried(state: ViewState): ViewState {
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
  const { threshold, clip, sign, shown } = state.display;
  if (threshold) query.set("threshold", String(rounded(threshold)));
  if (clip != null) query.set("clip", String(rounded(clip)));
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
      clip: share(query.get("clip")),
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
  const found = rowsIn(rows ?? "");
  return found?.length ? [[Number(run), found]] : [];
}

function minusIn(text: string | undefined): Minus | null {
  try {
    const [run, method, target] = JSON.parse(text ?? "null") as unknown[];
    return Number.isInteger(run) && typeof method === "string" && typeof target === "string" ? { run: run as number, method, target } : null;
  } catch {
    return null;
  }
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
