/** What if these patches were not there? The model is asked again, and can be asked back. */

import { getDeciding, postWhatIf, type WhatIf } from "./api";
import { button, el, put } from "./dom";
import { counted, shown } from "./evidence";
import { decidingOf } from "./layer_patches";
import type { SlideView } from "./slide";

interface Step {
  name: string;
  removed: Uint8Array;
  answer: WhatIf;
}

/** Index ranges [start, stop) of the instances that stay. */
export function keptRanges(removed: Uint8Array): [number, number][] {
  const ranges: [number, number][] = [];
  for (let i = 0; i < removed.length; i++) {
    if (removed[i]) continue;
    const last = ranges[ranges.length - 1];
    if (last && last[1] === i) last[1] = i + 1;
    else ranges.push([i, i + 1]);
  }
  return ranges;
}

export class WhatIfPanel {
  readonly element = el("div", { class: "panel-body" });
  private steps = new Map<number, Step[]>();
  private readonly asking = new Set<number>(); // runs whose answer is awaited
  private problem: string | null = null;

  constructor(private readonly view: SlideView) {}

  private get run(): number {
    return this.view.active?.evidence?.choice.run ?? 0;
  }

  private get history(): Step[] {
    return this.stepsOf(this.run);
  }

  private stepsOf(run: number): Step[] {
    return this.steps.get(run) ?? [];
  }

  private get busy(): boolean {
    return this.asking.has(this.run);
  }

  /** What the last step of a run did, in a line; null where nothing is removed. */
  told(run: number): string | null {
    const steps = this.stepsOf(run);
    const last = steps[steps.length - 1];
    if (!last) return null;
    const gone = last.removed.reduce((sum, one) => sum + one, 0);
    const best = last.answer.probabilities ? last.answer.after.indexOf(Math.max(...last.answer.after)) : 0;
    const value = last.answer.probabilities ? `${last.answer.labels[best]} ${percent(last.answer.after[best])}` : shown(last.answer.after[0]);
    return `without ${counted(gone, "patch", "patches")}: ${value}`;
  }

  /** Takes patches out, or all others, and asks the model; refused where nothing would stay. */
  async apply(patches: number[], action: "remove" | "keep"): Promise<void> {
    const { view, run } = this;
    const scores = view.scores.get(run);
    if (!scores || this.busy || !patches.length) return;
    const before = this.stepsOf(run);
    const removed = this.after(run, patches, action, scores.set.n);
    const ranges = keptRanges(removed);
    this.problem = ranges.length ? null : "Nothing would stay: select fewer patches.";
    if (this.problem) return this.refresh();
    const asked = view.selection;
    this.asking.add(run);
    this.refresh();
    try {
      const answer = await postWhatIf(view.info.key, run, ranges);
      const name = `${action === "remove" ? "Removed" : "Kept only"} ${counted(patches.length, "patch", "patches")}`;
      this.steps.set(run, [...before, { name, removed, answer }]); // the answer belongs to the run that was asked
      this.show(run);
      if (view.selection === asked) view.clearSelection();
    } catch (error) {
      this.problem = (error as Error).message;
    }
    this.asking.delete(run);
    this.refresh();
  }

  private after(run: number, patches: number[], action: "remove" | "keep", n: number): Uint8Array {
    const before = this.view.removed.get(run) ?? new Uint8Array(n);
    const chosen = new Uint8Array(n);
    for (const i of patches) chosen[i] = 1;
    return before.map((gone, i) => (gone || (action === "remove" ? chosen[i] : 1 - chosen[i]) ? 1 : 0));
  }

  /** Takes the last step back, or all. */
  undo(all = false): void {
    if (this.busy) return;
    this.steps.set(this.run, all ? [] : this.history.slice(0, -1));
    this.problem = null;
    this.show(this.run);
    this.refresh();
  }

  private show(run: number): void {
    const steps = this.stepsOf(run);
    const last = steps[steps.length - 1];
    const removed = new Map(this.view.removed);
    if (last) removed.set(run, last.removed);
    else removed.delete(run);
    this.view.store.set({ removed });
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
      last && this.steppedBack(),
    );
  }

  private hint(): string {
    return this.view.run.live
      ? "Start xmil view with --model and --features to ask the model what it would say without some patches."
      : "This is an exported copy: asking the model needs xmil view with --model and --features.";
  }

  private selectionBlock(): HTMLElement {
    const { view } = this;
    const patches = view.selection?.patches ?? [];
    const none = !patches.length || this.busy;
    const text = patches.length ? `${counted(patches.length, "patch", "patches")} selected.` : "Draw around a region with the lasso (L) or the brush (B), or take what the threshold leaves.";
    return el(
      "section",
      { class: "block" },
      el("p", {}, text),
      el(
        "div",
        { class: "buttons" },
        button("Remove", () => void this.apply(patches, "remove"), { disabled: none, class: "primary", data: { action: "remove" } }),
        button("Keep only", () => void this.apply(patches, "keep"), { disabled: none, data: { action: "keep" } }),
        button("Select shown patches", () => view.selectShown(), { disabled: this.busy }),
        this.deciding(),
      ),
    );
  }

  /** Selects the smallest set of patches that decides, where the slide was evaluated. */
  private deciding(): HTMLElement | null {
    const { view } = this;
    const evidence = view.active?.evidence;
    const found = evidence ? decidingOf(evidence) : null;
    if (!found && evidence) return button("Find the patches that decide", () => void this.findDeciding(), { disabled: this.busy, data: { action: "find-deciding" } });
    if (!found) return null;
    const text = `Select the ${counted(found.instances.length, "patch that decides", "patches that decide")}`;
    return button(text, () => view.select(found.instances), { disabled: this.busy, title: found.sentence, data: { action: "deciding" } });
  }

  /** Asks the model for the smallest set that decides, and selects it. */
  private async findDeciding(): Promise<void> {
    const { view, run } = this;
    const set = view.scores.get(run)?.set;
    if (!set) return;
    this.asking.add(run);
    this.problem = null;
    this.refresh();
    try {
      const deciding = await getDeciding(view.info.key, run);
      set.deciding = deciding;
      view.say(deciding.sentence);
      if (deciding.instances && this.run === run) view.select(deciding.instances);
    } catch (error) {
      this.problem = (error as Error).message;
    }
    this.asking.delete(run);
    this.refresh();
  }

  private comparison(step: Step): HTMLElement {
    const { labels, before, after, probabilities: shares, changed, sentence, n_left, seconds, note } = step.answer;
    const rows = labels.map((label, i) =>
      el(
        "div",
        { class: "compare", data: { label } },
        el("span", { class: "compare-name" }, label),
        shares ? pair(before[i], after[i]) : el("span", {}),
        el("span", { class: "number" }, shares ? `${percent(before[i])} → ${percent(after[i])}` : `${shown(before[i])} → ${shown(after[i])}`),
      ),
    );
    return el(
      "section",
      { class: "block whatif-result", role: "status" },
      el("h2", {}, "Before ", el("span", { class: "chip before" }), " and after ", el("span", { class: "chip after" })),
      ...rows,
      sentence && el("p", { class: changed ? "changed" : "" }, sentence),
      note && el("p", { class: "problem small" }, note),
      el("p", { class: "muted small" }, `${counted(n_left, "patch", "patches")} left · ${shown(seconds, 2)} s. Grey on the slide: removed.`),
    );
  }

  private steppedBack(): HTMLElement {
    return el(
      "section",
      { class: "block" },
      el("h2", {}, "Steps"),
      el("ol", { class: "steps" }, ...this.history.map((step) => el("li", {}, step.name))),
      el("div", { class: "buttons" }, button("Undo", () => this.undo(), { data: { action: "undo" } }), button("Start again", () => this.undo(true))),
    );
  }
}

function percent(value: number): string {
  return `${(100 * value).toFixed(1)} %`;
}

function pair(before: number, after: number): HTMLElement {
  const bar = (kind: string, value: number) => el("span", { class: `compare-bar ${kind}`, style: { width: `${100 * value}%` } });
  return el("span", { class: "compare-track", ariaHidden: "true" }, bar("before", before), bar("after", after));
}
