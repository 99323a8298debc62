/** Maps of what a what-if left: asked for by question, shown where that question is the present one. */

import { withoutPatches, type Evidence, type LeftMaps } from "./evidence";
import { methodName } from "../words";
import { postExplain, type LeftScores, type Run, type Scores, type SlideInfo } from "../server/api";
import type { SlideState, Store } from "../state/store";

/** What of the page is asked about. */
export interface LeftHost {
  readonly run: Run;
  readonly info: SlideInfo;
  readonly scores: ReadonlyMap<number, Scores>;
  readonly store: Store<SlideState>;
}

/** A question under way. */
export interface Asking {
  began: number;
  stop: AbortController;
}

const texts = new WeakMap<Uint8Array, string>();

/** What was asked: two questions are the same where run, method and patches are. */
function questionOf(run: number, method: string, removed: Uint8Array): string {
  let ranges = texts.get(removed);
  if (ranges === undefined) texts.set(removed, (ranges = keptRanges(removed).join(";")));
  return JSON.stringify([run, method, ranges]);
}

export class LeftExplanations {
  private readonly asking = new Map<string, Asking>();

  constructor(
    private readonly host: LeftHost,
    private readonly changed: () => void,
  ) {}

  private key({ choice }: Evidence): string | null {
    const removed = this.host.store.state.removed.get(choice.run);
    return removed ? questionOf(choice.run, choice.method, removed) : null;
  }

  /** The evidence as the state wants it. */
  present(own: Evidence): Evidence {
    const { left, showLeft } = this.host.store.state;
    const key = left.size && showLeft ? this.key(own) : null;
    return key === null ? own : withoutPatches(own, left.get(key));
  }

  /** Whether the map of what is left is there, can be asked for, or cannot. */
  has(evidence: Evidence): boolean {
    const key = this.key(evidence);
    const maps = key === null ? undefined : this.host.store.state.left.get(key);
    return maps !== undefined && targetsOf(evidence).every((target) => maps.targets.has(target));
  }

  /** Why no map of what is left can be made of this evidence; null where one can. */
  refusal({ choice, column }: Evidence): string | null {
    if (choice.minus) return "A difference of maps cannot be explained again; choose one map.";
    return column.kind === "scores" ? null : `${methodName(choice.method)} is not a map of scores; choose the scores themselves.`;
  }

  underWay(evidence: Evidence): Asking | null {
    const key = this.key(evidence);
    return key === null ? null : (this.asking.get(key) ?? null);
  }

  /** Asks for the map of what is left; the answer belongs to this question, whatever is done meanwhile. */
  async ask(evidence: Evidence): Promise<void> {
    const { info, store } = this.host;
    const { run, method } = evidence.choice;
    const [key, removed] = [this.key(evidence), store.state.removed.get(run)];
    if (key === null || !removed || this.asking.has(key) || this.refusal(evidence) !== null) return;
    const question = { began: performance.now(), stop: new AbortController() };
    this.asking.set(key, question);
    this.changed();
    try {
      const answer = await postExplain(info.key, { run, keep: keptRanges(removed), method, targets: targetsOf(evidence) }, question.stop.signal);
      const before = this.host.store.state.left;
      store.set({ left: new Map([...before, [key, joined(before.get(key), answer, removed)]]), showLeft: true });
    } finally {
      this.asking.delete(key);
      this.changed();
    }
  }

  cancel(evidence: Evidence): void {
    this.underWay(evidence)?.stop.abort();
  }

  destroy(): void {
    for (const { stop } of this.asking.values()) stop.abort();
  }
}

function targetsOf({ choice }: Evidence): string[] {
  return choice.against === null ? [choice.target] : [choice.target, choice.against];
}

/** The answer among those to the same question about other targets; what was taken out has no score. */
function joined(known: LeftMaps | undefined, answer: LeftScores, removed: Uint8Array): LeftMaps {
  const without = removed.reduce((sum, one) => sum + one, 0);
  const targets = new Map(known?.targets);
  for (const { target, scores, ...rest } of answer.columns) {
    if (scores.length !== removed.length - without) throw new Error(`The answer has ${scores.length} scores for ${removed.length - without} patches.`);
    let at = 0;
    targets.set(target, { ...rest, values: Float32Array.from(removed, (isRemoved) => (isRemoved ? NaN : scores[at++])) });
  }
  return { without, targets };
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
