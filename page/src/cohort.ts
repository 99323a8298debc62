/** The list of slides: find one by name, label, prediction or verdict. */

import { slideHash } from "./address";
import { getColumns, smallUrl, thumbnailUrl, type Run, type SlideRow } from "./api";
import { verdictLabel } from "./certificate";
import { confusion } from "./confusion";
import { button, el, put, select } from "./dom";
import { counted } from "./evidence";
import { listedSlides, listHash, natural, PAGE, type ListState, type PageStore } from "./page_state";

const COLUMNS: [keyof SlideRow, string][] = [["id", "Slide"], ["label", "Label"], ["predicted", "Prediction"], ["probability", "Probability"], ["correct", "Correct"], ["verdict", "Faithfulness"], ["n", "Patches"]];

export class Cohort {
  readonly element = el("main", { class: "cohort", tabIndex: -1 });
  private readonly body = el("tbody", {});
  private readonly head = el("tr", {});
  private readonly counted = el("p", { class: "muted", role: "status" });
  private readonly confusion = el("div", {});
  private columns: { method: string; target: string }[] = [];
  private readonly more = button("Show more", () => this.extend(), { class: "more" });

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
      el("div", { class: "filters" }, search, this.choice("label", "Label"), this.choice("predicted", "Prediction"), this.correctness(), withVerdict && this.choice("verdict", "Faithfulness"), run.live && el("a", { href: "#/wall", class: "to-wall" }, "Patches that say most")),
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

  /** The slide's evidence for its prediction, as small as its thumbnail. */
  private small(slide: SlideRow): HTMLElement | null {
    const column = Math.max(0, this.columns.findIndex(({ target }) => target === slide.predicted));
    if (!this.columns.length || slide.n === null) return null;
    const image = el("img", { loading: "lazy", alt: "", class: "small-map", title: `${this.columns[column].method}: evidence for ${this.columns[column].target}` });
    image.onerror = () => image.remove();
    image.src = smallUrl(slide.key, 0, column);
    return image;
  }

  /** Small pictures of the evidence come when the server has said which scores there are. */
  private async fetchColumns(): Promise<void> {
    if (!this.run.live) return;
    this.columns = await getColumns(0).catch(() => []);
    if (this.element.isConnected && this.columns.length) this.refresh();
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

  private found(): SlideRow[] {
    return listedSlides(this.run, this.state);
  }

  /** Scrolls to where the list was left. */
  comeBack(): void {
    const scroller = this.element.parentElement ?? this.element;
    scroller.scrollTop = this.state.top;
    const keep = () => this.element.isConnected && this.page.set({ list: { ...this.state, top: scroller.scrollTop } });
    scroller.addEventListener("scroll", keep, { passive: true });
  }

  refresh(): void {
    const found = this.found();
    this.drawConfusion();
    for (const key of ["label", "predicted"] as const) {
      const list = this.element.querySelector<HTMLSelectElement>(`select[name=${key}]`);
      if (list) list.value = this.state[key];
    }
    put(this.head, el("th", { class: "thumb" }, el("span", { class: "hidden-text" }, "Picture")), ...COLUMNS.map(([key, name]) => this.header(key, name)));
    put(this.body, ...found.slice(0, this.state.length).map((slide) => this.row(slide)));
    this.more.hidden = found.length <= this.state.length;
    this.counted.textContent = this.sentence(found);
    if (!found.length) put(this.body, el("tr", {}, el("td", { colSpan: COLUMNS.length + 1, class: "muted none" }, "No slide fits.")));
  }

  private sentence(found: SlideRow[]): string {
    const known = found.filter((slide) => slide.correct !== null);
    const right = known.filter((slide) => slide.correct).length;
    const failed = found.filter((slide) => slide.error).length;
    const parts = [`${found.length.toLocaleString("en")} of ${counted(this.run.slides.length, "slide")}`];
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

  private row(slide: SlideRow): HTMLElement {
    const link = el("a", { href: slideHash(slide.id) }, slide.id);
    const open = (event: MouseEvent) => {
      if (!(event.target as Element).closest("a, button") && !getSelection()?.toString()) location.hash = link.hash;
    };
    const about = slide.error ? el("div", { class: "problem small" }, slide.error) : slide.case && slide.case !== slide.id ? el("div", { class: "muted small" }, slide.case) : null;
    return el(
      "tr",
      { onclick: open, data: { key: slide.key } },
      el("td", { class: "thumb" }, thumbnail(slide), this.small(slide)),
      el("td", {}, link, about),
      el("td", {}, slide.label ?? "–"),
      el("td", {}, slide.predicted ?? "–"),
      el("td", { class: "number column-probability" }, slide.probability === null ? "–" : `${(100 * slide.probability).toFixed(1)} %`),
      el("td", {}, correctLabel(slide.correct)),
      el("td", {}, verdictLabel(slide.verdict, slide.verdict_method)),
      el("td", { class: "number column-n" }, slide.n === null ? "–" : slide.n.toLocaleString("en")),
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
