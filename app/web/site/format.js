/** Dates, numbers and texts formatted for the page. */

const MOMENT = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "long", year: "numeric" });

/** @param {string} at a moment in ISO 8601 */
export const moment = (at) => MOMENT.format(new Date(at));

/** @param {string} at */
export const day = (at) => DAY.format(new Date(at));

/**
 * @param {number} count
 * @param {string} one
 * @param {string} [many]
 */
export const count = (count, one, many = `${one}s`) => `${count.toLocaleString()} ${count === 1 ? one : many}`;

/**
 * The beginning of a text on one line.
 * @param {string} text
 * @param {number} [most] characters
 */
export function excerpt(text, most = 90) {
  const line = text.replace(/\s+/g, " ").trim();
  // By code points, so that no emoji is cut in half.
  const letters = [...line];
  return letters.length <= most ? line : `${letters.slice(0, most - 1).join("").trimEnd()}…`;
}

/** @param {number} seconds */
export function span(seconds) {
  if (seconds < 1) return "under a second";
  if (seconds < 90) return count(Math.round(seconds), "second");
  return count(Math.round(seconds / 60), "minute");
}

/**
 * The mean log-probability of a token, as how likely a token is: 0 to 1.
 * @param {number} logprob nats
 */
export const likely = (logprob) => Math.exp(Math.min(0, logprob));

/** @param {number} part */
export function percent(part) {
  const value = 100 * part;
  return `${value >= 10 || value === 0 ? Math.round(value) : Number(value.toPrecision(2))} %`;
}

/**
 * The name of a layer on this page.
 * @param {string} layer
 */
export function layerName(layer) {
  return layer.startsWith("skill.") ? `Skill: ${layer.slice(6)}` : layer.charAt(0).toUpperCase() + layer.slice(1);
}

/**
 * The id of a revision without its layer.
 * @param {string} id
 */
export const shortId = (id) => id.slice(id.lastIndexOf("@") + 1).slice(0, 8);

/** @type {Record<string, string>} */
const KINDS = {
  rating: "thumb", edit: "correction", preference: "choice", comment: "rule", reward: "score", demonstration: "demonstration", fact: "fact",
};

/** @param {string} kind of a signal */
export const kindName = (kind) => KINDS[kind] ?? kind;

/**
 * The text of a signal.
 * @param {{ kind: string, payload: Record<string, any> }} signal
 * @returns {string}
 */
export function signalText({ kind, payload }) {
  if (kind === "rating") return payload.value > 0 ? "Rated good" : "Rated not good";
  return String(payload.text ?? payload.answer ?? payload.value ?? "");
}
