/** Coming in: the token, and whose model it is about. A token of one user leads straight to theirs. */

import { ask, pages, Problem, redeem } from "./api.js";
import { openDialog } from "./dialog.js";
import { button, h, said } from "./dom.js";
import * as notify from "./notify.js";
import { signOut, keepToken, keepUser, token, user } from "./session.js";
import { count } from "./format.js";

/**
 * @typedef {{ user: string, base: string, many: boolean }} Who `many`: the token may choose another user.
 */

/**
 * Who it is about, as soon as that is known; asks in `place` for what is missing.
 * @param {HTMLElement} place
 * @returns {Promise<Who>}
 */
export async function comeIn(place) {
  for (;;) {
    if (!token()) await new Promise((done) => place.replaceChildren(signIn("", () => done(undefined))));
    try {
      const holder = await ask("GET", "token");
      const chosen = holder.user ?? (user() || (await choose(place)));
      // Made where there is none yet, as everywhere on first use.
      await ask("PUT", `users/${encodeURIComponent(chosen)}`);
      keepUser(chosen);
      return { user: chosen, base: holder.base, many: holder.user === null };
    } catch (error) {
      const status = error instanceof Problem ? error.status : 0;
      if (status === 401) {
        signOut();
        await new Promise((done) => place.replaceChildren(signIn("That token is not known here.", () => done(undefined))));
      } else {
        notify.error(error);
        // A name that cannot be one is asked for anew; else the server has no time now, and the token is as good as before.
        if (status === 400) keepUser("");
        else await new Promise((done) => place.replaceChildren(h("div", { class: "alone" }, button("Try again", () => done(undefined), { class: "go" }))));
      }
    }
  }
}

/**
 * Signs in by a link, if it can be used. Where another session is signed in, the person decides first; after a no it stays as it was.
 * @param {import("./session.js").Link} link
 * @returns {Promise<boolean>} whether this tab has another session now
 */
export async function followLink(link) {
  try {
    const before = token() ? await sessionOf(token(), user()) : null;
    const secret = link.code ? await redeem(link.code) : link.token;
    if (before) {
      const after = await sessionOf(secret, link.user);
      if (!after) throw new Problem("Unauthorized", "The link's token is not known here.", "Nothing was changed.");
      if (before !== after && !(await agreed(before, after))) return false;
    }
    keepToken(secret);
    keepUser(link.user);
    return true;
  } catch (error) {
    notify.error(error);
    return false;
  }
}

/**
 * @param {string} secret
 * @param {string} chosen whose model it is used for, where it may choose
 * @returns {Promise<string | null>} who is signed in with it, and with whose model; null for a token that is not known
 */
async function sessionOf(secret, chosen) {
  try {
    const holder = await ask("GET", "token", { secret, quiet: true });
    return holder.user ?? (chosen ? `the administrator, with the model of ${chosen}` : "the administrator");
  } catch (error) {
    if (error instanceof Problem && error.status === 401) return null;
    throw error;
  }
}

/**
 * @param {string} before
 * @param {string} after
 * @returns {Promise<boolean>} no answer is a no
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
      h("p", {}, "This tab is signed in as ", h("strong", {}, said(before)), "."),
      h("p", {}, "The link that was opened signs it in as ", h("strong", {}, said(after)), "."),
      h("p", { class: "dim" }, "If you did not ask for that link, stay."), row);
    row.closest("dialog")?.addEventListener("close", () => done(yes));
  });
}

/**
 * Asks for a token over whatever is on the page, which stays as it is: nobody loses what they typed because a token ended.
 * @param {() => void} done
 */
export function comeInAgain(done) {
  const dialog = h("dialog", { "aria-label": "Sign in again" }, signIn("The token is not good any more.", () => {
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
function signIn(problem, done) {
  const field = h("input", { type: "password", id: "token", autocomplete: "current-password", required: true, spellcheck: "false", "aria-describedby": "token-hint" });
  return h("form", { class: "alone", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    keepToken(field.value);
    done();
  } },
  h("h1", {}, "Sign in"),
  h("p", { class: "dim" }, "A model that learns from what you say about its answers."),
  problem ? h("p", { class: "harm", role: "alert" }, problem) : null,
  h("div", { class: "field" }, h("label", { for: "token" }, "Token"), field,
    h("p", { class: "hint", id: "token-hint" }, "The server prints a link that signs you in once. ", h("code", {}, "personalpeft token make --user NAME"), " makes a token for one person.")),
  h("button", { type: "submit", class: "go" }, "Come in"));
}

/**
 * Whose model, for a token that may choose.
 * @param {HTMLElement} place
 * @returns {Promise<string>}
 */
async function choose(place) {
  const users = await pages("users");
  return new Promise((chosen) => {
    const field = h("input", { type: "text", id: "user", required: true, autocomplete: "off", autocapitalize: "none", spellcheck: "false", pattern: "[a-z0-9][a-z0-9._\\-]{0,63}", "aria-describedby": "user-hint" });
    const filter = h("input", { type: "search", "aria-label": "Find a person", placeholder: "Find a person", hidden: users.length < 12 });
    const rows = users.map((each) => ({ id: each.id, element: h("li", {}, h("button", { type: "button", class: "pick", onclick: () => chosen(each.id) },
      h("strong", {}, said(each.id)), h("span", { class: "dim number" }, `${count(each.turns, "turn")}, ${count(each.signals, "signal")}`))) }));
    filter.addEventListener("input", () => {
      for (const row of rows) row.element.hidden = !row.id.includes(filter.value.toLowerCase());
    });
    const form = h("form", { class: "field", onsubmit: (/** @type {Event} */ event) => {
      event.preventDefault();
      chosen(field.value.trim());
    } },
    h("label", { for: "user" }, users.length ? "Somebody new" : "Who are you?"),
    h("div", { class: "row nowrap" }, field, h("button", { type: "submit", class: "go" }, "Go")),
    h("p", { class: "hint", id: "user-hint" }, "A short name of small letters and digits."));
    place.replaceChildren(h("div", { class: "alone" }, h("h1", { tabindex: "-1" }, "Whose model?"), filter, h("ul", { class: "picks" }, rows.map((row) => row.element)), form));
  });
}

/** @param {() => void} press */
export const otherPerson = (press) => button("Somebody else", press, { class: "quiet" });
