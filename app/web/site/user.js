/**
 * One user's model, over the HTTP API. It fires "changed" after each request that may change a view. The event's detail names the
 * area: "chat", "feedback", "learn", "stack" or "forget".
 */

import { ask, events, file, pages } from "./api.js";

/**
 * @typedef {{ role: string, content: string }} Message
 * @typedef {{ base: string, digest: string, entries: { layer: string, revision: string, weight: number }[] }} Stack
 * @typedef {{ id: string, at: string, messages: Message[], reply: string, stack: Stack, finish_reason: string, used: string[] }} Turn
 * @typedef {{ id: string, title: string, updated_at: string, num_turns: number, last_turn: string }} ConversationSummary
 * @typedef {{ id: string, kind: string, at: string, payload: Record<string, any>, turn: string | null, source: string }} Signal
 * @typedef {{ signal: Signal, place: string, layer: string | null, why: string, use: string, use_code: string, revision: string | null }} SignalStatus
 * @typedef {{ id: string, kind: "rule" | "fact", text: string, at: string }} Item
 * @typedef {{ name: string, position: number, head: string | null, weight: number, scope: string }} Layer
 * @typedef {{ id: string, layer: string, parent: string | null, scores: Record<string, any>, verdict: string, reason: string, probation: boolean, at: string, signals: Record<string, string> }} Revision
 * @typedef {{ layer: string, before: string | null, after: string | null, cause: string, at: string }} Move
 * @typedef {{ id: string, kind: string, state: string, stage: string, progress: number, ended_at: string | null, report: Report | null, forget_report: any, rebase_report: Rebased | null, error: { message: string, hint: string, kind: string } | null }} Job
 * @typedef {{ rating: number | null, edit: string | null, comments: string[] }} TurnFeedback the user's own
 * @typedef {{ name: string, title: string, is_open: boolean }} Base
 * @typedef {{ base: string, to: string, name: string, outcome: string, verdict: string | null, reason: string, switched: boolean, against_bare_base: boolean, layers: { layer: string, before: string, after: string | null }[], questions: object[], examples: { prompt: string, before: string, after: string }[], improved: number, regressed: number, tied: number }} Rebased
 * @typedef {{ layer: string | null, stage: string, step: number, steps: number, since: string }} TrainingStatus
 * @typedef {{ layer: string, outcome: string, verdict: string | null, reason: string, at: string, seconds: number, revision: string | null, before: string | null, probation: boolean, steps: number, sources: { signal: string, kind: string, text: string, use: string, use_code: string }[], source_counts?: Record<string, number>, examples: { prompt: string, before: string, after: string }[], scores: Record<string, any>, accepted: boolean, error: string, above: Report[] }} Report
 */

export class User extends EventTarget {
  /** @param {string} id */
  constructor(id) {
    super();
    this.id = id;
    /** @type {Map<string, Promise<Turn | null>>} */
    this.known = new Map();
  }

  /** @param {string} about "chat", "feedback", "learn", "stack" or "forget" */
  changed(about) {
    if (about === "forget") this.known.clear();
    this.dispatchEvent(new CustomEvent("changed", { detail: about }));
  }

  /**
   * @param {string | null} after the `next` of the page before
   * @param {number} [limit]
   * @returns {Promise<{ items: ConversationSummary[], next: string | null }>} newest first
   */
  conversations(after, limit = 100) {
    return ask("GET", this.at("conversations"), { query: { limit, ...(after === null ? {} : { after }) } });
  }

  /** @param {string} id @returns {Promise<{ id: string, turns: Turn[], feedback: Record<string, TurnFeedback> }>} oldest turn first */
  conversation(id) {
    return ask("GET", this.at("conversations", id));
  }

  /**
   * One turn; null where it is gone.
   * @param {string} id
   * @returns {Promise<Turn | null>}
   */
  turn(id) {
    const found = this.known.get(id) ?? ask("GET", this.at("turns", id)).catch(() => null);
    this.known.set(id, found);
    return found;
  }

  /** @returns {Promise<SignalStatus[]>} oldest first */
  signalStatuses() {
    return pages(this.at("signal-statuses"));
  }

  /** @returns {Promise<Item[]>} */
  items() {
    return pages(this.at("items"));
  }

  /** @returns {Promise<Layer[]>} lowest first */
  layers() {
    return pages(this.at("layers"));
  }

  /** @returns {Promise<Revision[]>} oldest first */
  revisions() {
    return pages(this.at("revisions"));
  }

  /** @returns {Promise<Move[]>} oldest first */
  history() {
    return pages(this.at("history"));
  }

  /** @returns {Promise<Report[]>} oldest first */
  reports() {
    return pages(this.at("reports"));
  }

  /** @returns {Promise<{ text: string }>} */
  pending() {
    return ask("GET", this.at("pending"));
  }

  /** @returns {Promise<TrainingStatus | null>} the learn that runs now, in this server or another program on its home */
  trainingStatus() {
    return ask("GET", this.at("training-status"), { quiet: true });
  }

  /** @param {string} since ISO 8601 @returns {Promise<{ reports: Report[] }>} the learns since then */
  activity(since) {
    return ask("GET", this.at("activity"), { query: { since } });
  }

  /** @param {string} turn */
  why(turn) {
    return ask("GET", this.at("turns", turn, "why"));
  }

  /**
   * Streams a reply: events "begun", "piece" and "ended".
   * @param {{ prompt: string, conversation_id: string | null, replaces?: string }} chat
   * @param {AbortSignal} signal
   */
  stream(chat, signal) {
    return events("POST", this.at("chat/stream"), { body: chat, signal });
  }

  /** @param {string} stream */
  stop(stream) {
    return ask("DELETE", this.at("streams", stream));
  }

  /**
   * Exactly one of rating, edit and comment.
   * @param {string} turn
   * @param {{ rating?: 1 | -1, edit?: string, comment?: string }} what
   * @returns {Promise<string>} the signal's id
   */
  async feedback(turn, what) {
    const { signal } = await ask("POST", this.at("turns", turn, "feedback"), { body: what });
    this.changed("feedback");
    return signal;
  }

  /**
   * Reports implicit feedback. The server records it only where that is switched on.
   * @param {string} turn
   * @param {"copied"} event
   */
  recordImplicitFeedback(turn, event) {
    return ask("POST", this.at("turns", turn, "implicit-feedback"), { body: { event } }).catch(() => null);
  }

  /** @param {string} prompt @param {string} answer @param {string | null} skill null: for the style */
  async teach(prompt, answer, skill) {
    await ask("POST", this.at("teach"), { body: { prompt, answer, skill } });
    this.changed("feedback");
  }

  /** @param {string} text */
  async remember(text) {
    await ask("POST", this.at("remember"), { body: { text } });
    this.changed("feedback");
  }

  /** @returns {Promise<{ training: boolean }>} */
  summary() {
    return ask("GET", `users/${encodeURIComponent(this.id)}`);
  }

  /** @param {boolean} allowed whether layers may be trained on feedback from now on */
  async setTraining(allowed) {
    await ask("PUT", this.at("training"), { body: { allowed } });
    this.changed("feedback");
  }

  /** @param {string} item @param {string} text */
  async editItem(item, text) {
    await ask("PUT", this.at("items", item), { body: { text } });
    this.changed("feedback");
  }

  /** @param {string} item */
  async retractItem(item) {
    await ask("DELETE", this.at("items", item));
    this.changed("feedback");
  }

  /** @returns {Promise<Job>} */
  learn() {
    return ask("POST", this.at("learns"), { body: {} });
  }

  /** @returns {Promise<Stack>} a Problem of kind BaseMismatch if the layers are on another base than the server's */
  stack() {
    return ask("GET", this.at("stack"));
  }

  /** @returns {Promise<Base[]>} those that the layers can be built on */
  bases() {
    return ask("GET", "bases");
  }

  /**
   * Builds all layers on a base and compares.
   * @param {string} to its name
   * @param {boolean} accept whether to switch to it then
   * @returns {Promise<Job>}
   */
  rebase(to, accept) {
    return ask("POST", this.at("rebases"), { body: { to, accept, compare_only: !accept } });
  }

  /** @param {string} item @param {boolean} dry @returns {Promise<Job>} */
  forget(item, dry) {
    return ask("POST", this.at("forgets"), { body: { item, dry_run: dry } });
  }

  /**
   * Erases the user, or with `dry` counts what that would erase.
   * @param {boolean} dry
   * @returns {Promise<{ turns: number, signals: number, revisions: number, api_keys: number, complete: boolean }>}
   */
  forgetUser(dry) {
    return ask("DELETE", `users/${encodeURIComponent(this.id)}`, { query: { dry_run: dry } });
  }

  /** @returns {Promise<Job | undefined>} the newest one that runs */
  async running() {
    const { items } = await ask("GET", this.at("jobs"), { query: { limit: 20 } });
    return items.find((/** @type {Job} */ job) => !job.ended_at);
  }

  /**
   * Every change of a job until it is over.
   * @param {string} job
   * @returns {AsyncGenerator<Job, void, void>}
   */
  async *follow(job) {
    for await (const [, now] of events("GET", this.at("jobs", job, "events"))) yield now;
  }

  /** @param {string} job */
  cancel(job) {
    return ask("DELETE", this.at("jobs", job));
  }

  /** @param {string} layer @param {number} weight */
  async setWeight(layer, weight) {
    await ask("PUT", this.at("layers", layer, "weight"), { body: { weight } });
    this.changed("stack");
  }

  /** @param {string} layer @param {string} scope */
  async scope(layer, scope) {
    await ask("PUT", this.at("layers", layer, "scope"), { body: { scope } });
    this.changed("stack");
  }

  /** @param {string} layer @param {string | null} to a revision, "previous", or null for the bare base @returns {Promise<Move>} */
  async rollback(layer, to) {
    const move = await ask("POST", this.at("layers", layer, "rollback"), { body: { to } });
    this.changed("stack");
    return move;
  }

  /** @returns {Promise<Blob>} the user's whole ledger and adapters, as a .personal file */
  export() {
    return file(this.at("export"));
  }

  /** @param {string | null} layer null: all that is live, as one @returns {Promise<Blob>} a zip of what PEFT loads */
  exportPeft(layer) {
    return file(this.at("peft"), layer ? { layer } : {});
  }

  /** @param {{ prompt: string, layer: string, a: string, b: string }} what */
  compare(what) {
    return ask("POST", this.at("comparisons"), { body: what });
  }

  /** @param {string} comparison @param {1 | 2} which */
  async choose(comparison, which) {
    const choice = await ask("POST", this.at("comparisons", comparison, "choice"), { body: { which } });
    this.changed("feedback");
    return choice;
  }

  /** @param {...string} parts */
  at(...parts) {
    const [first, ...rest] = parts;
    return ["users", encodeURIComponent(this.id), first, ...rest.map(encodeURIComponent)].join("/");
  }
}
