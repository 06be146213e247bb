/** The changes of a correction, word by word, with a proofreader's marks. */

import { h } from "./dom.js";

// Texts with more pairs of words than this are shown without marks, since the comparison would take too long.
const MOST = 400_000;
// Fewer letters than these between two changes are one change with them.
const LEAST = 8;

/** @typedef {{ how: "same" | "out" | "in", text: string }} Change */

/**
 * The changes from `before` to `after`. "same" and "out" make up `before`, "same" and "in" make up `after`.
 * @param {string} before
 * @param {string} after
 * @returns {Change[]}
 */
export function changes(before, after) {
  const a = before.split(/(\s+)/).filter(Boolean);
  const b = after.split(/(\s+)/).filter(Boolean);
  let begin = 0;
  while (begin < a.length && begin < b.length && a[begin] === b[begin]) begin++;
  let end = 0;
  while (end < a.length - begin && end < b.length - begin && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const middle = between(a.slice(begin, a.length - end), b.slice(begin, b.length - end));
  return joined([
    ...a.slice(0, begin).map((text) => /** @type {Change} */ ({ how: "same", text })),
    ...middle,
    ...a.slice(a.length - end).map((text) => /** @type {Change} */ ({ how: "same", text })),
  ]);
}

/**
 * A correction with its marks: deletions are struck, insertions are underlined. Where little is left of the old text, only the
 * new one is shown.
 * @param {string} before
 * @param {string} after
 */
export function marked(before, after) {
  const found = changes(before, after);
  const kept = found.filter((change) => change.how === "same").reduce((sum, change) => sum + change.text.trim().length, 0);
  const place = h("div", { class: "written reply", dir: "auto" });
  if (kept < 0.35 * after.length) place.append(h("ins", {}, after));
  else {
    for (const [n, { how, text }] of found.entries()) {
      place.append(how === "same" ? text : h(how === "in" ? "ins" : "del", {}, text));
      if (how === "out" && found[n + 1]?.how === "in" && !/\s$/.test(text)) place.append(" ");
    }
  }
  return place;
}

/**
 * The longest common words in order, by the usual table.
 * @param {string[]} a
 * @param {string[]} b
 * @returns {Change[]}
 */
function between(a, b) {
  if (a.length * b.length > MOST) return [{ how: "out", text: a.join("") }, { how: "in", text: b.join("") }];
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  /** @type {Change[]} */
  const found = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) found.push({ how: "same", text: (j++, a[i++]) });
    else if (j >= b.length || (i < a.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) found.push({ how: "out", text: a[i++] });
    else found.push({ how: "in", text: b[j++] });
  }
  return found;
}

/**
 * Join changes that are separated by a few equal words. A deletion comes before an insertion.
 * @param {Change[]} found
 * @returns {Change[]}
 */
function joined(found) {
  /** @type {Change[]} */
  const whole = [];
  let out = "";
  let into = "";
  let between = "";
  const flush = () => {
    if (out) whole.push({ how: "out", text: out });
    if (into) whole.push({ how: "in", text: into });
    if (between) whole.push({ how: "same", text: between });
    out = into = between = "";
  };
  for (const { how, text } of found) {
    if (how === "same") {
      between += text;
      continue;
    }
    if (between && (out || into) && between.trim().length < LEAST) {
      out += between;
      into += between;
      between = "";
    } else if (between) flush();
    if (how === "out") out += text;
    else into += text;
  }
  flush();
  return whole;
}
