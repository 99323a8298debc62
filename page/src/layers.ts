/** Layers over the evidence: one interface for all, switched on and off in the Evidence panel. */

import { getInside, getPairs, type InsideMaps, type PairSets, type SlideInfo } from "./api";
import type { Evidence } from "./evidence";
import { insideLayer } from "./layer_inside";
import { pairsLayer } from "./layer_pairs";
import { decidingLayer, outlineLayer, unsureLayer } from "./layer_patches";
import type { Layout, Transform } from "./overlay";
import type { Display } from "./settings";

/** What is fetched for layers, by slide and run. */
export interface LayerData {
  pairs: PairSets | null;
  inside: InsideMaps | null;
}

/** What a layer is drawn on. */
export interface Scene {
  evidence: Evidence;
  layout: Layout;
  display: Display;
  data: LayerData;
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
  /** What must be fetched first. */
  needs?: keyof LayerData;
  draw(context: CanvasRenderingContext2D, scene: Scene): void;
  /** A line that says how it is to be read. */
  legend(evidence: Evidence, data: LayerData): string;
}

export const LAYERS: Layer[] = [outlineLayer, unsureLayer, insideLayer, pairsLayer, decidingLayer];
export const INITIAL_LAYERS = ["outline", "inside"];

export function offered(evidence: Evidence): Layer[] {
  return LAYERS.filter((layer) => layer.offers(evidence));
}

/** Fetches what layers need, once per run; answers go to the slide that they were asked for. */
export class LayerStore {
  private readonly held = new Map<number, LayerData>();
  private readonly asked = new Set<string>();

  constructor(
    private readonly info: () => SlideInfo,
    private readonly came: () => void,
    private readonly say: (text: string, problem?: boolean) => void,
  ) {}

  of(run: number): LayerData {
    let data = this.held.get(run);
    if (!data) this.held.set(run, (data = { pairs: null, inside: null }));
    return data;
  }

  /** Asks for what the layers that are on still lack. */
  want(layers: Layer[], run: number): void {
    for (const { needs } of layers) {
      if (!needs || this.asked.has(`${needs}-${run}`)) continue;
      this.asked.add(`${needs}-${run}`);
      void this.fetch(needs, run);
    }
  }

  private async fetch(needs: keyof LayerData, run: number): Promise<void> {
    try {
      const { key } = this.info();
      if (needs === "pairs") this.of(run).pairs = await getPairs(key, run);
      else this.of(run).inside = await getInside(key, run);
      this.came();
    } catch (error) {
      this.say((error as Error).message, true);
    }
  }
}

/** Draws the layers of one place that are on. */
export function drawLayers(context: CanvasRenderingContext2D, place: Layer["place"], on: readonly string[], scene: Scene): void {
  for (const layer of offered(scene.evidence)) {
    if (layer.place !== place || !on.includes(layer.name)) continue;
    context.save();
    layer.draw(context, scene);
    context.restore();
  }
}
