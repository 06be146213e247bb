/**
 * The dialogs to forget a signal and a user. A dry run first shows what that would erase, since forgetting cannot be undone.
 */

import { Problem } from "./api.js";
import { openDialog } from "./dialog.js";
import { button, h, inlineText, textBlock } from "./dom.js";
import * as notify from "./notify.js";
import { count, layerName } from "./format.js";

/**
 * @param {import("./user.js").User} user
 * @param {{ follow: (job: any) => Promise<any> }} learning
 * @param {string} item the id of a signal
 * @param {string} text of the signal
 */
export async function confirmForget(user, learning, item, text) {
  await notify.attempt(async () => {
    const would = await previewForget(user, item);
    const forget = button("Forget it permanently", () => {
      close();
      notify.attempt(async () => learning.follow(await user.forget(item, false)));
    }, { class: "do harm" });
    const close = openDialog("Forget this?", textBlock(text, "words quoted"), h("p", {}, consequences(would)),
      h("p", { class: "dim" }, "This cannot be undone. Revisions trained on it are rebuilt without it, which can take a while."),
      h("div", { class: "row", data: { way: "out" } }, button("Keep it", () => close()), forget));
  });
}

/**
 * Erases the user once the name was typed.
 * @param {import("./user.js").User} user
 * @param {(note: string) => void} leave leaves the page, with a message
 */
export async function confirmForgetUser(user, leave) {
  await notify.attempt(async () => {
    const would = await user.forgetUser(true);
    const field = h("input", { type: "text", id: "erase", autocomplete: "off", autocapitalize: "none", spellcheck: "false" });
    const forget = h("button", { type: "submit", class: "do harm", disabled: true }, "Forget everything permanently");
    field.addEventListener("input", () => (forget.disabled = field.value.trim() !== user.id));
    const form = h("form", { data: { way: "out" }, onsubmit: async (/** @type {Event} */ event) => {
      event.preventDefault();
      if (forget.disabled) return;
      forget.disabled = true;
      const left = await notify.attempt(async () => {
        const done = await user.forgetUser(false);
        leave(`${erased("Erased", done)}${done.complete ? "" : " The rest follows when no other program reads this home."}`);
      });
      if (!left) close();
    } },
    h("div", { class: "field" }, h("label", { for: "erase" }, "Type ", h("strong", {}, inlineText(user.id)), " to confirm"), field),
    h("div", { class: "row" }, button("Keep everything", () => close()), forget));
    const close = openDialog("Forget everything?", h("p", {}, erased("This erases", would)),
      h("p", { class: "dim" }, "This cannot be undone. Backups and exported files are not reached."), form);
  });
}

/** @param {string} verb @param {{ turns: number, signals: number, revisions: number, api_keys: number }} report */
function erased(verb, report) {
  const parts = [
    report.turns && count(report.turns, "turn"),
    report.signals && count(report.signals, "signal"),
    report.revisions && count(report.revisions, "revision"),
    report.api_keys && count(report.api_keys, "API key"),
  ].filter(Boolean);
  return `${verb} ${parts.length ? list(parts) : "the user name"}.`;
}

/**
 * @param {import("./user.js").User} user
 * @param {string} item
 */
async function previewForget(user, item) {
  const begun = await user.forget(item, true);
  let now = begun;
  for await (now of user.follow(begun.id));
  if (now.error) throw new Problem(now.error.kind, now.error.message, now.error.hint);
  return now.forget_report;
}

/** @param {any} would */
function consequences(would) {
  const parts = [
    would.signals.length && count(would.signals.length, "signal"),
    would.turns.length && count(would.turns.length, "question with its reply", "questions with their replies"),
    would.emptied_replies.length && count(would.emptied_replies.length, "reply", "replies"),
    would.revisions.length && count(would.revisions.length, "revision"),
  ].filter(Boolean);
  const layers = Object.keys(would.heads).map(layerName);
  const live = layers.length ? ` ${layers.join(" and ")} returns to an earlier revision until it is rebuilt.` : "";
  return `This erases ${list(parts)}.${live}`;
}

/** @param {(string | number)[]} parts */
const list = (parts) => (parts.length < 2 ? parts.join("") : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`);
