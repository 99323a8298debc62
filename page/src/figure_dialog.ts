/** The dialog that asks for a figure's resolution and kind. */

import { button, el, select } from "./dom";

export function figureDialog(figures: (dpi: number, kind: "png" | "svg") => Promise<void>): HTMLDialogElement {
  let [dpi, kind] = ["300", "png"];
  const dpis = ["96", "150", "300", "600"].map((value) => ({ value, text: `${value} dpi` }));
  const kinds = [{ value: "png", text: "PNG" }, { value: "svg", text: "SVG (annotations, scales and words as lines)" }];
  const save = () => {
    dialog.close();
    void figures(Number(dpi), kind as "png" | "svg");
  };
  const dialog: HTMLDialogElement = el(
    "dialog",
    { class: "help", ariaLabel: "Save a figure" },
    el("h2", {}, "Save a figure"),
    el("p", { class: "muted" }, "As large as on the screen at 96 dpi. What it shows and every setting go into its caption and its metadata."),
    el("label", { class: "row" }, "Resolution", select("Resolution", dpis, dpi, (v) => (dpi = v), { name: "dpi" })),
    el("label", { class: "row" }, "Kind", select("Kind", kinds, kind, (v) => (kind = v), { name: "figure-kind" })),
    el("div", { class: "buttons" }, button("Save", save, { class: "primary", data: { action: "save-figure" } }), button("Cancel", () => dialog.close())),
  );
  return dialog;
}
