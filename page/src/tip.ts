/** A line beside the pointer. */

import { el, put } from "./dom";

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
