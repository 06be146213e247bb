/** The dialog that explains a reply: the revisions that answered, their signals, and the rules and facts in the prompt. */

import { openDialog } from "./dialog.js";
import { h, inlineText } from "./dom.js";
import { attempt } from "./notify.js";
import { count, excerpt, kindName, layerName, moment, signalText, shortId } from "./format.js";

const SHOWN = 12;

/**
 * @param {import("./user.js").User} user
 * @param {string} turn
 */
export async function openWhy(user, turn) {
  await attempt(async () => openDialog("Why this answer?", ...provenanceSections(await user.why(turn))));
}

/** @param {any} why */
function provenanceSections(why) {
  /** @type {HTMLElement[]} */
  const parts = [];
  if (!why.parts.length && !why.items.length && !why.forgotten.length) {
    parts.push(h("p", {}, "The bare base answered: no layer was active, and the prompt held no rule or fact."));
  }
  for (const { revision, weight, signals } of why.parts) {
    parts.push(h("section", {},
      h("h3", {}, layerName(revision.layer), " ", h("span", { class: "id dim" }, shortId(revision.id))),
      h("p", { class: "dim" }, `Trained on ${count(signals.length, "signal")} on ${moment(revision.at)}`, weight === 1 ? "." : `, at weight ${weight}.`),
      signalList(signals)));
  }
  if (why.items.length) parts.push(h("section", {}, h("h3", {}, "In the prompt"), signalList(why.items)));
  if (why.forgotten.length) parts.push(h("p", {}, `${count(why.forgotten.length, "revision")} of this reply forgotten since.`));
  return parts;
}

/** @param {import("./user.js").Signal[]} signals */
function signalList(signals) {
  const rows = signals.slice(-SHOWN).map((signal) =>
    h("li", {}, h("span", { class: "dim" }, `${kindName(signal.kind)} `), h("span", { class: "words" }, inlineText(excerpt(signalText(signal), 160)))));
  if (signals.length > SHOWN) rows.unshift(h("li", { class: "dim" }, `${signals.length - SHOWN} older ones, and`));
  return h("ul", { class: "plain" }, rows);
}
