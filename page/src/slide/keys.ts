/** Keys, and the list of them. */

import { WORDS } from "../words";
import { button, el } from "../dom";
import type { Tool } from "../annotations/drawing";
import type { CompareView } from "../compare/compare";
import { methodsOf, targetsOf } from "../evidence/evidence";
import { goHome, goTo, neighbour, zoomBy, type HeadHost } from "./head";
import { toggleFullScreen, turnSlide } from "./image";
import type { Pane } from "./pane";
import type { PanelName } from "./panels";
import { listHash } from "../state/page";
import type { Display } from "../state/settings";
import type { SlideState, Store } from "../state/store";

/** What keys do on a slide. */
export interface KeyHost extends HeadHost {
  readonly element: HTMLElement;
  readonly display: Display;
  readonly store: Store<SlideState>;
  readonly whatif: { undo(): void; summary(run: number): string | null };
  readonly notes: { add(): void; rename(): void };
  setDisplay(change: Partial<Display>): void;
  choose(tool: Tool): void;
  show(panel: PanelName, focus?: boolean): void;
  pick(pane: Pane, index: number): void;
  say(text: string, problem?: boolean): void;
}

const HELP: [string, string][] = [
  ["?", "This list"],
  ["/", "Search slides (in the list)"],
  ["[  ]", "Previous, next slide"],
  ["Backspace", "Back to the list"],
  ["+  −  0", "Zoom in, out, whole slide"],
  ["Arrows", "Move"],
  ["M  C", "Next method, next class"],
  ["X", "Compare with another class"],
  ["H", "Show or hide the evidence"],
  [",  .", "Hide fewer or more weak scores"],
  ["S", "One or two panes"],
  ["W", WORDS.compareSlides],
  ["F  O", "Full screen, rotate by 90°"],
  ["V L B R P", "Move, lasso, brush, rectangle, polygon"],
  ["D I K", "Line, point, ruler"],
  ["Enter", "Finish a polygon or line"],
  ["P X", "Two slides: mark places, unlink"],
  ["A  N", "Annotate the selection, rename the annotation"],
  ["U", "Undo the last what-if step or marked place"],
  ["E", "Save the view as a picture"],
  ["1 – 5", "Panels"],
  ["T", "Light or dark"],
  ["Esc", "Clear the selection and return to moving"],
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
export function slideKey(view: KeyHost, event: KeyboardEvent): boolean {
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

const ACTIONS: Record<string, (view: KeyHost) => void> = {
  "+": (view) => zoomBy(view, 1.6),
  "=": (view) => zoomBy(view, 1.6),
  "-": (view) => zoomBy(view, 1 / 1.6),
  "0": goHome,
  "[": (view) => go(view, -1),
  "]": (view) => go(view, 1),
  Backspace: (view) => (location.hash = listHash(view.page.state.list)),
  h: (view) => view.setDisplay({ shown: !view.display.shown }),
  m: nextMethod,
  c: nextTarget,
  x: contrast,
  s: (view) => view.split(view.panes.length < 2),
  w: (view) => view.askOtherSlide(),
  f: toggleFullScreen,
  o: (view) => turnSlide(view, 90),
  e: (view) => view.exports.picture(),
  u: (view) => view.whatif.undo(),
  a: (view) => annotate(view),
  n: (view) => {
    view.show("notes");
    view.notes.rename();
  },
  ",": (view) => view.setDisplay({ threshold: Math.max(0, view.display.threshold - 0.05) }),
  ".": (view) => view.setDisplay({ threshold: Math.min(1, view.display.threshold + 0.05) }),
  Enter: (view) => view.active?.drawing.finish(),
  Escape: escape,
};

function pan(view: { readonly active: Pane | null }, [dx, dy]: [number, number]): boolean {
  const viewport = view.active?.viewer.viewport;
  if (!viewport) return false;
  const bounds = viewport.getBounds();
  const centre = viewport.getCenter();
  centre.x += 0.15 * dx * bounds.width;
  centre.y += 0.15 * dy * bounds.height;
  viewport.panTo(centre);
  return true;
}

function go(view: KeyHost, step: number): void {
  goTo(view, neighbour(view, step));
}

const after = (values: string[], value: string): string => values[(values.indexOf(value) + 1) % values.length];

function nextMethod(view: { readonly active: Pane | null }): void {
  const evidence = view.active?.evidence;
  if (evidence) view.active!.choose({ method: after(methodsOf(evidence.scores), evidence.choice.method) });
}

function nextTarget(view: { readonly active: Pane | null }): void {
  const evidence = view.active?.evidence;
  if (evidence) view.active!.choose({ target: after(targetsOf(evidence.scores, evidence.choice.method), evidence.choice.target), against: null, classChosen: true });
}

function contrast(view: KeyHost): void {
  const evidence = view.active?.evidence;
  if (!evidence) return;
  const { target, against, method } = evidence.choice;
  const others = targetsOf(evidence.scores, method).filter((other) => other !== target);
  const place = against === null ? 0 : others.indexOf(against) + 1;
  view.active!.choose({ against: others[place] ?? null });
}

function annotate(view: KeyHost): void {
  if (!view.store.state.selection) return;
  view.show("notes");
  view.notes.add();
}

function escape(view: KeyHost): void {
  view.choose("move");
  view.store.set({ selection: null });
  if (view.active) view.pick(view.active, -1);
}

/** Handles a key on two slides side by side; Tab goes from one to the other. */
export function compareKey(view: CompareView, event: KeyboardEvent): boolean {
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const target = { active: view.active.pane };
  if (ARROWS[key]) return pan(target, ARROWS[key]);
  if (COMPARING[key]) COMPARING[key](view, target);
  else return false;
  return true;
}

const COMPARING: Record<string, (view: CompareView, target: { active: Pane }) => void> = {
  "+": (_, target) => zoomBy(target, 1.6),
  "=": (_, target) => zoomBy(target, 1.6),
  "-": (_, target) => zoomBy(target, 1 / 1.6),
  "0": (_, target) => goHome(target),
  p: (view) => view.place(),
  Enter: (view) => view.placeMiddle(),
  u: (view) => view.undo(),
  x: (view) => view.unlink(),
  h: (view) => view.setDisplay({ shown: !view.sides[0].display.shown }),
  o: (view) => view.turnActive(90),
  m: (_, target) => nextMethod(target),
  c: (_, target) => nextTarget(target),
  f: (view) => toggleFullScreen(view),
  e: (view) => view.askFigure(),
  Escape: (view) => view.place(false),
  Backspace: () => history.back(),
};
