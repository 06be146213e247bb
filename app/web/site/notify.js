/**
 * What the page tells a person: messages that are seen until they are read, and words for who listens. Invariant: a message
 * takes no focus, so that nobody is interrupted while typing.
 */

import { h, said } from "./dom.js";
import { Problem } from "./api.js";

const LONG = 9000;
const MOST = 3;

/** @param {string} id */
const place = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * Something was done. It goes by itself.
 * @param {string} text
 */
export function toast(text) {
  announce(text);
  const note = show(text, "");
  setTimeout(() => note.remove(), LONG);
}

/**
 * Something went wrong. It stays until it is put away.
 * @param {unknown} error
 */
export function error(error) {
  if (error instanceof Problem && error.kind === "Cancelled") return;
  const ours = error instanceof Problem;
  if (!ours) console.error(error);
  const message = ours ? error.message : "Something went wrong in this page.";
  const hint = ours ? error.hint : "Load it again; what you typed is kept.";
  announce(`${message} ${hint}`);
  show(message, hint);
}

/**
 * For who listens alone.
 * @param {string} text
 */
export function announce(text) {
  const line = h("p", {}, text);
  place("announcements").append(line);
  // Long enough for it to be taken in, and then nobody finds it by chance.
  setTimeout(() => line.remove(), 4000);
}

/**
 * Reads out a reply that is still being written, a sentence at a time: word by word nobody could listen to it.
 */
export function reader() {
  let told = 0;
  return {
    /** @param {string} text all of it so far */
    heard(text) {
      const ends = [...text.slice(told).matchAll(/(?<=[.!?:;\n])\s/g)].at(-1);
      if (!ends) return;
      const to = told + ends.index + ends[0].length;
      announce(spoken(text.slice(told, to)));
      told = to;
    },
    /** @param {string} text */
    over(text) {
      if (text.length > told) announce(spoken(text.slice(told)));
    },
  };
}

/**
 * Without the marks of Markdown, which nobody wants to hear.
 * @param {string} text
 */
const spoken = (text) => text.replace(/\*{1,3}(?=\S)|(?<=\S)\*{1,3}|`+|^ *(?:#+|>) /gm, "");

/**
 * @param {string} message
 * @param {string} hint
 */
function show(message, hint) {
  const notes = place("notes");
  while (notes.children.length >= MOST) notes.firstElementChild?.remove();
  const note = h("div", { class: "note" },
    h("p", {}, said(message), hint ? h("span", { class: "way" }, said(hint)) : null),
    h("button", { type: "button", "aria-label": "Put this message away", onclick: () => note.remove() }, "×"));
  notes.append(note);
  return note;
}
