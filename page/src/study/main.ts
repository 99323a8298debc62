/** The page of a reading study: a code opens a reader's worklist, and its cases come one by one. */

import { button, el, openDialog, put } from "../dom";
import { messages, say } from "../messages";
import { applyTheme, isDark, setTheme } from "../state/settings";
import { CaseView } from "./case";
import { UnreachableError } from "../server/api";
import { enter, getState, postEntry, StaleError, type Entry, type StudyState } from "./server";
import { UnsavedEntry } from "./unsaved";

const RETRY = 2000; // milliseconds until what could not be written is tried again
const KEYS: [string, string][] = [
  ["1 – 9", "answer the marked question"], ["Tab", "go to the next question"], ["Enter", "commit, or go to the next case"],
  ["R L P", "draw a rectangle, a lasso, a polygon"], ["Esc", "move the slide again"], ["U", "remove the last region"],
  ["H", "hide or show the colours"], ["+ − 0", "zoom, or show the whole slide"], ["W", "the worklist"], ["T", "light or dark"], ["?", "these keys"],
];

const app = document.getElementById("app")!;
const bar = el("header", { class: "top" });
const content = el("div", { class: "content" });

let state: StudyState | null = null;
let view: CaseView | null = null;
let waiting: Entry | null = null; // the newest that the server has not got
let refused: Entry | null = null; // what it did not take; the reader can change it
let writing: Promise<void> | null = null;
const unsaved = new UnsavedEntry();

/** What tests and the console may look at. */
const handle = {
  get study(): StudyState | null {
    return state;
  },
  get reading(): CaseView | null {
    return view;
  },
  get isSaved(): boolean {
    return !waiting && !refused && !writing && !view?.unsent();
  },
};
declare global {
  interface Window {
    study: typeof handle;
  }
}
window.study = handle;

function drawBar(): void {
  const lines = state?.reader ? state.worklist : [];
  const done = lines.filter((line) => line.done).length;
  put(
    bar,
    el("span", { class: "brand" }, "xmil"),
    el("span", { class: "run-name" }, state?.title ?? ""),
    el("span", { class: "space" }),
    lines.length > 0 && button(`${done} of ${lines.length} done`, () => openDialog(app, worklist()), { class: "progress-button", title: "The worklist (W)", data: { action: "worklist" } }),
    state?.reader && el("span", { class: "muted reader-name" }, state.reader),
    state?.reader && button("Leave", () => void leave(), { title: "Forget the code in this browser" }),
    button(isDark() ? "Light" : "Dark", toggleTheme, { title: "Light or dark (T)" }),
    button("?", () => openDialog(app, help()), { title: "Keys (?)", ariaLabel: "Keys" }),
  );
}

/** The cases with what is done; names, arms and labels are not known here. */
function worklist(): HTMLDialogElement {
  const lines = state!.worklist;
  const done = lines.filter((line) => line.done).length;
  const open = state!.case?.number;
  const rows = lines.map((line) =>
    el(
      "tr",
      { class: line.number === open ? "open" : "" },
      el("td", {}, line.practice ? `Practice case ${line.number + 1}` : `Case ${line.number + 1}`),
      el("td", {}, state!.parts > 1 ? `part ${line.part}` : ""),
      el("td", {}, line.done ? "done" : line.number === open ? "open" : ""),
      el("td", { class: "number" }, line.seconds === null ? "" : `${Math.round(line.seconds)} s`),
    ),
  );
  const dialog = el("dialog", { class: "help worklist", ariaLabel: "Worklist" }, el("h2", {}, "Worklist"), el("p", {}, `${done} of ${lines.length} cases are done.`), el("div", { class: "rows", tabIndex: 0 }, el("table", {}, el("tbody", {}, ...rows))));
  dialog.append(button("Close", () => dialog.close()));
  return dialog;
}

function help(): HTMLDialogElement {
  const rows = KEYS.flatMap(([keys, what]) => [el("dt", {}, ...keys.split(/\s+/).map((key) => (key === "–" ? "–" : el("kbd", {}, key)))), el("dd", {}, what)]);
  const dialog = el("dialog", { class: "help", ariaLabel: "Keys" }, el("h2", {}, "Keys"), el("dl", {}, ...rows));
  dialog.append(button("Close", () => dialog.close()));
  return dialog;
}

function toggleTheme(): void {
  setTheme(isDark() ? "light" : "dark");
  drawBar();
  view?.pane?.paint();
}

/** Shows where the reader is. */
async function show(now: StudyState): Promise<void> {
  const same = view && now.case && view.open.number === now.case.number && view.open.stage === now.case.stage;
  state = now;
  drawBar();
  document.title = `${now.case?.info.id ?? now.title} – xmil`;
  if (same) return;
  view?.destroy();
  view = null;
  if (!now.reader) return showPage(door());
  if (!now.case) return showPage(now.opens ? pause(now.opens) : finished());
  const left = unsaved.take(now);
  if (left) Object.assign(now.case, { answers: left.answers, drawn: left.regions, seconds: left.seconds });
  else unsaved.clear(now);
  const opened = (view = new CaseView(now.case, { version: now.version, keep, say }));
  put(content, opened.element);
  try {
    await opened.load();
  } catch (error) {
    say((error as Error).message, true);
  }
  if (!left || view !== opened) return;
  if (left.commit) opened.commit();
  else keep(left);
}

/** Keeps the answered case on the screen with its label; the next one is opened when the reader goes on. */
function showLabel(answered: CaseView, label: string, now: StudyState): void {
  state = now;
  drawBar();
  answered.reveal(label, !now.case, () => void show(now));
}

function showPage(page: HTMLElement): void {
  put(content, page);
  (page.querySelector<HTMLElement>("input") ?? page).focus();
}

function door(): HTMLElement {
  const code = el("input", { type: "text", name: "code", autocomplete: "off", spellcheck: false, autocapitalize: "none", required: true });
  const go = async (): Promise<void> => {
    try {
      await show(await enter(code.value));
    } catch (error) {
      say((error as Error).message, true);
    }
  };
  const form = el("form", { onsubmit: (event: Event) => (event.preventDefault(), void go()) }, el("label", {}, el("span", {}, "Your code"), code), el("button", { type: "submit", class: "primary" }, "Begin"));
  return el("main", { class: "card", tabIndex: -1 }, el("h1", {}, state!.title), el("p", {}, "Enter your code. You can stop at any time and continue later, here or on another machine."), form);
}

function pause(opens: string): HTMLElement {
  const when = new Date(opens).toLocaleString(undefined, { dateStyle: "long", timeStyle: "short" });
  return el("main", { class: "card", tabIndex: -1 }, el("h1", {}, "This part is done"), el("p", {}, `Thank you. The next part opens on ${when}; the pause helps you forget the cases.`));
}

function finished(): HTMLElement {
  return el("main", { class: "card", tabIndex: -1 }, el("h1", {}, "All cases are read"), el("p", {}, "Thank you. All answers are saved; you can close the page."));
}

async function leave(): Promise<void> {
  await settled();
  try {
    await show(await enter(""));
  } catch (error) {
    say((error as Error).message, true);
  }
}

/** Keeps the newest entry, here until the server has it; one at a time, and a commit is never overtaken. */
function keep(entry: Entry): void {
  if (waiting?.commit) return;
  waiting = entry;
  refused = null;
  unsaved.put(state!, entry);
  writing ??= write().finally(() => (writing = null));
}

async function write(): Promise<void> {
  while (waiting) {
    try {
      await send(waiting);
    } catch (error) {
      if (error instanceof UnreachableError) {
        const safe = waiting && unsaved.put(state!, waiting) ? "Your answers stay in this browser; trying" : "Trying";
        say(`Not saved yet: ${error.message} ${safe} again.`, true);
        await new Promise((done) => setTimeout(done, RETRY));
        continue;
      }
      [refused, waiting] = [waiting, null];
      say((error as Error).message, true);
      view?.reopen();
    }
  }
}

/** Sends an entry and shows what the server then says. */
async function send(entry: Entry): Promise<void> {
  unsaved.note(entry);
  let now: StudyState;
  try {
    now = await postEntry(entry, state!.revision);
  } catch (error) {
    if (!(error instanceof StaleError)) throw error;
    return compare(await getState());
  }
  taken(entry, now);
  if (entry.commit && now.label && view) showLabel(view, now.label, now);
  else await show(now);
}

/** The server is ahead: a reply of its own was lost, or another window of this reader went on. */
async function compare(now: StudyState): Promise<void> {
  const isOpen = now.case && now.case.number === waiting?.number && now.case.stage === waiting.stage;
  const isOwn = unsaved.isOwn(now);
  if (isOwn && isOpen && waiting!.id !== now.entry) {
    state = now; // and the newest entry is sent after it
    return;
  }
  taken(waiting!, now);
  if (!isOwn) {
    say("You continued in another window; this one follows.");
    view?.destroy();
    view = null;
  }
  await show(now);
}

/** The server has an entry; what was entered meanwhile still waits. */
function taken(entry: Entry, now: StudyState): void {
  if (waiting !== entry) return void unsaved.put(now, waiting!);
  waiting = null;
  unsaved.clear(now);
}

async function settled(): Promise<void> {
  const entry = view?.unsent();
  if (entry) keep(entry);
  while (writing) await writing;
}

function onKey(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  if (document.querySelector("dialog[open]") || event.altKey) return;
  if (target.matches("textarea")) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) view?.commit();
    else if (event.key === "Escape") view?.element.focus();
    return;
  }
  if (event.ctrlKey || event.metaKey || target.matches("input[type=text]")) return;
  if (target.matches("button, a") && (event.key === "Enter" || event.key === " ")) return;
  if (target.matches("input[type=radio]") && event.key.startsWith("Arrow")) return;
  const key = event.key.toLowerCase();
  if (key === "?") openDialog(app, help());
  else if (key === "t") toggleTheme();
  else if (key === "w" && state?.reader) openDialog(app, worklist());
  else if (!view?.key(event)) return;
  event.preventDefault();
}

async function start(): Promise<void> {
  applyTheme();
  put(app, bar, content, messages);
  put(content, el("p", { class: "loading" }, "Opening the study…"));
  drawBar();
  addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawBar);
  addEventListener("pagehide", () => {
    const entry = waiting?.commit ? waiting : (view?.unsent() ?? waiting);
    if (!entry) return;
    if (!writing) unsaved.note(entry);
    unsaved.put(state!, entry);
    if (!writing) void postEntry(entry, state!.revision, true).catch(() => undefined);
  });
  addEventListener("beforeunload", (event) => {
    if (waiting || refused) event.preventDefault();
  });
  try {
    await show(await getState());
  } catch (error) {
    put(content, el("div", { class: "problem banner", role: "alert" }, (error as Error).message));
  }
}

void start();
