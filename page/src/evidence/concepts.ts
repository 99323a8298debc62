/** Concepts: in place of the scores, the part of them that goes through one concept of `xmil insight`. */

import { button, el } from "../dom";
import { formatNumber, methodName } from "../words";
import type { Evidence } from "./evidence";
import type { ChoiceHost, Layer, LayerData } from "./layers";
import { Layout } from "./overlay";
import { patchCanvas } from "./patches";
import { getConcept, getConcepts, type Concept } from "../server/api";
import { conceptName, keepNames } from "../state/names";

/** The concept that is chosen, else the strongest; null where the concepts are of another map. */
function conceptOf(evidence: Evidence, data: LayerData, chosen: string): Concept | null {
  const { concepts } = data;
  const { method, target } = evidence.choice;
  return concepts && concepts.method === method && concepts.target === target ? chosenIn(data, chosen) : null;
}

function chosenIn({ concepts }: LayerData, chosen: string): Concept | null {
  return concepts?.concepts.find(({ concept }) => String(concept) === chosen) ?? concepts?.concepts[0] ?? null;
}

export const conceptsLayer: Layer = {
  name: "concepts",
  label: "One concept's part of the scores",
  place: "evidence",
  lacks(data, chosen) {
    const concept = chosenIn(data, chosen)?.concept;
    if (!data.concepts) return "concepts";
    return concept === undefined || data.concept.has(concept) ? null : `concept-${concept}`;
  },
  async fetch(slide, run, data, chosen) {
    data.concepts ??= await getConcepts(slide, run);
    const concept = chosenIn(data, chosen)?.concept;
    if (concept !== undefined) data.concept.set(concept, await getConcept(slide, run, concept));
  },
  offers: ({ scores, choice }) => scores.set.concepts && choice.against === null && !choice.minus,
  legend(evidence, data, chosen, run) {
    if (!data.concepts) return "Fetching the concepts…";
    const concept = conceptOf(evidence, data, chosen);
    if (!concept) return `The concepts belong to ${methodName(data.concepts.method)} for ${data.concepts.target}.`;
    return `The map, its histogram and its patches show the part of each score that passes through ${conceptName(run, evidence.choice.run, concept)}: ${formatNumber(concept.sum)} of ${formatNumber(data.concepts.total)} over the slide. ${formatNumber(data.concepts.rest)} passes through no concept.`;
  },
  note(evidence, data, chosen, run) {
    const concept = conceptOf(evidence, data, chosen);
    return concept && data.concept.has(concept.concept) ? `Only the part through ${conceptName(run, evidence.choice.run, concept)}` : null;
  },
  replace(evidence, data, chosen) {
    const concept = conceptOf(evidence, data, chosen);
    const values = concept && data.concept.get(concept.concept);
    return values && values.length === evidence.values.length ? { ...evidence, values, part: `concept-${concept.concept}` } : evidence;
  },
  chooser(evidence, data, chosen, host) {
    const current = conceptOf(evidence, data, chosen);
    return current && data.concepts ? el("div", {}, list(evidence, data.concepts.concepts, current, host), nameField(evidence, current, host)) : null;
  },
};

/** Each concept with its strongest patch on this slide, its name, and what of the output goes through it. */
function list(evidence: Evidence, concepts: Concept[], current: Concept, { info, run, choose }: ChoiceHost): HTMLElement {
  const layout = evidence.scores.x ? Layout.of(evidence.scores) : null;
  const rows = concepts.map((each) => {
    const { concept, sum, patch } = each;
    const row = button("", () => choose(String(concept)), { class: "concept", ariaPressed: String(each === current), data: { concept } });
    if (layout && info.image) row.append(patchCanvas(info, layout.x[patch], layout.y[patch], layout.edge, 48));
    row.append(el("span", { class: "concept-name" }, conceptName(run.name, evidence.choice.run, each)), el("span", { class: "number" }, formatNumber(sum)));
    return row;
  });
  return el("div", { class: "concept-list", role: "group", ariaLabel: "Concepts" }, ...rows);
}

function nameField(evidence: Evidence, current: Concept, host: ChoiceHost): HTMLElement {
  const { concept } = current;
  const [shown, unnamed] = [conceptName(host.run.name, evidence.choice.run, current), `Concept ${concept}`];
  const input = el("input", { type: "text", name: "concept-name", value: shown === unnamed ? "" : shown, placeholder: unnamed, maxLength: 60, ariaLabel: `Name of concept ${concept}` });
  input.addEventListener("change", () => {
    current.name = input.value.trim() || null;
    void keepNames(host, evidence.choice.run, { concepts: { [concept]: input.value.trim() } }).then(() => host.changed());
  });
  return el("label", { class: "row" }, "Name", input);
}
