/** Small helpers that build elements; data only ever becomes text, never markup. */

type Child = Node | string | null | undefined | false;
type Props = Record<string, unknown>;

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, `on...` handlers, attributes and children. */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) assign(node, key, value);
  fill(node, children);
  return node;
}

/** An SVG element with attributes and children. */
export function svg(tag: string, attributes: Record<string, string | number> = {}, ...children: Child[]): SVGElement {
  const node = document.createElementNS(SVG, tag) as SVGElement;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  fill(node, children);
  return node;
}

/** Replaces what a node holds; the focus stays on the control that stands for the one that had it. */
export function put(node: Element, ...children: Child[]): void {
  const focused = document.activeElement;
  const name = focused && node !== focused && node.contains(focused) ? markOf(focused) : null;
  node.replaceChildren();
  fill(node, children);
  if (name !== null && document.activeElement === document.body) refocus(node, name, focused as HTMLElement);
}

/** What a control is known by when it is drawn anew. */
function markOf(node: Element): string {
  const { data = {}, name = "" } = { data: { ...(node as HTMLElement).dataset }, name: node.getAttribute("name") ?? "" };
  return JSON.stringify([node.tagName, name, data, node.getAttribute("aria-label") ?? (name || Object.keys(data).length ? "" : node.textContent)]);
}

/** Focuses the control of that mark, or the nearest thing above it that takes the focus. */
function refocus(node: Element, mark: string, focused: HTMLElement): void {
  const all = [...node.querySelectorAll<HTMLElement>("button, a[href], input, select, textarea, [tabindex]")];
  const same = focused.isConnected ? focused : all.find((each) => markOf(each) === mark && !(each as HTMLButtonElement).disabled);
  if (same) return same.focus();
  const near = (node as HTMLElement).closest<HTMLElement>("[tabindex]") ?? document.querySelector<HTMLElement>(".stage, main");
  near?.focus();
}

/** A button with a label and what it does. */
export function button(label: string, onclick: () => void, props: Props = {}): HTMLButtonElement {
  return el("button", { type: "button", onclick, ...props }, label);
}

/** A drop-down list; the values are the texts unless given. */
export function select(
  label: string,
  options: { value: string; text: string }[],
  value: string,
  onchange: (value: string) => void,
  props: Props = {},
): HTMLSelectElement {
  const node = el("select", { ariaLabel: label, title: label, ...props });
  for (const option of options) node.append(el("option", { value: option.value }, option.text));
  node.value = value;
  node.addEventListener("change", () => onchange(node.value));
  return node;
}

function fill(node: Element, children: Child[]): void {
  for (const child of children) if (child !== null && child !== undefined && child !== false) node.append(child);
}

function assign(node: HTMLElement, key: string, value: unknown): void {
  if (value === null || value === undefined) return;
  if (key === "class") node.className = String(value);
  else if (key === "data") Object.assign(node.dataset, value);
  else if (key === "style") Object.assign(node.style, value);
  else if (key in node) (node as unknown as Props)[key] = value;
  else node.setAttribute(key, String(value));
}

/** Offers a blob as a download. */
export function download(blob: Blob, name: string): void {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A name that is safe as a file name on every system. */
export function fileName(text: string): string {
  return text.replace(/[^\w.-]+/g, "_").slice(0, 120) || "slide";
}

/** Shows a dialog that goes when it is closed. */
export function openDialog(parent: HTMLElement, dialog: HTMLDialogElement): void {
  dialog.addEventListener("close", () => dialog.remove());
  parent.append(dialog);
  dialog.showModal();
}
