/** The panels beside the slide, as tabs: one is open. */

import { button, el, put } from "../dom";

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
    const hadFocus = this.tabs.contains(document.activeElement);
    put(this.tabs, ...tabs);
    if (hadFocus) tabs.find((tab) => tab.ariaSelected === "true")?.focus();
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

// A line beside the pointer.

export class Tip {
  readonly element = el("div", { class: "tip", role: "tooltip", hidden: true });

  hide(): void {
    this.element.hidden = true;
  }

  /** Shows the line where the pointer is; without a text the last one stays. */
  show({ clientX, clientY }: MouseEvent, text: { title: string; line: string } | null): void {
    this.element.hidden = false;
    if (text) put(this.element, el("strong", {}, text.title), ` ${text.line}`);
    const { offsetWidth, offsetHeight } = this.element;
    const left = Math.min(clientX + 16, innerWidth - offsetWidth - 8);
    const top = clientY + 22 + offsetHeight > innerHeight ? clientY - offsetHeight - 12 : clientY + 18;
    Object.assign(this.element.style, { left: `${left}px`, top: `${top}px` });
  }
}
