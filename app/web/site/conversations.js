/** A conversation as the chat view shows it: the server's turns with the feedback on each. */

/** @typedef {import("./user.js").User} User */

/**
 * One prompt and its reply. `turn` is null until the ledger has it; `rating` is 0 for none.
 * @typedef {{ prompt: string, reply: string, turn: string | null, stopped: boolean, rating: number, edited: string | null, comments: string[] }} Exchange
 * `id` is null until the ledger has a turn of it.
 * @typedef {{ id: string | null, exchanges: Exchange[] }} Conversation
 */

/** @returns {Conversation} */
export const emptyConversation = () => ({ id: null, exchanges: [] });

/** @param {string} prompt @returns {Exchange} */
export const newExchange = (prompt) => ({ prompt, reply: "", turn: null, stopped: false, rating: 0, edited: null, comments: [] });

/**
 * @param {User} user
 * @param {string} id
 * @returns {Promise<Conversation>}
 */
export async function readConversation(user, id) {
  const { id: name, turns, feedback } = await user.conversation(id);
  return { id: name, exchanges: turns.map((turn) => exchangeOf(turn, feedback[turn.id])) };
}

/** @param {import("./user.js").Turn} turn @param {import("./user.js").TurnFeedback | undefined} feedback @returns {Exchange} */
function exchangeOf(turn, feedback) {
  return {
    prompt: turn.messages.findLast((message) => message.role === "user")?.content ?? "",
    reply: turn.reply,
    turn: turn.id,
    stopped: turn.finish_reason === "cancelled",
    rating: feedback?.rating ?? 0,
    edited: feedback?.edit ?? null,
    comments: feedback?.comments ?? [],
  };
}
