/** The address of a slide's view: written a moment after each change, copied as a link, remembered for the next slide. */

import { carried, parseHash, slideHash, type ViewState } from "./address";
import type { SlideView } from "./slide";

const PAUSE = 250; // milliseconds after the last change

let last: ViewState | null = null;

/** How the last slide was shown: the next one starts so. */
export function remembered(): ViewState | null {
  return last;
}

export class Linking {
  private timer = 0;

  constructor(private readonly view: SlideView) {}

  /** What a link to this view carries. */
  state(): ViewState {
    const { panes, store } = this.view;
    const { display, layers, panel, picked } = store.state;
    const { threshold, clip, sign, shown, brightness, contrast, gamma, rotation } = display;
    const viewport = panes[0]?.viewer.isOpen() ? panes[0].viewer.viewport : null;
    const home = viewport !== null && viewport.getZoom() < 1.02 * viewport.getHomeZoom();
    return {
      panes: panes.flatMap((each) => (each.evidence ? [each.evidence.choice] : [])),
      display: { threshold, clip, sign, shown, brightness, contrast, gamma, rotation },
      area: home ? null : (panes[0]?.area() ?? null),
      panel,
      picked: picked?.index ?? null,
      layers,
    };
  }

  moved(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.keep(), PAUSE);
  }

  private keep(): void {
    const here = parseHash(location.hash)?.slide === this.view.info?.id; // else the reader is on the way elsewhere
    if (!this.view.panes.length || !here) return;
    last = carried(this.state());
    history.replaceState(null, "", slideHash(this.view.info.id, this.state()));
  }

  async copy(): Promise<void> {
    this.keep();
    try {
      await navigator.clipboard.writeText(location.href);
      this.view.say("The link to this view is copied.");
    } catch {
      this.view.say(`The browser does not let pages copy; the address bar has the link: ${location.href}`);
    }
  }

  destroy(): void {
    clearTimeout(this.timer);
    if (this.view.panes.length) last = carried(this.state());
  }
}
