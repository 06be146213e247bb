/**
 * Requests to the HTTP API. Each carries the API key; each failure is thrown as a `Problem`.
 */

import { apiKey } from "./session.js";

const ROOT = new URL("api/v1/", document.baseURI);

/** An error: `kind` as in docs/reference/http-api.md, `hint` says what to do; `status` is 0 if no server answered. */
export class Problem extends Error {
  /**
   * @param {string} kind
   * @param {string} message
   * @param {string} [hint]
   * @param {number} [status]
   */
  constructor(kind, message, hint = "", status = 0) {
    super(message);
    this.kind = kind;
    this.hint = hint;
    this.status = status;
  }
}

/** @type {{ refused: () => void }} Called when the server refuses the API key. */
export const listener = { refused: () => {} };

/**
 * @param {string} method
 * @param {string} path below /api/v1/
 * @param {{ body?: any, query?: Record<string, any>, signal?: AbortSignal, quiet?: boolean, secret?: string }} [more] quiet: the
 *   user did nothing, so a refused API key opens no sign-in; secret: used instead of this tab's API key
 * @returns {Promise<any>} the JSON of the response, null if it has none
 */
export async function ask(method, path, more = {}) {
  const response = await send(method, path, more);
  if (response.status === 204) return null;
  return response.json();
}

/**
 * Exchanges the one-time code of a link.
 * @param {string} code
 * @returns {Promise<string>} the token of a session
 */
export async function redeem(code) {
  return (await ask("POST", "../../web/session", { secret: code, quiet: true })).token;
}

/**
 * @param {string} path
 * @param {Record<string, any>} [query]
 * @returns {Promise<Blob>}
 */
export async function file(path, query = {}) {
  const response = await send("GET", path, { query });
  return response.blob().catch(unreachable);
}

/**
 * Reads all pages of a list, or pages until there are `most` values.
 * @param {string} path
 * @param {Record<string, any>} [query]
 * @param {number} [most]
 * @returns {Promise<any[]>}
 */
export async function pages(path, query = {}, most = Infinity) {
  /** @type {any[]} */
  const found = [];
  let after = null;
  do {
    const limit = Math.min(1000, most - found.length);
    const page = await ask("GET", path, { query: { ...query, limit, ...(after === null ? {} : { after }) } });
    found.push(...page.items);
    after = page.next;
  } while (after !== null && found.length < most);
  return found;
}

/**
 * Yields the events of a stream as [name, value]. Throws the Problem of an error event.
 * @param {string} method
 * @param {string} path
 * @param {{ body?: any, signal?: AbortSignal }} [more]
 * @returns {AsyncGenerator<[string, any], void, void>}
 */
export async function* events(method, path, more = {}) {
  const response = await send(method, path, more);
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let over = false;
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(unreachable);
      if (done) {
        over = true;
        return;
      }
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const event = parsed(block);
        if (event?.[0] === "error") throw problemOf(event[1].error, response.status);
        if (event) yield event;
      }
    }
  } finally {
    if (!over) reader.cancel().catch(() => {});
  }
}

/**
 * @param {string} block
 * @returns {[string, any] | null} null for a keep-alive line
 */
function parsed(block) {
  let name = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) return [name, JSON.parse(line.slice(6))];
  }
  return null;
}

/**
 * @param {string} method
 * @param {string} path
 * @param {{ body?: any, query?: Record<string, any>, signal?: AbortSignal, quiet?: boolean, secret?: string }} more
 */
async function send(method, path, { body, query, signal, quiet, secret }) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query ?? {})) url.searchParams.set(name, String(value));
  /** @type {Record<string, string>} */
  const headers = { Authorization: `Bearer ${secret ?? apiKey()}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(url, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
    referrerPolicy: "no-referrer",
  }).catch(unreachable);
  if (response.ok) return response;
  const failure = await response.json().catch(() => ({}));
  if (response.status === 401 && !quiet) listener.refused();
  throw problemOf(failure.error ?? {}, response.status);
}

/**
 * @param {{ kind?: string, message?: string, hint?: string }} error
 * @param {number} status
 */
function problemOf(error, status) {
  return new Problem(error.kind ?? "Problem", error.message ?? `The server answered ${status}.`, error.hint ?? "", status);
}

/**
 * @param {any} error
 * @returns {never}
 */
function unreachable(error) {
  if (error instanceof DOMException && error.name === "AbortError") throw new Problem("Cancelled", "Stopped.");
  throw new Problem("Unreachable", "The server does not answer.", "Is it still running? What you typed is kept.");
}
