/** Signing in: the API key, then the user. A key of one user needs no choice. */

import { ask, Problem, redeem } from "./api.js";
import { coalesce } from "./coalesce.js";
import { openDialog } from "./dialog.js";
import { button, h, inlineText } from "./dom.js";
import * as notify from "./notify.js";
import { apiKey, signOut, storeApiKey, storeUser, user } from "./session.js";
import { count } from "./format.js";

/**
 * @typedef {{ items: { id: string, turns: number, signals: number }[], next: string | null }} Found
 * @typedef {{ user: string, base: string, many: boolean }} Who `many`: the API key may choose another user.
 */

/**
 * Returns the signed-in user; asks for a missing API key or user in `place`.
 * @param {HTMLElement} place
 * @returns {Promise<Who>}
 */
export async function signIn(place) {
  for (;;) {
    if (!apiKey()) await new Promise((done) => place.replaceChildren(apiKeyForm("", () => done(undefined))));
    try {
      const whoami = await ask("GET", "whoami");
      const chosen = whoami.user ?? (user() || (await choose(place)));
      // Creates the user on first use.
      await ask("PUT", `users/${encodeURIComponent(chosen)}`);
      storeUser(chosen);
      return { user: chosen, base: whoami.base, many: whoami.user === null };
    } catch (error) {
      const status = error instanceof Problem ? error.status : 0;
      if (status === 401) {
        signOut();
        await new Promise((done) => place.replaceChildren(apiKeyForm("The server does not know that API key.", () => done(undefined))));
      } else {
        notify.error(error);
        // An invalid name is asked for again; any other error is the server's, and the API key stays.
        if (status === 400) storeUser("");
        else await new Promise((done) => place.replaceChildren(h("div", { class: "alone" }, button("Try again", () => done(undefined), { class: "go" }))));
      }
    }
  }
}

/**
 * Sign in by a link, if it can be used. Where another session is signed in, the user is asked first. Without consent nothing changes.
 * @param {import("./session.js").Link} link
 * @returns {Promise<boolean>} whether this tab has another session now
 */
export async function followLink(link) {
  try {
    const before = apiKey() ? await sessionOf(apiKey(), user()) : null;
    const secret = link.code ? await redeem(link.code) : link.secret;
    if (before) {
      const after = await sessionOf(secret, link.user);
      if (!after) throw new Problem("Unauthorized", "The server does not know the link's API key.", "Nothing was changed.");
      if (before !== after && !(await agreed(before, after))) return false;
    }
    storeApiKey(secret);
    storeUser(link.user);
    return true;
  } catch (error) {
    notify.error(error);
    return false;
  }
}

/**
 * @param {string} secret
 * @param {string} chosen the user of an administrator's API key
 * @returns {Promise<string | null>} who is signed in, null for an unknown API key
 */
async function sessionOf(secret, chosen) {
  try {
    const whoami = await ask("GET", "whoami", { secret, quiet: true });
    return whoami.user ?? (chosen ? `the administrator, with the model of ${chosen}` : "the administrator");
  } catch (error) {
    if (error instanceof Problem && error.status === 401) return null;
    throw error;
  }
}

/**
 * @param {string} before
 * @param {string} after
 * @returns {Promise<boolean>} false if the dialog is closed
 */
function agreed(before, after) {
  return new Promise((done) => {
    let yes = false;
    const stay = button("Stay signed in", () => close(), { class: "go" });
    const change = button("Sign in by the link", () => {
      yes = true;
      close();
    });
    const row = h("div", { class: "row", data: { way: "out" } }, stay, change);
    const close = openDialog("Change who is signed in?",
      h("p", {}, "This tab is signed in as ", h("strong", {}, inlineText(before)), "."),
      h("p", {}, "The link that was opened signs it in as ", h("strong", {}, inlineText(after)), "."),
      h("p", { class: "dim" }, "If you did not ask for that link, stay."), row);
    row.closest("dialog")?.addEventListener("close", () => done(yes));
  });
}

/**
 * Asks for a new API key in a dialog over the page, so that drafts stay.
 * @param {() => void} done
 */
export function signInAgain(done) {
  const dialog = h("dialog", { "aria-label": "Sign in again" }, apiKeyForm("The API key is no longer valid.", () => {
    dialog.close();
    done();
  }));
  dialog.addEventListener("close", () => {
    dialog.remove();
    done();
  });
  document.body.append(dialog);
  dialog.showModal();
}

/**
 * @param {string} problem
 * @param {() => void} done
 */
function apiKeyForm(problem, done) {
  const field = h("input", { type: "password", id: "api-key", autocomplete: "current-password", required: true, spellcheck: "false", "aria-describedby": "api-key-hint" });
  return h("form", { class: "alone", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    storeApiKey(field.value);
    done();
  } },
  h("h1", {}, "Sign in"),
  h("p", { class: "dim" }, "A model that learns from your feedback."),
  problem ? h("p", { class: "harm", role: "alert" }, problem) : null,
  h("div", { class: "field" }, h("label", { for: "api-key" }, "API key"), field,
    h("p", { class: "hint", id: "api-key-hint" }, "The server prints a link that signs you in once. ", h("code", {}, "personalpeft api-key make --user NAME"), " makes an API key for one user.")),
  h("button", { type: "submit", class: "go" }, "Sign in"));
}

/**
 * Lets an administrator choose a user.
 * @param {HTMLElement} place
 * @returns {Promise<string>}
 */
async function choose(place) {
  const first = await findUsers("");
  return new Promise((chosen) => {
    const field = h("input", { type: "text", id: "user", required: true, autocomplete: "off", autocapitalize: "none", spellcheck: "false", pattern: "[a-z0-9][a-z0-9._\\-]{0,63}", "aria-describedby": "user-hint" });
    const search = h("input", { type: "search", "aria-label": "Find a user", placeholder: "Find a user", hidden: first.next === null && first.items.length < 12 });
    const picks = h("ul", { class: "picks" });
    const rest = h("p", { class: "dim" }, "Search to find more users.");
    /** @param {Found} found */
    const draw = (found) => {
      rest.hidden = found.next === null;
      picks.replaceChildren(...found.items.map((each) => h("li", {}, h("button", { type: "button", class: "pick", onclick: () => chosen(each.id) },
        h("strong", {}, inlineText(each.id)), h("span", { class: "dim number" }, `${count(each.turns, "turn")}, ${count(each.signals, "signal")}`)))));
    };
    const find = coalesce(async () => draw(await findUsers(search.value.trim().toLowerCase())));
    search.addEventListener("input", find);
    const form = h("form", { class: "field", onsubmit: (/** @type {Event} */ event) => {
      event.preventDefault();
      chosen(field.value.trim());
    } },
    h("label", { for: "user" }, first.items.length ? "New user" : "Your user name"),
    h("div", { class: "row nowrap" }, field, h("button", { type: "submit", class: "go" }, "Go")),
    h("p", { class: "hint", id: "user-hint" }, "A short name of lower-case letters and digits."));
    draw(first);
    place.replaceChildren(h("div", { class: "alone" }, h("h1", { tabindex: "-1" }, "Choose a user"), search, picks, rest, form));
  });
}

/**
 * @param {string} search
 * @returns {Promise<Found>} the first users whose id contains it
 */
const findUsers = (search) => ask("GET", "users", { query: { search, limit: 50 } });
