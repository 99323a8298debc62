/** The page: the list of slides, or one of them, after the address. */

import { button, el, put } from "./dom";
import { AgreementView } from "./cohort/agreement";
import { takeNames } from "./words";
import { Cohort } from "./cohort/list";
import { WallView } from "./cohort/wall";
import { CompareView } from "./compare/compare";
import { messages, say } from "./messages";
import { UnreachableError, getRun, type Run, type SlideRow } from "./server/api";
import { compareKey, helpDialog, slideKey } from "./slide/keys";
import { SlideView } from "./slide/slide";
import { parseCompare, parseHash, type CompareAddress } from "./state/address";
import { listHash, listIn, pageStore } from "./state/page";
import { applyTheme, isDark, setTheme } from "./state/settings";

const app = document.getElementById("app")!;
const bar = el("header", { class: "top" });
const content = el("div", { class: "content" });
const help = helpDialog();

const CHOOSING = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "Enter", " ", "Escape"]; // keys of a control
const LEAVING = ["Backspace", "[", "]"]; // keys that work while a slide is still opening

let run: Run | null = null;
let view: SlideView | null = null;
let compare: CompareView | null = null;
const page = pageStore();

/** What tests and the console may look at. */
const handle = {
  get view(): SlideView | null {
    return view;
  },
  get compare(): CompareView | null {
    return compare;
  },
  get run(): Run | null {
    return run;
  },
  page,
};
declare global {
  interface Window {
    xmil: typeof handle;
  }
}
window.xmil = handle;

function drawBar(): void {
  const dark = isDark();
  put(
    bar,
    el("a", { href: listHash(page.state.list), class: "brand", title: run ? `All slides · xmil ${run.version}` : "xmil" }, "xmil"),
    el("span", { class: "run-name" }, run?.name ?? ""),
    (view || compare || ["#/wall", "#/agreement"].includes(location.hash)) && el("a", { href: listHash(page.state.list), class: "back" }, "All slides"),
    el("span", { class: "space" }),
    button(dark ? "Light" : "Dark", toggleTheme, { title: "Light or dark (T)", data: { action: "theme" } }),
    button("?", () => help.showModal(), { title: "Keys (?)", ariaLabel: "Keys" }),
  );
}

function toggleTheme(): void {
  setTheme(isDark() ? "light" : "dark");
  drawBar();
  view?.repaint();
  compare?.repaint();
}

async function route(): Promise<void> {
  view?.destroy();
  compare?.destroy();
  view = compare = null;
  const [address, both] = [parseHash(location.hash), parseCompare(location.hash)];
  if (!run) return;
  if (address) await openSlide(address.slide);
  else if (both) await openBoth(both);
  else if (location.hash === "#/wall") showPage(new WallView(run, page).element);
  else if (location.hash === "#/agreement" && run.live) showPage(new AgreementView(run).element);
  else showList(run);
  drawBar();
  const opened = handle.view;
  const title = opened ? (opened.info?.id ?? "Slide") : both ? both.slides.join(" and ") : run.name;
  document.title = `${title} – xmil`;
}

function showList(of: Run): void {
  const named = listIn(location.hash);
  if (named) page.set({ list: { ...named, top: page.state.list.top } });
  else history.replaceState(null, "", listHash(page.state.list));
  const list = new Cohort(of, page);
  showPage(list.element);
  list.restoreScroll();
}

function showPage(page: HTMLElement): void {
  put(content, page);
  page.focus({ preventScroll: true });
}

/** The slide of this name; the run is read again where it does not know it or knows it at another place. */
async function openSlide(slide: string): Promise<void> {
  const row = await findRow(slide);
  if (!row) return put(content, problem(`There is no slide ${slide} in this run.`));
  const opened = new SlideView(run!, row, say, page, parseHash(location.hash)?.state ?? null);
  view = opened;
  drawBar();
  put(content, opened.element);
  try {
    await opened.load();
    if (document.activeElement === document.body && view === opened) opened.panes[0]?.stage.focus();
  } catch (error) {
    if (view === opened) put(opened.element, problem((error as Error).message));
    if (view === opened && error instanceof UnreachableError) void reopenWhenBack(opened);
  }
}

/** Two slides side by side; a slide that no run explains may be one of them. */
async function openBoth({ slides, state }: CompareAddress): Promise<void> {
  const rows = await Promise.all(slides.map(async (id) => (await findRow(id)) ?? run!.others.find((other) => other.id === id)));
  const missing = slides.find((_, i) => !rows[i]);
  if (missing !== undefined) return put(content, problem(`There is no slide ${missing} in this run or its slides.`));
  const opened = new CompareView(run!, [rows[0]!, rows[1]!], say, state);
  compare = opened;
  showPage(opened.element);
  try {
    await opened.load();
  } catch (error) {
    if (compare === opened) put(opened.element, problem((error as Error).message));
  }
}

/** Opens the slide again when the server answers, unless another one was opened meanwhile. */
async function reopenWhenBack(waiting: SlideView): Promise<void> {
  while (view === waiting) {
    await new Promise((done) => setTimeout(done, 1500));
    if (await getRun().then(() => true, () => false)) return view === waiting ? route() : undefined;
  }
}

async function findRow(slide: string): Promise<SlideRow | undefined> {
  const find = () => run?.slides.find((row) => row.id === slide);
  const known = find();
  if (known) return known;
  try {
    run = await getRun();
  } catch {
    return undefined;
  }
  return find();
}

function problem(text: string): HTMLElement {
  return el("div", { class: "problem banner", role: "alert" }, text, " ", el("a", { href: listHash(page.state.list) }, "All slides"));
}

function onKey(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  const typing = target.matches("input:not([type=range]):not([type=checkbox]), textarea");
  const modified = event.ctrlKey || event.metaKey || event.altKey;
  if ((modified && !event.getModifierState("AltGraph")) || document.querySelector("dialog[open]")) return; // AltGr makes [ and ] on many keyboards
  if (typing) {
    if (event.key === "Escape") (target.closest<HTMLElement>(".panel, main") ?? document.body).focus();
    return;
  }
  if (target.matches("input[type=range], select, .panel") && CHOOSING.includes(event.key)) return;
  if (target.matches("button, a") && (event.key === "Enter" || event.key === " ")) return;
  if (handled(event)) event.preventDefault();
}

function handled(event: KeyboardEvent): boolean {
  if (event.key === "?") help.showModal();
  else if (event.key.toLowerCase() === "t") toggleTheme();
  else if (view) return (view.loaded || LEAVING.includes(event.key)) && slideKey(view, event);
  else if (compare) return compare.ready && compareKey(compare, event);
  else if (event.key === "/") document.querySelector<HTMLInputElement>("input[type=search]")?.focus();
  else return false;
  return true;
}

async function start(): Promise<void> {
  applyTheme();
  put(app, bar, content, messages, help);
  put(content, el("p", { class: "loading" }, "Opening the run…"));
  drawBar();
  try {
    run = await getRun();
    takeNames(run);
  } catch (error) {
    return put(content, problem((error as Error).message));
  }
  addEventListener("hashchange", () => void route());
  addEventListener("keydown", onKey);
  addEventListener("fullscreenchange", () => (document.fullscreenElement ?? app).append(messages)); // else nobody sees them
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawBar);
  await route();
}

void start();
