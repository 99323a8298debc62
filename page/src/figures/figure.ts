/** A figure of a pane at any resolution: the slide from its tiles, evidence, layers and marks drawn anew. */

import { PAPER } from "../colours";
import { countPatches, formatNumber } from "../words";
import { verdictText } from "../evidence/certificate";
import { cohortRange, rangeOf, type Evidence } from "../evidence/evidence";
import { drawCaption, drawLegend, describeEvidence, scaleWarning } from "../evidence/legend";
import { turn, windowOf, type Transform } from "../evidence/overlay";
import { tile } from "../evidence/patches";
import { tileUrl } from "../server/api";
import { filterOf, imageText } from "../slide/image";
import type { Pane } from "../slide/pane";
import { fullLevel } from "../slide/viewport";

const MOST_TILES = 600;
const MOST_PIXELS = 120_000_000;

function canvas(width: number, height: number): [HTMLCanvasElement, CanvasRenderingContext2D] {
  const made = document.createElement("canvas");
  Object.assign(made, { width, height });
  return [made, made.getContext("2d")!];
}

/** A pane and what its caption says. */
export interface Part {
  pane: Pane;
  lines: string[];
}

export const GAP = 8; // CSS pixels between two panes

/** Pixels of the figure per CSS pixel of the stages: screens are taken to have 96 dots per inch. */
export function unitOf(panes: readonly Pane[], dpi: number): number {
  const pixels = panes.reduce((sum, { stage }) => sum + stage.clientWidth * stage.clientHeight, 0);
  return Math.min(dpi / 96, Math.sqrt(MOST_PIXELS / Math.max(1, pixels)));
}

/** The slide's image, grey and adjusted as on the screen. */
async function drawImage(context: CanvasRenderingContext2D, pane: Pane, t: Transform): Promise<void> {
  const { info, display } = pane.host;
  if (!info.image) return;
  const full = fullLevel(info.image);
  const visible = windowOf(context.canvas, t);
  const box = [(visible.left - t.x) / t.scale, (visible.top - t.y) / t.scale, (visible.right - t.x) / t.scale, (visible.bottom - t.y) / t.scale];
  let level = Math.max(0, Math.min(info.image.finest ?? full, Math.ceil(full + Math.log2(t.scale))));
  while (level > 0 && tilesOf(pane, box, level).length > MOST_TILES) level--;
  const [image, on] = canvas(context.canvas.width, context.canvas.height);
  turn(on, t);
  const span = info.image.tile_size * 2 ** (full - level) * t.scale;
  const factor = span / info.image.tile_size;
  await Promise.all(
    tilesOf(pane, box, level).map(async ([column, row]) => {
      const picture = await tile(tileUrl(info.key, level, column, row)).catch(() => null);
      if (picture) on.drawImage(picture, t.x + column * span, t.y + row * span, picture.width * factor, picture.height * factor);
    }),
  );
  context.filter = filterOf(display, pane.grey) || "none";
  context.drawImage(image, 0, 0);
  context.filter = "none";
}

function tilesOf(pane: Pane, [left, top, right, bottom]: number[], level: number): [number, number][] {
  const image = pane.host.info.image!;
  const span = image.tile_size * 2 ** (fullLevel(image) - level);
  const range = (from: number, to: number, length: number) => [Math.max(0, Math.floor(from / span)), Math.min(Math.ceil(length / span) - 1, Math.floor(to / span))];
  const [[c0, c1], [r0, r1]] = [range(left, right, image.width), range(top, bottom, image.height)];
  const tiles: [number, number][] = [];
  for (let row = r0; row <= r1; row++) for (let column = c0; column <= c1; column++) tiles.push([column, row]);
  return tiles;
}

/** Slide and evidence without marks and scales: what a picture of points is in a drawing of lines. */
export async function plainFigure(pane: Pane, unit: number): Promise<HTMLCanvasElement> {
  const { display } = pane.host;
  const [width, height] = [Math.round(pane.stage.clientWidth * unit), Math.round(pane.stage.clientHeight * unit)];
  const [whole, context] = canvas(width, height);
  context.fillStyle = PAPER;
  context.fillRect(0, 0, width, height);
  const t = pane.transform(unit);
  await drawImage(context, pane, t);
  const [evidence, on] = canvas(width, height);
  pane.evidenceOn(on, unit);
  context.globalAlpha = display.shown ? display.opacity : 0;
  context.drawImage(evidence, 0, 0);
  context.globalAlpha = 1;
  return whole;
}

/** The whole figure: layers, annotations, scales and captions on top; panes stand side by side. */
export async function figure(parts: readonly Part[], dpi: number): Promise<HTMLCanvasElement> {
  const unit = unitOf(parts.map(({ pane }) => pane), dpi);
  return beside(await Promise.all(parts.map((part) => paneFigure(part, unit))), GAP * unit);
}

async function paneFigure({ pane, lines }: Part, unit: number): Promise<HTMLCanvasElement> {
  const whole = await plainFigure(pane, unit);
  drawMarksAndScales(whole.getContext("2d")!, { pane, lines }, unit);
  return whole;
}

/** Annotations, layers, scales and the caption; what is only being selected is left out. */
export function drawMarksAndScales(context: CanvasRenderingContext2D, { pane, lines }: Part, unit: number): void {
  const { host } = pane;
  pane.markOn(context, { ...host.marks, selection: null, draft: null, hovered: null }, unit);
  const evidence = host.display.shown ? pane.evidence : null;
  drawLegend(context, host.info, pane.transform().scale, evidence, host.display, unit);
  drawCaption(context, lines, unit);
}

/** Pictures in a row, on white. */
export function beside(parts: readonly HTMLCanvasElement[], gap: number): HTMLCanvasElement {
  const space = Math.round(gap);
  const [whole, context] = canvas(parts.reduce((sum, part) => sum + part.width, 0) + space * (parts.length - 1), Math.max(...parts.map((part) => part.height)));
  context.fillStyle = PAPER;
  context.fillRect(0, 0, whole.width, whole.height);
  let x = 0;
  for (const part of parts) {
    context.drawImage(part, x, 0);
    x += part.width + space;
  }
  return whole;
}

// What a picture of a pane says of itself: slide, run, map, and everything that changes what is seen.

/** The slide, the run where there are several, and what is shown. */
export function captionOf(pane: Pane): string[] {
  const { info, run, display } = pane.host;
  const evidence = display.shown ? pane.evidence : null;
  const image = imageText(display);
  if (!evidence) return [info.id, ...(image ? [image] : [])];
  const name = run.runs.length > 1 ? run.runs[evidence.choice.run]?.name : null;
  const settings = settingsOf(pane, evidence);
  return [name ? `${info.id} · ${name}` : info.id, describeEvidence(evidence), verdictText(evidence), ...pane.notes(), ...(settings ? [settings] : []), ...(image ? [image] : []), ...evidence.column.warnings];
}

/** What of the scores is not drawn: threshold, signs, and patches removed by a what-if. */
function settingsOf(pane: Pane, evidence: Evidence): string {
  const { display, removed } = pane.host;
  const range = rangeOf(evidence, display);
  const removedCount = countRemoved(removed.get(evidence.choice.run));
  return [
    display.threshold > 0 && `scores weaker than ${formatNumber(range.base + display.threshold * (range.limit - range.base))} hidden`,
    display.sign !== "both" && evidence.signed && `only ${display.sign} scores`,
    display.clip === "cohort" && cohortRange(evidence) !== null && "scale of the cohort",
    display.shared && evidence.partner && "one scale for both",
    scaleWarning(evidence, range),
    removedCount > 0 && `${countPatches(removedCount)} removed (what if)`,
  ]
    .filter(Boolean)
    .join(" · ");
}

export function countRemoved(removed: Uint8Array | undefined): number {
  return removed?.reduce((sum, one) => sum + one, 0) ?? 0;
}

/** Method, class and what is taken off, for the name of a file. */
export function choiceName({ choice: c }: Evidence): string {
  const minus = c.minus ? `-minus-${c.minus.run === c.run ? "" : `run${c.minus.run + 1}-`}${c.minus.method}-${c.minus.target}` : "";
  return `${c.method}-${c.target}${c.against === null ? "" : `-vs-${c.against}`}${minus}`;
}
