/** A conversation as the chat view shows it: the server's turns with the feedback on each. */

/** @typedef {import("./user.js").User} User */
/** @typedef {import("./user.js").Signal} Signal */

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
  const [conversation, signals] = await Promise.all([user.conversation(id), user.signals()]);
  const byTurn = Map.groupBy(signals, (signal) => signal.turn);
  return { id: conversation.id, exchanges: conversation.turns.map((turn) => exchangeOf(turn, byTurn.get(turn.id) ?? [])) };
}

/** @param {import("./user.js").Turn} turn @param {Signal[]} signals @returns {Exchange} */
function exchangeOf(turn, signals) {
  /** @param {string} kind */
  const latest = (kind) => signals.findLast((signal) => signal.kind === kind)?.payload;
  return {
    prompt: turn.messages.findLast((message) => message.role === "user")?.content ?? "",
    reply: turn.reply,
    turn: turn.id,
    stopped: turn.finish_reason === "cancelled",
    rating: latest("rating")?.value ?? 0,
    edited: latest("edit")?.text ?? null,
    comments: signals.filter((signal) => signal.kind === "comment").map((signal) => signal.payload.text),
  };
}
