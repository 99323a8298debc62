/** Pictures of patches, put together from the slide's tiles or asked from the server. */

import { css, rgbTable } from "../colours";
import { button, el, put } from "../dom";
import { formatDistinct, formatNumber, WORDS } from "../words";
import { top, type Evidence } from "./evidence";
import { colourEnds } from "./legend";
import { paletteEntries, Layout } from "./overlay";
import { patchUrl, tileUrl, type SlideInfo } from "../server/api";
import { fullLevel } from "../slide/viewport";
import type { Display } from "../state/settings";

const MOST_TILES = 300;
const tiles = new Map<string, Promise<HTMLImageElement>>();

export function tile(url: string): Promise<HTMLImageElement> {
  let image = tiles.get(url);
  if (!image) {
    image = new Promise((resolve, reject) => {
      const node = new Image();
      node.onload = () => resolve(node);
      node.onerror = () => reject(new Error(`${url} could not be read.`));
      node.src = url;
    });
    image.catch(() => tiles.delete(url));
    tiles.set(url, image);
    if (tiles.size > MOST_TILES) tiles.delete(tiles.keys().next().value!);
  }
  return image;
}

/** A square canvas of `size` pixels that fills with a patch as its tiles arrive. */
export function patchCanvas(info: SlideInfo, x: number, y: number, edge: number, size: number): HTMLCanvasElement {
  const canvas = el("canvas", { width: size, height: size });
  const { image } = info;
  if (!image) return canvas;
  const full = fullLevel(image);
  const level = Math.max(0, Math.min(image.finest ?? full, Math.ceil(full - Math.log2(Math.max(1, edge / size)))));
  const shrink = 2 ** (level - full);
  const length = image.tile_size;
  const context = canvas.getContext("2d")!;
  const zoom = size / (edge * shrink);
  const last = [Math.ceil(Math.ceil(image.width * shrink) / length) - 1, Math.ceil(Math.ceil(image.height * shrink) / length) - 1];
  const from = [x, y].map((v) => Math.max(0, Math.floor((v * shrink) / length)));
  const to = [x, y].map((v, axis) => Math.min(last[axis], Math.floor(((v + edge) * shrink - 1e-6) / length)));
  for (let row = from[1]; row <= to[1]; row++) {
    for (let column = from[0]; column <= to[0]; column++) {
      const place = (picture: HTMLImageElement) =>
        context.drawImage(picture, (column * length - x * shrink) * zoom, (row * length - y * shrink) * zoom, picture.width * zoom, picture.height * zoom);
      tile(tileUrl(info.key, level, column, row)).then(place, () => canvas.classList.add("missing"));
    }
  }
  return canvas;
}

/** A patch at full resolution: from the server where it is live, else from the tiles. */
export function patchPicture(info: SlideInfo, evidence: Evidence, index: number, live: boolean): HTMLElement {
  const { set } = evidence.scores;
  if (live && info.image) {
    const image = el("img", { alt: `Patch ${index}`, class: "patch-picture" });
    image.onerror = () => image.replaceWith(el("div", { class: "no-picture" }, "This patch could not be read."));
    image.src = patchUrl(info.key, set.run, index);
    return image;
  }
  const layout = evidence.scores.x ? Layout.of(evidence.scores) : null;
  if (!info.image || !layout) return el("div", { class: "no-picture" }, "No image of this patch.");
  const canvas = patchCanvas(info, layout.x[index], layout.y[index], layout.edge, Math.min(512, layout.edge));
  canvas.className = "patch-picture";
  return canvas;
}

/** A small picture that jumps to its patch. */
export function patchButton(info: SlideInfo, evidence: Evidence, index: number, display: Display, caption: string, jump: (index: number) => void): HTMLElement {
  const layout = evidence.scores.x ? Layout.of(evidence.scores) : null;
  const [entry] = paletteEntries(evidence, { ...display, threshold: 0, sign: "both" }, Float32Array.of(evidence.values[index]));
  const colour = css(rgbTable(display.palette, evidence.signed), entry);
  const picture =
    info.image && layout
      ? patchCanvas(info, layout.x[index], layout.y[index], layout.edge, 96)
      : el("span", { class: "swatch", style: { background: colour } }, String(index));
  const label = `Patch ${index}, ${caption}`;
  return el(
    "button",
    { type: "button", class: "patch-button", title: label, ariaLabel: label, data: { index }, style: { borderColor: colour }, onclick: () => jump(index) },
    picture,
    el("span", { class: "caption" }, caption),
  );
}

/** The instances that say most for and against. */
export function galleries(info: SlideInfo, evidence: Evidence, display: Display, jump: (index: number) => void): HTMLElement[] {
  const { signed, values } = evidence;
  const [against, supporting] = colourEnds(evidence);
  const kinds: [string, 1 | -1][] = signed ? [[`Strongest: ${supporting}`, 1], [`Strongest: ${against}`, -1]] : [["Highest scores", 1]];
  return kinds.map(([title, sign]) => {
    const strongest = top(values, signed ? 8 : 12, sign, signed);
    const captions = formatDistinct(strongest.map((i) => values[i]));
    const buttons = strongest.map((i, k) => patchButton(info, evidence, i, display, captions[k], jump));
    const content = buttons.length ? el("div", { class: "gallery" }, ...buttons) : el("p", { class: "muted" }, WORDS.none);
    return el("section", { class: "block" }, el("h2", {}, title), content);
  });
}

// Scores without places: a list from the highest to the lowest.

const PAGE = 200;

export class ScoreList {
  readonly element = el("div", { class: "score-list" });
  private length = PAGE;

  constructor(private readonly pick: (index: number) => void) {}

  refresh(evidence: Evidence, display: Display, picked: number): void {
    const { values } = evidence;
    const entries = paletteEntries(evidence, display);
    const colours = rgbTable(display.palette, evidence.signed);
    const order = Array.from(values.keys())
      .filter((i) => entries[i] >= 0)
      .sort((a, b) => values[b] - values[a]);
    const rows = order.slice(0, this.length).map((i, place) => {
      const width = (100 * Math.abs(values[i])) / evidence.largest;
      const fill = el("span", { class: "fill", style: { width: `${width}%`, background: css(colours, entries[i]) } });
      const open = button(`Patch ${i}`, () => this.pick(i), { class: "link" });
      return el("tr", { class: i === picked ? "current" : "", data: { index: i } }, el("td", { class: "number" }, String(place + 1)), el("td", {}, open), el("td", { class: "number" }, formatNumber(values[i])), el("td", { class: "wide" }, el("span", { class: "track" }, fill)));
    });
    const head = ["Rank", "Patch", "Score", ""].map((text) => el("th", { scope: "col", class: text === "Rank" || text === "Score" ? "number" : "" }, text));
    put(
      this.element,
      el("p", { class: "muted" }, "The features have no coordinates, so the scores cannot be placed on the slide."),
      el("table", { class: "scores" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)),
      order.length > this.length &&
        button(WORDS.showMore, () => {
          this.length += PAGE;
          this.refresh(evidence, display, picked);
        }),
    );
  }
}
