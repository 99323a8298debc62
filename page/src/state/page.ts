/** What outlives a slide: how the list is filtered and sorted, and how the last slide was shown. */

import type { Run, SlideRow } from "../server/api";
import type { ViewState } from "./address";
import { Store } from "./store";

export const PAGE = 200; // rows of the list that are drawn at once

const KEPT = `xmil:list:${location.pathname}`;
const SORTED: (keyof SlideRow)[] = ["id", "label", "predicted", "probability", "correct", "verdict", "n"];
const FILTERS = ["search", "label", "predicted", "correct", "verdict"] as const;

export interface ListState extends Record<(typeof FILTERS)[number], string> {
  sort: { key: keyof SlideRow; down: boolean };
  /** How many rows are drawn, and how far the list is scrolled. */
  length: number;
  top: number;
}

export interface PageState {
  list: ListState;
  /** How the last slide was shown: the next one starts so. */
  carried: ViewState | null;
}

export type PageStore = Store<PageState>;

export function initialList(): ListState {
  return { search: "", label: "", predicted: "", correct: "", verdict: "", sort: { key: "id", down: false }, length: PAGE, top: 0 };
}

/** The store of the page; a window that is loaded again has its list as it was. */
export function pageStore(): PageStore {
  const store = new Store<PageState>({ list: listIn(readSaved() ?? "") ?? initialList(), carried: null });
  store.on(["list"], () => save(listHash(store.state.list)));
  return store;
}

function readSaved(): string | null {
  try {
    return sessionStorage.getItem(KEPT);
  } catch {
    return null; // a browser that keeps nothing
  }
}

function save(hash: string): void {
  try {
    sessionStorage.setItem(KEPT, hash);
  } catch {
    return; // as above
  }
}

/** The address of the list. */
export function listHash({ sort, length, ...list }: ListState): string {
  const query = new URLSearchParams();
  for (const name of FILTERS) if (list[name]) query.set(name, list[name]);
  if (sort.key !== "id" || sort.down) query.set("sort", `${sort.down ? "-" : ""}${sort.key}`);
  if (length > PAGE) query.set("rows", String(length));
  return `#/${query.size ? `?${query.toString()}` : ""}`;
}

/** The list that an address names; null where it names none, or leaves it as it was. */
export function listIn(hash: string): ListState | null {
  const match = /^#\/\?(.+)$/.exec(hash);
  if (!match) return null;
  const query = new URLSearchParams(match[1]);
  const list = initialList();
  for (const name of FILTERS) list[name] = query.get(name) ?? "";
  const sort = query.get("sort") ?? "id";
  const key = SORTED.find((each) => each === sort.replace(/^-/, ""));
  if (key) list.sort = { key, down: sort.startsWith("-") };
  list.length = Math.max(PAGE, Math.min(1_000_000, Number(query.get("rows")) || PAGE));
  return list;
}

/** The slides that fit the filters, in the order of the list: previous and next follow it. */
export function listedSlides(run: Run, list: ListState): SlideRow[] {
  const needle = list.search.trim().toLowerCase();
  const fits = (slide: SlideRow) =>
    (!needle || `${slide.id} ${slide.case ?? ""}`.toLowerCase().includes(needle)) &&
    (!list.label || slide.label === list.label) &&
    (!list.predicted || slide.predicted === list.predicted) &&
    (!list.verdict || slide.verdict === list.verdict) &&
    (!list.correct || slide.correct === (list.correct === "yes"));
  const { key, down } = list.sort;
  const order = (a: SlideRow, b: SlideRow) => compare(a[key], b[key], down) || natural(a.id, b.id);
  return run.slides.filter(fits).sort(order);
}

const collator = new Intl.Collator("en", { numeric: true });
export const natural = (a: string, b: string): number => collator.compare(a, b);

/** Missing values come last in both directions. */
function compare(a: unknown, b: unknown, down: boolean): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
  const order = typeof a === "string" ? natural(a, String(b)) : Number(a) - Number(b);
  return down ? -order : order;
}
