/** Two slides in one figure: a caption on each, how they are linked, and every setting in the metadata. */

import { captionOf, choiceName } from "./caption";
import type { CompareLink } from "./compare_address";
import type { Similarity } from "./alignment";
import { download, fileName } from "./dom";
import { figure, unitOf, type Part } from "./figure";
import type { Run } from "./api";
import { withFacts } from "./png";
import type { Side } from "./side";
import { svgFigure } from "./svg_figure";

/** What the figure shows. */
export interface FigureHost {
  readonly run: Run;
  readonly sides: readonly [Side, Side];
  readonly linked: Similarity | null;
  linkText(): string | null;
  state(): CompareLink;
}

export class CompareFigures {
  constructor(private readonly view: FigureHost) {}

  async save(dpi: number, kind: "png" | "svg"): Promise<void> {
    const parts = this.parts();
    if (kind === "svg") return download(await svgFigure(parts, dpi, this.facts()), `${this.name()}.svg`);
    const resolution = 96 * unitOf(parts.map(({ pane }) => pane), dpi);
    const picture = await figure(parts, dpi);
    const blob = await new Promise<Blob | null>((done) => picture.toBlob(done, "image/png"));
    if (blob) download(await withFacts(blob, resolution, this.texts(parts)), `${this.name()}.${dpi}dpi.png`);
  }

  /** Each slide under its letter; the second says how it lies on the first. */
  private parts(): Part[] {
    const link = this.view.linkText() ?? "Not linked: each slide is shown at a place and size of its own.";
    return this.view.sides.map(({ pane, letter }) => {
      const [slide, ...lines] = captionOf(pane);
      return { pane, lines: [`${letter}: ${slide}`, ...lines, ...(letter === "B" ? [link] : [])] };
    });
  }

  private texts(parts: readonly Part[]): Record<string, string> {
    const { run, sides } = this.view;
    return { Title: sides.map(({ info }) => info.id).join(" beside "), Description: parts.map(({ lines }) => lines.join("; ")).join(" | "), Software: `xmil ${run.version}`, xmil: this.facts() };
  }

  /** Every setting that the figure depends on, as JSON. */
  private facts(): string {
    const { run, sides, linked } = this.view;
    const { view, choices, points, second, turn } = this.view.state();
    const slides = sides.map(({ info, display, pane }, i) => ({ slide: info.id, shows: choices[i], display, area: pane.area(), points: points[i] }));
    return JSON.stringify({ xmil: run.version, runs: run.runs.map(({ name }) => name), slides, display: view.display, linked, second, turn, address: location.hash });
  }

  /** A name that tells figures of the same two slides apart. */
  private name(): string {
    const { sides, linked } = this.view;
    const { threshold, sign, shown } = sides[0].display;
    const each = sides.flatMap(({ info, pane }) => [info.id, ...(pane.evidence && shown ? [choiceName(pane.evidence)] : [])]);
    const settings = [!shown && "hidden", threshold > 0 && `above-${Number((100 * threshold).toFixed(1))}`, sign !== "both" && sign, linked && "linked"].filter((part): part is string => Boolean(part));
    return [...each, ...settings].map(fileName).join(".");
  }
}
