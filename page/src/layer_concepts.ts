/** Concepts: in place of the scores, the part of them that goes through one concept of `xmil insight`. */

import { getConcept, getConcepts } from "./api";
import { shown, type Evidence } from "./evidence";
import type { Layer, LayerData } from "./layers";
import { Painting, windowOf } from "./overlay";

/** The concept that is chosen, else the strongest; null where the concepts are of another map. */
function conceptOf(evidence: Evidence, { concepts }: LayerData, chosen: string): { concept: number; sum: number } | null {
  const { method, target } = evidence.choice;
  if (!concepts || concepts.method !== method || concepts.target !== target) return null;
  return concepts.concepts.find(({ concept }) => String(concept) === chosen) ?? concepts.concepts[0] ?? null;
}

function strongest({ concepts }: LayerData, chosen: string): number | null {
  return (concepts?.concepts.find(({ concept }) => String(concept) === chosen) ?? concepts?.concepts[0])?.concept ?? null;
}

const paintings = new WeakMap<Float32Array, { painting: Painting; of: string; removed: Uint8Array | null }>();

export const conceptsLayer: Layer = {
  name: "concepts",
  label: "One concept's part of the scores",
  place: "evidence",
  lacks(data, chosen) {
    const concept = strongest(data, chosen);
    if (!data.concepts) return "concepts";
    return concept === null || data.concept.has(concept) ? null : `concept-${concept}`;
  },
  async fetch(slide, run, data, chosen) {
    data.concepts ??= await getConcepts(slide, run);
    const concept = strongest(data, chosen);
    if (concept !== null) data.concept.set(concept, await getConcept(slide, run, concept));
  },
  choices: ({ concepts }) => concepts?.concepts.map(({ concept, sum }) => ({ value: String(concept), text: `Concept ${concept}: ${shown(sum)} of ${shown(concepts.total)}` })) ?? [],
  offers: ({ scores, choice }) => scores.set.concepts && choice.against === null && !choice.minus,
  legend(evidence, data, chosen) {
    if (!data.concepts) return "Fetching the concepts…";
    const found = conceptOf(evidence, data, chosen);
    if (!found) return `The concepts are of ${data.concepts.method} for ${data.concepts.target}.`;
    return `In the colours of the scores, in place of them: what of each score goes through concept ${found.concept}. Over the slide ${shown(found.sum)} of ${shown(data.concepts.total)}; through no concept: ${shown(data.concepts.rest)}.`;
  },
  note(evidence, data, chosen) {
    const found = conceptOf(evidence, data, chosen);
    return found && data.concept.has(found.concept) ? `Only what goes through concept ${found.concept}` : null;
  },
  draw(context, { evidence, display, data, chosen, removed, transform: t }) {
    const found = conceptOf(evidence, data, chosen);
    const values = found ? data.concept.get(found.concept) : undefined;
    if (!values || values.length !== evidence.values.length) return;
    const of = JSON.stringify(display);
    let held = paintings.get(values);
    if (held?.of !== of || held.removed !== removed) {
      held = { painting: held?.painting ?? new Painting(), of, removed };
      held.painting.paint({ ...evidence, values }, display, removed);
      paintings.set(values, held);
    }
    const { left, top, right, bottom } = windowOf(context.canvas, t);
    context.clearRect(left, top, right - left, bottom - top);
    held.painting.draw(context, t);
  },
};
