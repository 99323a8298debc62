/** The panels beside the slide, as tabs: one is open. */

import { button, el, put } from "./dom";

export type PanelName = "evidence" | "patch" | "certificate" | "whatif" | "notes";
export const PANELS: [PanelName, string][] = [["evidence", "Evidence"], ["patch", "Patch"], ["certificate", "Certificate"], ["whatif", "What if"], ["notes", "Annotations"]];

/** What a panel shows, drawn when it is opened and whenever what it tells of has changed. */
export interface Panel {
  element: HTMLElement;
  refresh(): void;
}

export class Panels {
  readonly element: HTMLElement;
  open: PanelName = "evidence";
  private readonly tabs = el("div", { class: "tabs", role: "tablist", ariaLabel: "Panels", onkeydown: (event: KeyboardEvent) => this.turn(event) });
  private readonly panel = el("div", { class: "panel", role: "tabpanel", id: "panel", tabIndex: 0, ariaLabel: "Panel" });

  constructor(
    private readonly shown: Record<PanelName, Panel>,
    private readonly choose: (name: PanelName) => void,
  ) {
    this.element = el("aside", { class: "side", ariaLabel: "Panels" }, this.tabs, this.panel);
  }

  show(name: PanelName, focus = false): void {
    this.open = name;
    const tabs = PANELS.map(([id, text]) =>
      button(text, () => this.choose(id), { role: "tab", ariaSelected: String(id === name), tabIndex: id === name ? 0 : -1, "aria-controls": "panel", data: { panel: id } }),
    );
    const held = this.tabs.contains(document.activeElement);
    put(this.tabs, ...tabs);
    if (held) tabs.find((tab) => tab.ariaSelected === "true")?.focus();
    put(this.panel, this.shown[name].element);
    this.refresh();
    if (focus) this.panel.focus({ preventScroll: true });
  }

  refresh(): void {
    this.shown[this.open].refresh();
  }

  /** Arrows go from tab to tab, as in every list of tabs. */
  private turn(event: KeyboardEvent): void {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const place = PANELS.findIndex(([id]) => id === this.open);
    this.choose(PANELS[(place + step + PANELS.length) % PANELS.length][0]);
  }
}
