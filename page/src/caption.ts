/** What a picture of a pane says of itself: slide, run, map, and everything that changes what is seen. */

import { counted, shown, type Evidence } from "./evidence";
import { imageText } from "./image_settings";
import { title } from "./legend";
import { limitOf } from "./overlay";
import type { Pane } from "./pane";

/** The slide, the run where there are several, and what is shown. */
export function captionOf(pane: Pane): string[] {
  const { info, run, display } = pane.host;
  const evidence = display.shown ? pane.evidence : null;
  const image = imageText(display);
  if (!evidence) return [info.id, ...(image ? [image] : [])];
  const name = run.runs.length > 1 ? run.runs[evidence.choice.run]?.name : null;
  const settings = settingsOf(pane, evidence);
  return [name ? `${info.id} · ${name}` : info.id, title(evidence), ...pane.notes(), ...(settings ? [settings] : []), ...(image ? [image] : []), ...evidence.column.warnings];
}

/** What of the scores is not drawn: threshold, signs, and patches removed by a what-if. */
function settingsOf(pane: Pane, evidence: Evidence): string {
  const { display, removed } = pane.host;
  const limit = limitOf(evidence, display);
  const gone = countRemoved(removed.get(evidence.choice.run));
  return [
    display.threshold > 0 && `scores weaker than ${shown(evidence.smallest + display.threshold * (limit - evidence.smallest))} hidden`,
    display.sign !== "both" && evidence.signed && `only ${display.sign} scores`,
    gone > 0 && `${counted(gone, "patch", "patches")} removed (what if)`,
  ]
    .filter(Boolean)
    .join(" · ");
}

export function countRemoved(removed: Uint8Array | undefined): number {
  return removed?.reduce((sum, one) => sum + one, 0) ?? 0;
}

/** Method, class and what is taken off, for the name of a file. */
export function choiceName({ choice: c }: Evidence): string {
  const minus = c.minus ? `-minus-${c.minus.run === c.run ? "" : `run${c.minus.run + 1}-`}${c.minus.method}-${c.minus.target}` : "";
  return `${c.method}-${c.target}${c.against === null ? "" : `-vs-${c.against}`}${minus}`;
}
