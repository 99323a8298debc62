/** The dialog that asks for a figure's resolution and kind. */

import { WORDS } from "../words";
import { button, el, put, select } from "../dom";
import type { Run, SlideRow } from "../server/api";
import { carryOver, compareHash, type ViewState } from "../state/address";

export function figureDialog(figures: (dpi: number, kind: "png" | "svg") => Promise<void>): HTMLDialogElement {
  let [dpi, kind] = ["300", "png"];
  const dpis = ["96", "150", "300", "600"].map((value) => ({ value, text: `${value} dpi` }));
  const kinds = [{ value: "png", text: "PNG" }, { value: "svg", text: "SVG (annotations, scales and text as vectors)" }];
  const save = () => {
    dialog.close();
    void figures(Number(dpi), kind as "png" | "svg");
  };
  const dialog: HTMLDialogElement = el(
    "dialog",
    { class: "help", ariaLabel: "Save a figure" },
    el("h2", {}, "Save a figure"),
    el("p", { class: "muted" }, "At 96 dpi it is as large as on the screen. Its caption and metadata contain what it shows and every setting."),
    el("label", { class: "row" }, "Resolution", select("Resolution", dpis, dpi, (v) => (dpi = v), { name: "dpi" })),
    el("label", { class: "row" }, "Kind", select("Kind", kinds, kind, (v) => (kind = v), { name: "figure-kind" })),
    el("div", { class: "buttons" }, button("Save", save, { class: "primary", data: { action: "save-figure" } }), button(WORDS.cancel, () => dialog.close())),
  );
  return dialog;
}

// The dialog that asks for the slide to set beside another: those of its case first, then all, then other stains.

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

export function otherSlideDialog(run: Run, row: Pick<SlideRow, "id" | "case">, state: ViewState): HTMLDialogElement {
  const offers = offersOf(run, row);
  const list = el("div", { class: "offers", role: "list" });
  const search = el("input", { type: "search", placeholder: "Search", ariaLabel: "Search slides", name: "beside" });
  const choose = (id: string) => {
    dialog.close();
    location.hash = compareHash([row.id, id], { view: { ...carryOver(state), panel: null }, choices: [state.panes[0] ?? {}, state.panes[0] ?? {}], points: [[], []], second: null, turn: 0 });
  };
  const fill = () => {
    const needle = search.value.trim().toLowerCase();
    const matches = offers.filter(({ id }) => id.toLowerCase().includes(needle));
    const rows = matches.slice(0, MOST).map(({ id, about }) => {
      const open = button(id, () => choose(id), { data: { beside: id } });
      if (about) open.append(el("span", { class: "muted small" }, about));
      return el("div", { role: "listitem" }, open);
    });
    const more = matches.length > MOST ? el("p", { class: "muted" }, `… and ${(matches.length - MOST).toLocaleString("en")} more: search by name.`) : null;
    put(list, ...rows, matches.length ? more : el("p", { class: "muted" }, "No other slide has this name."));
  };
  search.addEventListener("input", fill);
  const dialog: HTMLDialogElement = el(
    "dialog",
    { class: "help beside", ariaLabel: WORDS.compareSlides },
    el("h2", {}, `Compare ${row.id} with`),
    el("p", { class: "muted" }, "Mark two places that both slides show to move the slides together."),
    search,
    list,
    el("div", { class: "buttons" }, button(WORDS.cancel, () => dialog.close())),
  );
  fill();
  return dialog;
}
