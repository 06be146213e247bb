/**
 * The part of the stack view that moves the layers to another base: it builds them there, shows the answers of both side by side, and
 * switches, keeps or goes back as the user says.
 */

import { Problem } from "./api.js";
import { button, h, textBlock } from "./dom.js";
import { reply } from "./exchange.js";
import * as notify from "./notify.js";
import { count } from "./format.js";

/** @typedef {import("./user.js").Base} Base */
/** @typedef {import("./user.js").Layer} Layer */
/** @typedef {import("./user.js").Rebased} Rebased */

/**
 * @param {import("./user.js").User} user
 * @param {{ follow: (job: any) => Promise<import("./user.js").Job> }} learning
 */
export function rebasePart(user, learning) {
  const choice = h("select", { "aria-labelledby": "rebase" });
  const build = button("Build and compare", () => rebase(choice.value, false));
  const form = h("div", { class: "row" }, choice, build);
  const result = h("div", { class: "rebased", "aria-live": "polite" });
  const element = h("section", { class: "part", "aria-labelledby": "rebase", hidden: true }, h("h2", { id: "rebase" }, "Another base"),
    h("p", { class: "lead" }, "Your layers are built anew from your feedback, and both answer the same held-out questions. Nothing changes until you switch."),
    form, result);
  /** @type {Base[]} */
  let bases = [];

  /** @param {Layer[]} layers */
  async function load(layers) {
    element.hidden = !layers.some((layer) => layer.head);
    if (element.hidden) return;
    try {
      bases = await user.bases();
      const before = choice.value;
      choice.replaceChildren(...bases.map((each) => h("option", { value: each.name, selected: each.name === before },
        `${each.name}: ${each.title}${each.is_open ? ", as it is now" : ""}`)));
      await user.stack();
      form.hidden = false;
    } catch (error) {
      if (error instanceof Problem && error.kind === "BaseMismatch") elsewhere();
      else notify.error(error);
    }
  }

  /** The layers are on a base that this server does not have open. */
  function elsewhere() {
    const open = bases.find((each) => each.is_open);
    form.hidden = true;
    result.replaceChildren(h("p", {}, "Your layers are on another base than this server. Start it with that base, or go back:"),
      h("div", { class: "row" }, open ? button(`Go back to ${open.name}`, () => rebase(open.name, true)) : null));
  }

  /** @param {string} to @param {boolean} accept */
  async function rebase(to, accept) {
    result.replaceChildren();
    build.disabled = true;
    await notify.attempt(async () => {
      const over = await learning.follow(await user.rebase(to, accept));
      if (over.rebase_report) show(over.rebase_report, to);
    });
    build.disabled = false;
  }

  /** @param {Rebased} report @param {string} to */
  function show(report, to) {
    if (report.outcome === "unchanged") {
      result.replaceChildren(h("p", {}, "The layers came out as they are. There is nothing to switch to."));
    } else if (!report.switched) {
      result.replaceChildren(h("h3", {}, score(report)), h("p", { class: "dim" }, `The gate: ${report.verdict ?? "not judged"} (${report.reason}).`), ...examples(report),
        h("div", { class: "row" }, button(`Switch to ${report.name}`, () => rebase(to, true), { class: "go" }), button("Keep what is live", () => result.replaceChildren(), { class: "quiet" })));
    } else if (report.base === report.to) {
      result.replaceChildren(h("p", {}, "The layers that were built anew are live."), h("div", { class: "row" }, button("Go back", () => goBack(report))));
    }
  }

  /** @param {Rebased} report */
  const goBack = (report) => notify.attempt(async () => {
    for (const each of report.layers) await user.rollback(each.layer, each.before);
    result.replaceChildren(h("p", {}, "The former layers are live again."));
  });

  return { element, load };
}

/** @param {Rebased} report */
function score({ questions, improved, regressed, tied, name, against_bare_base: bare }) {
  if (!questions.length) return "Nothing is held out to compare them by";
  return `Of ${count(questions.length, "wanted answer")} ${improved} are likelier with your layers on ${name}${bare ? " than on it without them" : ""}, ${regressed} less likely, ${tied} as likely`;
}

/** @param {Rebased} report @returns {HTMLElement[]} */
function examples({ examples, name, against_bare_base: bare }) {
  return examples.map((each) => h("div", { class: "answers" }, h("div", {}, textBlock(each.prompt, "example-asked")),
    ...[[bare ? `${name} without layers` : "Live now", each.before], [`On ${name}`, each.after]].map(([title, text]) =>
      h("section", { class: "answer", "aria-label": title }, h("h3", {}, title), reply(text || "(nothing)")))));
}
