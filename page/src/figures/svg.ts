/** A figure as SVG: slide and evidence as a picture, annotations, scales and words as lines and letters. */

import { css, INK, LAST, PAPER, PLATE, rgb, rgbTable } from "../colours";
import { svg } from "../dom";
import { rangeOf } from "../evidence/evidence";
import { colourEnds, scaleLength, colourTicks } from "../evidence/legend";
import { GAP, plainFigure, unitOf, type Part } from "./figure";
import type { Pane } from "../slide/pane";

const FONT = "system-ui, sans-serif";

/** The figure's SVG text, panes side by side; `facts` go into its metadata. */
export async function svgFigure(parts: readonly Part[], dpi: number, facts: string): Promise<Blob> {
  const unit = unitOf(parts.map(({ pane }) => pane), dpi);
  const groups: SVGElement[] = [];
  let [x, height] = [0, 0];
  for (const { pane, lines } of parts) {
    groups.push(await drawn(pane, lines, unit, x));
    x += pane.stage.clientWidth + GAP;
    height = Math.max(height, pane.stage.clientHeight);
  }
  const width = x - GAP;
  const root = svg(
    "svg",
    { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": 12 },
    svg("title", {}, parts.map(({ lines }) => lines[0]).join(" beside ")),
    svg("desc", {}, parts.map(({ lines }) => lines.join("\n")).join("\n\n")),
    svg("metadata", {}, facts),
    ...groups,
  );
  return new Blob([new XMLSerializer().serializeToString(root)], { type: "image/svg+xml" });
}

/** One pane; what lies beyond its stage is cut off. */
async function drawn(pane: Pane, lines: string[], unit: number, x: number): Promise<SVGElement> {
  const { clientWidth: width, clientHeight: height } = pane.stage;
  const picture = (await plainFigure(pane, unit)).toDataURL("image/png");
  const cut = `stage-${pane.letter}`;
  return svg(
    "g",
    { class: `pane-${pane.letter}`, transform: `translate(${x} 0)`, "clip-path": `url(#${cut})` },
    svg("clipPath", { id: cut }, svg("rect", { width, height })),
    svg("image", { href: picture, width, height }),
    annotations(pane),
    legend(pane, width, height),
    caption(lines, width),
  );
}

function annotations(pane: Pane): SVGElement {
  const t = pane.transform();
  const [cx, cy] = t.centre;
  const at = ([x, y]: readonly number[]) => `${(t.x + x * t.scale).toFixed(2)},${(t.y + y * t.scale).toFixed(2)}`;
  const paths = pane.host.marks.annotations.flatMap((note) => {
    const d = note.polygons.flat().map((ring) => `M${ring.map(at).join("L")}${note.shape === "line" || note.shape === "point" ? "" : "Z"}`).join("");
    const colour = rgb(note.colour);
    const cap: Record<string, string | number> = note.shape === "point" ? { "stroke-linecap": "round", "stroke-width": 7 } : { "stroke-width": 2 };
    const path = svg("path", { d: note.shape === "point" ? `${d}h.01` : d, fill: "none", stroke: colour, ...cap }, svg("title", {}, note.name || note.kind));
    return [path];
  });
  return svg("g", { class: "annotations", transform: `rotate(${(t.angle * 180) / Math.PI} ${cx} ${cy})` }, ...paths);
}

function plate(x: number, y: number, width: number, height: number): SVGElement {
  return svg("rect", { x, y, width, height, fill: PAPER, "fill-opacity": PLATE });
}

const LETTER = 7.2; // its width, in pixels, on the safe side

/** A line that would run out of the pane is made narrower. */
function caption(lines: string[], width: number): SVGElement {
  const room = width - 40;
  const long = (line: string): Record<string, string | number> => (LETTER * line.length > room ? { textLength: room, lengthAdjust: "spacingAndGlyphs" } : {});
  const widest = Math.min(room, Math.max(...lines.map((line) => LETTER * line.length)));
  const rows = lines.map((line, i) => svg("text", { x: 20, y: 29 + 18 * i, "font-size": 13, "font-weight": 600, ...long(line) }, line));
  return svg("g", { class: "caption" }, plate(10, 10, widest + 20, 12 + 18 * lines.length), ...rows);
}

function legend(pane: Pane, width: number, height: number): SVGElement {
  const { info, display } = pane.host;
  const bar = scaleLength(info, pane.transform().scale);
  const scale = [plate(10, height - 44, bar.width + 20, 34), svg("text", { x: 20, y: height - 27 }, bar.text), svg("rect", { x: 20, y: height - 20, width: bar.width, height: 3, fill: INK })];
  const evidence = display.shown ? pane.evidence : null;
  if (!evidence) return svg("g", { class: "legend" }, ...scale);
  const [x, y] = [width - 250, height - 66];
  const colours = rgbTable(display.palette, evidence.signed);
  const stops = Array.from({ length: 17 }, (_, i) => svg("stop", { offset: i / 16, "stop-color": css(colours, (i * LAST) / 16) }));
  const row = (texts: string[], top: number) =>
    texts.map((text, i) => {
      const share = texts.length < 2 ? 0 : i / (texts.length - 1);
      return svg("text", { x: x + 10 + 220 * share, y: y + top, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, text);
    });
  return svg(
    "g",
    { class: "legend" },
    ...scale,
    plate(x, y, 240, 56),
    svg("linearGradient", { id: `colours-${pane.letter}` }, ...stops),
    svg("rect", { x: x + 10, y: y + 22, width: 220, height: 12, fill: `url(#colours-${pane.letter})` }),
    ...row(colourEnds(evidence), 16),
    ...row(colourTicks(evidence, rangeOf(evidence, display)), 48),
  );
}
