/** Lines that tell something for a while, above the page. */

import { el } from "./dom";

export const messages = el("div", { class: "messages", role: "status", ariaLive: "polite" });
const leaving = new WeakMap<Element, number>();

/** Tells something for a while; what is told already stays longer. */
export function say(text: string, problem = false): void {
  const existing = [...messages.children].find((each) => each.textContent === text);
  const line = existing ?? el("div", { class: problem ? "message problem" : "message", role: problem ? "alert" : "status" }, text);
  if (!existing) messages.append(line);
  clearTimeout(leaving.get(line));
  leaving.set(line, window.setTimeout(() => line.remove(), problem ? 12_000 : 5_000));
}
