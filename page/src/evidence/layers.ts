/** Layers over the evidence: one interface for all, switched on and off in the Evidence panel. */

import type { Evidence } from "./evidence";
import type { Layout, Transform } from "./overlay";
import { decidingLayer, outlineLayer, pairsLayer, unsureLayer } from "./patch_layers";
import { conceptsLayer } from "./concepts";
import { insideLayer } from "./inside";
import type { ConceptList, InsideMaps, PairSets, SlideInfo } from "../server/api";
import type { NamesHost } from "../state/names";
import type { Display } from "../state/settings";

/** What is fetched for layers, by slide and run. */
export interface LayerData {
  pairs: PairSets | null;
  inside: InsideMaps | null;
  concepts: ConceptList | null;
  /** Of the concepts that were looked at, what goes through them. */
  concept: Map<number, Float32Array>;
}

/** What a layer is drawn on. */
export interface Scene {
  evidence: Evidence;
  layout: Layout;
  display: Display;
  data: LayerData;
  /** What is chosen of a layer with several things to show; empty is the first. */
  chosen: string;
  removed: Uint8Array | null;
  transform: Transform;
  /** Pixels of the canvas per CSS pixel. */
  unit: number;
}

export interface Layer {
  name: string;
  label: string;
  /** Below the marks, in the evidence's own opacity, or above it. */
  place: "evidence" | "marks";
  /** Whether there is something to draw for this evidence. */
  offers(evidence: Evidence): boolean;
  /** What must be fetched before it can be drawn: a name for it, null where all is there. */
  lacks?(data: LayerData, chosen: string): string | null;
  fetch?(slide: number, run: number, data: LayerData, chosen: string): Promise<void>;
  /** Chooses which of several things is shown. */
  chooser?(evidence: Evidence, data: LayerData, chosen: string, host: ChoiceHost): HTMLElement | null;
  draw?(context: CanvasRenderingContext2D, scene: Scene): void;
  /** The evidence with what stands in place of its scores. */
  replace?(evidence: Evidence, data: LayerData, chosen: string): Evidence;
  /** A line that says how it is to be read; `run` is the name of what is on show. */
  legend(evidence: Evidence, data: LayerData, chosen: string, run: string, display: Display): string;
  /** A few words on the map and in captions, where the layer stands in place of the evidence. */
  note?(evidence: Evidence, data: LayerData, chosen: string, run: string): string | null;
}

/** What a chooser is drawn from. */
export interface ChoiceHost extends NamesHost {
  readonly info: SlideInfo;
  choose(value: string): void;
  changed(): void;
}

export const LAYERS: Layer[] = [outlineLayer, unsureLayer, insideLayer, conceptsLayer, pairsLayer, decidingLayer];
export const INITIAL_LAYERS = ["outline", "inside"];

/** What can be drawn over a map; of one made without some patches the run knows nothing more. */
export function offered(evidence: Evidence): Layer[] {
  return evidence.without ? [outlineLayer] : LAYERS.filter((layer) => layer.offers(evidence));
}

/** A layer that is on, with what is chosen of it: "concepts:3". */
export interface Shown {
  layer: Layer;
  chosen: string;
}

export function layersOn(evidence: Evidence, on: readonly string[]): Shown[] {
  return offered(evidence).flatMap((layer) => {
    const entry = on.find((each) => nameOf(each) === layer.name);
    return entry === undefined ? [] : [{ layer, chosen: entry.slice(layer.name.length + 1) }];
  });
}

/** The layer's name in an entry of the state. */
export function nameOf(entry: string): string {
  return entry.split(":")[0];
}

/** What stands in place of the evidence, in words. */
export function layerNotes(evidence: Evidence, on: readonly string[], data: LayerData, run: string): string[] {
  return layersOn(evidence, on).flatMap(({ layer, chosen }) => layer.note?.(evidence, data, chosen, run) ?? []);
}

/** The evidence with what the layers that are on put in place of its scores. */
export function replaced(evidence: Evidence, on: readonly string[], data: LayerData): Evidence {
  return layersOn(evidence, on).reduce((shown, { layer, chosen }) => layer.replace?.(shown, data, chosen) ?? shown, evidence);
}

/** Fetches what layers need, once per run; answers go to the slide that they were asked for. */
export class LayerStore {
  private readonly dataByRun = new Map<number, LayerData>();
  private readonly requested = new Set<string>();

  constructor(
    private readonly info: () => SlideInfo,
    private readonly came: () => void,
    private readonly say: (text: string, problem?: boolean) => void,
  ) {}

  of(run: number): LayerData {
    let data = this.dataByRun.get(run);
    if (!data) this.dataByRun.set(run, (data = { pairs: null, inside: null, concepts: null, concept: new Map() }));
    return data;
  }

  /** Asks for what the layers that are on still lack. */
  want(layers: Shown[], run: number): void {
    for (const { layer, chosen } of layers) {
      const lacking = layer.lacks?.(this.of(run), chosen) ?? null;
      if (lacking === null || this.requested.has(`${lacking}-${run}`)) continue;
      this.requested.add(`${lacking}-${run}`);
      layer.fetch!(this.info().key, run, this.of(run), chosen).then(this.came, (error: Error) => this.say(error.message, true));
    }
  }
}

/** Draws the layers of one place that are on. */
export function drawLayers(context: CanvasRenderingContext2D, place: Layer["place"], on: Shown[], scene: Omit<Scene, "chosen">): void {
  for (const { layer, chosen } of on) {
    if (layer.place !== place || !layer.draw) continue;
    context.save();
    layer.draw(context, { ...scene, chosen });
    context.restore();
  }
}
