/** A figure as SVG: slide and evidence as a picture, annotations, scales and words as lines and letters. */

import { svg } from "./dom";
import { ends, scaleLength, ticks } from "./legend";
import { limitOf } from "./overlay";
import { css, LAST, table } from "./palette";
import { plainFigure, unitOf } from "./figure";
import type { Pane } from "./pane";

const FONT = "system-ui, sans-serif";

/** The figure's SVG text; `facts` go into its metadata. */
export async function svgFigure(pane: Pane, dpi: number, lines: string[], facts: string): Promise<Blob> {
  const { clientWidth: width, clientHeight: height } = pane.stage;
  const picture = (await plainFigure(pane, unitOf(pane, dpi))).toDataURL("image/png");
  const root = svg(
    "svg",
    { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": 12 },
    svg("title", {}, lines[0]),
    svg("desc", {}, lines.join("\n")),
    svg("metadata", {}, facts),
    svg("image", { href: picture, width, height }),
    annotations(pane),
    legend(pane, width, height),
    caption(lines),
  );
  return new Blob([new XMLSerializer().serializeToString(root)], { type: "image/svg+xml" });
}

function annotations(pane: Pane): SVGElement {
  const t = pane.transform();
  const [cx, cy] = t.centre;
  const at = ([x, y]: readonly number[]) => `${(t.x + x * t.scale).toFixed(2)},${(t.y + y * t.scale).toFixed(2)}`;
  const paths = pane.host.marks.annotations.flatMap((note) => {
    const d = note.polygons.flat().map((ring) => `M${ring.map(at).join("L")}${note.shape === "line" || note.shape === "point" ? "" : "Z"}`).join("");
    const colour = `rgb(${note.colour.join(",")})`;
    const cap: Record<string, string | number> = note.shape === "point" ? { "stroke-linecap": "round", "stroke-width": 7 } : { "stroke-width": 2 };
    const path = svg("path", { d: note.shape === "point" ? `${d}h.01` : d, fill: "none", stroke: colour, ...cap }, svg("title", {}, note.name || note.kind));
    return [path];
  });
  return svg("g", { class: "annotations", transform: `rotate(${(t.angle * 180) / Math.PI} ${cx} ${cy})` }, ...paths);
}

function plate(x: number, y: number, width: number, height: number): SVGElement {
  return svg("rect", { x, y, width, height, fill: "#fff", "fill-opacity": 0.88 });
}

function caption(lines: string[]): SVGElement {
  const widest = Math.max(...lines.map((line) => 7.2 * line.length));
  const rows = lines.map((line, i) => svg("text", { x: 20, y: 29 + 18 * i, "font-size": 13, "font-weight": 600 }, line));
  return svg("g", { class: "caption" }, plate(10, 10, widest + 20, 12 + 18 * lines.length), ...rows);
}

function legend(pane: Pane, width: number, height: number): SVGElement {
  const { info, display } = pane.host;
  const bar = scaleLength(info, pane.transform().scale);
  const scale = [plate(10, height - 44, bar.width + 20, 34), svg("text", { x: 20, y: height - 27 }, bar.text), svg("rect", { x: 20, y: height - 20, width: bar.width, height: 3, fill: "#111" })];
  const evidence = display.shown ? pane.evidence : null;
  if (!evidence) return svg("g", { class: "legend" }, ...scale);
  const [x, y] = [width - 250, height - 66];
  const colours = table(display.palette, evidence.signed);
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
    svg("linearGradient", { id: "colours" }, ...stops),
    svg("rect", { x: x + 10, y: y + 22, width: 220, height: 12, fill: "url(#colours)" }),
    ...row(ends(evidence), 16),
    ...row(ticks(evidence, limitOf(evidence, display)), 48),
  );
}
