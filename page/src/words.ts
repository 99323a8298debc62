/** Numbers and counts as text, and the words that several parts of the page use. */

/** Formats a number with three significant digits, without trailing zeros; extreme values as powers. */
export function formatNumber(value: number | null | undefined, digits = 3): string {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e5 && size >= 1e-3) return String(Number(value.toPrecision(digits))).replace("-", "−");
  const [factor, power] = value.toExponential(digits - 1).split("e");
  return `${Number(factor)}×10${[...power.replace("+", "")].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)])).join("")}`.replace("-", "−");
}

/** Formats values with the fewest digits, three to six, that keep them distinct. */
export function formatDistinct(values: number[]): string[] {
  const different = new Set(values).size;
  const texts = (digits: number) => values.map((value) => formatNumber(value, digits));
  const digits = [3, 4, 5].find((count) => new Set(texts(count)).size === different) ?? 6;
  return texts(digits);
}

/** Formats a count with its noun. */
export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** Formats a number of patches. */
export function countPatches(count: number): string {
  return plural(count, "patch", "patches");
}

/** Formats a share as a percentage. */
export function formatPercent(share: number, digits = 1): string {
  return `${(100 * share).toFixed(digits)} %`;
}

const known: { methods: Record<string, string>; parts: Record<string, string> } = { methods: {}, parts: {} };

/** Stores the names of methods and parts from the run. */
export function takeNames({ methods, parts }: { methods?: Record<string, string>; parts?: Record<string, string> }): void {
  Object.assign(known, { methods: methods ?? {}, parts: parts ?? {} });
}

/** Returns a method's display name; a suffix, as in "lrp (spread)", stays. */
export function methodName(id: string): string {
  const base = /^[^ :]+/.exec(id)?.[0] ?? "";
  return Object.hasOwn(known.methods, base) ? known.methods[base] + id.slice(base.length) : id;
}

/** Returns the parts of the explained output in order, with their display names. */
export function partNames(): [string, string][] {
  return Object.entries(known.parts);
}

/** Labels used in several places. */
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
