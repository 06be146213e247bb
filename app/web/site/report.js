/** The report of a learn in words. */

import { h, inlineText, textBlock } from "./dom.js";
import { count, excerpt, kindName, layerName, likely, percent, span } from "./format.js";

/** @typedef {import("./user.js").Report} Report */

/** @type {Record<string, string>} */
const USES = {
  learned: "Trained on",
  learned_not_live: "Trained on, not live",
  held_out: "Held out, for the gate",
  no_capacity: "Left out, since the layer is full",
};
/** @type {Record<string, string>} */
const OUTCOMES = {
  promoted: "learned",
  refused: "not better, so nothing changed",
  abstained: "too little evidence, so nothing changed",
  dry_run: "a dry run",
  unfinished: "unfinished; the next learn continues it",
  nothing_to_learn: "nothing to learn",
  unchanged: "unchanged",
  head_moved: "another program changed it meanwhile",
  failed: "nothing was learned",
  withdrawn: "withdrawn",
  confirmed: "confirmed, the probation is over",
  retracted: "removed, since all of its lessons were retracted",
};
const SHOWN = 6;

/**
 * The outcome in one line.
 * @param {Report} report
 * @returns {string}
 */
export function headline(report) {
  const name = report.layer ? layerName(report.layer) : "Learning";
  if (report.accepted) return `${name}: live because you accepted it`;
  return `${name}: ${(OUTCOMES[report.outcome] ?? report.outcome)}${report.outcome === "promoted" && report.probation ? ", on probation" : ""}`;
}

/**
 * What the outcome means for the user.
 * @param {Report} report
 * @returns {string}
 */
export function meaning(report) {
  if (report.accepted) return "The gate did not promote it; you made it live by name.";
  if (report.outcome === "withdrawn") return "Your later feedback was against it, so the earlier revision is live again.";
  if (report.outcome === "confirmed") return "Your later feedback confirmed it.";
  if (report.outcome === "promoted") return report.probation ? "It is live. The evidence is thin: your next feedback decides whether it stays." : "It is live.";
  return "";
}

/**
 * The figures, each as a sentence.
 * @param {Record<string, any>} scores
 * @returns {string[]}
 */
export function figures(scores) {
  const lines = [];
  const names = { target: "Held-out answers", retention: "Older answers", trained: "Trained answers" };
  for (const [key, name] of Object.entries(names)) {
    const part = scores[key];
    if (!part?.asked || part.before === null || part.after === null) continue;
    const [before, after] = [likely(part.before), likely(part.after)];
    const same = percent(before) === percent(after);
    const how = same ? "stayed as likely" : after > before ? "became likelier" : "became less likely";
    lines.push(`${name} ${how}: ${same ? percent(after) : `${percent(before)} → ${percent(after)}`} a token. ${part.improved} of ${part.asked} better, ${part.regressed} worse.`);
  }
  const { probes, tasks } = scores;
  if (tasks) lines.push(`Tasks passed: ${tasks.passed_before} → ${tasks.passed_after} of ${tasks.asked} held-out tasks.`);
  if (probes?.right_before) lines.push(`General knowledge: ${probes.still_right} of ${probes.right_before} right answers stayed right.`);
  if (scores.leakage?.auc != null) {
    const { auc, matched, variants } = scores.leakage;
    const others = matched || variants ? "variants of them" : "held-out ones";
    lines.push(`Leakage: membership inference distinguishes its own ${matched ? "facts" : "lessons"} from ${others} with an AUC of ${auc.toFixed(2)}; 0.50 is chance.`);
  }
  return lines;
}

/**
 * The report without its headline.
 * @param {Report} report
 * @returns {HTMLElement[]}
 */
export function reportParts(report) {
  const lines = figures(report.scores ?? {});
  const means = meaning(report);
  return [
    means && h("p", {}, means),
    h("p", { class: "dim" }, "Reason: ", inlineText(report.reason), "."),
    lines.length && h("ul", { class: "plain figures" }, lines.map((line) => h("li", {}, line))),
    ...sources(report),
    ...examples(report),
    report.steps > 0 && h("p", { class: "dim" }, `${count(report.steps, "step")} in ${span(report.seconds)}.`),
  ].filter((part) => part instanceof HTMLElement);
}

/** @param {Report} report */
function sources(report) {
  if (!report.sources?.length) return [];
  const uses = Map.groupBy(report.sources, (source) => source.use_code);
  return [h("details", {}, h("summary", {}, `Sources: ${count(report.sources.length, "signal")}`),
    [...uses].map(([use, these]) => h("div", {}, h("h3", {}, USES[use] ?? capital(these[0].use)),
      h("ul", { class: "plain" }, these.slice(0, SHOWN).map((source) =>
        h("li", {}, h("span", { class: "dim" }, `${kindName(source.kind)} `), h("span", { class: "words" }, inlineText(excerpt(source.text, 140))))),
      these.length > SHOWN ? h("li", { class: "dim" }, `and ${these.length - SHOWN} more`) : null))),
    Object.entries(report.source_counts ?? {}).map(([use, number]) => h("p", { class: "dim" }, `${USES[use] ?? capital(use.replaceAll("_", " "))}: ${number}`)))];
}

/** @param {Report} report */
function examples(report) {
  if (!report.examples?.length) return [];
  return [h("details", { open: true }, h("summary", {}, "Before and after, on held-out prompts"),
    report.examples.slice(0, 4).map((example) => h("dl", { class: "example" },
      h("div", { class: "example-asked" }, h("dt", { class: "unseen" }, "Asked"), h("dd", {}, textBlock(example.prompt))),
      h("div", {}, h("dt", {}, "before"), h("dd", {}, textBlock(example.before || "(nothing)", "words"))),
      h("div", {}, h("dt", {}, "after"), h("dd", {}, textBlock(example.after || "(nothing)", "words"))))))];
}

/** @param {string} text */
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
