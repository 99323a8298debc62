/** How evidence is shown, and the page's colours; kept in the browser between visits. */

/** Auto: the box plot's whiskers; max: the largest score; cohort: the whiskers over all slides. */
export const CLIP_NAMES = ["auto", "max", "cohort"] as const;
export type ClipName = (typeof CLIP_NAMES)[number];

export interface Display {
  palette: string;
  opacity: number;
  fade: boolean;
  /** Whether tissue is grey below the evidence: over pink, zero would look red. */
  grey: boolean;
  shown: boolean;
  sign: "both" | "positive" | "negative";
  /** Where colours end: as a share of the largest score, or by name. */
  clip: number | ClipName;
  /** Whether two panes, or two slides, have one scale. */
  shared: boolean;
  /** Scores below this share of the scale are not drawn. */
  threshold: number;
  /** The image itself: 1 is as it was scanned. */
  brightness: number;
  contrast: number;
  gamma: number;
  /** Degrees by which the slide is turned, clockwise. */
  rotation: number;
}

const DISPLAY: Display = {
  palette: "rdbu",
  opacity: 0.6,
  fade: true,
  grey: true,
  shown: true,
  sign: "both",
  clip: "auto",
  shared: false,
  threshold: 0,
  brightness: 1,
  contrast: 1,
  gamma: 1,
  rotation: 0,
};
const KEPT = ["palette", "opacity", "fade", "grey"] as const;

export function initialDisplay(): Display {
  const known = stored<Partial<Display>>("xmil:display") ?? {};
  const display = { ...DISPLAY };
  for (const key of KEPT) if (typeof known[key] === typeof DISPLAY[key]) Object.assign(display, { [key]: known[key] });
  return display;
}

export function keepDisplay(display: Display): void {
  store("xmil:display", Object.fromEntries(KEPT.map((key) => [key, display[key]])));
}

export type Theme = "auto" | "light" | "dark";

export function theme(): Theme {
  const known = stored<string>("xmil:theme");
  return known === "light" || known === "dark" ? known : "auto";
}

export function setTheme(value: Theme): void {
  store("xmil:theme", value);
  applyTheme();
}

export function applyTheme(): void {
  const chosen = theme();
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
}

export function isDark(): boolean {
  const chosen = theme();
  return chosen === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : chosen === "dark";
}

/** What the browser keeps under a name; null where it keeps nothing or forbids it. */
export function stored<T>(name: string): T | null {
  try {
    const text = localStorage.getItem(name);
    return text === null ? null : (JSON.parse(text) as T);
  } catch {
    return null;
  }
}

/** Keeps a value; false where the browser does not allow it or is full. */
export function store(name: string, value: unknown): boolean {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Removes what the browser keeps under a name, where it keeps anything. */
export function forget(name: string): void {
  try {
    localStorage.removeItem(name);
  } catch {
    // it keeps nothing
  }
}
