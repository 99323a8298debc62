/** Names that readers give to concepts, and classes of their own: kept with the run for all readers, else in this browser. */

import type { Rgb } from "../colours";
import { postNames, type Names } from "../server/api";
import { store, stored } from "./settings";

/** What a run is asked with, and where its reader is told of a fault. */
export interface NamesHost {
  readonly run: { readonly name: string; readonly live: boolean };
  say(text: string, problem?: boolean): void;
}

const keyOf = (run: string): string => `xmil:names:${location.origin}${location.pathname}:${run}`;

/** The names that are kept in this browser, as the run could not be written. */
function ownNames(run: string): Names {
  const known = stored<Partial<Names>>(keyOf(run)) ?? {};
  return { classes: known.classes ?? {}, concepts: known.concepts ?? {} };
}

/** Keeps names: with the run where that can be, for other readers and machines; else here. */
export async function keepNames({ run, say }: NamesHost, number: number, names: Partial<Names>): Promise<void> {
  let reason = "";
  if (run.live) {
    try {
      return await postNames(number, names);
    } catch (error) {
      reason = (error as Error).message;
    }
  }
  const own = ownNames(run.name);
  const concepts = Object.fromEntries(Object.entries(names.concepts ?? {}).map(([concept, name]) => [`${number}-${concept}`, name]));
  store(keyOf(run.name), { classes: { ...own.classes, ...names.classes }, concepts: { ...own.concepts, ...concepts } });
  if (reason) say(`The name is saved only in this browser: ${reason}`, true);
}

/** A concept as readers call it. */
export function conceptName(run: string, number: number, { concept, name }: { concept: number; name: string | null }): string {
  return ownNames(run).concepts[`${number}-${concept}`] || name || `Concept ${concept}`;
}

/** The classes that readers of a run have added. */
export function ownKinds(run: string, kinds: Record<string, Rgb> = {}): { name: string; colour: Rgb }[] {
  return Object.entries({ ...kinds, ...ownNames(run).classes }).map(([name, colour]) => ({ name, colour }));
}
