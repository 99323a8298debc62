/** What if these patches were not there? The model is asked again, and can be asked back. */

import { button, el, put } from "../dom";
import { countPatches, formatNumber, formatPercent, methodName, WORDS } from "../words";
import type { Evidence } from "./evidence";
import { keptRanges, LeftExplanations, type LeftHost } from "./left_maps";
import { decidingOf, decidingWords } from "./patch_layers";
import { getDeciding, postWhatIf } from "../server/api";
import type { Step } from "../state/store";

/** What the panel needs of the page. */
export interface WhatIfHost extends LeftHost {
  readonly active: { evidence: Evidence | null } | null;
  select(patches: number[]): void;
  selectShown(): void;
  say(text: string, problem?: boolean): void;
}

export class WhatIfPanel {
  readonly element = el("div", { class: "panel-body" });
  readonly left: LeftExplanations;
  private readonly asking = new Set<number>(); // runs whose answer is awaited
  private problem: string | null = null;

  constructor(private readonly view: WhatIfHost) {
    this.left = new LeftExplanations(view, () => this.refresh());
  }

  private get run(): number {
    return this.view.active?.evidence?.choice.run ?? 0;
  }

  private get history(): readonly Step[] {
    return this.stepsOf(this.run);
  }

  private stepsOf(run: number): readonly Step[] {
    return this.view.store.state.steps.get(run) ?? [];
  }

  private get busy(): boolean {
    return this.asking.has(this.run);
  }

  /** What the last step of a run did, in a line; null where nothing is removed. */
  summary(run: number): string | null {
    const steps = this.stepsOf(run);
    const last = steps[steps.length - 1];
    if (!last) return null;
    const count = last.removed.reduce((sum, one) => sum + one, 0);
    const best = last.answer.probabilities ? last.answer.after.indexOf(Math.max(...last.answer.after)) : 0;
    const value = last.answer.probabilities ? `${last.answer.labels[best]} ${formatPercent(last.answer.after[best])}` : formatNumber(last.answer.after[0]);
    return `without ${countPatches(count)}: ${value}`;
  }

  /** Takes patches out, or all others, and asks the model; refused where nothing would stay. */
  async apply(patches: number[], action: "remove" | "keep"): Promise<void> {
    const scores = this.view.scores.get(this.run);
    if (!scores || this.busy || !patches.length) return;
    const name = `${action === "remove" ? "Removed" : "Kept only"} ${countPatches(patches.length)}`;
    await this.ask(this.run, name, this.after(this.run, patches, action, scores.set.n));
  }

  /** Takes out what a link names, and explains what is left where it says so. */
  async restore(removed: [number, number[]][], explained: readonly Evidence[]): Promise<void> {
    if (removed.length && !this.view.run.whatif) return this.view.say("This link removes patches from the slide, which needs xmil view with --model and --features.", true);
    for (const [run, rows] of removed) {
      const n = this.view.scores.get(run)?.set.n ?? 0;
      const mask = new Uint8Array(n);
      for (const i of rows) if (i < n) mask[i] = 1;
      if (n && rows.length) await this.ask(run, `Removed ${countPatches(rows.length)}`, mask);
    }
    await Promise.all(explained.map((evidence) => this.explain(evidence)));
  }

  private async ask(run: number, name: string, removed: Uint8Array): Promise<void> {
    const { view } = this;
    const before = this.stepsOf(run);
    const ranges = keptRanges(removed);
    this.problem = ranges.length ? null : "No patch would remain: select fewer patches.";
    if (this.problem) return this.refresh();
    const selectionBefore = view.store.state.selection;
    await this.wait(run, async () => {
      const answer = await postWhatIf(view.info.key, run, ranges);
      this.show(run, [...before, { name, removed, answer }]); // the answer belongs to the run that was asked
      if (view.store.state.selection === selectionBefore) view.store.set({ selection: null });
    });
  }

  /** Shows that a run's model is at work until an answer or a problem is there. */
  private async wait(run: number, work: () => Promise<void>): Promise<void> {
    this.asking.add(run);
    this.problem = null;
    this.refresh();
    try {
      await work();
    } catch (error) {
      this.problem = (error as Error).message;
    }
    this.asking.delete(run);
    this.refresh();
  }

  private after(run: number, patches: number[], action: "remove" | "keep", n: number): Uint8Array {
    const before = this.view.store.state.removed.get(run) ?? new Uint8Array(n);
    const chosen = new Uint8Array(n);
    for (const i of patches) chosen[i] = 1;
    return before.map((isRemoved, i) => (isRemoved || (action === "remove" ? chosen[i] : 1 - chosen[i]) ? 1 : 0));
  }

  /** Takes the last step back, or all. */
  undo(all = false): void {
    if (this.busy) return;
    this.problem = null;
    this.show(this.run, all ? [] : this.history.slice(0, -1));
    this.refresh();
  }

  private show(run: number, steps: readonly Step[]): void {
    const last = steps[steps.length - 1];
    const removed = new Map(this.view.store.state.removed);
    if (last) removed.set(run, last.removed);
    else removed.delete(run);
    this.view.store.set({ steps: new Map([...this.view.store.state.steps, [run, steps]]), removed });
  }

  refresh(): void {
    if (!this.view.run.whatif) return put(this.element, el("p", { class: "muted" }, this.hint()));
    const last = this.history[this.history.length - 1];
    put(
      this.element,
      this.selectionBlock(),
      this.problem && el("p", { class: "problem", role: "alert" }, this.problem),
      this.busy && el("p", { class: "muted" }, "Asking the model…"),
      last && this.comparison(last),
      last && this.explaining(),
      last && this.steppedBack(),
    );
  }

  private hint(): string {
    return this.view.run.live
      ? "Start xmil view with --model and --features to see what the model would predict without some patches."
      : "This is an exported copy: asking the model needs xmil view with --model and --features.";
  }

  private selectionBlock(): HTMLElement {
    const { view } = this;
    const patches = view.store.state.selection?.patches ?? [];
    const none = !patches.length || this.busy;
    const text = patches.length ? `${countPatches(patches.length)} selected.` : "Draw around a region with the lasso (L) or the brush (B), or select the shown patches.";
    return el(
      "section",
      { class: "block" },
      el("p", {}, text),
      el(
        "div",
        { class: "buttons" },
        button(WORDS.remove, () => void this.apply(patches, "remove"), { disabled: none, class: "primary", data: { action: "remove" } }),
        button(WORDS.keepOnly, () => void this.apply(patches, "keep"), { disabled: none, data: { action: "keep" } }),
        button("Select shown patches", () => view.selectShown(), { disabled: this.busy }),
        this.deciding(),
      ),
      this.decidingLines(),
    );
  }

  /** Selects the smallest set of patches that decides, where the slide was evaluated. */
  private deciding(): HTMLElement | null {
    const { view } = this;
    const evidence = view.active?.evidence;
    const deciding = evidence ? decidingOf(evidence) : null;
    if (!deciding && evidence) return button("Find the smallest set that changes the prediction", () => void this.findDeciding(), { disabled: this.busy, data: { action: "find-deciding" } });
    if (!deciding) return null;
    return button(`Select ${decidingWords(deciding)}`, () => view.select(deciding.instances), { disabled: this.busy, title: deciding.sentence, data: { action: "deciding" } });
  }

  /** What was found of the smallest set, with its caution: that another patch would do as well. */
  private decidingLines(): HTMLElement | null {
    const evidence = this.view.active?.evidence;
    const deciding = evidence ? decidingOf(evidence) : null;
    if (!deciding) return null;
    const { sentence, caution } = deciding;
    const plain = caution ? sentence.replace(caution, "").trim() : sentence;
    return el("div", { class: "deciding" }, el("p", { class: "muted small" }, plain), caution ? el("p", { class: "problem small", role: "alert" }, caution) : null);
  }

  /** Asks the model for the smallest set that decides, and selects it. */
  private async findDeciding(): Promise<void> {
    const { view, run } = this;
    const set = view.scores.get(run)?.set;
    if (!set) return;
    await this.wait(run, async () => {
      const deciding = await getDeciding(view.info.key, run);
      set.deciding = deciding;
      view.say(deciding.sentence);
      if (deciding.instances && this.run === run) view.select(deciding.instances);
    });
  }

  private comparison(step: Step): HTMLElement {
    const { labels, before, after, probabilities: shares, changed, sentence, n_left, seconds, note } = step.answer;
    const rows = labels.map((label, i) =>
      el(
        "div",
        { class: "compare", data: { label } },
        el("span", { class: "compare-name" }, label),
        shares ? pair(before[i], after[i]) : el("span", {}),
        el("span", { class: "number" }, shares ? `${formatPercent(before[i])} → ${formatPercent(after[i])}` : `${formatNumber(before[i])} → ${formatNumber(after[i])}`),
      ),
    );
    return el(
      "section",
      { class: "block whatif-result", role: "status" },
      el("h2", {}, "Before ", el("span", { class: "chip before" }), " and after ", el("span", { class: "chip after" })),
      ...rows,
      sentence && el("p", { class: changed ? "changed" : "" }, sentence),
      note && el("p", { class: "problem small" }, note),
      el("p", { class: "muted small" }, `${countPatches(n_left)} left · ${formatNumber(seconds, 2)} s. Removed patches are grey on the slide.`),
    );
  }

  /** What is left, explained again: asked for, under way, or on show. */
  private explaining(): HTMLElement | null {
    const evidence = this.view.active?.evidence;
    if (!evidence) return null;
    const { left } = this;
    const [refusal, pending] = [left.refusal(evidence), left.underWay(evidence)];
    const about = `${methodName(evidence.choice.method)}, evidence for ${evidence.choice.target}`;
    return el(
      "section",
      { class: "block explain-left" },
      el("h2", {}, "Map of the remaining patches"),
      pending
        ? waiting(pending.began, () => left.cancel(evidence))
        : refusal
          ? el("p", { class: "muted" }, refusal)
          : left.has(evidence)
            ? this.shownMap(evidence)
            : el("div", { class: "buttons" }, button("Explain the remaining patches", () => void this.explain(evidence), { class: "primary", title: about, data: { action: "explain-left" } })),
      !pending && !refusal && el("p", { class: "muted small" }, `${about}: the map on the slide shows ${evidence.without ? "the remaining patches" : "the whole slide"}.`),
    );
  }

  private shownMap(evidence: Evidence): HTMLElement {
    const on = evidence.without > 0;
    const text = on ? "Show the map of the whole slide" : "Show the map of the remaining patches";
    return el("div", { class: "buttons" }, button(text, () => this.view.store.set({ showLeft: !on }), { data: { action: "toggle-left" } }));
  }

  private async explain(evidence: Evidence): Promise<void> {
    this.problem = null;
    try {
      await this.left.ask(evidence);
    } catch (error) {
      const cancelled = (error as Error).name === "AbortError";
      if (cancelled) this.view.say("The explanation was cancelled.");
      else this.problem = (error as Error).message;
      this.refresh();
    }
  }

  private steppedBack(): HTMLElement {
    return el(
      "section",
      { class: "block" },
      el("h2", {}, "Steps"),
      el("ol", { class: "steps" }, ...this.history.map((step) => el("li", {}, step.name))),
      el("div", { class: "buttons" }, button(WORDS.undo, () => this.undo(), { data: { action: "undo" } }), button("Undo all", () => this.undo(true))),
    );
  }
}

/** How long an answer takes already, and the way out. */
function waiting(began: number, cancel: () => void): HTMLElement {
  const time = el("span", {});
  const tell = () => (time.textContent = `Explaining the remaining patches… ${Math.round((performance.now() - began) / 1000)} s `);
  const timer = setInterval(() => (time.isConnected ? tell() : clearInterval(timer)), 1000);
  tell();
  return el("p", {}, time, button(WORDS.cancel, cancel, { class: "small-button", data: { action: "cancel-left" } }));
}

function pair(before: number, after: number): HTMLElement {
  const bar = (kind: string, value: number) => el("span", { class: `compare-bar ${kind}`, style: { width: `${100 * value}%` } });
  return el("span", { class: "compare-track", ariaHidden: "true" }, bar("before", before), bar("after", after));
}
