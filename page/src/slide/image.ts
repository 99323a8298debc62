/** How the slide's own image is shown: brightness, contrast, gamma, rotation, magnification, full screen. */

import { button, el, put, svg } from "../dom";
import { formatNumber } from "../words";
import { objectiveOf } from "../evidence/legend";
import { labelUrl, type SlideInfo } from "../server/api";
import type { Pane } from "./pane";
import type { Display } from "../state/settings";

/** What is set here, and of what. */
export interface ImageHost {
  readonly element: HTMLElement;
  readonly run: { labels: boolean };
  readonly info: SlideInfo;
  readonly display: Display;
  readonly active: Pane | null;
  setDisplay(change: Partial<Display>): void;
  say(text: string, problem?: boolean): void;
}

const OBJECTIVES = [5, 10, 20, 40];
const LEVELS = ["brightness", "contrast", "gamma"] as const;

/** Shows the middle of the view as an objective would. */
export function showAt(pane: Pane, objective: number): void {
  const full = objectiveOf(pane.host.info);
  if (full === null || !pane.viewer.isOpen()) return;
  const { viewport } = pane.viewer;
  viewport.zoomTo((objective / full) * (pane.host.bounds.width / viewport.getContainerSize().x)).applyConstraints();
}

/** A CSS filter for the image, and for pictures of it; `gray` takes the stain's colour away. */
export function filterOf({ brightness, contrast, gamma }: Display, gray: boolean): string {
  const parts = [gray && "grayscale(1)", brightness !== 1 && `brightness(${brightness})`, contrast !== 1 && `contrast(${contrast})`, gamma !== 1 && "url(#xmil-gamma)"];
  return parts.filter(Boolean).join(" ");
}

/** What was done to the image, for a caption; empty where nothing was. */
export function imageText(display: Display): string {
  const parts = LEVELS.filter((name) => display[name] !== 1).map((name) => `${name} ${formatNumber(display[name])}`);
  if (display.rotation) parts.push(`rotated by ${display.rotation}°`);
  return parts.length ? `image: ${parts.join(", ")}` : "";
}

/** The filter that a gamma needs, as part of the page. */
export class GammaFilter {
  readonly element = el("div", { class: "filters-svg", ariaHidden: "true" });
  private readonly channels = ["feFuncR", "feFuncG", "feFuncB"].map((name) => svg(name, { type: "gamma", exponent: 1 }));

  constructor() {
    const filter = svg("filter", { id: "xmil-gamma", "color-interpolation-filters": "sRGB" }, svg("feComponentTransfer", {}, ...this.channels));
    this.element.append(svg("svg", { width: 0, height: 0 }, filter));
  }

  set(gamma: number): void {
    for (const channel of this.channels) channel.setAttribute("exponent", String(1 / gamma));
  }
}

export function toggleFullScreen(view: Pick<ImageHost, "element" | "say">): void {
  if (document.fullscreenElement) void document.exitFullscreen();
  else void view.element.requestFullscreen().catch(() => view.say("The browser does not allow full screen here.", true));
}

export function turnSlide(view: Pick<ImageHost, "display" | "setDisplay">, degrees: number): void {
  view.setDisplay({ rotation: (view.display.rotation + degrees + 360) % 360 });
}

/** The section of the Evidence panel that sets them. */
export class ImageSettings {
  readonly element = el("details", { class: "block image-settings" }, el("summary", {}, "Image"));
  private readonly body = el("div", {});
  private readonly label = el("details", { class: "label-image" });

  constructor(private readonly view: ImageHost) {
    this.element.append(this.body, this.label);
  }

  /** The photographed label, where the server was started with labels; fetched when it is opened. */
  private offerLabel(): void {
    const { info, run } = this.view;
    const offered = run.labels && info.image !== null;
    if (!offered || this.label.childElementCount) return;
    const picture = el("div", {});
    put(this.label, el("summary", {}, "Label of the glass slide (may name the patient)"), picture);
    this.label.addEventListener("toggle", () => {
      if (!this.label.open) return put(picture);
      const image = el("img", { class: "label-picture", alt: "The photographed label of the glass slide" });
      image.onerror = () => put(picture, el("p", { class: "muted" }, "This slide has no label image."));
      image.src = labelUrl(info.key);
      put(picture, image);
    });
  }

  refresh(): void {
    const { view } = this;
    const { display, info } = view;
    this.offerLabel();
    const objective = objectiveOf(info);
    const steps = objective === null ? [] : OBJECTIVES.filter((each) => each <= 2 * objective);
    const buttons = steps.map((each) => button(`${each}×`, () => view.active && showAt(view.active, each), { class: "small-button", data: { objective: each } }));
    put(
      this.body,
      buttons.length > 0 && el("div", { class: "buttons", role: "group", ariaLabel: "Magnification" }, ...buttons),
      el(
        "div",
        { class: "buttons" },
        button("Turn left", () => turnSlide(view, -90), { class: "small-button", data: { action: "turn-left" } }),
        button("Turn right", () => turnSlide(view, 90), { class: "small-button", title: "O", data: { action: "turn-right" } }),
        button("Full screen", () => toggleFullScreen(view), { class: "small-button", title: "F", data: { action: "full-screen" } }),
      ),
      ...(info.image ? LEVELS.map((name) => this.slider(name)) : []),
      info.image && button("Reset image", () => view.setDisplay({ brightness: 1, contrast: 1, gamma: 1, rotation: 0 }), { class: "small-button", disabled: !imageText(display), data: { action: "as-scanned" } }),
    );
  }

  private slider(name: (typeof LEVELS)[number]): HTMLElement {
    const value = this.view.display[name];
    const range = el("input", { type: "range", min: 0.25, max: 3, step: 0.05, value, name, ariaLabel: name });
    range.addEventListener("input", () => this.view.setDisplay({ [name]: Number(range.value) }));
    return el("label", { class: "slider" }, el("span", { class: "slider-head" }, el("span", {}, name), el("output", {}, formatNumber(value))), range);
  }
}
