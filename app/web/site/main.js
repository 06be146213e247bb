/** Entry point: signs in, creates the views and switches between them. */

import { listener } from "./api.js";
import { chatView } from "./chat.js";
import { compareView } from "./compare.js";
import { button, h, place } from "./dom.js";
import { listenForKeys, showKeys } from "./keys.js";
import { learningStrip } from "./learning.js";
import { memoryView } from "./memory.js";
import { toast } from "./notify.js";
import { signIn, signInAgain, followLink } from "./users.js";
import { User } from "./user.js";
import { dropUser, signOut, storeUser, takeLink, takeStoredNote } from "./session.js";
import { stackView } from "./stack.js";
import { timelineView } from "./timeline.js";

/** @typedef {{ element: HTMLElement, title: HTMLElement, shown: () => unknown, changed: (about: string) => unknown }} View */

const link = takeLink();
// A tab that shows this page loads nothing when its user follows a link.
addEventListener("hashchange", async (event) => {
  const link = takeLink(new URL(event.oldURL).hash);
  if (link && (await followLink(link))) location.reload();
});
if (link) await followLink(link);
const note = takeStoredNote();
if (note) toast(note);
const main = place("main");
const who = await signIn(main);
const user = new User(who.user);
const learning = learningStrip(user, place("learning"));
const compare = compareView(user);
// Other tabs must drop erased texts too.
const tabs = new BroadcastChannel("personalpeft");
let isFromOtherTab = false;
tabs.onmessage = (event) => {
  if (event.data !== user.id) return;
  isFromOtherTab = true;
  user.changed("forget");
  isFromOtherTab = false;
};
/** @type {Record<string, View>} */
const views = {
  chat: chatView(user),
  timeline: timelineView(user, { compare: (layer, revision) => {
    go("compare");
    compare.choose(layer, revision);
  } }),
  memory: memoryView(user, learning, (note) => {
    tabs.postMessage(user.id);
    leave(() => dropUser(who.many, note));
  }),
  stack: stackView(user, who.base, learning),
  compare,
};
const names = Object.keys(views);
/** @type {string} */
let here = "";
// The scroll position of the chat view when it was left.
let chatScroll = 0;

place("who").textContent = who.user;
const links = names.map((name) => h("a", { href: `#/${name}` }, views[name].title.textContent));
place("nav").replaceChildren(h("ul", {}, links.map((link) => h("li", {}, link))));
place("foot").replaceChildren(
  button("Keys", showKeys, { class: "quiet", "aria-haspopup": "dialog" }),
  ...(who.many ? [button("Switch user", () => leave(() => storeUser("")), { class: "quiet" })] : []),
  button("Sign out", () => leave(signOut), { class: "quiet" }));
for (const id of ["nav", "foot"]) place(id).hidden = false;

/** @param {string} name */
function go(name) {
  if (location.hash === `#/${name}`) show();
  else location.hash = `#/${name}`;
}

function show() {
  const named = location.hash.slice(2);
  // Other hashes, such as the skip link's, are anchors in this view.
  if (location.hash && !(named in views) && here) return;
  const name = named in views ? named : names[0];
  const first = !here;
  if (here === names[0]) chatScroll = scrollY;
  here = name;
  const view = views[name];
  main.replaceChildren(view.element);
  for (const [n, link] of links.entries()) {
    if (names[n] === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title.textContent} · ${who.user} · My model`;
  view.shown();
  // Focus moves to the heading, so that screen readers announce the view. On load it stays at the top.
  if (!first) {
    view.title.focus({ preventScroll: true });
    // The chat keeps its scroll position.
    scrollTo(0, name === names[0] ? chatScroll : 0);
  }
}

/** @param {() => void} forget */
function leave(forget) {
  forget();
  // A reload drops all data of this user.
  location.replace(location.pathname);
}

let asked = false;
listener.refused = () => {
  if (asked) return;
  asked = true;
  signInAgain(() => {
    asked = false;
  });
};
// Hidden views reload when shown. The chat reloads at once, because it must drop erased texts.
user.addEventListener("changed", (event) => {
  const about = /** @type {CustomEvent<string>} */ (event).detail;
  if (about === "forget" && !isFromOtherTab) tabs.postMessage(user.id);
  views[here].changed(about);
  if (here !== "chat") views.chat.changed(about);
});
listenForKeys({
  view: (number) => go(names[number - 1]),
  ask: () => {
    go("chat");
    place("ask").focus();
  },
  learn: () => place("learn").click(),
});
addEventListener("hashchange", show);
show();
document.body.dataset.ready = "yes";
