/**
 * The token of this tab. It comes behind the `#` of a link, which no browser sends to anybody, or from the form; it stays in
 * this tab's storage until the tab is closed, and is in no cookie, so that no other page can have it sent.
 */

const TOKEN = "personalpeft.token";
const USER = "personalpeft.user";

/**
 * Takes token and user out of the address, before anything else can see them there.
 * @returns {boolean} whether there was a token
 */
export function takeFromAddress() {
  const told = new URLSearchParams(location.hash.slice(1));
  const token = told.get("token");
  if (!token) return false;
  // In place of the entry with the token, so that neither Back nor a copied address holds it.
  history.replaceState(null, "", location.pathname + location.search);
  keepToken(token);
  keepUser(told.get("user") ?? "");
  return true;
}

/** @returns {string} empty where nobody has signed in. */
export function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

/** @param {string} secret */
export function keepToken(secret) {
  sessionStorage.setItem(TOKEN, secret.trim());
}

/** @returns {string} whose model is looked at; empty where that is not chosen. */
export function user() {
  return sessionStorage.getItem(USER) ?? "";
}

/** @param {string} id */
export function keepUser(id) {
  if (id) sessionStorage.setItem(USER, id);
  else sessionStorage.removeItem(USER);
}

/** Forgets all that this tab keeps, what was typed too. */
export function end() {
  sessionStorage.clear();
}

/**
 * What somebody was typing, kept until it is sent.
 * @param {string} place
 */
export function draft(place) {
  const key = `personalpeft.draft.${user()}.${place}`;
  return {
    /** @returns {string} */
    read: () => sessionStorage.getItem(key) ?? "",
    /** @param {string} text */
    write: (text) => {
      if (text) sessionStorage.setItem(key, text);
      else sessionStorage.removeItem(key);
    },
  };
}
