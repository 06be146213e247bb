/** A dialog over the page. It holds the focus until it is closed, and then returns it. Escape closes it. */

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
  // A click outside closes it.
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return close;
}
