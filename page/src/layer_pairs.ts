/** Interactions: lines between patches that say more, or less, together than one by one. */

import { getPairs, type Pair } from "./api";
import { counted, type Evidence } from "./evidence";
import type { Layer, LayerData } from "./layers";
import { css, LAST, table } from "./palette";

const MOST = 60; // lines that can still be told apart

function pairsOf(evidence: Evidence, data: LayerData): Pair[] {
  const set = data.pairs?.sets.find((each) => each.target === evidence.choice.target);
  return set?.pairs.slice(0, MOST) ?? [];
}

export const pairsLayer: Layer = {
  name: "pairs",
  label: "Pairs that act together",
  place: "marks",
  lacks: (data) => (data.pairs ? null : "pairs"),
  fetch: async (slide, run, data) => void (data.pairs = await getPairs(slide, run)),
  offers: (evidence) => evidence.scores.set.pairs && evidence.choice.against === null && !evidence.choice.minus,
  legend(evidence, data) {
    if (!data.pairs) return "Fetching the pairs…";
    const pairs = pairsOf(evidence, data);
    const sure = pairs.filter((pair) => pair.sure).length;
    return pairs.length
      ? `${counted(pairs.length, "pair")} for ${evidence.choice.target}, ${sure} of them beyond three standard errors (full lines); wider is stronger. In the colour of support: more together than one by one.`
      : `No pairs were computed for ${evidence.choice.target}.`;
  },
  draw(context, { evidence, layout, display, data, transform: t, unit }) {
    const pairs = pairsOf(evidence, data);
    const most = Math.max(1e-30, ...pairs.map((pair) => Math.abs(pair.value)));
    const colours = table(display.palette, true);
    const centre = (i: number) => [t.x + (layout.x[i] + layout.edge / 2) * t.scale, t.y + (layout.y[i] + layout.edge / 2) * t.scale] as const;
    context.lineCap = "round";
    for (const { first, second, value, sure } of [...pairs].reverse()) {
      const width = (1 + (4 * Math.abs(value)) / most) * unit;
      context.setLineDash(sure ? [] : [2 * unit, 5 * unit]);
      for (const [colour, extra] of [["rgba(255,255,255,.85)", 2 * unit], [css(colours, value > 0 ? LAST : 0), 0]] as const) {
        context.beginPath();
        context.moveTo(...centre(first));
        context.lineTo(...centre(second));
        context.strokeStyle = colour;
        context.lineWidth = width + extra;
        context.stroke();
      }
    }
  },
};
