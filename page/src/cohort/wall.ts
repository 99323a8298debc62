/** The strongest patches of all slides, for and against, by label and by right and wrong; each leads to its slide. */

import { el, put, select } from "../dom";
import { css, LAST, rgbTable } from "../colours";
import { formatNumber, methodName, plural, WORDS } from "../words";
import { chooseColumn, chosenPalette, cohortBar, columnChooser, columnOf, stateFor } from "./scale";
import { patchUrl, type Run } from "../server/api";
import { getColumns, getScales, getWall, type CohortScales, type ColumnName, type Wall, type WallPatch } from "../server/cohort";
import { slideHash } from "../state/address";
import type { PageStore } from "../state/page";

export class WallView {
  readonly element = el("main", { class: "cohort wall", tabIndex: -1 });
  private readonly bar = el("div", { class: "filters" });
  private readonly groups = el("div", {});
  private columns: ColumnName[] = [];
  private scales: CohortScales["scales"] = {};
  private lastTicket = 0;
  private which = { run: 0, column: 0 };

  constructor(
    private readonly run: Run,
    private readonly page: PageStore,
  ) {
    put(this.element, el("h1", {}, WORDS.strongest), this.bar, this.groups);
    void this.choose(0);
  }

  private async choose(run: number): Promise<void> {
    try {
      this.columns = await getColumns(run);
      this.which = { run, column: run ? 0 : columnOf(this.columns, this.page.state) };
    } catch (error) {
      return put(this.groups, el("p", { class: "problem" }, (error as Error).message));
    }
    await this.show(this.which.column);
  }

  private drawBar(): void {
    const runs = this.run.runs.map(({ name }, i) => ({ value: String(i), text: name }));
    const { run, column } = this.which;
    const scale = this.columns.length ? this.scales[this.columns[column].method] : undefined;
    const choose = (value: string) => {
      if (!run) chooseColumn(this.page, this.columns[Number(value)]);
      void this.show(Number(value));
    };
    put(
      this.bar,
      runs.length > 1 && select(WORDS.run, runs, String(run), (v) => void this.choose(Number(v)), { name: "run" }),
      this.columns.length > 0 && columnChooser("Evidence", this.columns, column, choose),
      scale && cohortBar(chosenPalette(this.page.state), this.columns[column], scale),
    );
  }

  /** Asks for a wall; an answer that comes after the next question is dropped. */
  private async show(column: number): Promise<void> {
    const ticket = ++this.lastTicket;
    this.which.column = column;
    this.drawBar();
    if (!this.columns.length) return put(this.groups, el("p", { class: "muted" }, "This run has no signed scores for a class."));
    put(this.groups, el("p", { class: "muted", role: "status" }, "Reading all slides…"));
    try {
      const [wall, { scales }] = await Promise.all([getWall(this.which.run, column), getScales(this.which.run)]);
      if (ticket !== this.lastTicket) return;
      this.scales = scales;
      this.drawBar();
      this.draw(wall);
    } catch (error) {
      if (ticket === this.lastTicket) put(this.groups, el("p", { class: "problem", role: "alert" }, (error as Error).message));
    }
  }

  private draw(wall: Wall): void {
    const groups = wall.groups.map((group) => {
      const correctness = group.correct === null ? "" : group.correct ? ", predicted correctly" : ", predicted wrongly";
      return el(
        "section",
        { class: "wall-group", data: { label: group.label ?? "", correct: String(group.correct) } },
        el("h2", {}, `${group.label === null ? "Slides without a label" : `Label ${group.label}`}${correctness}`),
        this.side(`For ${wall.target}`, group.supporting, wall),
        this.side(`Against ${wall.target}`, group.refuting, wall),
      );
    });
    const about = `${methodName(wall.method)} over ${plural(wall.slides, "slide")}; at most three patches per slide in a row. The frame has the colour of the score, on one scale for all slides.`;
    put(this.groups, el("p", { class: "muted" }, about), ...groups);
  }

  private side(title: string, patches: WallPatch[], wall: Wall): HTMLElement {
    const links = patches.map((patch) => this.link(patch, wall));
    return el("div", { class: "wall-side" }, el("h3", {}, title), links.length ? el("div", { class: "wall-row" }, ...links) : el("p", { class: "muted" }, WORDS.none));
  }

  private link({ key, index, score }: WallPatch, wall: Wall): HTMLElement {
    const slide = this.run.slides.find((row) => row.key === key);
    const { run } = this.which;
    const column = this.columns[this.which.column];
    const state = { ...stateFor(column), panes: [{ run, method: wall.method, target: wall.target }], panel: "patch", picked: index };
    const limit = this.scales[wall.method]?.high ?? 1;
    const borderColor = css(rgbTable(chosenPalette(this.page.state), true), (LAST / 2) * (1 + Math.max(-1, Math.min(1, score / limit))));
    const name = slide?.id ?? `slide ${key}`;
    const image = slide?.image ? el("img", { src: patchUrl(key, run, index), alt: "", loading: "lazy", width: 96, height: 96 }) : el("span", { class: "no-thumb" });
    const label = `Patch ${index} of ${name}, score ${formatNumber(score)}`;
    return el("a", { href: slideHash(slide?.id ?? "", state), class: "wall-patch", style: { borderColor }, title: label, ariaLabel: label, data: { key, index } }, image, el("span", { class: "caption" }, formatNumber(score)), el("span", { class: "caption muted" }, name));
  }
}
