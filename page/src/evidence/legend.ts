/** The colour bar with numbers, the scale bar and the magnification, as elements and for pictures. */

import { css, INK, LAST, PLATE, rgbTable, white } from "../colours";
import { el } from "../dom";
import { formatNumber, methodName } from "../words";
import { FAR, rangeOf, timesBeyond, type Evidence, type Range } from "./evidence";
import type { SlideInfo } from "../server/api";
import type { Display } from "../state/settings";

/** What the two ends of the colours mean. */
export function colourEnds(evidence: Evidence): [string, string] {
  const { choice, column } = evidence;
  if (choice.minus) return ["more in the other", "more in this"];
  return choice.against === null ? column.ends : [`for ${choice.against}`, `for ${choice.target}`];
}

/** Numbers at the start, middle and end of the bar, with a sign where scores lie beyond that end. */
export function colourTicks(evidence: Evidence, { base, limit }: Range): [string, string, string] {
  const low = evidence.signed ? -limit : base;
  const slack = 1e-3 * (limit - low);
  const below = evidence.lowest < low - slack ? "≤ " : "";
  const above = evidence.highest > limit + slack ? "≥ " : "";
  return [below + formatNumber(low), formatNumber((low + limit) / 2), above + formatNumber(limit)];
}

/** A warning where the strongest scores lie far beyond the scale: weak ones then look as strong; null else. */
export function scaleWarning(evidence: Evidence, range: Range): string | null {
  const times = timesBeyond(evidence, range);
  return times > FAR ? `Strongest score: ${formatNumber(times, 2)} times this scale` : null;
}

/** What a choice shows, in a line. */
export function describeEvidence(evidence: Evidence): string {
  const { target, against, minus } = evidence.choice;
  const method = methodName(evidence.choice.method);
  if (minus) return `${method}: evidence for ${target}, minus ${methodName(minus.method)} for ${minus.target}${minus.run === evidence.choice.run ? "" : ` of run ${minus.run + 1}`} (each in units of its scale)`;
  if (!evidence.signed) return `${method}: weight of each patch, for no class`;
  return `${method}: evidence for ${target}${against === null ? "" : ` compared with ${against}`}`;
}

/** The sentences that an explanation carries, for a panel. */
export function warningsOf({ column }: Evidence): HTMLElement | null {
  if (!column.warnings.length) return null;
  return el("ul", { class: "warnings", ariaLabel: "Warnings" }, ...column.warnings.map((text) => el("li", {}, text)));
}

/** The colour bar in words. */
export function barLabel(evidence: Evidence, range: Range): string {
  const [[from, to], [low, , high]] = [colourEnds(evidence), colourTicks(evidence, range)];
  return [`Colours: from ${low} (${from}) to ${high} (${to})`, scaleWarning(evidence, range)].filter(Boolean).join(". ");
}

export function colourBar(evidence: Evidence, display: Display, range: Range): Node[] {
  const warning = scaleWarning(evidence, range);
  return [
    ...plainBar(display.palette, evidence.signed, colourEnds(evidence), colourTicks(evidence, range)),
    ...(warning ? [el("div", { class: "bar-warning" }, `⚠ ${warning}`)] : []),
  ];
}

/** Colours with what they mean above and numbers below. */
export function plainBar(palette: string, signed: boolean, [from, to]: [string, string], ticks: string[]): Node[] {
  const colours = rgbTable(palette, signed);
  const stops = Array.from({ length: 17 }, (_, i) => css(colours, (i * LAST) / 16)).join(", ");
  return [
    el("div", { class: "bar-ends" }, el("span", {}, from), el("span", {}, to)),
    el("div", { class: "bar-colours", style: { background: `linear-gradient(to right, ${stops})` } }),
    el("div", { class: "bar-numbers" }, ...ticks.map((text) => el("span", {}, text))),
  ];
}

/** A round length that is 60 to 150 screen pixels long: its pixels and its text. */
export function scaleLength(info: SlideInfo, scale: number): { width: number; text: string } {
  const unit = info.mpp ? scale / info.mpp : scale; // screen pixels per micron, or per level-0 pixel
  const longest = 150 / unit;
  const power = 10 ** Math.floor(Math.log10(longest));
  const length = [5, 2, 1].map((step) => step * power).find((step) => step <= longest) ?? power;
  const text = !info.mpp ? `${length} px` : length >= 1000 ? `${length / 1000} mm` : `${Number(length.toPrecision(3))} µm`;
  return { width: length * unit, text };
}

export function scaleBar(info: SlideInfo, scale: number): HTMLElement {
  const { width, text } = scaleLength(info, scale);
  return el("div", { class: "scale-bar", role: "img", ariaLabel: `Scale: ${text}`, style: { width: `${width}px` } }, text);
}

/** The objective that would show the slide at this size. */
export function magnification(info: SlideInfo, scale: number): HTMLElement {
  const objective = objectiveOf(info);
  const text = objective === null ? `${formatNumber(100 * scale, 2)} %` : `${formatNumber(objective * scale, 2)}×`;
  return el("div", { class: "magnification", title: "Magnification" }, text);
}

/** The objective of level 0: the scanner's, or 10 µm per micron. */
export function objectiveOf(info: SlideInfo): number | null {
  return info.magnification ?? (info.mpp ? 10 / info.mpp : null);
}

/** Draws the scale bar and the colour bar into a picture of the view. */
export function drawLegend(context: CanvasRenderingContext2D, info: SlideInfo, scale: number, evidence: Evidence | null, display: Display, unit: number): void {
  const { height, width } = context.canvas;
  const bar = scaleLength(info, scale);
  plate(context, 10 * unit, height - 44 * unit, bar.width * unit + 20 * unit, 34 * unit);
  context.fillStyle = INK;
  context.font = `${12 * unit}px system-ui, sans-serif`;
  context.fillText(bar.text, 20 * unit, height - 27 * unit);
  context.fillRect(20 * unit, height - 20 * unit, bar.width * unit, 3 * unit);
  if (evidence) drawColours(context, evidence, display, width - 250 * unit, height - 66 * unit, unit);
}

/** Writes what a picture shows into its upper left corner. */
export function drawCaption(context: CanvasRenderingContext2D, lines: string[], unit: number): void {
  context.font = `600 ${13 * unit}px system-ui, sans-serif`;
  const widest = Math.max(...lines.map((line) => context.measureText(line).width));
  const room = context.canvas.width - 40 * unit;
  plate(context, 10 * unit, 10 * unit, Math.min(widest, room) + 20 * unit, (12 + 18 * lines.length) * unit);
  context.fillStyle = INK;
  lines.forEach((line, i) => context.fillText(line, 20 * unit, (29 + 18 * i) * unit, room));
}

function drawColours(context: CanvasRenderingContext2D, evidence: Evidence, display: Display, x: number, y: number, unit: number): void {
  plate(context, x, y, 240 * unit, 56 * unit);
  const colours = rgbTable(display.palette, evidence.signed);
  for (let i = 0; i < 220; i++) {
    context.fillStyle = css(colours, (i * LAST) / 219);
    context.fillRect(x + (10 + i) * unit, y + 22 * unit, unit + 1, 12 * unit);
  }
  context.fillStyle = INK;
  const row = (texts: string[], top: number) =>
    texts.forEach((text, i) => {
      const share = texts.length < 2 ? 0 : i / (texts.length - 1);
      context.fillText(text, x + (10 + 220 * share) * unit - context.measureText(text).width * share, y + top * unit);
    });
  row(colourEnds(evidence), 16);
  row(colourTicks(evidence, rangeOf(evidence, display)), 48);
}

function plate(context: CanvasRenderingContext2D, x: number, y: number, width: number, height: number): void {
  context.fillStyle = white(PLATE);
  context.fillRect(x, y, width, height);
}
