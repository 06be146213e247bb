/**
 * Messages on the screen and for screen readers. Invariant: a message takes no focus.
 */

import { h, inlineText, place } from "./dom.js";
import { Problem } from "./api.js";

const TOAST_MS = 9000;
const MAX_NOTES = 3;

/**
 * Shows a message that disappears by itself.
 * @param {string} text
 */
export function toast(text) {
  announce(text);
  const note = show(text, "");
  setTimeout(() => note.remove(), TOAST_MS);
}

/**
 * Shows an error until the user closes it.
 * @param {unknown} error
 */
export function error(error) {
  if (error instanceof Problem && error.kind === "Cancelled") return;
  const ours = error instanceof Problem;
  if (!ours) console.error(error);
  const message = ours ? error.message : "This page has a bug.";
  const hint = ours ? error.hint : "Reload it; drafts are kept.";
  announce(`${message} ${hint}`);
  show(message, hint);
}

/**
 * Runs an act of the user, and shows its error.
 * @param {() => Promise<unknown>} act
 * @param {string} [done] shown where it succeeds
 * @returns {Promise<boolean>} whether it succeeded
 */
export async function attempt(act, done = "") {
  try {
    await act();
    if (done) toast(done);
    return true;
  } catch (failure) {
    error(failure);
    return false;
  }
}

/**
 * Announces a text to screen readers alone.
 * @param {string} text
 */
export function announce(text) {
  const line = h("p", {}, text);
  place("announcements").append(line);
  // Long enough for a screen reader to read it, then removed so that browsing does not find it.
  setTimeout(() => line.remove(), 4000);
}

/**
 * Announces a streaming reply sentence by sentence.
 */
export function reader() {
  let announced = 0;
  return {
    /** @param {string} text the reply so far */
    add(text) {
      const ends = [...text.slice(announced).matchAll(/(?<=[.!?:;\n])\s/g)].at(-1);
      if (!ends) return;
      const to = announced + ends.index + ends[0].length;
      announce(plainText(text.slice(announced, to)));
      announced = to;
    },
    /** @param {string} text */
    end(text) {
      if (text.length > announced) announce(plainText(text.slice(announced)));
    },
  };
}

/**
 * Returns the text without Markdown marks.
 * @param {string} text
 */
const plainText = (text) => text.replace(/\*{1,3}(?=\S)|(?<=\S)\*{1,3}|`+|^ *(?:#+|>) /gm, "");

/**
 * @param {string} message
 * @param {string} hint
 */
function show(message, hint) {
  const notes = place("notes");
  while (notes.children.length >= MAX_NOTES) notes.firstElementChild?.remove();
  const note = h("div", { class: "note" },
    h("p", {}, inlineText(message), hint ? h("span", { class: "way" }, inlineText(hint)) : null),
    h("button", { type: "button", "aria-label": "Close this message", onclick: () => note.remove() }, "×"));
  notes.append(note);
  return note;
}
