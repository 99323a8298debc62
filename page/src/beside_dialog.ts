/** The dialog that asks for the slide to set beside another: those of its case first, then all, then other stains. */

import { carried, type ViewState } from "./address";
import type { Run, SlideRow } from "./api";
import { compareHash } from "./compare_address";
import { button, el, put } from "./dom";

const MOST = 60;

interface Offer {
  id: string;
  about: string;
}

function offersOf(run: Run, row: Pick<SlideRow, "id" | "case">): Offer[] {
  const others = run.slides.filter((slide) => slide.id !== row.id);
  const mates = others.filter((slide) => row.case !== null && slide.case === row.case);
  const rest = others.filter((slide) => !mates.includes(slide));
  const about = (slide: SlideRow) => [mates.includes(slide) && "same case", slide.label, slide.predicted && `predicted ${slide.predicted}`].filter(Boolean).join(" · ");
  return [...[...mates, ...rest].map((slide) => ({ id: slide.id, about: about(slide) })), ...run.others.map(({ id }) => ({ id, about: "no evidence" }))];
}

export function besideDialog(run: Run, row: Pick<SlideRow, "id" | "case">, state: ViewState): HTMLDialogElement {
  const offers = offersOf(run, row);
  const list = el("div", { class: "offers", role: "list" });
  const search = el("input", { type: "search", placeholder: "Search", ariaLabel: "Search slides", name: "beside" });
  const choose = (id: string) => {
    dialog.close();
    location.hash = compareHash([row.id, id], { view: { ...carried(state), panel: null }, choices: [state.panes[0] ?? {}, state.panes[0] ?? {}], points: [[], []], second: null, turn: 0 });
  };
  const fill = () => {
    const needle = search.value.trim().toLowerCase();
    const found = offers.filter(({ id }) => id.toLowerCase().includes(needle));
    const rows = found.slice(0, MOST).map(({ id, about }) => {
      const open = button(id, () => choose(id), { data: { beside: id } });
      if (about) open.append(el("span", { class: "muted small" }, about));
      return el("div", { role: "listitem" }, open);
    });
    const more = found.length > MOST ? el("p", { class: "muted" }, `… and ${(found.length - MOST).toLocaleString("en")} more: search by name.`) : null;
    put(list, ...rows, found.length ? more : el("p", { class: "muted" }, "No other slide fits."));
  };
  search.addEventListener("input", fill);
  const dialog: HTMLDialogElement = el(
    "dialog",
    { class: "help beside", ariaLabel: "Another slide beside this one" },
    el("h2", {}, `Beside ${row.id}`),
    el("p", { class: "muted" }, "The two slides move together once two places are marked on each."),
    search,
    list,
    el("div", { class: "buttons" }, button("Cancel", () => dialog.close())),
  );
  fill();
  return dialog;
}
