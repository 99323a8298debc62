/** Where annotations are kept: with the run on the server, one file per reader; else in this browser. */

import { asFeature, fromFeature, originOf, type Annotation } from "./annotations";
import { getNotes, postNotes, type KeptNotes, type SlideInfo } from "./api";
import { moved } from "./geometry";
import { contents, merged, type Contents } from "./merging";
import { store, stored } from "./settings";
import { WaitingRoom } from "./waiting";

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

/** Asks for what this reader has drawn on a slide. */
export function readNotes(key: number): Promise<KeptNotes> {
  const asked = getNotes(key, readerName());
  asked.catch(() => undefined); // whoever waits for it is told
  return asked;
}

/** One slide's annotations: read at the start, written a moment after each change, merged where two windows write. */
export class Keeping {
  notes: Annotation[] = [];
  readers: string[] = [];
  /** Whether the server keeps them. */
  shared = false;
  private readonly reader = readerName(); // as it was when the slide was opened
  private revision = 0;
  private known: Contents = new Map(); // what the server had when it was last read
  private timer = 0;
  private writing: Promise<void> | null = null;
  private readonly waiting = new WaitingRoom(() => `xmil:waiting:${location.origin}:${this.run}:${this.info.id}:${this.reader}`);
  private taken: string[] = []; // what waited, and is written with the next write

  constructor(
    private readonly live: boolean,
    private readonly run: string,
    private readonly version: string,
    private readonly info: SlideInfo,
    private readonly tell: (text: string, problem?: boolean) => void,
    private readonly changed: () => void,
  ) {
    addEventListener("beforeunload", this.ask);
    addEventListener("pagehide", this.leave);
  }

  private get unsent(): boolean {
    return this.shared && Boolean(this.timer || this.writing);
  }

  /** The page is about to go: where what is not written can wait nowhere, the reader is asked to stay. */
  private readonly ask = (event: BeforeUnloadEvent): void => {
    if (this.unsent && !this.waiting.put(this.notes, this.known)) event.preventDefault();
  };

  /**
   * The page goes away: what is not written goes out with it, and waits here until it is seen to have arrived. A write that
   * is under way may be of an older state; another beside it would be refused.
   */
  private readonly leave = (): void => {
    if (!this.unsent) return;
    this.waiting.put(this.notes, this.known);
    if (!this.writing) void postNotes(this.info.key, this.reader, this.revision, this.document()).catch(() => undefined);
  };

  private get localKey(): string {
    return `xmil:notes:${location.pathname}:${this.run}:${this.info.id}`;
  }

  /** Reads what is kept; `asked` where that is under way already. */
  async load(asked: Promise<KeptNotes> | null = null): Promise<void> {
    try {
      if (!this.live) throw new Error("an exported copy");
      const kept = await (asked ?? getNotes(this.info.key, this.reader));
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

  /** What could not be written before a page was left joins what is there. */
  private takeWaiting(): void {
    const waiting = this.shared ? this.waiting.all() : new Map();
    if (!waiting.size) return;
    for (const { base, notes } of waiting.values()) this.notes = merged(base, notes, this.notes).notes;
    this.taken = [...waiting.keys()];
    if (same(contents(this.notes), this.known)) this.arrived();
    else this.keep(this.notes);
  }

  /** All is on the server: nothing waits. */
  private arrived(): void {
    this.waiting.clear(this.taken);
    this.taken = [];
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
        const { revision, conflict } = await postNotes(this.info.key, this.reader, this.revision, this.document());
        if (!conflict) {
          this.revision = revision;
          this.known = sent;
          this.arrived();
          return;
        }
        this.merge(conflict);
      }
      this.tell("The annotations are being changed in many windows at once; they are kept here and tried again with the next change.", true);
    } catch (error) {
      const safe = this.waiting.put(this.notes, this.known) ? " They wait in this browser." : "";
      this.tell(`The annotations are not kept yet: ${(error as Error).message}${safe}`, true);
      this.timer = window.setTimeout(() => void this.write(), RETRY);
    }
  }

  private merge(kept: KeptNotes): void {
    const { notes, added, doubled } = merged(this.known, this.notes, this.parsed(kept));
    this.take(kept);
    this.notes = notes;
    for (const note of doubled) this.tell(`${note.name || note.kind} was changed in another window too: both versions are kept.`, true);
    if (added) this.tell(`${added} annotation${added === 1 ? "" : "s"} from another window joined.`);
    this.changed();
  }

  private document(): unknown {
    const origin = originOf(this.info);
    const features = this.notes.map((note) => asFeature(note, origin));
    return { type: "FeatureCollection", xmil: { version: this.version, slide: this.info.id, origin, level: 0 }, features };
  }

  /** The slide is left: what is not written is written now; until then the page's end is listened for. */
  destroy(): void {
    if (this.timer) this.keep(this.notes, true);
    void this.settled().then(() => {
      removeEventListener("beforeunload", this.ask);
      removeEventListener("pagehide", this.leave);
    });
  }

  private async settled(): Promise<void> {
    while (this.unsent) await (this.writing ?? new Promise((done) => setTimeout(done, RETRY)));
  }
}

function same(one: Contents, other: Contents): boolean {
  return one.size === other.size && [...one].every(([id, content]) => other.get(id) === content);
}
