/** Files of what is shown: annotations and patches as GeoJSON, the view as a picture. */

import { GREY, PAPER, rgbTable } from "../colours";
import { download, fileName } from "../dom";
import { countPatches } from "../words";
import { asFeature, asGeoJson, originOf, patchFeature } from "../annotations/annotation";
import { rectangle, type Similarity } from "../annotations/geometry";
import type { Marks } from "../annotations/marks";
import type { Side } from "../compare/side";
import { lowerBound, percentile, rank, upperBound } from "../evidence/evidence";
import { paletteEntries, type Layout } from "../evidence/overlay";
import { beside, captionOf, choiceName, countRemoved, drawMarksAndScales, figure, GAP, unitOf, type Part } from "./figure";
import { withFacts } from "./png";
import { svgFigure } from "./svg";
import type { Run, SlideInfo } from "../server/api";
import { filterOf } from "../slide/image";
import type { Pane } from "../slide/pane";
import type { CompareLink, ViewState } from "../state/address";
import type { Display } from "../state/settings";

/** What is written, and what its files say of it. */
export interface ExportHost {
  readonly run: Run;
  readonly info: SlideInfo;
  readonly panes: readonly Pane[];
  readonly active: Pane | null;
  readonly display: Display;
  readonly marks: Marks;
  readonly removed: ReadonlyMap<number, Uint8Array>;
  readonly link: { state(): ViewState; write(): void };
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
    const colours = rgbTable(view.display.palette, evidence.signed);
    const entries = paletteEntries(evidence, view.display);
    const { choice, values } = evidence;
    const name = `${choice.method}:${choice.target}${choice.against === null ? "" : `-vs-${choice.against}`}${evidence.part ? `:${evidence.part}` : ""}`;
    const rows = view.visible(pane).filter((i) => inView(pane, layout, i));
    const orders = ranks(values, rows);
    const origin = originOf(view.info);
    const features = rows.map((i) =>
      patchFeature(rectangle(layout.x[i] - origin[0], layout.y[i] - origin[1], layout.edge, layout.edge), [...colours.slice(3 * entries[i], 3 * entries[i] + 3)], {
        [name]: values[i],
        rank: orders.get(i)![0],
        percentile: orders.get(i)![1],
      }),
    );
    download(asGeoJson(features, view.info.id, origin, view.run.version), `${fileName(view.info.id)}.${fileName(name)}.geojson`);
    view.say(`Exported ${countPatches(features.length)} in the view.`);
  }

  /** What the panes show, with slide, method, scale and colour bar; what is only being selected is left out. */
  picture(): void {
    const { view } = this;
    const whole = beside(view.panes.map((pane) => this.paneCanvas(pane)), GAP);
    void this.save(whole, 96 * (devicePixelRatio || 1), `${this.name()}.png`);
  }

  private async save(canvas: HTMLCanvasElement, dpi: number, name: string): Promise<void> {
    const { info, panes, run } = this.view;
    await savePng(canvas, dpi, name, { title: info.id, captions: panes.map(captionOf), version: run.version, facts: this.facts() });
  }

  /** A figure of each pane at a resolution, as PNG or SVG. */
  async figures(dpi: number, kind: "png" | "svg"): Promise<void> {
    for (const pane of this.view.panes) {
      const lines = captionOf(pane);
      const name = [this.name([pane]), kind === "png" ? `${dpi}dpi` : "", this.view.panes.length > 1 ? pane.letter : ""].filter(Boolean).join(".");
      if (kind === "svg") download(await svgFigure([{ pane, lines }], dpi, this.facts()), `${name}.svg`);
      else await this.save(await figure([{ pane, lines }], dpi), 96 * unitOf([pane], dpi), `${name}.png`);
    }
  }

  /** Every setting that the figure depends on, as JSON. */
  private facts(): string {
    const { view } = this;
    const removed = Object.fromEntries([...view.removed].map(([run, removedCounts]) => [run, countRemoved(removedCounts)]));
    const { panes, display, area, layers, left } = view.link.state();
    view.link.write();
    return JSON.stringify({ xmil: view.run.version, slide: view.info.id, runs: view.run.runs.map((run) => run.name), panes, display: { ...view.display, ...display }, area, layers, removed, explained: left ? "what is left" : "the whole slide", address: location.hash });
  }

  private paneCanvas(pane: Pane): HTMLCanvasElement {
    const { view } = this;
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width: pane.overlay.width, height: pane.overlay.height });
    const context = canvas.getContext("2d")!;
    context.fillStyle = PAPER;
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
    drawMarksAndScales(context, { pane, lines: captionOf(pane) }, unit);
    return canvas;
  }

  /** A file name that tells pictures of one slide apart. */
  private name(panes: readonly Pane[] = this.view.panes): string {
    const { view } = this;
    const shownMaps = panes.flatMap((pane) => pane.evidence ?? []);
    const removedCounts = shownMaps.map(({ choice }) => countRemoved(view.removed.get(choice.run)));
    const settings = [
      ...displayNames(view.display),
      Math.max(0, ...removedCounts) > 0 && `without-${[...new Set(removedCounts)].join("-")}`,
      panes.some((pane) => pane.evidence?.without) && "explained-again",
      ...panes.flatMap((pane) => pane.evidence?.part ?? []),
    ].filter((part): part is string => Boolean(part));
    return [view.info.id, ...shownMaps.map(choiceName), ...settings].map(fileName).join(".");
  }
}

/** Offers a picture as a PNG that says what it shows. */
async function savePng(canvas: HTMLCanvasElement, dpi: number, name: string, about: { title: string; captions: string[][]; version: string; facts: string }): Promise<void> {
  const { title, captions, version, facts } = about;
  const texts = { Title: title, Description: captions.map((lines) => lines.join("; ")).join(" | "), Software: `xmil ${version}`, xmil: facts };
  const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
  if (blob) download(await withFacts(blob, dpi, texts), name);
}

/** The settings that change what a map shows, for the name of a file. */
function displayNames({ shown, threshold, sign }: Display): string[] {
  const names = [!shown && "hidden", threshold > 0 && `above-${Number((100 * threshold).toFixed(1))}`, sign !== "both" && sign];
  return names.filter((name): name is string => Boolean(name));
}

/** Takes the colour out of what has been drawn. */
function withoutColour(context: CanvasRenderingContext2D): void {
  context.globalCompositeOperation = "saturation";
  context.fillStyle = GREY;
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
  return new Map(wanted.map((i) => [i, [n - upperBound(sorted, values[i]) + 1, (100 * lowerBound(sorted, values[i])) / Math.max(1, n - 1)]]));
}

// Two slides in one figure: a caption on each, how they are linked, and every setting in the metadata.

/** What the figure shows. */
export interface FigureHost {
  readonly run: Run;
  readonly sides: readonly [Side, Side];
  readonly linked: Similarity | null;
  linkText(): string | null;
  state(): CompareLink;
}

export class CompareFigures {
  constructor(private readonly view: FigureHost) {}

  async save(dpi: number, kind: "png" | "svg"): Promise<void> {
    const parts = this.parts();
    if (kind === "svg") return download(await svgFigure(parts, dpi, this.facts()), `${this.name()}.svg`);
    const resolution = 96 * unitOf(parts.map(({ pane }) => pane), dpi);
    const title = this.view.sides.map(({ info }) => info.id).join(" beside ");
    const about = { title, captions: parts.map(({ lines }) => lines), version: this.view.run.version, facts: this.facts() };
    await savePng(await figure(parts, dpi), resolution, `${this.name()}.${dpi}dpi.png`, about);
  }

  /** Each slide under its letter; the second says how it lies on the first. */
  private parts(): Part[] {
    const link = this.view.linkText() ?? "Not linked: each slide has its own position and zoom.";
    return this.view.sides.map(({ pane, letter }) => {
      const [slide, ...lines] = captionOf(pane);
      return { pane, lines: [`${letter}: ${slide}`, ...lines, ...(letter === "B" ? [link] : [])] };
    });
  }

  /** Every setting that the figure depends on, as JSON. */
  private facts(): string {
    const { run, sides, linked } = this.view;
    const { view, choices, points, second, turn } = this.view.state();
    const slides = sides.map(({ info, display, pane }, i) => ({ slide: info.id, shows: choices[i], display, area: pane.area(), points: points[i] }));
    return JSON.stringify({ xmil: run.version, runs: run.runs.map(({ name }) => name), slides, display: view.display, linked, second, turn, address: location.hash });
  }

  /** A name that tells figures of the same two slides apart. */
  private name(): string {
    const { sides, linked } = this.view;
    const { display } = sides[0];
    const each = sides.flatMap(({ info, pane }) => [info.id, ...(pane.evidence && display.shown ? [choiceName(pane.evidence)] : [])]);
    return [...each, ...displayNames(display), ...(linked ? ["linked"] : [])].map(fileName).join(".");
  }
}
