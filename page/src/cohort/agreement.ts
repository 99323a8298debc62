/** What readers have drawn on the slides of a run against its evidence: overall, and slide by slide. */

import { el, put, select } from "../dom";
import { methodName, plural, WORDS } from "../words";
import type { Run } from "../server/api";
import { getAgreement, type Agreement } from "../server/cohort";
import { slideHash } from "../state/address";

const MEASURES = [["auroc", "AUROC"], ["dice", "Dice"], ["pointing", "Pointing"]] as const;
const NO_CLASS = "(no class)";

export class AgreementView {
  readonly element = el("main", { class: "cohort agreement", tabIndex: -1 });
  private readonly bar = el("div", { class: "filters" });
  private readonly tables = el("div", {});

  constructor(private readonly run: Run) {
    put(this.element, el("h1", {}, "Annotations against evidence"), this.bar, this.tables);
    void this.show(0);
  }

  private async show(run: number): Promise<void> {
    const runs = this.run.runs.map(({ name }, i) => ({ value: String(i), text: name }));
    put(this.bar, runs.length > 1 && select(WORDS.run, runs, String(run), (v) => void this.show(Number(v)), { name: "run" }));
    put(this.tables, el("p", { class: "muted", role: "status" }, "Reading all annotated slides…"));
    try {
      this.draw(await getAgreement(run));
    } catch (error) {
      put(this.tables, el("p", { class: "muted", role: "status" }, (error as Error).message));
    }
  }

  private draw({ rows, summary, left_out }: Agreement): void {
    const reasons = left_out.map((reason) => el("p", { class: "muted small" }, reason));
    if (!rows.length) return put(this.tables, el("p", { class: "muted", role: "status" }, "There are no regions on slides of this run yet."), ...reasons);
    const slides = new Set(rows.map((row) => row.slide_id)).size;
    const groupOf = (line: Agreement["summary"][number]) => JSON.stringify([line.class, line.method, line.target]);
    const overall = [...new Set(summary.map(groupOf))].map((group) => {
      const own = summary.filter((line) => groupOf(line) === group);
      const cells = MEASURES.map(([name]) => own.find((line) => line.measure === name)!);
      const { class: kind, method, target, chance } = own.find((line) => line.measure === "dice")!;
      return [kind || NO_CLASS, methodName(method), target, ...cells.map((line) => (line.low === null ? share(line.mean) : `${share(line.mean)} [${share(line.low)}, ${share(line.high)}]`)), share(chance), String(cells[0].cases)];
    });
    const each = rows.map((row) => [link(row.slide_id), row.reader || "–", row.class || NO_CLASS, methodName(row.method), row.target, ...MEASURES.map(([name]) => share(row[name])), share(row.chance), `${row.marked} of ${row.patches}`]);
    const titles = MEASURES.map(([, title]) => title);
    put(
      this.tables,
      el("p", { class: "muted" }, `${plural(slides, "annotated slide")}; each class of regions is measured separately; means and intervals are over cases. AUROC: do patches inside the regions score higher (chance 0.5)? Dice: the regions against the same number of highest-scored patches. Pointing: does the highest-scored patch lie inside? Chance gives the last two the share of the slide that is marked.`),
      el("h2", {}, "Overall"),
      table(["Regions", "Method", "Target", ...titles, "Chance", "Cases"], overall, "overall"),
      el("h2", {}, "By slide"),
      table(["Slide", "Reader", "Regions", "Method", "Target", ...titles, "Chance", "Patches inside"], each, "by-slide"),
      ...reasons,
    );
  }
}

const share = (value: number | null): string => (value === null ? "–" : value.toFixed(2));
const link = (slide: string): HTMLElement => el("a", { href: slideHash(slide) }, slide);

function table(head: string[], rows: (string | HTMLElement)[][], name: string): HTMLElement {
  const lines = rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))));
  return el("div", { class: "wide", tabIndex: 0, role: "region", ariaLabel: name }, el("table", { class: "agreement-table", data: { table: name } }, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, ...lines)));
}
