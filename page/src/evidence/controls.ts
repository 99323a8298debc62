/** The panel that says how evidence is shown: histogram, threshold, clipping, colours. */

import { BAR_EDGE, css, LAST, PALETTES, rgbTable } from "../colours";
import { button, el, put, select } from "../dom";
import { countPatches, formatNumber } from "../words";
import { histogram, rangeOf, type Evidence, type Range } from "./evidence";
import { nameOf, offered, type LayerStore } from "./layers";
import { scaleWarning, warningsOf } from "./legend";
import { galleries } from "./patches";
import type { Run } from "../server/api";
import { ImageSettings, type ImageHost } from "../slide/image";
import type { Pane } from "../slide/pane";
import type { ClipName, Display } from "../state/settings";
import type { SlideState, Store } from "../state/store";

/** What the panel needs of the page. */
export interface ControlsHost extends ImageHost {
  readonly run: Run;
  readonly store: Store<SlideState>;
  readonly layers: LayerStore;
  /** When the slide was opened, and how long it took until it was seen. */
  readonly began: number;
  readonly firstPaint: number | null;
  visible(pane: Pane): number[];
  jump(pane: Pane, index: number): void;
}

const BINS = 64;
const PATIENCE = 3000; // milliseconds that galleries wait for the slide's first picture

export class Controls {
  readonly element = el("div", { class: "panel-body" });
  private readonly chart = el("canvas", { class: "histogram", role: "img", width: 640, height: 150 });
  private readonly axis = el("div", { class: "axis" });
  private readonly gallery = el("div", {});
  private readonly warnings = el("div", {});
  private readonly image: ImageSettings;
  private readonly layers = el("section", { class: "block layers" });
  private readonly threshold = slider("Hide scores weaker than", 0, 1, 0.005, (v) => this.view.setDisplay({ threshold: v }));
  private readonly clip = slider("Full colour at", 0.01, 1, 0.005, (v) => this.view.setDisplay({ clip: v }));
  private readonly ranges = el("div", { class: "segments", role: "group", ariaLabel: "Colour scale" });
  private readonly shared = el("input", { type: "checkbox", name: "shared", onchange: () => this.view.setDisplay({ shared: this.shared.checked }) });
  private readonly sharing = el("label", { class: "row check" }, this.shared, "Same scale in both panes");
  private readonly beyond = el("p", { class: "problem small", role: "status" });
  private readonly opacity = slider("Opacity", 0, 1, 0.02, (v) => this.view.setDisplay({ opacity: v }));
  private readonly counted = el("p", { class: "muted small" });
  private readonly signs = el("div", { class: "segments", role: "group", ariaLabel: "Signs shown" });
  private readonly fade = el("input", { type: "checkbox", onchange: () => this.view.setDisplay({ fade: this.fade.checked }) });
  private readonly grey = el("input", { type: "checkbox", onchange: () => this.view.setDisplay({ grey: this.grey.checked }) });
  private readonly palette: HTMLSelectElement;
  private waiting = 0;

  constructor(private readonly view: ControlsHost) {
    this.image = new ImageSettings(view);
    const palettes = PALETTES.map((palette) => ({ value: palette.id, text: palette.name }));
    this.palette = select("Colours", palettes, view.display.palette, (v) => view.setDisplay({ palette: v }), { name: "palette" });
    put(
      this.element,
      this.warnings,
      el("section", { class: "block" }, el("h2", {}, "Distribution of scores"), this.chart, this.axis, this.counted, this.threshold.element, this.clip.element, this.ranges, this.sharing, this.beyond),
      el(
        "section",
        { class: "block" },
        el("h2", {}, "Appearance"),
        this.signs,
        this.opacity.element,
        el("label", { class: "row" }, "Colours", this.palette),
        el(
          "div",
          { class: "row checks" },
          el("label", { class: "row check", title: "Signed scores near zero are transparent" }, this.fade, "Fade weak evidence"),
          el("label", { class: "row check", title: "Over pink tissue a score of zero would look red" }, this.grey, "Grey tissue"),
        ),
      ),
      this.layers,
      this.image.element,
      this.gallery,
    );
  }

  refresh(): void {
    this.refreshNumbers();
    this.refreshGallery();
  }

  /** Everything but the galleries, which do not depend on threshold and opacity. */
  refreshNumbers(): void {
    const evidence = this.view.active?.evidence;
    this.element.classList.toggle("empty", !evidence);
    if (!evidence) return;
    const { display } = this.view;
    const range = rangeOf(evidence, display);
    const { base: low, limit } = range;
    put(this.warnings, warningsOf(evidence));
    this.threshold.set(display.threshold, display.threshold === 0 ? "–" : formatNumber(low + display.threshold * (limit - low)));
    this.clip.set((limit - low) / (evidence.largest - low || 1), formatNumber(limit));
    this.drawRanges(evidence, range);
    this.opacity.set(display.opacity, `${Math.round(100 * display.opacity)} %`);
    this.fade.checked = display.fade && evidence.signed;
    this.fade.disabled = !evidence.signed;
    this.grey.checked = display.grey;
    this.grey.disabled = !this.view.info.image;
    PALETTES.forEach((palette, i) => (this.palette.options[i].textContent = evidence.signed ? palette.name : palette.sequential));
    this.drawLayers(evidence);
    this.image.refresh();
    this.drawSigns(evidence, display);
    this.drawChart(evidence, display, range);
  }

  /** The scales there are, and a warning where weak scores look like the strongest. */
  private drawRanges(evidence: Evidence, range: Range): void {
    const { display } = this.view;
    const own = evidence.choice.against === null && !evidence.choice.minus && evidence.column.kind === "scores";
    const names: [ClipName, string, string][] = [
      ["auto", "Auto range", "Full colour at the last score within 1.5 interquartile ranges of the quartiles, like the whiskers of a box plot"],
      ["max", "Max", "Full colour at the strongest score of this slide"],
      ["cohort", "Cohort", own ? "One scale for all slides, as in the list: 99 % of all patches lie within it, so slides can be compared" : "A difference of maps has no cohort scale"],
    ];
    const buttons = names.map(([clip, name, title]) => button(name, () => this.view.setDisplay({ clip }), { title, ariaPressed: String(display.clip === clip), disabled: clip === "cohort" && !own, data: { clip } }));
    put(this.ranges, ...buttons);
    this.shared.checked = display.shared;
    this.sharing.hidden = !evidence.partner;
    const warning = scaleWarning(evidence, range);
    this.beyond.textContent = warning ? `Caution: ${warning.toLowerCase()}. Weak and strong patches look alike; Max shows the difference.` : "";
    this.beyond.hidden = !warning;
  }

  /** The galleries follow a moment later, so that switching stays instant; the slide's own tiles come first. */
  refreshGallery(): void {
    clearTimeout(this.waiting);
    this.waiting = window.setTimeout(() => {
      const pane = this.view.active;
      if (!pane?.evidence) return;
      if (this.view.firstPaint === null && performance.now() - this.view.began < PATIENCE) return this.refreshGallery();
      put(this.gallery, ...galleries(this.view.info, pane.evidence, this.view.display, (i) => this.view.jump(pane, i)));
    }, 60);
  }

  private drawLayers(evidence: Evidence): void {
    const { store, layers, info, run, display } = this.view;
    const on = store.state.layers;
    const rows = (evidence.scores.x ? offered(evidence) : []).flatMap((layer) => {
      const entry = on.find((each) => nameOf(each) === layer.name);
      const others = on.filter((each) => each !== entry);
      const change = () => store.set({ layers: entry === undefined ? [...on, layer.name] : others });
      const box = el("input", { type: "checkbox", checked: entry !== undefined, onchange: change, name: `layer-${layer.name}` });
      const label = el("label", { class: "row check" }, box, layer.label);
      if (entry === undefined) return [label];
      const [data, chosen] = [layers.of(evidence.choice.run), entry.slice(layer.name.length + 1)];
      const choose = (value: string) => store.set({ layers: [...others, `${layer.name}:${value}`] });
      const chooser = layer.chooser?.(evidence, data, chosen, { info, run, say: this.view.say, choose, changed: () => this.refreshNumbers() });
      return [label, chooser ?? null, el("p", { class: "muted small" }, layer.legend(evidence, data, chosen, run.name, display))];
    });
    put(this.layers, el("h2", {}, "Layers"), ...rows);
    this.layers.hidden = !rows.length;
  }

  private drawSigns(evidence: Evidence, display: Display): void {
    const [negative, positive] = evidence.scores.set.sides;
    const names = { both: "Both", positive, negative };
    const buttons = (Object.keys(names) as Display["sign"][]).map((sign) =>
      button(names[sign], () => this.view.setDisplay({ sign }), { ariaPressed: String(display.sign === sign), data: { sign } }),
    );
    put(this.signs, ...buttons);
    this.signs.hidden = !evidence.signed;
  }

  private drawChart(evidence: Evidence, display: Display, { base, limit }: Range): void {
    const { values, signed, largest, lowest } = evidence;
    const [low, high] = signed ? [-largest, largest] : [lowest, largest];
    const counts = histogram(values, low, high, BINS);
    const most = Math.max(1, ...counts);
    const context = this.chart.getContext("2d")!;
    const { width, height } = this.chart;
    const colours = rgbTable(display.palette, signed);
    const at = (value: number) => ((value - low) / (high - low || 1)) * width;
    context.clearRect(0, 0, width, height);
    const least = display.threshold * (limit - base);
    counts.forEach((count, bin) => {
      if (!count) return;
      const value = low + ((bin + 0.5) / BINS) * (high - low);
      const share = signed ? 0.5 + 0.5 * (value / limit) : (value - base) / (limit - base || 1);
      const wrong = signed && ((display.sign === "positive" && value < 0) || (display.sign === "negative" && value > 0));
      context.globalAlpha = wrong || Math.abs(value - base) < least ? 0.25 : 1;
      context.fillStyle = css(colours, LAST * share);
      const tall = Math.max(3, Math.sqrt(count / most) * (height - 6));
      context.fillRect(at(low) + (bin * width) / BINS + 0.5, height - tall, width / BINS - 1, tall);
      context.globalAlpha = 0.7;
      context.strokeStyle = BAR_EDGE;
      context.strokeRect(at(low) + (bin * width) / BINS + 0.5, height - tall, width / BINS - 1, tall);
    });
    context.globalAlpha = 1;
    const lines = (value: number, dash: number[]) => {
      context.setLineDash(dash);
      context.strokeStyle = getComputedStyle(this.chart).color;
      context.lineWidth = 2;
      for (const x of signed ? [at(-value), at(value)] : [at(base + value)]) {
        context.beginPath();
        context.moveTo(x, 0);
        context.lineTo(x, height);
        context.stroke();
      }
      context.setLineDash([]);
    };
    lines(limit - base, [2, 5]);
    if (least > 0) lines(least, []);
    put(this.axis, el("span", {}, formatNumber(low)), el("span", {}, signed ? "0" : ""), el("span", {}, formatNumber(high)));
    const drawn = this.view.visible(this.view.active!).length;
    this.counted.textContent = `${drawn.toLocaleString("en")} of ${countPatches(values.length)} shown. Height: square root of the count; dotted line: full colour.`;
    this.chart.ariaLabel = `Histogram of ${values.length} scores from ${formatNumber(low)} to ${formatNumber(high)}`;
  }
}

interface Slider {
  element: HTMLElement;
  row: HTMLElement;
  set(value: number, text: string): void;
}

function slider(label: string, min: number, max: number, step: number, input: (value: number) => void): Slider {
  const name = label.toLowerCase().split(" ")[0];
  const range = el("input", { type: "range", min, max, step, ariaLabel: label, name, oninput: () => input(Number(range.value)) });
  const output = el("output", {});
  const row = el("div", { class: "slider-row" }, range);
  const element = el("div", { class: "slider" }, el("div", { class: "slider-head" }, el("span", {}, label), output), row);
  const set = (value: number, text: string) => {
    if (Number(range.value) !== value) range.value = String(value);
    range.setAttribute("aria-valuetext", text);
    output.textContent = text;
  };
  return { element, row, set };
}
