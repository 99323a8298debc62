/** Keys, and the list of them. */

import { button, el } from "./dom";
import { methodsOf, targetsOf } from "./evidence";
import { toggleFullScreen, turnSlide } from "./image_settings";
import type { SlideView } from "./slide";
import { goHome, goTo, neighbour, zoomBy } from "./slidebar";
import type { Tool } from "./tools";

const HELP: [string, string][] = [
  ["?", "This list"],
  ["/", "Search slides (in the list)"],
  ["[  ]", "Previous, next slide"],
  ["Backspace", "Back to the list"],
  ["+  −  0", "Zoom in, out, whole slide"],
  ["Arrows", "Move"],
  ["M  C", "Next method, next class"],
  ["X", "Contrast with another class"],
  ["H", "Show or hide the evidence"],
  [",  .", "Threshold down, up"],
  ["S", "One or two panes"],
  ["F  O", "Full screen, turn by 90°"],
  ["V L B R P", "Move, lasso, brush, rectangle, polygon"],
  ["D I K", "Line, point, ruler"],
  ["Enter", "End a polygon or line"],
  ["A", "Annotate the selection"],
  ["U", "Undo the last what-if step"],
  ["E", "Save the view as a picture"],
  ["1 – 5", "Panels"],
  ["T", "Light or dark"],
  ["Esc", "Clear"],
];

const TOOLS: Record<string, Tool> = { v: "move", l: "lasso", b: "brush", r: "rectangle", p: "polygon", d: "line", i: "point", k: "ruler" };
const PANELS = ["evidence", "patch", "certificate", "whatif", "notes"] as const;

/** The list of keys as a dialog. */
export function helpDialog(): HTMLDialogElement {
  const rows = HELP.flatMap(([keys, what]) => [el("dt", {}, ...keys.split(/\s+/).map((key) => (key === "–" ? "–" : el("kbd", {}, key)))), el("dd", {}, what)]);
  const dialog = el("dialog", { class: "help", ariaLabel: "Keys" }, el("h2", {}, "Keys"), el("dl", {}, ...rows));
  dialog.append(button("Close", () => dialog.close()));
  return dialog;
}

/** Handles a key on a slide; false where it means nothing. */
export function slideKey(view: SlideView, event: KeyboardEvent): boolean {
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const move = ARROWS[key];
  if (move) return pan(view, move);
  if (TOOLS[key]) view.choose(TOOLS[key]);
  else if (key >= "1" && key <= "5") view.show(PANELS[Number(key) - 1], true);
  else if (ACTIONS[key]) ACTIONS[key](view);
  else return false;
  return true;
}

const ARROWS: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const ACTIONS: Record<string, (view: SlideView) => void> = {
  "+": (view) => zoomBy(view, 1.6),
  "=": (view) => zoomBy(view, 1.6),
  "-": (view) => zoomBy(view, 1 / 1.6),
  "0": goHome,
  "[": (view) => go(view, -1),
  "]": (view) => go(view, 1),
  Backspace: () => (location.hash = "#/"),
  h: (view) => view.setDisplay({ shown: !view.display.shown }),
  m: nextMethod,
  c: nextTarget,
  x: contrast,
  s: (view) => view.split(view.panes.length < 2),
  f: toggleFullScreen,
  o: (view) => turnSlide(view, 90),
  e: (view) => view.exports.picture(),
  u: (view) => view.whatif.undo(),
  a: (view) => annotate(view),
  ",": (view) => view.setDisplay({ threshold: Math.max(0, view.display.threshold - 0.05) }),
  ".": (view) => view.setDisplay({ threshold: Math.min(1, view.display.threshold + 0.05) }),
  Enter: (view) => view.active?.drawing.finish(),
  Escape: escape,
};

function pan(view: SlideView, [dx, dy]: [number, number]): boolean {
  const viewport = view.active?.viewer.viewport;
  if (!viewport) return false;
  const bounds = viewport.getBounds();
  const centre = viewport.getCenter();
  centre.x += 0.15 * dx * bounds.width;
  centre.y += 0.15 * dy * bounds.height;
  viewport.panTo(centre);
  return true;
}

function go(view: SlideView, step: number): void {
  goTo(view, neighbour(view, step));
}

const after = (values: string[], value: string): string => values[(values.indexOf(value) + 1) % values.length];

function nextMethod(view: SlideView): void {
  const evidence = view.active?.evidence;
  if (evidence) view.active!.choose({ method: after(methodsOf(evidence.scores), evidence.choice.method) });
}

function nextTarget(view: SlideView): void {
  const evidence = view.active?.evidence;
  if (evidence) view.active!.choose({ target: after(targetsOf(evidence.scores, evidence.choice.method), evidence.choice.target), against: null });
}

function contrast(view: SlideView): void {
  const evidence = view.active?.evidence;
  if (!evidence) return;
  const { target, against, method } = evidence.choice;
  const others = targetsOf(evidence.scores, method).filter((other) => other !== target);
  const place = against === null ? 0 : others.indexOf(against) + 1;
  view.active!.choose({ against: others[place] ?? null });
}

function annotate(view: SlideView): void {
  if (!view.selection) return;
  view.show("notes");
  view.notes.add();
}

function escape(view: SlideView): void {
  view.choose("move");
  view.clearSelection();
  if (view.active) view.pick(view.active, -1);
}
