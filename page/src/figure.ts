/** A figure of a pane at any resolution: the slide from its tiles, evidence, layers and marks drawn anew. */

import { tileUrl } from "./api";
import { filterOf } from "./image_settings";
import { drawCaption, drawLegend } from "./legend";
import { limitOf, turn, windowOf, type Transform } from "./overlay";
import { tile } from "./patches";
import type { Pane } from "./pane";
import { fullLevel } from "./viewport";

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
  const seen = windowOf(context.canvas, t);
  const box = [(seen.left - t.x) / t.scale, (seen.top - t.y) / t.scale, (seen.right - t.x) / t.scale, (seen.bottom - t.y) / t.scale];
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
  const found: [number, number][] = [];
  for (let row = r0; row <= r1; row++) for (let column = c0; column <= c1; column++) found.push([column, row]);
  return found;
}

/** Slide and evidence without marks and scales: what a picture of points is in a drawing of lines. */
export async function plainFigure(pane: Pane, unit: number): Promise<HTMLCanvasElement> {
  const { display } = pane.host;
  const [width, height] = [Math.round(pane.stage.clientWidth * unit), Math.round(pane.stage.clientHeight * unit)];
  const [whole, context] = canvas(width, height);
  context.fillStyle = "#fff";
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
  const context = whole.getContext("2d")!;
  const { host } = pane;
  pane.markOn(context, { ...host.marks, selection: null, draft: null, hovered: null }, unit);
  const evidence = host.display.shown ? pane.evidence : null;
  drawLegend(context, host.info, pane.transform().scale, evidence, host.display, evidence ? limitOf(evidence, host.display) : 1, unit);
  drawCaption(context, lines, unit);
  return whole;
}

/** Pictures in a row, on white. */
export function beside(parts: readonly HTMLCanvasElement[], gap: number): HTMLCanvasElement {
  const space = Math.round(gap);
  const [whole, context] = canvas(parts.reduce((sum, part) => sum + part.width, 0) + space * (parts.length - 1), Math.max(...parts.map((part) => part.height)));
  context.fillStyle = "#fff";
  context.fillRect(0, 0, whole.width, whole.height);
  let x = 0;
  for (const part of parts) {
    context.drawImage(part, x, 0);
    x += part.width + space;
  }
  return whole;
}
