/** Files of what is shown: annotations and patches as GeoJSON, the view as a picture. */

import { asFeature, asGeoJson, originOf, patchFeature } from "./annotations";
import { download, fileName } from "./dom";
import { captionOf, choiceName, countRemoved } from "./caption";
import { counted, percentile, rank } from "./evidence";
import { rectangle } from "./geometry";
import { beside, figure, GAP, unitOf } from "./figure";
import { filterOf } from "./image_settings";
import { drawCaption, drawLegend } from "./legend";
import { indices, Layout, limitOf } from "./overlay";
import { table } from "./palette";
import type { Pane } from "./pane";
import { withFacts } from "./png";
import type { Run, SlideInfo } from "./api";
import type { ViewState } from "./address";
import type { Marks } from "./marks";
import type { Display } from "./settings";
import { svgFigure } from "./svg_figure";

/** What is written, and what its files say of it. */
export interface ExportHost {
  readonly run: Run;
  readonly info: SlideInfo;
  readonly panes: readonly Pane[];
  readonly active: Pane | null;
  readonly display: Display;
  readonly marks: Marks;
  readonly removed: ReadonlyMap<number, Uint8Array>;
  readonly link: { state(): ViewState; keep(): void };
  visible(pane: Pane): number[];
  say(text: string, problem?: boolean): void;
}

export class Exports {
  constructor(private readonly view: ExportHost) {}

  annotations(): void {
    const { info, marks, run } = this.view;
    const origin = originOf(info);
    const features = marks.annotations.map((note) => asFeature(note, origin));
    download(asGeoJson(features, info.id, origin, run.version), `${fileName(info.id)}.annotations.geojson`);
  }

  /** The patches that are shown and lie in the view, with score, rank and percentile. */
  patches(): void {
    const { view } = this;
    const pane = view.active;
    const evidence = pane?.evidence;
    const layout = pane?.layout();
    if (!pane || !evidence || !layout) return;
    const colours = table(view.display.palette, evidence.signed);
    const entries = indices(evidence, view.display);
    const { choice, values } = evidence;
    const name = `${choice.method}:${choice.target}${choice.against === null ? "" : `-vs-${choice.against}`}`;
    const found = view.visible(pane).filter((i) => inView(pane, layout, i));
    const orders = ranks(values, found);
    const origin = originOf(view.info);
    const features = found.map((i) =>
      patchFeature(rectangle(layout.x[i] - origin[0], layout.y[i] - origin[1], layout.edge, layout.edge), [...colours.slice(3 * entries[i], 3 * entries[i] + 3)], {
        [name]: values[i],
        rank: orders.get(i)![0],
        percentile: orders.get(i)![1],
      }),
    );
    download(asGeoJson(features, view.info.id, origin, view.run.version), `${fileName(view.info.id)}.${fileName(name)}.geojson`);
    view.say(`${counted(features.length, "patch", "patches")} in the view written.`);
  }

  /** What the panes show, with slide, method, scale and colour bar; what is only being selected is left out. */
  picture(): void {
    const { view } = this;
    const whole = beside(view.panes.map((pane) => this.paneCanvas(pane)), GAP);
    this.save(whole, 96 * (devicePixelRatio || 1), `${this.name()}.png`);
  }

  private save(canvas: HTMLCanvasElement, dpi: number, name: string): void {
    const texts = { Title: this.view.info.id, Description: this.view.panes.map((pane) => captionOf(pane).join("; ")).join(" | "), Software: `xmil ${this.view.run.version}`, xmil: this.facts() };
    canvas.toBlob((blob) => blob && void withFacts(blob, dpi, texts).then((file) => download(file, name)), "image/png");
  }

  /** A figure of each pane at a resolution, as PNG or SVG. */
  async figures(dpi: number, kind: "png" | "svg"): Promise<void> {
    for (const pane of this.view.panes) {
      const lines = captionOf(pane);
      const name = [this.name([pane]), kind === "png" ? `${dpi}dpi` : "", this.view.panes.length > 1 ? pane.letter : ""].filter(Boolean).join(".");
      if (kind === "svg") download(await svgFigure([{ pane, lines }], dpi, this.facts()), `${name}.svg`);
      else this.save(await figure([{ pane, lines }], dpi), 96 * unitOf([pane], dpi), `${name}.png`);
    }
  }

  /** Every setting that the figure depends on, as JSON. */
  private facts(): string {
    const { view } = this;
    const removed = Object.fromEntries([...view.removed].map(([run, gone]) => [run, countRemoved(gone)]));
    const { panes, display, area, layers, left } = view.link.state();
    view.link.keep();
    return JSON.stringify({ xmil: view.run.version, slide: view.info.id, runs: view.run.runs.map((run) => run.name), panes, display: { ...view.display, ...display }, area, layers, removed, explained: left ? "what is left" : "the whole slide", address: location.hash });
  }

  private paneCanvas(pane: Pane): HTMLCanvasElement {
    const { view } = this;
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width: pane.overlay.width, height: pane.overlay.height });
    const context = canvas.getContext("2d")!;
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    const image = pane.viewer.drawer.canvas as HTMLCanvasElement;
    context.filter = filterOf(view.display, false) || "none";
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    context.filter = "none";
    if (pane.grey) withoutColour(context);
    context.globalAlpha = view.display.shown ? view.display.opacity : 0;
    context.drawImage(pane.overlay, 0, 0);
    context.globalAlpha = 1;
    const unit = devicePixelRatio || 1;
    pane.markOn(context, { ...view.marks, selection: null, draft: null, hovered: null }, unit);
    const evidence = view.display.shown ? pane.evidence : null;
    drawLegend(context, view.info, pane.transform().scale, evidence, view.display, evidence ? limitOf(evidence, view.display) : 1, unit);
    drawCaption(context, captionOf(pane), unit);
    return canvas;
  }

  /** A file name that tells pictures of one slide apart. */
  private name(panes: readonly Pane[] = this.view.panes): string {
    const { view } = this;
    const shownMaps = panes.flatMap((pane) => pane.evidence ?? []);
    const { threshold, sign, shown: seen } = view.display;
    const gone = shownMaps.map(({ choice }) => countRemoved(view.removed.get(choice.run)));
    const settings = [
      !seen && "hidden",
      threshold > 0 && `above-${Number((100 * threshold).toFixed(1))}`,
      sign !== "both" && sign,
      Math.max(0, ...gone) > 0 && `without-${[...new Set(gone)].join("-")}`,
      panes.some((pane) => pane.evidence?.without) && "explained-again",
      ...panes.flatMap((pane) => pane.notes().flatMap((note) => /concept \d+$/.exec(note)?.[0].replace(" ", "-") ?? [])),
    ].filter((part): part is string => Boolean(part));
    return [view.info.id, ...shownMaps.map(choiceName), ...settings].map(fileName).join(".");
  }
}

/** Takes the colour out of what has been drawn. */
function withoutColour(context: CanvasRenderingContext2D): void {
  context.globalCompositeOperation = "saturation";
  context.fillStyle = "#808080";
  context.fillRect(0, 0, context.canvas.width, context.canvas.height);
  context.globalCompositeOperation = "source-over";
}

function inView(pane: Pane, layout: Layout, i: number): boolean {
  const t = pane.transform();
  const size = layout.edge * t.scale;
  const [x, y] = [t.x + layout.x[i] * t.scale, t.y + layout.y[i] * t.scale];
  return x + size > 0 && y + size > 0 && x < pane.stage.clientWidth && y < pane.stage.clientHeight;
}

/** Rank and percentile of many instances with one sort. */
function ranks(values: Float32Array, wanted: number[]): Map<number, [number, number]> {
  if (wanted.length < 50) return new Map(wanted.map((i) => [i, [rank(values, i), percentile(values, i)]]));
  const sorted = Float32Array.from(values).sort();
  const n = sorted.length;
  const below = (value: number, orEqual: boolean) => {
    let [low, high] = [0, n];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < value || (orEqual && sorted[middle] === value)) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return new Map(wanted.map((i) => [i, [n - below(values[i], true) + 1, (100 * below(values[i], false)) / Math.max(1, n - 1)]]));
}
