/** What lies over the page until it is closed: it holds the focus, Escape closes it, and the focus goes back to where it was. */

import { button, h } from "./dom.js";

/**
 * @param {string} title
 * @param {...(Node | Node[])} content
 * @returns {() => void} closes it
 */
export function openDialog(title, ...content) {
  const heading = h("h2", { id: `dialog-${Math.random().toString(36).slice(2)}`, tabindex: "-1" }, title);
  const close = () => dialog.close();
  const inside = content.flat();
  const hasWayOut = inside.some((each) => each instanceof HTMLElement && each.dataset.way);
  const dialog = h("dialog", { "aria-labelledby": heading.id }, heading, inside,
    hasWayOut ? null : h("div", { class: "row" }, button("Close", close)));
  // A click beside it.
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return close;
}
