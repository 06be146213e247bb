/**
 * The API key, or a session's token in its place, and the drafts of this tab, in its session storage. The API key comes from the
 * form or from the fragment of a link. Browsers send fragments to no server. No cookie holds it, so that no other page can make the browser send it.
 */

const API_KEY = "personalpeft.token";
const USER = "personalpeft.user";
const NOTE = "personalpeft.note";

const USER_ID = /^[a-z0-9][a-z0-9._-]{0,63}$/;

/** @typedef {{ code: string, secret: string, user: string }} Link what a link signs in with: a one-time code, or an API key */

/**
 * The link that the address holds, taken out of it before anything else can see it there.
 * @param {string} [hash] what stands behind the address instead
 * @returns {Link | null}
 */
export function takeLink(hash = "") {
  const params = new URLSearchParams(location.hash.slice(1));
  // The old name, for one release.
  if (params.has("token")) params.set("api_key", params.get("token") ?? "");
  if (!params.has("code") && !params.has("api_key")) return null;
  // Replace the entry with the secret, so that neither Back nor a copied address holds it.
  history.replaceState(null, "", location.pathname + location.search + hash);
  const [code, secret, user] = ["code", "api_key", "user"].map((name) => params.get(name)?.trim() ?? "");
  return code || secret ? { code, secret, user: USER_ID.test(user) ? user : "" } : null;
}

/** @returns {string} empty if signed out. */
export function apiKey() {
  return sessionStorage.getItem(API_KEY) ?? "";
}

/** @param {string} secret */
export function storeApiKey(secret) {
  sessionStorage.setItem(API_KEY, secret.trim());
}

/** @returns {string} the chosen user; empty without one. */
export function user() {
  return sessionStorage.getItem(USER) ?? "";
}

/** @param {string} id */
export function storeUser(id) {
  if (id) sessionStorage.setItem(USER, id);
  else sessionStorage.removeItem(USER);
}

/** Delete all data of this tab, drafts too. */
export function signOut() {
  sessionStorage.clear();
}

/**
 * Delete all data of this tab's user, drafts too, and store a message for the page that loads next.
 * @param {boolean} many whether the API key may choose another user, and stays
 * @param {string} note
 */
export function dropUser(many, note) {
  const secret = apiKey();
  signOut();
  if (many) storeApiKey(secret);
  sessionStorage.setItem(NOTE, note);
}

/** @returns {string} the message of the page before, once; empty without one */
export function takeStoredNote() {
  const note = sessionStorage.getItem(NOTE) ?? "";
  sessionStorage.removeItem(NOTE);
  return note;
}

/**
 * Keeps the text of a field at every key, until it is sent. A text that was kept takes the place of the field's own.
 * @param {HTMLInputElement | HTMLTextAreaElement} field
 * @param {string} place names the draft
 */
export function keepDraft(field, place) {
  const key = `personalpeft.draft.${user()}.${place}`;
  const store = () => {
    if (field.value) sessionStorage.setItem(key, field.value);
    else sessionStorage.removeItem(key);
  };
  field.value = sessionStorage.getItem(key) ?? field.value;
  field.addEventListener("input", store);
  return {
    store,
    /** Empties the field too. */
    clear() {
      field.value = "";
      store();
    },
  };
}
