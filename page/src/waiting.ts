/** Annotations that the server has not got yet: they wait in the browser, each window's under a name of its own. */

import type { Annotation } from "./annotations";
import type { Contents } from "./merging";
import { store, stored } from "./settings";

/** What is drawn, and what the server had when that was begun. */
export interface Unsent {
  base: Contents;
  notes: Annotation[];
}

export class WaitingRoom {
  private readonly own = Math.random().toString(36).slice(2);

  /** `prefix` names slide, run and reader. */
  constructor(private readonly prefix: () => string) {}

  private get key(): string {
    return `${this.prefix()}:${this.own}`;
  }

  /** False where the browser has no room. */
  put(notes: readonly Annotation[], base: Contents): boolean {
    return store(this.key, { base: [...base], notes });
  }

  /** What windows that are gone have left, and of this one. */
  all(): Map<string, Unsent> {
    const names = Array.from({ length: localStorage.length }, (_, i) => localStorage.key(i)!);
    const found = new Map<string, Unsent>();
    for (const name of names.filter((each) => each === this.prefix() || each.startsWith(`${this.prefix()}:`))) {
      const held = stored<{ base?: [string, string][]; notes?: Annotation[] } | Annotation[]>(name);
      const [base, notes] = Array.isArray(held) ? [[], held] : [held?.base ?? [], held?.notes ?? []];
      found.set(name, { base: new Map(base), notes: notes.filter((note) => note && Array.isArray(note.polygons)) });
    }
    return found;
  }

  clear(names: Iterable<string> = []): void {
    for (const name of [this.key, ...names]) localStorage.removeItem(name);
  }
}
