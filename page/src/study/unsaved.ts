/** A reader's newest entry, which stays in this browser until the server has it. */

import { forget, store, stored } from "../state/settings";
import type { Entry, StudyState } from "./server";

interface Unsaved {
  entry: Entry;
  /** The server's revision that the entry follows. */
  revision: number;
  /** Ids of earlier entries that were sent without a reply; the server may have them. */
  sent: string[];
}

const MOST_SENT = 20;

/** One entry for each reader of a study. */
export class UnsavedEntry {
  private sent: string[] = [];

  /** Keeps an entry; false where the browser has no room. */
  put(state: StudyState, entry: Entry): boolean {
    return store(keyOf(state), { entry, revision: state.revision, sent: this.sent } satisfies Unsaved);
  }

  /** Notes that an entry is on its way: its reply may be lost. */
  note(entry: Entry): void {
    if (!this.sent.includes(entry.id)) this.sent = [...this.sent, entry.id].slice(-MOST_SENT);
  }

  /** Whether the last entry that the server has came from here. */
  isOwn(state: StudyState): boolean {
    return state.entry !== null && this.sent.includes(state.entry);
  }

  /** The entry for the open case that the server has not got; null where it has it, or another window went on. */
  take(state: StudyState): Entry | null {
    const unsaved = stored<Unsaved>(keyOf(state));
    if (!unsaved?.entry || !state.case) return null;
    const { entry, revision } = unsaved;
    this.sent = Array.isArray(unsaved.sent) ? unsaved.sent : [];
    const isOpen = entry.number === state.case.number && entry.stage === state.case.stage;
    const isNewest = entry.id !== state.entry && (revision === state.revision || this.isOwn(state));
    return isOpen && isNewest ? entry : null;
  }

  clear(state: StudyState): void {
    forget(keyOf(state));
  }
}

function keyOf({ made, reader }: StudyState): string {
  return `xmil:study:${made}:${reader}`;
}
