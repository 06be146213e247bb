/** Why a reply was as it was: what answered, what that was built from, and what stood in its prompt. */

import { openDialog } from "./dialog.js";
import { h, said } from "./dom.js";
import * as notify from "./notify.js";
import { count, excerpt, kindName, layerName, moment, saidBy, shortId } from "./format.js";

const SHOWN = 12;

/**
 * @param {import("./user.js").Person} person
 * @param {string} turn
 */
export async function openWhy(person, turn) {
  try {
    const why = await person.why(turn);
    openDialog("Why this answer?", ...account(why));
  } catch (error) {
    notify.error(error);
  }
}

/** @param {any} why */
function account(why) {
  /** @type {HTMLElement[]} */
  const parts = [];
  if (!why.parts.length && !why.items.length && !why.forgotten.length) {
    parts.push(h("p", {}, "The bare base answered, with nothing of yours: nothing was learned yet, and no rule or fact was near the question."));
  }
  for (const { revision, weight, signals } of why.parts) {
    parts.push(h("section", {},
      h("h3", {}, layerName(revision.layer), " ", h("span", { class: "id dim" }, shortId(revision.id))),
      h("p", { class: "dim" }, `Built on ${moment(revision.at)} from ${count(signals.length, "thing")} you said`, weight === 1 ? "." : `, at weight ${weight}.`),
      signalList(signals)));
  }
  if (why.items.length) parts.push(h("section", {}, h("h3", {}, "In the prompt"), signalList(why.items)));
  if (why.forgotten.length) parts.push(h("p", {}, `${count(why.forgotten.length, "revision")} that answered then was forgotten since.`));
  return parts;
}

/** @param {import("./user.js").Signal[]} signals */
function signalList(signals) {
  const rows = signals.slice(-SHOWN).map((signal) =>
    h("li", {}, h("span", { class: "dim" }, `${kindName(signal.kind)} `), h("span", { class: "words" }, said(excerpt(saidBy(signal), 160)))));
  if (signals.length > SHOWN) rows.unshift(h("li", { class: "dim" }, `${signals.length - SHOWN} older ones, and`));
  return h("ul", { class: "plain" }, rows);
}
