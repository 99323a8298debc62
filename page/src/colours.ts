/** Every colour that scripts draw with: marks, annotation classes, and colour-blind-safe palettes as tables of 257 colours. */

export type Rgb = [number, number, number];

export const INK = "#111";
export const PAPER = "#fff";
export const GREY = "#808080";
export const PLACE: Rgb = [23, 105, 210]; // --place in style.css
export const PLATE = 0.88; // opacity of the white below words on a picture
export const SELECTED = "#0057d9";
export const SELECTED_FILL = "rgba(0, 110, 255, .10)";
export const BRUSHED = "rgba(0, 87, 217, .35)";
export const PICKED = "#00c2ff";
export const SIMILAR = "#ffd400";
export const REMOVED = 0xd0606060; // grey, as an RGBA word
export const SCORED_OUTLINE = "rgba(115, 115, 115, .75)";
export const HATCH = "rgba(20,20,20,.85)";
export const BAR_EDGE = "#8a929c";

/** White of some opacity: below words, and around lines so that they show on any tissue. */
export function white(opacity: number): string {
  return `rgba(255, 255, 255, ${opacity})`;
}

export function rgb(colour: Rgb): string {
  return `rgb(${colour.join(",")})`;
}

/** The last entry of a table; zero has the middle one to itself. */
export const LAST = 256;

export interface Palette {
  id: string;
  name: string;
  sequential: string;
  diverging: Rgb[];
}

const hex = (codes: string): Rgb[] =>
  codes.split(" ").map((code) => [0, 2, 4].map((i) => parseInt(code.slice(i, i + 2), 16)) as Rgb);

/** Diverging colours after ColorBrewer (RdBu, PuOr, PRGn), refuting first; their ends, almost black over tissue, are left out. */
export const PALETTES: Palette[] = [
  { id: "rdbu", name: "Red – blue", sequential: "Viridis", diverging: hex("2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b") },
  { id: "puor", name: "Orange – purple", sequential: "Cividis", diverging: hex("542788 8073ac b2abd2 d8daeb f7f7f7 fee0b6 fdb863 e08214 b35806") },
  { id: "prgn", name: "Green – purple", sequential: "Inferno", diverging: hex("762a83 9970ab c2a5cf e7d4e8 f7f7f7 d9f0d3 a6dba0 5aae61 1b7837") },
];

/** Sequential colours for scores without a sign (after cividis and viridis). */
const SEQUENTIAL: Record<string, Rgb[]> = {
  rdbu: hex("440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"),
  puor: hex("00224e 123570 3b496c 575d6d 707173 8a8678 a59c74 c3b369 fee838"),
  prgn: hex("000004 1b0c41 4a0c6b 781c6d a52c60 cf4446 ed6925 fb9b06 fcffa4"),
};

/** The names of the colours of evidence against and for. */
export function colourNames(id: string): [string, string] {
  const [positive, negative] = (PALETTES.find((p) => p.id === id) ?? PALETTES[0]).name.split(" – ");
  return [negative[0].toUpperCase() + negative.slice(1), positive];
}

/** RGB at LAST + 1 steps, from the most negative (or zero) to the most positive. */
export function rgbTable(id: string, signed: boolean): Uint8Array {
  const palette = PALETTES.find((p) => p.id === id) ?? PALETTES[0];
  const stops = signed ? palette.diverging : SEQUENTIAL[palette.id];
  const colours = new Uint8Array((LAST + 1) * 3);
  for (let i = 0; i <= LAST; i++) colours.set(mix(stops, i / LAST), 3 * i);
  return colours;
}

/** RGBA words (little endian) for canvas pixels; with `fade`, weak signed evidence is more transparent. */
export function rgbaTable(id: string, signed: boolean, fade: boolean): Uint32Array {
  const colours = rgbTable(id, signed);
  const result = new Uint32Array(LAST + 1);
  for (let i = 0; i <= LAST; i++) {
    const strength = Math.abs(2 * i - LAST) / LAST;
    const alpha = fade && signed ? Math.round(255 * Math.pow(strength, 0.7)) : 255; // low scores without a sign have a colour of their own
    result[i] = ((alpha << 24) | (colours[3 * i + 2] << 16) | (colours[3 * i + 1] << 8) | colours[3 * i]) >>> 0;
  }
  return result;
}

/** A CSS colour of a table's entry. */
export function css(colours: Uint8Array, index: number): string {
  const i = 3 * Math.max(0, Math.min(LAST, Math.round(index)));
  return `rgb(${colours[i]}, ${colours[i + 1]}, ${colours[i + 2]})`;
}

function mix(stops: Rgb[], t: number): Rgb {
  const place = t * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2);
  const f = place - i;
  return [0, 1, 2].map((c) => Math.round(stops[i][c] * (1 - f) + stops[i + 1][c] * f)) as Rgb;
}

/** Classes that are offered; none has the red or blue of evidence, and all can be told apart with deuteranopia and protanopia. */
export const KINDS: { name: string; colour: Rgb }[] = [
  { name: "Tumor", colour: [245, 190, 0] },
  { name: "Stroma", colour: [0, 130, 95] },
  { name: "Immune cells", colour: [165, 75, 215] },
  { name: "Necrosis", colour: [45, 45, 45] },
  { name: "Normal", colour: [165, 220, 120] },
  { name: "Artefact", colour: [140, 90, 20] },
  { name: "Other", colour: [205, 205, 215] },
];

/** Colours for classes of one's own, in turn. */
export const SPARE: Rgb[] = [[95, 120, 0], [215, 160, 230], [110, 70, 60], [235, 215, 130], [70, 40, 110], [120, 170, 140]];

export function colourOf(kind: string, own: readonly { name: string; colour: Rgb }[] = []): Rgb {
  return [...KINDS, ...own].find((known) => known.name === kind)?.colour ?? [120, 120, 120];
}
