/** Numbers and counts as text, and the words that several parts of the page use. */

/** Three significant digits without needless zeros; very large and small numbers as powers. */
export function formatNumber(value: number | null | undefined, digits = 3): string {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e5 && size >= 1e-3) return String(Number(value.toPrecision(digits))).replace("-", "−");
  const [factor, power] = value.toExponential(digits - 1).split("e");
  return `${Number(factor)}×10${[...power.replace("+", "")].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)])).join("")}`.replace("-", "−");
}

/** The values with as many digits, three to six, as tell them apart. */
export function formatDistinct(values: number[]): string[] {
  const different = new Set(values).size;
  const texts = (digits: number) => values.map((value) => formatNumber(value, digits));
  const digits = [3, 4, 5].find((count) => new Set(texts(count)).size === different) ?? 6;
  return texts(digits);
}

/** A number of things in words. */
export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** How many patches, in words. */
export function countPatches(count: number): string {
  return plural(count, "patch", "patches");
}

/** A share as a percentage. */
export function formatPercent(share: number, digits = 1): string {
  return `${(100 * share).toFixed(digits)} %`;
}

const known: { methods: Record<string, string>; parts: Record<string, string> } = { methods: {}, parts: {} };

/** Takes the names that every picture and page uses from the run. */
export function takeNames({ methods, parts }: { methods?: Record<string, string>; parts?: Record<string, string> }): void {
  Object.assign(known, { methods: methods ?? {}, parts: parts ?? {} });
}

/** A method as readers know it; what follows its name, as in "lrp (spread)", stays. */
export function methodName(id: string): string {
  const base = /^[^ :]+/.exec(id)?.[0] ?? "";
  return Object.hasOwn(known.methods, base) ? known.methods[base] + id.slice(base.length) : id;
}

/** The parts of the explained output, in their order, as readers know them. */
export function partNames(): [string, string][] {
  return Object.entries(known.parts);
}

/** Labels that stand in several places. */
export const WORDS = {
  account: "Where the output comes from",
  cancel: "Cancel",
  clear: "Clear",
  copyLink: "Copy link",
  copyLinkHint: "A link to this view",
  evidenceFor: "Evidence for",
  faithfulness: "Faithfulness",
  figure: "Figure…",
  keepOnly: "Keep only",
  label: "Label",
  method: "Method",
  none: "None.",
  compareSlides: "Compare with another slide",
  prediction: "Prediction",
  strongest: "Strongest patches across slides",
  remove: "Remove",
  run: "Run",
  showMore: "Show more",
  undo: "Undo",
} as const;
