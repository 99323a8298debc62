/** Where annotations are kept: with the run on the server, one file per reader; else in this browser. */

import { annotation, asFeature, contentOf, fromFeature, originOf, type Annotation } from "./annotations";
import { getNotes, postNotes, type KeptNotes, type SlideInfo } from "./api";
import { moved } from "./geometry";
import { store, stored } from "./settings";

const PAUSE = 400; // milliseconds after the last change
const RETRY = 2000; // milliseconds until what could not be written is tried again

/** The name under which this browser's annotations are kept. */
export function readerName(): string {
  const known = stored<string>("xmil:reader");
  return typeof known === "string" && /^[A-Za-z0-9_-]{1,40}$/.test(known) ? known : "reader";
}

export function setReader(name: string): boolean {
  return /^[A-Za-z0-9_-]{1,40}$/.test(name) && store("xmil:reader", name);
}

/** One slide's annotations: read at the start, written a moment after each change, merged where two windows write. */
export class Keeping {
  notes: Annotation[] = [];
  readers: string[] = [];
  /** Whether the server keeps them. */
  shared = false;
  private revision = 0;
  private known = new Map<string, string>(); // what the server had when it was last read, by id
  private timer = 0;
  private writing: Promise<void> | null = null;

  constructor(
    private readonly live: boolean,
    private readonly run: string,
    private readonly version: string,
    private readonly info: SlideInfo,
    private readonly tell: (text: string, problem?: boolean) => void,
    private readonly changed: () => void,
  ) {
    addEventListener("pagehide", this.leave);
  }

  /** The page goes away: what is not written yet goes out with it. */
  private readonly leave = (): void => {
    if (!this.timer || !this.shared) return;
    clearTimeout(this.timer);
    void postNotes(this.info.key, readerName(), this.revision, this.document(), true).catch(() => undefined);
  };

  private get localKey(): string {
    return `xmil:notes:${location.pathname}:${this.run}:${this.info.id}`;
  }

  /** Where what the server has not got yet is kept meanwhile. */
  private get waitingKey(): string {
    return `xmil:waiting:${location.origin}:${this.run}:${this.info.id}:${readerName()}`;
  }

  async load(): Promise<void> {
    try {
      if (!this.live) throw new Error("an exported copy");
      const kept = await getNotes(this.info.key, readerName());
      this.shared = kept.writable;
      this.take(kept);
      this.notes = this.parsed(kept);
      this.takeWaiting();
    } catch {
      this.shared = false;
    }
    if (!this.shared) {
      const found = stored<Annotation[]>(this.localKey);
      this.notes = [...this.notes, ...(Array.isArray(found) ? found.filter((note) => note && Array.isArray(note.polygons)) : [])];
    }
  }

  /** What could not be written before the page was left joins what is there. */
  private takeWaiting(): void {
    const waiting = this.shared ? stored<Annotation[]>(this.waitingKey) : null;
    if (!Array.isArray(waiting)) return;
    const known = new Set(this.notes.flatMap((note) => [note.id, contentOf(note)]));
    const fresh = waiting.filter((note) => note && Array.isArray(note.polygons) && !known.has(note.id) && !known.has(contentOf(note)));
    if (fresh.length) this.keep([...this.notes, ...fresh]);
    else localStorage.removeItem(this.waitingKey);
  }

  private take(kept: KeptNotes): void {
    this.revision = kept.revision;
    this.readers = kept.readers;
    this.known = contents(this.parsed(kept));
  }

  private parsed(kept: KeptNotes): Annotation[] {
    const notes = kept.features.map(fromFeature).filter((note): note is Annotation => note !== null);
    for (const note of notes) note.polygons = moved(note.polygons, kept.origin ?? originOf(this.info));
    return notes;
  }

  /** Keeps what is drawn; at once where it is the last chance. */
  keep(notes: Annotation[], now = false): void {
    this.notes = notes;
    clearTimeout(this.timer);
    this.timer = 0;
    if (!this.shared) {
      if (!store(this.localKey, notes)) this.tell("The browser has no room for the annotations: export them before you leave.", true);
      return;
    }
    if (now) void this.write();
    else this.timer = window.setTimeout(() => void this.write(), PAUSE);
  }

  /** Writes, after any write that is under way. */
  private async write(): Promise<void> {
    this.timer = 0;
    while (this.writing) await this.writing;
    this.writing = this.send().finally(() => (this.writing = null));
    await this.writing;
  }

  private async send(): Promise<void> {
    try {
      for (let tries = 0; tries < 5; tries++) {
        const sent = contents(this.notes);
        const { revision, conflict } = await postNotes(this.info.key, readerName(), this.revision, this.document());
        if (!conflict) {
          this.revision = revision;
          this.known = sent;
          localStorage.removeItem(this.waitingKey);
          return;
        }
        this.merge(conflict);
      }
      this.tell("The annotations are being changed in many windows at once; they are kept here and tried again with the next change.", true);
    } catch (error) {
      const safe = store(this.waitingKey, this.notes) ? " They wait in this browser." : "";
      this.tell(`The annotations are not kept yet: ${(error as Error).message}${safe}`, true);
      this.timer = window.setTimeout(() => void this.write(), RETRY);
    }
  }

  /**
   * Theirs and mine; what I deleted stays deleted, what they deleted goes unless I have just drawn or changed it.
   * Of a note changed in both places both versions stay, mine under its id.
   */
  private merge(kept: KeptNotes): void {
    const theirs = new Map(this.parsed(kept).map((note) => [note.id, note]));
    const mine = new Set(this.notes.map((note) => note.id));
    const added = [...theirs.values()].filter((note) => !mine.has(note.id) && !this.known.has(note.id));
    const stayed = this.notes.flatMap((note) => this.reconciled(note, theirs.get(note.id)));
    this.take(kept);
    this.notes = [...stayed, ...added];
    if (added.length) this.tell(`${added.length} annotation${added.length === 1 ? "" : "s"} from another window joined.`);
    this.changed();
  }

  private reconciled(mine: Annotation, theirs: Annotation | undefined): Annotation[] {
    const before = this.known.get(mine.id);
    const changed = before !== contentOf(mine);
    if (!theirs) return before === undefined || changed ? [mine] : [];
    if (!changed || contentOf(theirs) === contentOf(mine)) return [theirs];
    if (contentOf(theirs) === before) return [mine];
    this.tell(`${mine.name || mine.kind} was changed in another window too: both versions are kept.`, true);
    return [mine, { ...theirs, id: annotation("", "Other", []).id, name: `${theirs.name || theirs.kind} (other window)` }];
  }

  private document(): unknown {
    const origin = originOf(this.info);
    const features = this.notes.map((note) => asFeature(note, origin));
    return { type: "FeatureCollection", xmil: { version: this.version, slide: this.info.id, origin, level: 0 }, features };
  }

  destroy(): void {
    removeEventListener("pagehide", this.leave);
    if (this.timer) this.keep(this.notes, true);
  }
}



function contents(notes: Annotation[]): Map<string, string> {
  return new Map(notes.map((note) => [note.id, contentOf(note)]));
}
