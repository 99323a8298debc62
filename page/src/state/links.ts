/** The address of what is shown: written a moment after each change, copied as a link, remembered for the next slide. */

import type { SlideInfo } from "../server/api";
import type { Evidence } from "../evidence/evidence";
import type { Pane } from "../slide/pane";
import { showOnceOpen, type Bounds } from "../slide/viewport";
import { carryOver, parseHash, rowsOf, rowsText, slideHash, type ViewState } from "./address";
import type { PageStore } from "./page";
import type { SlideState, Store } from "./store";

const PAUSE = 250; // milliseconds after the last change

/** Writes an address a moment after each change. */
export class AddressBar {
  private timer = 0;

  /** `make` gives the address now, or null where the reader is on the way elsewhere. */
  constructor(private readonly make: () => string | null) {}

  schedule(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.write(), PAUSE);
  }

  write(): void {
    const hash = this.make();
    if (hash !== null) history.replaceState(null, "", hash);
  }

  async copy(say: (text: string) => void): Promise<void> {
    this.write();
    try {
      await navigator.clipboard.writeText(location.href);
      say("The link to this view was copied.");
    } catch {
      say(`The browser does not allow copying; the address bar has the link: ${location.href}`);
    }
  }

  destroy(): void {
    clearTimeout(this.timer);
  }
}

/** What a link is made of. */
export interface LinkHost {
  readonly info: SlideInfo;
  readonly panes: readonly Pane[];
  readonly store: Store<SlideState>;
  /** Whether the slide shows what it is to show. */
  readonly loaded: boolean;
  /** What it was opened with. */
  readonly wanted: ViewState | null;
  say(text: string, problem?: boolean): void;
}

export class Linking {
  private readonly bar = new AddressBar(() => this.hash());

  constructor(
    private readonly view: LinkHost,
    private readonly page: PageStore,
  ) {}

  /** What a link to this view carries. */
  state(): ViewState {
    const { panes, store } = this.view;
    const { display, choices, layers, panel, picked, selection, removed } = store.state;
    const home = panes[0]?.showsWhole() ?? true;
    return {
      panes: [choices.A, choices.B].flatMap((choice) => choice ?? []),
      display,
      area: home ? null : (panes[0]?.area() ?? null),
      panel,
      picked: picked?.index ?? null,
      layers,
      selected: selection?.patches ?? null,
      removed: [...removed].map(([run, mask]) => [run, rowsOf(mask)]),
      left: panes.some((pane) => pane.evidence?.without),
    };
  }

  /** What goes along to another slide; of one that is still opening, what was to be shown. */
  nextState(): ViewState | null {
    const { loaded, wanted } = this.view;
    if (loaded) return this.carried();
    return wanted ? carryOver(wanted) : this.page.state.carried;
  }

  /** What goes along to other slides: of a class only one that the reader chose, or that this slide is not predicted as. */
  private carried(): ViewState {
    const state = carryOver(this.state());
    const panes = state.panes.map((pane, i) => {
      const isPredicted = pane.target === this.view.panes[i]?.evidence?.scores.set.predicted;
      return isPredicted && !pane.classChosen && pane.against == null && !pane.minus ? { ...pane, target: undefined } : pane;
    });
    return { ...state, panes };
  }

  schedule(): void {
    this.bar.schedule();
  }

  private hash(): string | null {
    const { info, loaded } = this.view;
    if (!loaded || parseHash(location.hash)?.slide !== info?.id) return null;
    const state = this.state();
    this.page.set({ carried: this.carried() });
    return slideHash(info.id, state);
  }

  write(): void {
    this.bar.write();
  }

  async copy(): Promise<void> {
    const { selected, removed } = this.state();
    const sets = [selected ?? [], ...(removed ?? []).map(([, rows]) => rows)];
    const whole = sets.every((rows) => rowsText(rows) !== null);
    await this.bar.copy((text) => this.view.say(whole ? text : `${text} It does not contain the selected or removed patches, which are too scattered.`, !whole));
  }

  destroy(): void {
    this.bar.destroy();
    if (this.view.loaded) this.page.set({ carried: this.carried() });
  }
}

const SETTLING = 120; // milliseconds until a pane has its new width

/** What a link brings back on a slide. */
export interface RestoreHost {
  readonly panes: readonly Pane[];
  readonly bounds: Bounds;
  readonly whatif: { restore(removed: [number, number[]][], explained: Evidence[]): Promise<void> };
  pick(pane: Pane, index: number): void;
  select(patches: number[]): void;
}

/** Shows the places that a link names: the area in view, the patch that is looked at, what is selected and removed. */
export function restoreView(view: RestoreHost, { area, picked, selected, removed, left }: ViewState): void {
  const { panes, bounds } = view;
  const [pane] = panes;
  if (area) pane.leaveHome();
  if (area) showOnceOpen(pane.viewer, bounds, area, panes.length > 1 ? SETTLING : 0);
  const n = pane.evidence?.scores.set.n ?? 0;
  if (picked !== null && picked < n) view.pick(pane, picked);
  if (selected?.length) view.select(selected.filter((i) => i < n));
  const shown = left ? panes.flatMap(({ evidence }) => evidence ?? []) : [];
  if (removed?.length) void view.whatif.restore(removed, shown);
}
