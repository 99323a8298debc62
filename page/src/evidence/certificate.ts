/** How far the scores can be trusted: flip curve against chance, account of the output, verdict. */

import { button, el, put, svg } from "../dom";
import { countPatches, formatNumber, methodName, partNames, plural, WORDS } from "../words";
import { sameForAll, type Choice, type Evidence } from "./evidence";
import { describeEvidence, warningsOf } from "./legend";
import type { Audit, Certificate, MethodCertificate, SlideRow } from "../server/api";

const MARKS: Record<string, [string, string]> = { better: ["good", "better than random"], "no better": ["poor", "no better than random"], worse: ["bad", "worse than random"] };
const SIGNS: Record<string, string> = { good: "✓", poor: "≈", bad: "✕", open: "?" };

/** The verdict of a slide's row: its certificate's, else that of the run, with the map that was tested. */
export function rowVerdict(row: SlideRow): HTMLElement {
  const map = row.verdict_method && methodName(row.verdict_method) + (row.verdict_target === null ? "" : ` for ${row.verdict_target}`);
  return titled(verdictLabel(row.verdict, map, row.verdict_orders, row.verdict_cases), row.verdict_sentence);
}

/** The verdict on the evidence that is shown: of this slide, else of its method over the run. */
export function shownVerdict(evidence: Evidence): HTMLElement {
  const name = methodName(evidence.choice.method);
  const verdict = verdictOn(evidence);
  if (!verdict) return el("span", { class: "verdict" }, `${name}: this map was not tested`);
  return titled(verdictLabel(verdict.kind, verdict.cases ? null : name, verdict.orders, verdict.cases), verdict.sentence);
}

/** The verdict on the evidence that is shown, for the caption of a picture. */
export function verdictText(evidence: Evidence): string {
  const name = methodName(evidence.choice.method);
  const verdict = verdictOn(evidence);
  if (!verdict) return `${name}: this map was not tested`;
  const words = MARKS[verdict.kind]?.[1] ?? `${verdict.kind} from random`; // "cannot tell"
  if (verdict.cases) return `${name}: ${words} over the cohort (${plural(verdict.cases, "case")})`;
  return `${name}: ${words} on this slide${verdict.orders ? ` (${verdict.orders} orders)` : ""}`;
}

/** A verdict, and the random orders or cases that it is held against. */
interface Verdict {
  kind: string;
  orders: number | null;
  cases: number | null;
  sentence: string | null;
}

/** What the slide's certificate, else the run, says of this very map; null where it was not tested. */
function verdictOn(evidence: Evidence): Verdict | null {
  const own = measuredOf(evidence);
  if (own) return { kind: own.verdict, orders: own.orders ?? null, cases: null, sentence: own.sentence };
  const { cohort } = evidence.scores.set;
  const { method } = evidence.choice;
  const kind = cohort?.verdicts[method];
  if (!cohort || !kind || !isPlain(evidence) || !isFor(evidence, cohort.target)) return null;
  return { kind, orders: null, cases: cohort.cases[method] ?? null, sentence: method === cohort.method ? cohort.sentence : null };
}

/** Whether the map is for a class, or the same for every class. */
const isFor = ({ choice, scores }: Evidence, target: string): boolean => choice.target === target || sameForAll(scores, choice.method);

function titled(chip: HTMLElement, sentence: string | null): HTMLElement {
  if (sentence) chip.title = sentence;
  return chip;
}

/** Whether the map is a method's own for a class, of the whole slide. */
const isPlain = ({ choice, without, part }: Evidence): boolean => choice.against === null && choice.minus === null && !without && !part;

/** What the slide's certificate says of the evidence that is shown. */
function measuredOf(evidence: Evidence): MethodCertificate | undefined {
  const { method } = evidence.choice;
  return isPlain(evidence) ? evidence.scores.set.certificate?.methods.find((m) => m.method === method && isFor(evidence, m.target)) : undefined;
}

/** A verdict as a small label with a sign that does not rely on colour: whose it is, and how many random orders or cases it is held against. */
export function verdictLabel(verdict: string | null, map: string | null = null, orders: number | null = null, cases: number | null = null): HTMLElement {
  if (!verdict) return el("span", { class: "muted" }, "–");
  const [mark, words] = MARKS[verdict] ?? ["open", verdict]; // "cannot tell", or the word of an earlier version
  const beside = [map, orders ? `${orders} orders` : null, cases ? plural(cases, "case") : null].filter(Boolean).join(", ");
  return el("span", { class: `verdict ${mark}${cases ? " of-cohort" : ""}` }, el("span", { ariaHidden: "true" }, `${SIGNS[mark]} `), cases ? "cohort: " : "", beside ? `${words} (${beside})` : words);
}

/** What the panel needs of the page. */
export interface CertificateHost {
  readonly active: { evidence: Evidence | null; choose(change: Partial<Choice>): void } | null;
}

export class CertificatePanel {
  readonly element = el("div", { class: "panel-body" });

  constructor(private readonly view: CertificateHost) {}

  refresh(): void {
    const evidence = this.view.active?.evidence;
    if (!evidence) return put(this.element, el("p", { class: "muted" }, "This slide has no evidence."));
    const { certificate } = evidence.scores.set;
    const { audit } = evidence.column;
    const { method, target, against } = evidence.choice;
    const measured = certificate?.methods.filter((m) => m.method === method) ?? [];
    const result = measuredOf(evidence);
    put(
      this.element,
      el("h2", {}, describeEvidence(evidence)),
      warningsOf(evidence),
      ...(evidence.without ? [this.partOnly(evidence.without)] : certificate && result ? this.faithfulness(certificate, result) : measured.length ? [this.elsewhere(measured[0])] : [this.missing(certificate)]),
      ...(result ? [] : this.cohort(evidence)),
      ...(audit ? [accountOf(audit, against === null ? null : target)] : [el("section", { class: "block" }, el("h2", {}, WORDS.account), el("p", { class: "muted" }, "The scores of this method do not add up to the output."))]),
      this.made(evidence),
      certificate && certificate.methods.length > 1 && this.others(certificate, evidence),
    );
  }

  /** Rule, baseline and whatever else the explanation says of its making. */
  private made({ column }: Evidence): HTMLElement | null {
    if (!column.made.length) return null;
    const rows = column.made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    return el("section", { class: "block made" }, el("h2", {}, "How the scores were computed"), el("dl", {}, ...rows));
  }

  private missing(certificate: Certificate | null): HTMLElement {
    const text = certificate ? "This method was not tested on this slide." : "The evidence of this slide was not tested; xmil evaluate measures how faithful it is.";
    return el("p", { class: "muted" }, text);
  }

  /** The verdict on the method's maps over the run. */
  private cohort(evidence: Evidence): HTMLElement[] {
    const { cohort } = evidence.scores.set;
    const verdict = verdictOn(evidence);
    if (verdict) return [el("p", { class: "cohort-line" }, verdictLabel(verdict.kind, null, null, verdict.cases), verdict.sentence ? ` ${verdict.sentence}` : "")];
    if (!cohort?.verdicts[evidence.choice.method]) return [];
    return [el("p", { class: "cohort-line muted" }, `The verdict over the cohort is on the evidence for ${cohort.target} on this slide, not on this map.`)];
  }

  /** No verdict on a map of part of the bag. */
  private partOnly(without: number): HTMLElement {
    return el("p", { class: "muted" }, `No verdict on this map: it was explained without ${countPatches(without)}, but the whole slide was tested.`);
  }

  /** No verdict on evidence that was not measured, but the way to the one that was. */
  private elsewhere(measured: MethodCertificate): HTMLElement {
    const show = () => this.view.active?.choose({ target: measured.target, against: null, minus: null });
    return el(
      "div",
      { class: "unmeasured" },
      el("p", { class: "muted" }, `No verdict on this map: only the evidence for ${measured.target} was tested.`),
      button(`Show evidence for ${measured.target}`, show, { class: "small-button", data: { action: "measured" } }),
    );
  }

  private faithfulness(certificate: Certificate, result: MethodCertificate): HTMLElement[] {
    return [
      el("p", { class: "verdict-line" }, verdictLabel(result.verdict, null, result.orders), ` ${result.sentence}`),
      el("section", { class: "block" }, el("h2", {}, "Flip curve: the output while patches are removed"), flipChart(certificate, result)),
    ];
  }

  private others(certificate: Certificate, evidence: Evidence): HTMLElement {
    const targets = new Set(certificate.methods.map((m) => m.target));
    const about = targets.size === 1 ? `All methods, evidence for ${[...targets][0]}` : "All methods on this slide";
    const rows = certificate.methods.map((m) =>
      el(
        "tr",
        { class: m === measuredOf(evidence) ? "current" : "" },
        el("td", { title: methodName(m.method) }, targets.size === 1 ? methodName(m.method) : `${methodName(m.method)}: ${m.target}`),
        el("td", {}, verdictLabel(m.verdict)),
        el("td", { class: "number" }, formatNumber(m.aupc)),
        el("td", { class: "number" }, formatNumber(m.srg)),
      ),
    );
    const head = [WORDS.method, "Verdict", "AUPC", "SRG"].map((text) => el("th", { scope: "col" }, text));
    return el("section", { class: "block" }, el("h2", {}, about), el("table", { class: "scores" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
  }
}

const CHART = { width: 320, height: 190, left: 50, right: 8, top: 8, bottom: 30 };

/** What the curve measures: the probability of the class, or the value or risk. */
function outputName({ explained }: Certificate, { target }: MethodCertificate): string {
  return !explained || explained === "probability" ? `probability of ${target}` : explained;
}

/** Output against the share of patches removed, most relevant first, with the band of random orders. */
function flipChart(certificate: Certificate, result: MethodCertificate): Element {
  const { mean, low, high } = certificate.random_band;
  const all = [...low, ...high, ...(result.morf ?? [])].filter(Number.isFinite);
  const bounded = all.every((v) => v >= -1e-6 && v <= 1 + 1e-6);
  const [bottom, peak] = bounded ? [0, 1] : [Math.min(...all), Math.max(...all)];
  const x = (i: number, n: number) => CHART.left + (i / Math.max(1, n - 1)) * (CHART.width - CHART.left - CHART.right);
  const y = (v: number) => CHART.height - CHART.bottom - ((v - bottom) / (peak - bottom || 1)) * (CHART.height - CHART.top - CHART.bottom);
  const line = (values: number[]) => values.map((v, i) => `${i ? "L" : "M"}${x(i, values.length).toFixed(1)},${y(v).toFixed(1)}`).join("");
  const band = `${line(high)}${[...low].reverse().map((v, i) => `L${x(low.length - 1 - i, low.length).toFixed(1)},${y(v).toFixed(1)}`).join("")}Z`;
  const text = (content: string, tx: number, ty: number, anchor = "middle") => svg("text", { x: tx, y: ty, "text-anchor": anchor }, content);
  const steps = mean.length - 1;
  const chart = svg(
    "svg",
    { viewBox: `0 0 ${CHART.width} ${CHART.height}`, class: "flip", role: "img", "aria-label": result.sentence },
    ...[0, 0.5, 1].flatMap((f) => {
      const v = bottom + f * (peak - bottom);
      return [svg("line", { x1: CHART.left, x2: CHART.width - CHART.right, y1: y(v), y2: y(v), class: "grid" }), text(formatNumber(v, 2), CHART.left - 5, y(v) + 4, "end")];
    }),
    ...[0, 50, 100].map((p) => text(`${p} %`, x(p, 101), CHART.height - 15, p === 100 ? "end" : p === 0 ? "start" : "middle")),
    text("patches removed", (CHART.left + CHART.width) / 2, CHART.height - 2),
    svg("text", { transform: `translate(10 ${(CHART.height - CHART.bottom + CHART.top) / 2}) rotate(-90)`, "text-anchor": "middle", class: "y-label" }, outputName(certificate, result)),
    svg("path", { d: band, class: "band" }),
    svg("path", { d: line(mean), class: "mean" }),
    result.lerf ? svg("path", { d: line(result.lerf), class: "lerf" }) : null,
    result.morf ? svg("path", { d: line(result.morf), class: "morf" }) : null,
    result.flipped !== null && steps > 0 ? svg("line", { x1: x(result.flipped, steps + 1), x2: x(result.flipped, steps + 1), y1: CHART.top, y2: CHART.height - CHART.bottom, class: "flipped" }) : null,
  );
  const key = (kind: string, name: string) => el("span", { class: `key ${kind}` }, name);
  const keys = [result.morf && key("morf", "strongest evidence first"), result.lerf && key("lerf", "weakest first"), key("band", "random orders"), result.flipped !== null && key("flipped", "prediction changes")];
  const figure = el("figure", {}, el("figcaption", { class: "keys" }, ...keys.filter((k): k is HTMLSpanElement => Boolean(k))));
  figure.prepend(chart);
  return figure;
}

const SELDOM: (keyof Audit)[] = ["baseline", "cut"]; // shown where they are not zero

/** The explained output as a sum: each share as a bar from zero. */
function accountOf(audit: Audit, target: string | null): HTMLElement {
  const shares = (partNames() as [keyof Audit, string][]).filter(([key]) => audit[key] || !SELDOM.includes(key));
  const most = Math.max(...shares.map(([key]) => Math.abs(audit[key] ?? 0)), 1e-12);
  const rows = shares.map(([key, name]) => {
    const value = audit[key] ?? 0;
    const width = (50 * Math.abs(value)) / most;
    const bar = el("span", { class: `share ${key}`, style: { width: `${width}%`, left: `${value < 0 ? 50 - width : 50}%` } });
    return el("div", { class: "account-row" }, el("span", {}, name), el("span", { class: "account-track" }, bar), el("span", { class: "number" }, formatNumber(value)));
  });
  const total = el("div", { class: "account-row total" }, el("span", {}, "Output"), el("span", {}), el("span", { class: "number" }, formatNumber(audit.output)));
  return el("section", { class: "block" }, el("h2", {}, `${WORDS.account}${target === null ? "" : ` for ${target}`}`), el("div", { class: "account" }, ...rows, total));
}
