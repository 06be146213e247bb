/**
 * Conversations, found again among turns: the ledger knows no others. A turn holds what the model was told, so it names the
 * turn before it: the one whose question and reply stand at the end of that. A reply that was asked for again takes the place
 * of the old one.
 */

/** @typedef {import("./user.js").Turn} Turn */
/** @typedef {import("./user.js").Signal} Signal */

/**
 * One question and its reply as the page shows them.
 * @typedef {{ asked: string, reply: string, turn: string | null, stopped: boolean, rating: number, edited: string | null, comments: string[] }} Exchange
 * @typedef {{ id: string, at: string, system: import("./user.js").Message[], exchanges: Exchange[] }} Thread
 */

/**
 * @param {Turn[]} turns newest first
 * @param {Signal[]} signals
 * @returns {Thread[]} the one that was spoken in last first
 */
export function threads(turns, signals) {
  const about = Map.groupBy(signals.filter((signal) => signal.turn), (signal) => /** @type {string} */ (signal.turn));
  /** @typedef {{ turn: Turn, before: Place | null, first: string }} Place */
  /** @type {Map<string, Place>} */
  const newest = new Map();
  /** @type {Map<string, Place[]>} */
  const ends = new Map();
  /** @type {Place | null} */
  let last = null;
  for (const turn of turns.toReversed()) {
    const own = about.get(turn.id) ?? [];
    // The half of a blind comparison that was not chosen is no conversation.
    if (own.some((signal) => signal.kind === "preference" && "revision" in signal.payload)) continue;
    const before = placeBefore(turn, ends);
    let first = before?.first ?? turn.id;
    if (!before && last && !last.before && same(last.turn, turn)) first = last.first;
    const place = { turn, before, first };
    last = place;
    newest.delete(first);
    newest.set(first, place);
    const edits = own.filter((signal) => signal.kind === "edit").map((signal) => signal.payload.text);
    for (const reply of new Set([turn.reply, ...edits])) {
      const key = JSON.stringify([turn.messages.at(-1)?.content, reply]);
      ends.set(key, [...(ends.get(key) ?? []), place]);
    }
  }
  return [...newest.values()].reverse().map((place) => threadOf(place, about));
}

/**
 * What the model is told before a question.
 * @param {Thread} thread
 * @param {string} question
 * @param {number} [until] how many exchanges come before it
 * @returns {import("./user.js").Message[]}
 */
export function messagesOf(thread, question, until = thread.exchanges.length) {
  const told = thread.exchanges.slice(0, until).filter((exchange) => exchange.turn).flatMap((exchange) => [
    { role: "user", content: exchange.asked },
    { role: "assistant", content: exchange.edited ?? exchange.reply },
  ]);
  return [...thread.system, ...told, { role: "user", content: question }];
}

/** @returns {Thread} */
export const emptyConversation = () => ({ id: "", at: "", system: [], exchanges: [] });

/**
 * @param {{ turn: Turn, before: any, first: string }} place
 * @param {Map<string, Signal[]>} about
 * @returns {Thread}
 */
function threadOf(place, about) {
  /** @type {Turn[]} */
  const turns = [];
  for (let at = place; at; at = at.before) turns.unshift(at.turn);
  const newest = /** @type {Turn} */ (turns.at(-1));
  return {
    id: place.first,
    at: newest.at,
    system: newest.messages.filter((message) => message.role === "system"),
    exchanges: turns.map((turn) => {
      const own = about.get(turn.id) ?? [];
      /** @param {string} kind */
      const latest = (kind) => own.findLast((signal) => signal.kind === kind)?.payload;
      return {
        asked: turn.messages.at(-1)?.content ?? "",
        reply: turn.reply,
        turn: turn.id,
        stopped: turn.finish_reason === "cancelled",
        rating: latest("rating")?.value ?? 0,
        edited: latest("edit")?.text ?? null,
        comments: own.filter((signal) => signal.kind === "comment").map((signal) => signal.payload.text),
      };
    }),
  };
}

/**
 * @param {Turn} turn
 * @param {Map<string, any[]>} ends
 */
function placeBefore(turn, ends) {
  const told = turn.messages;
  if (told.length < 3 || told.at(-3)?.role !== "user" || told.at(-2)?.role !== "assistant") return null;
  const questions = asked(told.slice(0, -2));
  const found = ends.get(JSON.stringify([told.at(-3)?.content, told.at(-2)?.content])) ?? [];
  // Only the questions are compared further back: a long conversation may have lost its beginning, and replies are edited.
  return found.findLast((place) => {
    const known = asked(place.turn.messages).slice(-questions.length);
    return known.length === questions.length && known.every((/** @type {string} */ text, /** @type {number} */ n) => text === questions[n]);
  }) ?? null;
}

/** @param {import("./user.js").Message[]} messages */
const asked = (messages) => messages.filter((message) => message.role === "user").map((message) => message.content);

/** @param {Turn} one @param {Turn} other */
const same = (one, other) => JSON.stringify(one.messages) === JSON.stringify(other.messages);
