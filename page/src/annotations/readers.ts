/** Who reads, and which classes they use: asked for when they are needed. */

import { KINDS, SPARE } from "../colours";
import { button, el, openDialog } from "../dom";
import type { SlideInfo } from "../server/api";
import { keepNames, ownKinds, type NamesHost } from "../state/names";
import { WORDS } from "../words";
import { asReader } from "./storage";

/** Asks for a line of text; null where it is cancelled. `accept` gives what is taken, or null with the reason shown. */
function askLine(parent: HTMLElement, about: { title: string; text: string; label: string; refusal: string; offers?: readonly string[] }, accept: (text: string) => string | null): Promise<string | null> {
  return new Promise((done) => {
    let answer: string | null = null;
    const input = el("input", { type: "text", name: "answer", ariaLabel: about.label, maxLength: 60, autocomplete: "off" });
    const refusal = el("p", { class: "problem", role: "alert" });
    const take = (text: string) => {
      answer = accept(text);
      refusal.textContent = answer === null ? about.refusal : "";
      if (answer !== null) dialog.close();
    };
    const offers = (about.offers ?? []).map((name) => button(name, () => take(name), { class: "small-button" }));
    const form = el("form", { method: "dialog", onsubmit: (event: Event) => (event.preventDefault(), take(input.value)) }, el("label", { class: "row" }, about.label, input), refusal, el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "OK"), button(WORDS.cancel, () => dialog.close())));
    const dialog: HTMLDialogElement = el("dialog", { class: "help ask", ariaLabel: about.title }, el("h2", {}, about.title), el("p", { class: "muted" }, about.text), offers.length > 0 ? el("div", { class: "buttons" }, ...offers) : null, form);
    dialog.addEventListener("close", () => done(answer));
    openDialog(parent, dialog);
    input.focus();
  });
}

/** Asks who is reading; those who have drawn on this slide can be chosen. */
export function askReader(parent: HTMLElement, known: readonly string[]): Promise<string | null> {
  const text = "Annotations are saved with the run under your name, separate from those of other readers.";
  return askLine(parent, { title: "Who is reading?", text, label: "Name", refusal: "A name must have 1 to 40 letters, digits, - or _.", offers: known }, asReader);
}

/** Asks for a class of one's own; it is offered from then on, to all readers of the run. */
export async function askKind(parent: HTMLElement, host: NamesHost & { readonly info: SlideInfo }): Promise<string | null> {
  const where = host.run.live ? "to all readers of this run" : "in this browser";
  const about = { title: "New class", text: `It will be available ${where} and is exported with the annotations.`, label: "Class", refusal: "A class needs a name." };
  const name = await askLine(parent, about, (text) => text.trim() || null);
  const own = ownKinds(host.run.name, host.info.kinds);
  if (name !== null && ![...KINDS, ...own].some((kind) => kind.name === name)) {
    const colour = SPARE[own.length % SPARE.length];
    host.info.kinds = { ...host.info.kinds, [name]: colour };
    await keepNames(host, 0, { classes: { [name]: colour } });
  }
  return name;
}

/** Where the reader is typing; gives what brings focus and caret back when the panel has been drawn anew. */
export function typedIn(panel: HTMLElement): () => void {
  const node = document.activeElement as HTMLInputElement | HTMLTextAreaElement | null;
  const row = node?.closest<HTMLElement>("[data-note]");
  if (!node || !row || !panel.contains(node) || !node.matches("input, textarea")) return () => undefined;
  const { selectionStart, selectionEnd, tagName } = node;
  return () => {
    const again = panel.querySelector<HTMLInputElement>(`[data-note="${CSS.escape(row.dataset.note!)}"] ${tagName.toLowerCase()}`);
    again?.focus();
    again?.setSelectionRange(selectionStart, selectionEnd);
  };
}
