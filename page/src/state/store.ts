/** The state of a slide's view: one typed object. Views read it, changes go through `set`, listeners draw. */

import type { Annotation } from "../annotations/annotation";
import type { Tool } from "../annotations/drawing";
import type { Point, Polygon } from "../annotations/geometry";
import type { Choice, LeftMaps } from "../evidence/evidence";
import { INITIAL_LAYERS } from "../evidence/layers";
import type { WhatIf } from "../server/api";
import type { PanelName } from "../slide/panels";
import { initialDisplay, type Display } from "./settings";

/** A patch of a run. */
export interface Place {
  run: number;
  index: number;
}

export interface Selection {
  polygons: Polygon[];
  patches: number[];
}

/** A question that was answered: what was done, what is gone since, what the model says. */
export interface Step {
  name: string;
  removed: Uint8Array;
  answer: WhatIf;
}

export interface SlideState {
  display: Display;
  /** What each pane shows: run, method, class, and what is taken off. */
  choices: Readonly<Partial<Record<"A" | "B", Choice>>>;
  /** The pane that panels and keys are about, by place. */
  active: number;
  panel: PanelName;
  tool: Tool;
  /** Names of the layers that are switched on. */
  layers: readonly string[];
  selection: Selection | null;
  /** By run: 1 for each patch that what-if has taken out. */
  removed: ReadonlyMap<number, Uint8Array>;
  /** By run: the what-if questions that led there. */
  steps: ReadonlyMap<number, readonly Step[]>;
  /** Maps of what is left, by the question they answer; shown where that question is the present one. */
  left: ReadonlyMap<string, LeftMaps>;
  showLeft: boolean;
  annotations: readonly Annotation[];
  /** What other readers have drawn, by their names; only to look at. */
  others: ReadonlyMap<string, readonly Annotation[]>;
  focused: string | null;
  draft: { points: Point[]; width: number; closed: boolean; text: string } | null;
  picked: Place | null;
  hovered: Place | null;
  similar: { run: number; indices: number[] } | null;
}

export function initialState(): SlideState {
  return {
    display: initialDisplay(),
    choices: {},
    active: 0,
    panel: "evidence",
    tool: "move",
    layers: INITIAL_LAYERS,
    selection: null,
    removed: new Map(),
    steps: new Map(),
    left: new Map(),
    showLeft: true,
    annotations: [],
    others: new Map(),
    focused: null,
    draft: null,
    picked: null,
    hovered: null,
    similar: null,
  };
}

/** Holds a state; listeners are told once for each change of what they listen to. */
export class Store<S extends object> {
  private readonly listeners: { keys: (keyof S)[]; draw: () => void }[] = [];

  constructor(private current: S) {}

  get state(): Readonly<S> {
    return this.current;
  }

  set(change: Partial<S>): void {
    const changed = (Object.keys(change) as (keyof S)[]).filter((key) => this.current[key] !== change[key]);
    if (!changed.length) return;
    this.current = { ...this.current, ...change };
    for (const { keys, draw } of this.listeners) if (keys.some((key) => changed.includes(key))) draw();
  }

  on(keys: (keyof S)[], draw: () => void): void {
    this.listeners.push({ keys, draw });
  }
}
