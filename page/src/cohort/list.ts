/** The list of slides: find one by name, label, prediction or verdict. */

import { button, el, put, select } from "../dom";
import { formatPercent, methodName, plural, WORDS } from "../words";
import { rowVerdict } from "../evidence/certificate";
import { thumbnailUrl, type Run, type SlideRow } from "../server/api";
import { getColumns, getScales, smallUrl, type CohortScale, type CohortScales, type ColumnName } from "../server/cohort";
import { slideHash, type ViewState } from "../state/address";
import { chooseColumn, chosenPalette, cohortBar, columnChooser, columnOf, paletteFilter, stateFor } from "./scale";
import { listedSlides, listHash, natural, PAGE, type ListState, type PageStore } from "../state/page";

const COLUMNS: [keyof SlideRow, string][] = [["id", "Slide"], ["label", WORDS.label], ["predicted", WORDS.prediction], ["probability", "Probability"], ["correct", "Correct"], ["verdict", WORDS.faithfulness], ["n", "Patches"]];

export class Cohort {
  readonly element = el("main", { class: "cohort", tabIndex: -1 });
  private readonly body = el("tbody", {});
  private readonly head = el("tr", {});
  private readonly counted = el("p", { class: "muted", role: "status" });
  private readonly confusion = el("div", {});
  private columns: ColumnName[] = [];
  private scale: CohortScale | null = null; // of the chosen method over all slides
  private readonly evidence = el("div", { class: "list-evidence" });
  private readonly more = button(WORDS.showMore, () => this.extend(), { class: "more" });

  constructor(
    private readonly run: Run,
    private readonly page: PageStore,
  ) {
    const search = el("input", { type: "search", name: "search", placeholder: "Search slides and cases ( / )", ariaLabel: "Search slides and cases", value: this.state.search });
    search.addEventListener("input", () => this.filter({ search: search.value }));
    const withVerdict = run.slides.some((slide) => slide.verdict);
    put(
      this.element,
      el("h1", { class: "hidden-text" }, `Slides of ${run.name}`),
      el("div", { class: "filters" }, search, this.choice("label", WORDS.label), this.choice("predicted", WORDS.prediction), this.correctness(), withVerdict && this.choice("verdict", WORDS.faithfulness), el("a", { href: "#/wall", class: "to-wall" }, WORDS.strongest), run.live && el("a", { href: "#/agreement", class: "to-agreement" }, "Annotations against evidence")),
      this.evidence,
      this.confusion,
      this.counted,
      el("table", { class: "slides" }, el("thead", {}, this.head), this.body),
      this.more,
    );
    this.refresh();
    void this.fetchColumns();
  }

  private get state(): ListState {
    return this.page.state.list;
  }

  /** The slide's evidence for the chosen class, as small as its thumbnail; there once the cohort's scale is known. */
  private small(slide: SlideRow): HTMLElement | null {
    const column = columnOf(this.columns, this.page.state);
    if (this.scale === null || slide.n === null) return null;
    const { method, target } = this.columns[column];
    const image = el("img", { loading: "lazy", alt: "", class: "small-map", title: `${methodName(method)}: evidence for ${target}`, style: { filter: paletteFilter(chosenPalette(this.page.state)) } });
    image.onerror = () => image.remove();
    image.src = smallUrl(slide.key, 0, column);
    return image;
  }

  /** Small pictures of the evidence come when the server has said which scores there are, and how far they reach. */
  private async fetchColumns(): Promise<void> {
    this.columns = await getColumns(0).catch(() => []);
    if (!this.columns.length) return;
    const { scales } = await getScales(0).catch(() => ({ scales: {} as CohortScales["scales"] }));
    this.scale = scales[this.columns[columnOf(this.columns, this.page.state)].method] ?? null;
    if (!this.element.isConnected) return;
    this.drawEvidence(scales);
    this.refresh();
  }

  /** Which class the small maps are for, and what their colours mean: the same on every row. */
  private drawEvidence(scales: CohortScales["scales"]): void {
    if (this.scale === null) return;
    const column = columnOf(this.columns, this.page.state);
    const choose = (value: string) => {
      chooseColumn(this.page, this.columns[Number(value)]);
      this.scale = scales[this.columns[Number(value)].method] ?? null;
      this.drawEvidence(scales);
      this.refresh();
    };
    put(this.evidence, columnChooser("Small maps", this.columns, column, choose), cohortBar(chosenPalette(this.page.state), this.columns[column], this.scale), el("span", { class: "muted" }, "One scale for all slides"));
  }

  private drawConfusion(): void {
    const open = this.confusion.querySelector("details")?.open ?? false;
    const table = confusion(this.run, this.state, (label, predicted) => this.filter({ label, predicted }));
    put(this.confusion, table);
    if (table) (table as HTMLDetailsElement).open = open;
  }

  private choice(key: "label" | "predicted" | "verdict", name: string): HTMLElement | null {
    const values = [...new Set(this.run.slides.map((slide) => slide[key]).filter((v): v is string => v !== null))].sort(natural);
    if (values.length < 2 || values.length > 50) return null;
    const options = [{ value: "", text: `${name}: all` }, ...values.map((value) => ({ value, text: value }))];
    return select(name, options, this.state[key], (v) => this.filter({ [key]: v }), { name: key });
  }

  private correctness(): HTMLElement | null {
    if (!this.run.slides.some((slide) => slide.correct !== null)) return null;
    const options = [{ value: "", text: "Correct and wrong" }, { value: "yes", text: "Correct only" }, { value: "no", text: "Wrong only" }];
    return select("Correct", options, this.state.correct, (v) => this.filter({ correct: v }), { name: "correct" });
  }

  private filter(change: Partial<ListState>): void {
    this.page.set({ list: { ...this.state, length: PAGE, ...change } });
    history.replaceState(null, "", listHash(this.state));
    this.refresh();
  }

  private extend(): void {
    this.filter({ length: this.state.length + PAGE });
  }

  private rows(): SlideRow[] {
    return listedSlides(this.run, this.state);
  }

  /** Scrolls to where the list was left. */
  restoreScroll(): void {
    const scroller = this.element.parentElement ?? this.element;
    scroller.scrollTop = this.state.top;
    const keep = () => this.element.isConnected && this.page.set({ list: { ...this.state, top: scroller.scrollTop } });
    scroller.addEventListener("scroll", keep, { passive: true });
  }

  refresh(): void {
    const rows = this.rows();
    this.drawConfusion();
    for (const key of ["label", "predicted"] as const) {
      const list = this.element.querySelector<HTMLSelectElement>(`select[name=${key}]`);
      if (list) list.value = this.state[key];
    }
    put(this.head, el("th", { class: "thumb" }, el("span", { class: "hidden-text" }, "Picture")), ...COLUMNS.map(([key, name]) => this.header(key, name)));
    put(this.body, ...rows.slice(0, this.state.length).map((slide) => this.row(slide)));
    this.more.hidden = rows.length <= this.state.length;
    this.counted.textContent = this.sentence(rows);
    if (!rows.length) put(this.body, el("tr", {}, el("td", { colSpan: COLUMNS.length + 1, class: "muted none" }, "No slide matches the search and filters.")));
  }

  private sentence(rows: SlideRow[]): string {
    const known = rows.filter((slide) => slide.correct !== null);
    const right = known.filter((slide) => slide.correct).length;
    const failed = rows.filter((slide) => slide.error).length;
    const parts = [`${rows.length.toLocaleString("en")} of ${plural(this.run.slides.length, "slide")}`];
    if (known.length) parts.push(`${right} of ${known.length} predicted correctly`);
    if (failed) parts.push(`${failed} with problems`);
    return parts.join(" · ");
  }

  private header(key: keyof SlideRow, name: string): HTMLElement {
    const { sort: sorted } = this.state;
    const here = sorted.key === key;
    const arrow = here ? (sorted.down ? " ↓" : " ↑") : "";
    const sort = () => this.filter({ sort: { key, down: here && !sorted.down } });
    return el("th", { scope: "col", "aria-sort": here ? (sorted.down ? "descending" : "ascending") : "none", class: `column-${key}` }, button(name + arrow, sort, { class: "sort" }));
  }

  /** How the first slide is shown: by the method and on the scale of its small map, for the class that is predicted. */
  private firstState({ predicted }: SlideRow): ViewState | null {
    const column = this.scale === null ? undefined : this.columns[columnOf(this.columns, this.page.state)];
    if (!column) return null;
    return stateFor(this.columns.find(({ method, target }) => method === column.method && target === predicted) ?? column);
  }

  private row(slide: SlideRow): HTMLElement {
    const link = el("a", { href: slideHash(slide.id, this.page.state.carried ? null : this.firstState(slide)) }, slide.id);
    const open = (event: MouseEvent) => {
      if (!(event.target as Element).closest("a, button") && !getSelection()?.toString()) location.hash = link.hash;
    };
    const about = slide.error ? el("div", { class: "problem small" }, slide.error) : slide.case && slide.case !== slide.id ? el("div", { class: "muted small" }, slide.case) : null;
    return el(
      "tr",
      { onclick: open, data: { key: slide.key } },
      el("td", { class: "thumb" }, thumbnail(slide), this.small(slide)),
      el("td", {}, link, about),
      el("td", { data: { name: WORDS.label } }, slide.label ?? "–"),
      el("td", { data: { name: WORDS.prediction } }, slide.predicted ?? "–"),
      el("td", { class: "number column-probability", data: { name: "Probability" } }, slide.probability === null ? "–" : formatPercent(slide.probability)),
      el("td", {}, correctLabel(slide.correct)),
      el("td", { data: { name: WORDS.faithfulness } }, rowVerdict(slide)),
      el("td", { class: "number column-n", data: { name: "Patches" } }, slide.n === null ? "–" : slide.n.toLocaleString("en")),
    );
  }
}

export function correctLabel(correct: boolean | null): HTMLElement {
  if (correct === null) return el("span", { class: "muted" }, "–");
  return correct ? el("span", { class: "right" }, "✓ correct") : el("span", { class: "wrong" }, "✕ wrong");
}

function thumbnail(slide: SlideRow): HTMLElement {
  if (!slide.image) return el("div", { class: "no-thumb", role: "img", ariaLabel: "No image" });
  const image = el("img", { loading: "lazy", alt: "", width: 64, height: 48 });
  image.onerror = () => image.replaceWith(el("div", { class: "no-thumb" }));
  image.src = thumbnailUrl(slide.key);
  return image;
}

// The confusion matrix: counts that filter the list.

const MOST = 12; // classes that still make a table

/** The table of counts; `choose` gets a label and a prediction, empty strings where the chosen cell is pressed again. */
export function confusion(run: Run, chosen: { label: string; predicted: string }, choose: (label: string, predicted: string) => void): HTMLElement | null {
  const known = run.slides.filter((slide): slide is SlideRow & { label: string; predicted: string } => slide.label !== null && slide.predicted !== null);
  const classes = [...new Set(known.flatMap((slide) => [slide.label, slide.predicted]))].sort();
  if (classes.length < 2 || classes.length > MOST || !known.some((slide) => slide.correct !== null)) return null;
  const cell = (label: string, predicted: string) => {
    const count = known.filter((slide) => slide.label === label && slide.predicted === predicted).length;
    const on = chosen.label === label && chosen.predicted === predicted;
    const press = () => (on ? choose("", "") : choose(label, predicted));
    const text = `${plural(count, "slide")} with label ${label}, predicted ${predicted}`;
    return el("td", { class: label === predicted ? "agree" : "" }, button(String(count), press, { ariaPressed: String(on), ariaLabel: text, title: text, disabled: !count, data: { label, predicted } }));
  };
  const head = el("tr", {}, el("th", { scope: "col" }, "Label \\ prediction"), ...classes.map((name) => el("th", { scope: "col" }, name)));
  const rows = classes.map((label) => el("tr", {}, el("th", { scope: "row" }, label), ...classes.map((predicted) => cell(label, predicted))));
  return el("details", { class: "confusion" }, el("summary", {}, "Confusion matrix"), el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}
