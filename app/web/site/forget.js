/**
 * Destroying something that was said. What would go is asked first and shown, since there is no way back.
 */

import { Problem } from "./api.js";
import { openDialog } from "./dialog.js";
import { button, h, written } from "./dom.js";
import * as notify from "./notify.js";
import { count, layerName } from "./format.js";

/**
 * @param {import("./user.js").Person} person
 * @param {{ follow: (job: any) => Promise<any> }} learning
 * @param {string} item the id of a signal
 * @param {string} text what it says
 */
export async function askToForget(person, learning, item, text) {
  try {
    const would = await whatWouldGo(person, item);
    const forget = button("Forget it for good", async () => {
      close();
      try {
        await learning.follow(await person.forget(item, false));
      } catch (error) {
        notify.error(error);
      }
    }, { class: "do harm" });
    const close = openDialog("Forget this?", written(text, "words quoted"), h("p", {}, consequences(would)),
      h("p", { class: "dim" }, "It is destroyed, and there is no way back. What was built from it is built anew without it, which can take a while."),
      h("div", { class: "row", data: { way: "out" } }, button("Keep it", () => close()), forget));
  } catch (error) {
    notify.error(error);
  }
}

/**
 * @param {import("./user.js").Person} person
 * @param {string} item
 */
async function whatWouldGo(person, item) {
  const begun = await person.forget(item, true);
  let now = begun;
  for await (now of person.follow(begun.id));
  if (now.error) throw new Problem(now.error.kind, now.error.message, now.error.hint);
  return now.forgotten;
}

/** @param {any} would */
function consequences(would) {
  const parts = [
    would.signals.length && count(would.signals.length, "thing you said", "things you said"),
    would.turns.length && count(would.turns.length, "question with its reply", "questions with their replies"),
    would.emptied.length && count(would.emptied.length, "reply", "replies"),
    would.revisions.length && count(would.revisions.length, "revision"),
  ].filter(Boolean);
  const layers = Object.keys(would.heads).map(layerName);
  const live = layers.length ? ` ${layers.join(" and ")} would go back to what it was before, until it is built anew.` : "";
  return `This destroys ${list(parts)}.${live}`;
}

/** @param {(string | number)[]} parts */
const list = (parts) => (parts.length < 2 ? parts.join("") : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`);
