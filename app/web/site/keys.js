/**
 * Keys for the whole page, and the list of all of them. A single letter or mark does something only where nobody can be typing;
 * who speaks to the machine, or hits keys by chance, can switch those off.
 */

import { openDialog } from "./dialog.js";
import { h } from "./dom.js";

const OFF = "personalpeft.keys.off";

const LISTS = {
  Everywhere: [["1 … 5", "go to a room"], ["/", "go to where you ask"], ["l", "learn, or cancel a learn"], ["?", "this list"]],
  "Where you ask": [["Enter", "ask"], ["Shift Enter", "a new line"], ["↑", "to the last reply, with nothing typed"], ["Esc", "stop the reply"]],
  "On a reply": [["↑ ↓", "another reply"], ["+", "it was good"], ["-", "it was not good"], ["e", "correct it"], ["f", "a rule to follow from now on"], ["r", "ask again"], ["c", "copy"], ["w", "why this answer"]],
  "While you correct": [["Ctrl Enter", "keep it"], ["Esc", "leave it; what you typed stays"]],
};

/** @param {{ room: (number: number) => void, ask: () => void, learn: () => void }} acts */
export function listenForKeys(acts) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || localStorage.getItem(OFF)) return;
    const at = /** @type {HTMLElement} */ (event.target);
    if (at.closest("input, textarea, select, dialog, [contenteditable]")) return;
    if (event.key === "?") showKeys();
    else if (event.key === "/") acts.ask();
    else if (event.key === "l") acts.learn();
    else if (/^[1-5]$/.test(event.key)) acts.room(Number(event.key));
    else return;
    event.preventDefault();
  });
}

export function showKeys() {
  const off = h("input", { type: "checkbox", id: "keys-off" });
  off.checked = !localStorage.getItem(OFF);
  off.addEventListener("change", () => {
    if (off.checked) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "yes");
  });
  const lists = Object.entries(LISTS).map(([name, keys]) => h("section", {}, h("h3", {}, name),
    h("dl", { class: "keys" }, keys.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text))))));
  openDialog("Keys", h("div", { class: "key-lists" }, lists), h("p", { class: "check" }, off, h("label", { for: "keys-off" }, "Single keys do something")));
}
