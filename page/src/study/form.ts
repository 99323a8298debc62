/** The questions of a stage: native controls, and digits that answer the question whose turn it is. */

import { el } from "../dom";
import type { Answers, Question } from "./server";

export class Form {
  readonly element = el("div", { class: "questions" });
  readonly answers: Answers;

  constructor(
    readonly questions: readonly Question[],
    known: Answers,
    private readonly changed: () => void,
  ) {
    this.answers = { ...known };
    this.element.append(...questions.map((question) => this.draw(question)));
    this.mark();
  }

  /** The first question that must still be answered. */
  get missing(): Question | undefined {
    return this.questions.find((question) => question.required && !(question.id in this.answers));
  }

  private draw(question: Question): HTMLElement {
    const optional = question.required ? null : el("span", { class: "muted small" }, " (optional)");
    if (question.kind === "text") {
      const field = el("textarea", { rows: 2, maxLength: 2000, value: String(this.answers[question.id] ?? ""), name: question.id });
      field.addEventListener("input", () => this.set(question.id, field.value));
      return el("label", { class: "question", data: { question: question.id } }, el("span", {}, question.text, optional), field);
    }
    const choices = choicesOf(question);
    const labels = choices.map(({ value, text }, i) => {
      const spoken = question.kind === "scale" ? `${i + 1} of ${choices.length}${text ? `, ${text}` : ""}` : null; // a step may have no word of its own
      const input = el("input", { type: "radio", name: question.id, value: String(value), checked: this.answers[question.id] === value, ariaLabel: spoken });
      input.addEventListener("change", () => this.set(question.id, value));
      return el("label", { class: "choice" }, input, el("kbd", { ariaHidden: "true" }, String(i + 1)), el("span", {}, text));
    });
    const look = question.kind === "scale" ? "choices scale" : "choices";
    return el("fieldset", { class: "question", data: { question: question.id } }, el("legend", {}, question.text, optional), el("div", { class: look }, ...labels));
  }

  private set(id: string, value: string | number): void {
    if (value === "") delete this.answers[id];
    else this.answers[id] = value;
    this.mark();
    this.changed();
  }

  /** Shows whose turn it is for the digits. */
  private mark(): void {
    const current = this.current?.id;
    for (const node of this.element.children) node.classList.toggle("current", (node as HTMLElement).dataset.question === current);
  }

  /** The question that a digit answers: the one in focus, else the first without an answer. */
  private get current(): Question | undefined {
    const focused = document.activeElement?.closest<HTMLElement>("[data-question]")?.dataset.question;
    const inFocus = this.questions.find((question) => question.id === focused && question.kind !== "text");
    return inFocus ?? this.missing ?? this.questions.find((question) => question.kind !== "text" && !(question.id in this.answers));
  }

  /** Answers by a digit; false where there is no such answer. */
  press(digit: number): boolean {
    const question = this.current;
    const choice = question && choicesOf(question)[digit - 1];
    if (!question || !choice) return false;
    const inputs = this.element.querySelectorAll<HTMLInputElement>(`[data-question="${question.id}"] input`);
    inputs[digit - 1].checked = true;
    this.set(question.id, choice.value);
    return true;
  }
}

function choicesOf(question: Question): { value: string | number; text: string }[] {
  if (question.kind === "yes-no") return ["yes", "no"].map((value) => ({ value, text: value }));
  if (question.kind === "choice") return question.options.map((value) => ({ value, text: value }));
  const [low, high] = [question.options[0] ?? "", question.options[question.options.length - 1] ?? ""];
  return Array.from({ length: question.steps }, (_, i) => ({ value: i + 1, text: i === 0 ? low : i === question.steps - 1 ? high : "" }));
}
