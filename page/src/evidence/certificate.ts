/** How far the scores can be trusted: flip curve against chance, account of the output, verdict. */

import { button, el, put, svg } from "../dom";
import { countPatches, formatNumber, methodName, partNames, plural, WORDS } from "../words";
import type { Choice, Evidence } from "./evidence";
import { describeEvidence, warningsOf } from "./legend";
import type { Audit, Certificate, MethodCertificate, SlideRow } from "../server/api";

const MARKS: Record<string, [string, string]> = { better: ["good", "better than random"], "no better": ["poor", "no better than random"], worse: ["bad", "worse than random"] };
const SIGNS: Record<string, string> = { good: "✓", poor: "≈", bad: "✕", open: "?" };

/** The verdict of a slide's row: its certificate's, else that of the run. */
export function rowVerdict(row: SlideRow): HTMLElement {
  return titled(verdictLabel(row.verdict, row.verdict_method, row.verdict_orders, row.verdict_cases), row.verdict_sentence);
}

/** The verdict on the evidence that is shown: of this slide, else of its method over the run; null where nothing was tested. */
export function shownVerdict(evidence: Evidence, predicted: string | null): HTMLElement | null {
  const { certificate, cohort, columns } = evidence.scores.set;
  const { method, target } = evidence.choice;
  const among = columns.filter((column) => column.method === method).length; // of several classes, the predicted one was tested
  const own = measuredOf(evidence);
  if (own) return titled(verdictLabel(own.verdict, method, own.orders), own.sentence);
  const kind = isPlain(evidence) && (among < 2 || target === predicted) ? cohort?.verdicts[method] : undefined;
  if (cohort && kind) return titled(verdictLabel(kind, null, null, cohort.cases), method === cohort.method ? cohort.sentence : null);
  return certificate || cohort ? el("span", { class: "verdict" }, `${methodName(method)}: this map was not tested`) : null;
}

function titled(chip: HTMLElement, sentence: string | null): HTMLElement {
  if (sentence) chip.title = sentence;
  return chip;
}

/** Whether the map is a method's own for a class, of the whole slide. */
const isPlain = ({ choice, without, part }: Evidence): boolean => choice.against === null && choice.minus === null && !without && !part;

/** What the slide's certificate says of the evidence that is shown. */
function measuredOf(evidence: Evidence): MethodCertificate | undefined {
  const { method, target } = evidence.choice;
  return isPlain(evidence) ? evidence.scores.set.certificate?.methods.find((m) => m.method === method && m.target === target) : undefined;
}

/** A verdict as a small label with a sign that does not rely on colour: whose it is, and how many random orders or cases it is held against. */
export function verdictLabel(verdict: string | null, method: string | null = null, orders: number | null = null, cases: number | null = null): HTMLElement {
  if (!verdict) return el("span", { class: "muted" }, "–");
  const [mark, words] = MARKS[verdict] ?? ["open", verdict]; // "cannot tell", or the word of an earlier version
  const beside = [method && methodName(method), orders ? `${orders} orders` : null, cases ? plural(cases, "case") : null].filter(Boolean).join(", ");
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
  private cohort({ scores, choice }: Evidence): HTMLElement[] {
    const { cohort } = scores.set;
    const kind = cohort?.verdicts[choice.method];
    return cohort && kind ? [el("p", { class: "cohort-line" }, verdictLabel(kind, null, null, cohort.cases), choice.method === cohort.method ? ` ${cohort.sentence}` : "")] : [];
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
        { class: m.method === evidence.choice.method && m.target === evidence.choice.target ? "current" : "" },
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
