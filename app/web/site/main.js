/** Begins the page: comes in, makes the rooms, and goes from one to another. */

import { listener } from "./api.js";
import { chatView } from "./chat.js";
import { compareView } from "./compare.js";
import { button, h } from "./dom.js";
import { listenForKeys, showKeys } from "./keys.js";
import { learningStrip } from "./learning.js";
import { memoryView } from "./memory.js";
import { comeIn, comeInAgain, followLink, otherPerson } from "./users.js";
import { Person } from "./user.js";
import { signOut, keepUser, takeLink } from "./session.js";
import { stackView } from "./stack.js";
import { timelineView } from "./timeline.js";

/** @typedef {{ element: HTMLElement, title: HTMLElement, shown: () => unknown, changed: (about: string) => unknown }} Room */

/** @param {string} id */
const place = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

const link = takeLink();
// A link that is followed in a tab that has this page already loads nothing by itself.
addEventListener("hashchange", async (event) => {
  const link = takeLink(new URL(event.oldURL).hash);
  if (link && (await followLink(link))) location.reload();
});
if (link) await followLink(link);
const main = place("main");
const who = await comeIn(main);
const person = new Person(who.user);
const learning = learningStrip(person, place("learning"));
const compare = compareView(person);
/** @type {Record<string, Room>} */
const rooms = {
  talk: chatView(person),
  timeline: timelineView(person, { compare: (layer, revision) => {
    go("compare");
    compare.choose(layer, revision);
  } }),
  memory: memoryView(person, learning),
  stack: stackView(person, who.base),
  compare,
};
const names = Object.keys(rooms);
/** @type {string} */
let here = "";
// How far down the room to talk in was when it was left.
let left = 0;

place("who").textContent = who.user;
const links = names.map((name) => h("a", { href: `#/${name}` }, rooms[name].title.textContent));
place("nav").replaceChildren(h("ul", {}, links.map((link) => h("li", {}, link))));
place("foot").replaceChildren(
  button("Keys", showKeys, { class: "quiet", "aria-haspopup": "dialog" }),
  ...(who.many ? [otherPerson(() => leave(() => keepUser("")))] : []),
  button("Sign out", () => leave(signOut), { class: "quiet" }));
for (const id of ["nav", "foot"]) place(id).hidden = false;

/** @param {string} name */
function go(name) {
  if (location.hash === `#/${name}`) show();
  else location.hash = `#/${name}`;
}

function show() {
  const named = location.hash.slice(2);
  // Another hash is a place in this room, as the one that the skip link leads to.
  if (location.hash && !(named in rooms) && here) return;
  const name = named in rooms ? named : names[0];
  const first = !here;
  if (here === names[0]) left = scrollY;
  here = name;
  const room = rooms[name];
  main.replaceChildren(room.element);
  for (const [n, link] of links.entries()) {
    if (names[n] === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${room.title.textContent} · ${who.user} · My model`;
  room.shown();
  // Who listens hears where they are; who has just come begins at the top.
  if (!first) {
    room.title.focus({ preventScroll: true });
    // A conversation is gone on with where it was left.
    scrollTo(0, name === names[0] ? left : 0);
  }
}

/** @param {() => void} forget */
function leave(forget) {
  forget();
  // All that was read of this person goes with the page.
  location.replace(location.pathname);
}

let asked = false;
listener.refused = () => {
  if (asked) return;
  asked = true;
  comeInAgain(() => {
    asked = false;
  });
};
// A room that is not in sight asks again when it is shown; the one to talk in must let go of what was forgotten at once.
person.addEventListener("changed", (event) => {
  const about = /** @type {CustomEvent<string>} */ (event).detail;
  rooms[here].changed(about);
  if (here !== "talk") rooms.talk.changed(about);
});
listenForKeys({
  room: (number) => go(names[number - 1]),
  ask: () => {
    go("talk");
    place("ask").focus();
  },
  learn: () => place("learn").click(),
});
addEventListener("hashchange", show);
show();
document.body.dataset.ready = "yes";
