/** Where annotations are kept: with the run on the server, one file per reader; else in this browser. */

import { annotation, asFeature, contentOf, fromFeature, originOf, type Annotation } from "./annotation";
import { translated } from "./geometry";
import { getNotes, postNotes, UnreachableError, type StoredNotes, type SlideInfo } from "../server/api";
import { forget, store, stored } from "../state/settings";

const PAUSE = 400; // milliseconds after the last change
const RETRY = 2000; // milliseconds until what could not be written is tried again

const NAME = /^[\p{L}\p{M}\p{N}_-]{1,40}$/u; // as the server has it: letters of any script, digits, - and _
const UNNAMED = "reader";

/** The name that this browser's annotations are kept under; null before anybody has given one. */
export function givenReader(): string | null {
  const known = stored<string>("xmil:reader");
  return typeof known === "string" && NAME.test(known) ? known : null;
}

export function readerName(): string {
  return givenReader() ?? UNNAMED;
}

/** A typed name as it is kept, with - in place of spaces and full stops; null where it cannot be one. */
export function asReader(text: string): string | null {
  const name = text.normalize("NFC").trim().replace(/[\s.,]+/g, "-").replace(/^-+|-+$/g, "");
  return NAME.test(name) ? name : null;
}

/** Asks for what this reader has drawn on a slide. */
export function readNotes(key: number): Promise<StoredNotes> {
  const pending = getNotes(key, readerName());
  pending.catch(() => undefined); // whoever waits for it is told
  return pending;
}

/** One slide's annotations: read at the start, written a moment after each change, merged where two windows write. */
export class AnnotationStorage {
  notes: Annotation[] = [];
  readers: string[] = [];
  /** Whether the server keeps them. */
  shared = false;
  reader = readerName();
  private revision = 0;
  private known: Contents = new Map(); // what the server had when it was last read
  private timer = 0;
  private asking = 0; // timer until the server is asked again for what it has
  private isClosed = false;
  private writing: Promise<void> | null = null;
  private readonly unsent = new UnsentNotes(() => `xmil:waiting:${location.origin}:${this.run}:${this.info.id}:${this.reader}`);
  private resent: string[] = []; // what waited, and is written with the next write

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

  private get hasUnsent(): boolean {
    return this.shared && Boolean(this.timer || this.writing);
  }

  /** The page is about to go: where what is not written can wait nowhere, the reader is asked to stay. */
  private readonly ask = (event: BeforeUnloadEvent): void => {
    if (this.hasUnsent && !this.unsent.put(this.notes, this.known)) event.preventDefault();
  };

  /**
   * The page goes away: what is not written goes out with it, and waits here until it is seen to have arrived. A write that
   * is under way may be of an older state; another beside it would be refused.
   */
  private readonly leave = (): void => {
    if (!this.hasUnsent) return;
    this.unsent.put(this.notes, this.known);
    if (!this.writing) void postNotes(this.info.key, this.reader, this.revision, this.document()).catch(() => undefined);
  };

  private get localKey(): string {
    return `xmil:notes:${location.pathname}:${this.run}:${this.info.id}`;
  }

  /** Reads what is kept; `pending` where that is under way already. */
  async load(pending: Promise<StoredNotes> | null = null): Promise<void> {
    try {
      if (!this.live) throw new Error("an exported copy");
      this.adopt(await (pending ?? getNotes(this.info.key, this.reader)), this.local());
    } catch (error) {
      this.shared = false;
      this.notes = this.local();
      if (error instanceof UnreachableError) this.waitForServer();
    }
  }

  /** Shows what the server has, with what was drawn here while it could not be reached or written to. */
  private adopt(answer: StoredNotes, drawn: readonly Annotation[]): void {
    this.shared = answer.writable;
    this.take(answer);
    this.notes = this.parsed(answer);
    if (this.shared) this.takeUnsent(drawn);
    else this.notes = mergeNotes(new Map(), drawn, this.notes).notes;
  }

  /** What is drawn until the server answers stays in this browser, and joins what the server has. */
  private waitForServer(): void {
    this.asking = window.setTimeout(() => {
      void getNotes(this.info.key, this.reader).then(
        (answer) => {
          if (this.isClosed) return;
          this.adopt(answer, this.notes);
          this.changed();
        },
        (error) => error instanceof UnreachableError && !this.isClosed && this.waitForServer(),
      );
    }, RETRY);
  }

  /** What this browser keeps because the server does not. */
  private local(): Annotation[] {
    const saved = stored<Annotation[]>(this.localKey);
    return Array.isArray(saved) ? saved.filter((note) => note && Array.isArray(note.polygons)) : [];
  }

  /** Goes on as another reader, whose annotations on this slide come in place of those here. */
  async openAs(reader: string): Promise<void> {
    if (this.timer) this.keep(this.notes, true);
    await this.settled();
    const answer = await getNotes(this.info.key, reader);
    store("xmil:reader", reader);
    this.reader = reader;
    this.take(answer);
    this.notes = this.parsed(answer);
    this.takeUnsent(this.local());
    this.changed();
  }

  /** What another reader has drawn on this slide. */
  async of(reader: string): Promise<Annotation[]> {
    return this.parsed(await getNotes(this.info.key, reader));
  }

  /** What could not be written before a page was left, or was drawn without the server, joins what is there. */
  private takeUnsent(drawn: readonly Annotation[]): void {
    const waiting = this.unsent.all();
    if (!waiting.size && !drawn.length) return;
    for (const { base, notes } of waiting.values()) this.notes = mergeNotes(base, notes, this.notes).notes;
    this.notes = mergeNotes(new Map(), drawn, this.notes).notes;
    if (!waiting.size && givenReader() === null) return; // saved once the reader has given a name
    this.resent = [...waiting.keys(), this.localKey];
    if (same(contents(this.notes), this.known)) this.clearUnsent();
    else this.keep(this.notes);
  }

  /** All is on the server: nothing waits. */
  private clearUnsent(): void {
    this.unsent.clear(this.resent);
    this.resent = [];
  }

  private take(answer: StoredNotes): void {
    this.revision = answer.revision;
    this.readers = answer.readers;
    this.known = contents(this.parsed(answer));
  }

  private parsed(answer: StoredNotes): Annotation[] {
    const notes = answer.features.map(fromFeature).filter((note): note is Annotation => note !== null);
    for (const note of notes) note.polygons = translated(note.polygons, answer.origin ?? originOf(this.info));
    return notes;
  }

  /** Keeps what is drawn; at once where it is the last chance. */
  keep(notes: Annotation[], now = false): void {
    this.notes = notes;
    clearTimeout(this.timer);
    this.timer = 0;
    if (!this.shared) {
      if (!store(this.localKey, notes)) this.tell("The browser's storage is full: export the annotations before you leave.", true);
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
          this.clearUnsent();
          return;
        }
        this.merge(conflict);
      }
      this.tell("The annotations are being changed in many windows at once; they are kept here and tried again with the next change.", true);
    } catch (error) {
      const safe = this.unsent.put(this.notes, this.known) ? " They wait in this browser." : "";
      this.tell(`The annotations are not saved yet: ${(error as Error).message}${safe}`, true);
      this.timer = window.setTimeout(() => void this.write(), RETRY);
    }
  }

  private merge(answer: StoredNotes): void {
    const { notes, added, doubled } = mergeNotes(this.known, this.notes, this.parsed(answer));
    this.take(answer);
    this.notes = notes;
    for (const note of doubled) this.tell(`${note.name || note.kind} was also changed in another window: both versions are kept.`, true);
    if (added) this.tell(`${added} annotation${added === 1 ? "" : "s"} from another window added.`);
    this.changed();
  }

  private document(): unknown {
    const origin = originOf(this.info);
    const features = this.notes.map((note) => asFeature(note, origin));
    return { type: "FeatureCollection", xmil: { version: this.version, slide: this.info.id, origin, level: 0 }, features };
  }

  /** The slide is left: what is not written is written now; until then the page's end is listened for. */
  destroy(): void {
    this.isClosed = true;
    clearTimeout(this.asking);
    if (this.timer) this.keep(this.notes, true);
    void this.settled().then(() => {
      removeEventListener("beforeunload", this.ask);
      removeEventListener("pagehide", this.leave);
    });
  }

  private async settled(): Promise<void> {
    while (this.hasUnsent) await (this.writing ?? new Promise((done) => setTimeout(done, RETRY)));
  }
}

function same(one: Contents, other: Contents): boolean {
  return one.size === other.size && [...one].every(([id, content]) => other.get(id) === content);
}

// Annotations of two windows put together, so that nothing of either is lost.

/** What each annotation said, by id. */
export type Contents = ReadonlyMap<string, string>;

export interface MergedNotes {
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
export function mergeNotes(base: Contents, mine: readonly Annotation[], theirs: readonly Annotation[]): MergedNotes {
  const other = new Map(theirs.map((note) => [note.id, note]));
  const own = new Set(mine.map((note) => note.id));
  const added = theirs.filter((note) => !own.has(note.id) && !base.has(note.id));
  const doubled: Annotation[] = [];
  const stayed = mine.flatMap((note) => {
    const versions = mergeNote(note, other.get(note.id), base.get(note.id));
    if (versions.length > 1) doubled.push(note);
    return versions;
  });
  return { notes: [...stayed, ...added], added: added.length, doubled };
}

function mergeNote(mine: Annotation, theirs: Annotation | undefined, before: string | undefined): Annotation[] {
  const changed = before !== contentOf(mine);
  if (!theirs) return before === undefined || changed ? [mine] : [];
  if (!changed || contentOf(theirs) === contentOf(mine)) return [theirs];
  if (contentOf(theirs) === before) return [mine];
  return [mine, { ...theirs, id: annotation("", "Other", []).id, name: `${theirs.name || theirs.kind} (other window)` }];
}

// Annotations that the server has not got yet: they wait in the browser, each window's under a name of its own.

/** What is drawn, and what the server had when that was begun. */
export interface Draft {
  base: Contents;
  notes: Annotation[];
}

export class UnsentNotes {
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
  all(): Map<string, Draft> {
    const names = Array.from({ length: localStorage.length }, (_, i) => localStorage.key(i)!);
    const saved = new Map<string, Draft>();
    for (const name of names.filter((each) => each === this.prefix() || each.startsWith(`${this.prefix()}:`))) {
      const entry = stored<{ base?: [string, string][]; notes?: Annotation[] } | Annotation[]>(name);
      const [base, notes] = Array.isArray(entry) ? [[], entry] : [entry?.base ?? [], entry?.notes ?? []];
      saved.set(name, { base: new Map(base), notes: notes.filter((note) => note && Array.isArray(note.polygons)) });
    }
    return saved;
  }

  clear(names: Iterable<string> = []): void {
    for (const name of [this.key, ...names]) forget(name);
  }
}
