/** The patches of all slides that say most for and against, by label and by right and wrong; each leads to its slide. */

import { el, put, select } from "../dom";
import { formatNumber, plural, WORDS } from "../words";
import { getColumns, getWall, patchUrl, type Run, type Wall, type WallPatch } from "../server/api";
import { slideHash } from "../state/address";

export class WallView {
  readonly element = el("main", { class: "cohort wall", tabIndex: -1 });
  private readonly bar = el("div", { class: "filters" });
  private readonly groups = el("div", {});
  private columns: { method: string; target: string }[] = [];
  private lastTicket = 0;
  private which = { run: 0, column: 0 };

  constructor(private readonly run: Run) {
    put(this.element, el("h1", {}, "Patches that say most"), this.bar, this.groups);
    void this.choose(0);
  }

  private async choose(run: number): Promise<void> {
    this.which = { run, column: 0 };
    try {
      this.columns = await getColumns(run);
    } catch (error) {
      return put(this.groups, el("p", { class: "problem" }, (error as Error).message));
    }
    await this.show();
  }

  private drawBar(): void {
    const runs = this.run.runs.map(({ name }, i) => ({ value: String(i), text: name }));
    const columns = this.columns.map(({ method, target }, i) => ({ value: String(i), text: `${method}: evidence for ${target}` }));
    put(
      this.bar,
      runs.length > 1 && select(WORDS.run, runs, String(this.which.run), (v) => void this.choose(Number(v)), { name: "run" }),
      columns.length > 0 && select("Evidence", columns, String(this.which.column), (v) => void this.show(Number(v)), { name: "column" }),
    );
  }

  /** Asks for a wall; an answer that comes after the next question is dropped. */
  private async show(column = 0): Promise<void> {
    const ticket = ++this.lastTicket;
    this.which.column = column;
    this.drawBar();
    if (!this.columns.length) return put(this.groups, el("p", { class: "muted" }, "This run has no scores with signs."));
    put(this.groups, el("p", { class: "muted", role: "status" }, "Reading all slides…"));
    try {
      const wall = await getWall(this.which.run, column);
      if (ticket === this.lastTicket) this.draw(wall);
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
    const about = `${wall.method} over ${plural(wall.slides, "slide")}; at most three patches of a slide in a row.`;
    put(this.groups, el("p", { class: "muted" }, about), ...groups);
  }

  private side(title: string, patches: WallPatch[], wall: Wall): HTMLElement {
    const links = patches.map((patch) => this.link(patch, wall));
    return el("div", { class: "wall-side" }, el("h3", {}, title), links.length ? el("div", { class: "wall-row" }, ...links) : el("p", { class: "muted" }, WORDS.none));
  }

  private link({ key, index, score }: WallPatch, wall: Wall): HTMLElement {
    const slide = this.run.slides.find((row) => row.key === key);
    const { run } = this.which;
    const state = { panes: [{ run, method: wall.method, target: wall.target }], display: {}, area: null, panel: "patch", picked: index, layers: null };
    const name = slide?.id ?? `slide ${key}`;
    const image = slide?.image ? el("img", { src: patchUrl(key, run, index), alt: "", loading: "lazy", width: 96, height: 96 }) : el("span", { class: "no-thumb" });
    const label = `Patch ${index} of ${name}, score ${formatNumber(score)}`;
    return el("a", { href: slideHash(slide?.id ?? "", state), class: "wall-patch", title: label, ariaLabel: label, data: { key, index } }, image, el("span", { class: "caption" }, formatNumber(score)), el("span", { class: "caption muted" }, name));
  }
}
