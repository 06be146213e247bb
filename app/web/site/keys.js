/**
 * Keyboard shortcuts of the whole page, and their list. A single key acts only outside text fields; users of speech input can switch
 * single keys off.
 */

import { openDialog } from "./dialog.js";
import { h } from "./dom.js";

const OFF = "personalpeft.keys.off";

const LISTS = {
  Everywhere: [["1 … 5", "go to a view"], ["/", "go to the prompt"], ["l", "learn, or cancel a learn"], ["?", "this list"]],
  "In the prompt": [["Enter", "ask"], ["Shift Enter", "a new line"], ["↑", "to the last reply, with nothing typed"], ["Esc", "stop the reply"]],
  "On a reply": [["↑ ↓", "another reply"], ["+", "rate it good"], ["-", "rate it not good"], ["e", "correct it"], ["f", "a rule for all replies"], ["r", "regenerate"], ["c", "copy"], ["w", "why this answer"]],
  "While you correct": [["Ctrl Enter", "save it"], ["Esc", "cancel; the draft stays"]],
};

/** @param {{ view: (number: number) => void, ask: () => void, learn: () => void }} acts */
export function listenForKeys(acts) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || localStorage.getItem(OFF)) return;
    const at = /** @type {HTMLElement} */ (event.target);
    if (at.closest("input, textarea, select, dialog, [contenteditable]")) return;
    if (event.key === "?") showKeys();
    else if (event.key === "/") acts.ask();
    else if (event.key === "l") acts.learn();
    else if (/^[1-5]$/.test(event.key)) acts.view(Number(event.key));
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
  openDialog("Keys", h("div", { class: "key-lists" }, lists), h("p", { class: "check" }, off, h("label", { for: "keys-off" }, "Use single-key shortcuts")));
}
