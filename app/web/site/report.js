/** What a learn came to, in plain words. */

import { h, said, written } from "./dom.js";
import { count, excerpt, kindName, layerName, likely, percent, span } from "./format.js";

/** @typedef {import("./user.js").Report} Report */

/** @type {Record<string, string>} */
const USES = {
  "learned": "Learned from",
  "learned, not live": "Tried with",
  "held back to judge by": "Held back to judge by",
  "left out: the layer is full": "Left out, since the layer is full",
};
const SHOWN = 6;

/**
 * One line: what became of it.
 * @param {Report} report
 * @returns {string}
 */
export function headline(report) {
  const name = report.layer ? layerName(report.layer) : "Learning";
  if (report.error) return `${name}: nothing was learned`;
  if (report.dry_run) return `${name}: a dry run`;
  if (report.event === "withdrawn") return `${name}: taken back by itself`;
  if (report.event === "confirmed") return `${name}: the probation is over`;
  if (report.event === "taken back") return `${name}: gone, since all that it had learned was taken back`;
  if (report.accepted) return `${name}: live because you said so`;
  if (!report.revision) return `${name}: nothing was built`;
  if (report.verdict === "promoted") return report.probation ? `${name}: learned, on probation` : `${name}: learned`;
  if (report.verdict === "refused") return `${name}: not better, so nothing changed`;
  return `${name}: no difference could be seen, so nothing changed`;
}

/**
 * What it means for the person.
 * @param {Report} report
 * @returns {string}
 */
export function meaning(report) {
  if (report.error || report.dry_run) return "";
  if (report.event === "withdrawn") return "What you said afterwards spoke against it, so what was live before came back.";
  if (report.event === "confirmed") return "What you said afterwards spoke for it, so it stays.";
  if (report.accepted) return "The judge was against it, and you asked for it all the same.";
  if (report.verdict === "promoted" && report.probation) return "It answers from now on. The evidence is still thin: what you say next decides whether it stays.";
  if (report.verdict === "promoted") return "It answers from now on.";
  return "";
}

/**
 * The figures, each as a sentence.
 * @param {Record<string, any>} scores
 * @returns {string[]}
 */
export function figures(scores) {
  const lines = [];
  const names = { target: "The answers that were held back to judge by", retention: "Older answers", trained: "The answers just learned" };
  for (const [key, name] of Object.entries(names)) {
    const part = scores[key];
    if (!part?.asked || part.before === null || part.after === null) continue;
    const [before, after] = [likely(part.before), likely(part.after)];
    const same = percent(before) === percent(after);
    const how = same ? "stayed as likely" : after > before ? "became likelier" : "became less likely";
    lines.push(`${name} ${how}: ${same ? percent(after) : `${percent(before)} → ${percent(after)}`} a token. ${part.won} of ${part.asked} better, ${part.lost} worse.`);
  }
  const { canaries, tasks } = scores;
  if (tasks) lines.push(`Tasks passed: ${tasks.passed_before} → ${tasks.passed_after} of ${tasks.asked} held back.`);
  if (canaries?.right_before) lines.push(`General knowledge: ${canaries.still_right} of ${canaries.right_before} right answers stayed right.`);
  return lines;
}

/**
 * All of a report but its headline.
 * @param {Report} report
 * @returns {HTMLElement[]}
 */
export function reportParts(report) {
  const lines = figures(report.scores ?? {});
  const means = meaning(report);
  return [
    means && h("p", {}, means),
    h("p", { class: "dim" }, "The judge’s words: ", said(report.reason), "."),
    lines.length && h("ul", { class: "plain figures" }, lines.map((line) => h("li", {}, line))),
    ...sources(report),
    ...examples(report),
    report.steps > 0 && h("p", { class: "dim" }, `${count(report.steps, "step")} in ${span(report.seconds)}.`),
  ].filter((part) => part instanceof HTMLElement);
}

/** @param {Report} report */
function sources(report) {
  if (!report.sources?.length) return [];
  const uses = Map.groupBy(report.sources, (source) => source.use);
  return [h("details", {}, h("summary", {}, `What it went by: ${count(report.sources.length, "thing")} you said`),
    [...uses].map(([use, these]) => h("div", {}, h("h3", {}, USES[use] ?? capital(use)),
      h("ul", { class: "plain" }, these.slice(0, SHOWN).map((source) =>
        h("li", {}, h("span", { class: "dim" }, `${kindName(source.kind)} `), h("span", { class: "words" }, said(excerpt(source.text, 140))))),
      these.length > SHOWN ? h("li", { class: "dim" }, `and ${these.length - SHOWN} more`) : null))))];
}

/** @param {Report} report */
function examples(report) {
  if (!report.examples?.length) return [];
  return [h("details", { open: true }, h("summary", {}, "Before and after, on questions it was not shown"),
    report.examples.slice(0, 4).map((example) => h("dl", { class: "example" },
      h("div", { class: "example-asked" }, h("dt", { class: "unseen" }, "Asked"), h("dd", {}, written(example.prompt))),
      h("div", {}, h("dt", {}, "before"), h("dd", {}, written(example.before || "(nothing)", "words"))),
      h("div", {}, h("dt", {}, "after"), h("dd", {}, written(example.after || "(nothing)", "words"))))))];
}

/** @param {string} text */
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
