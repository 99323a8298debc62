/** Annotations of two windows put together, so that nothing of either is lost. */

import { annotation, contentOf, type Annotation } from "./annotations";

/** What each annotation said, by id. */
export type Contents = ReadonlyMap<string, string>;

export interface Merged {
  notes: Annotation[];
  /** How many came from the other window. */
  added: number;
  /** Those that both have changed: both versions are there. */
  doubled: Annotation[];
}

export function contents(notes: readonly Annotation[]): Map<string, string> {
  return new Map(notes.map((note) => [note.id, contentOf(note)]));
}

/**
 * Theirs and mine, both drawn over `base`; what I deleted stays deleted, what they deleted goes unless I have just drawn or
 * changed it. Of an annotation changed by both both versions stay, mine under its id.
 */
export function merged(base: Contents, mine: readonly Annotation[], theirs: readonly Annotation[]): Merged {
  const other = new Map(theirs.map((note) => [note.id, note]));
  const own = new Set(mine.map((note) => note.id));
  const added = theirs.filter((note) => !own.has(note.id) && !base.has(note.id));
  const doubled: Annotation[] = [];
  const stayed = mine.flatMap((note) => {
    const found = reconciled(note, other.get(note.id), base.get(note.id));
    if (found.length > 1) doubled.push(note);
    return found;
  });
  return { notes: [...stayed, ...added], added: added.length, doubled };
}

function reconciled(mine: Annotation, theirs: Annotation | undefined, before: string | undefined): Annotation[] {
  const changed = before !== contentOf(mine);
  if (!theirs) return before === undefined || changed ? [mine] : [];
  if (!changed || contentOf(theirs) === contentOf(mine)) return [theirs];
  if (contentOf(theirs) === before) return [mine];
  return [mine, { ...theirs, id: annotation("", "Other", []).id, name: `${theirs.name || theirs.kind} (other window)` }];
}
