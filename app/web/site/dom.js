/**
 * Builds elements. Text is inserted as text: no module of this page parses markup from a string.
 */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Create an element. In `props` "class" has the classes and "data" the data set. A key that begins with "on" is a listener. True is
 * an attribute without a value. Null and false are left out.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [props]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, props = {}, ...children) {
  return put(document.createElement(tag), props, children);
}

/**
 * The same of a drawing.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function s(tag, props = {}, ...children) {
  return put(document.createElementNS(SVG, tag), props, children);
}

/**
 * An element of index.html.
 * @param {string} id
 */
export const place = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * Text of a user inside a line of the page, isolated so that its direction does not change the line's.
 * @param {string} text
 */
export function inlineText(text) {
  return h("bdi", {}, text);
}

/**
 * Text of a user as a block with its own line breaks and direction.
 * @param {string} text
 * @param {string} [classes]
 */
export function textBlock(text, classes = "") {
  return h("div", { class: `written ${classes}`.trim(), dir: "auto" }, text);
}

/**
 * A button with a text.
 * @param {string} text
 * @param {(event: MouseEvent) => void} press
 * @param {Record<string, any>} [props]
 */
export function button(text, press, props = {}) {
  return h("button", { type: "button", class: "do", onclick: press, ...props }, text);
}

/**
 * Downloads a file.
 * @param {Blob} content
 * @param {string} name
 */
export function downloadFile(content, name) {
  const url = URL.createObjectURL(content);
  h("a", { href: url, download: name }).click();
  // The browser may still be reading it after this returns.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** @type {Record<string, string>} */
const SHAPES = {
  good: "M7 10.5V20M7 10.5L11 3c1.4 0 2.3 1 2 2.6l-.7 3.9h5.2a2 2 0 0 1 2 2.4L18.3 18a2.5 2.5 0 0 1-2.4 2H7M7 10.5H3.5V20H7",
  bad: "M7 13.5V4M7 13.5L11 21c1.4 0 2.3-1 2-2.6l-.7-3.9h5.2a2 2 0 0 0 2-2.4L18.3 6a2.5 2.5 0 0 0-2.4-2H7M7 13.5H3.5V4H7",
  edit: "M4 20l1-4.5L16.5 4 20 7.5 8.5 19 4 20M13.5 7L17 10.5",
  rule: "M5 5h14v10.5h-8L7 19v-3.5H5z",
  copy: "M9 9h10.5v10.5H9zM5.5 15h-1V4.5H15v1",
  again: "M18.5 7.5A8 8 0 1 0 20 12M19.5 3.5V8H15",
  why: "M9 9.5a3 3 0 1 1 4.5 2.5c-1 .6-1.5 1.2-1.5 2.2M12 17.3v.2M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17",
};

/**
 * A button with an icon; the text is its tooltip and its label for screen readers.
 * @param {string} shape
 * @param {string} text
 * @param {(event: MouseEvent) => void} press
 * @param {Record<string, any>} [props]
 */
export function icon(shape, text, press, props = {}) {
  const drawing = s("svg", { viewBox: "0 0 24 24", width: 18, height: 18, "aria-hidden": "true" },
    s("path", { d: SHAPES[shape], fill: "none", stroke: "currentColor", "stroke-width": 1.6, "stroke-linecap": "round", "stroke-linejoin": "round" }));
  return h("button", { type: "button", class: "icon", title: text, "aria-label": text, onclick: press, ...props }, drawing);
}

/**
 * @template {Element} E
 * @param {E} element
 * @param {Record<string, any>} props
 * @param {(Child | Child[])[]} children
 * @returns {E}
 */
function put(element, props, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  // Set attributes after the children: with dir="auto" the browser would read the whole text again for each child.
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(/** @type {HTMLElement} */ (/** @type {unknown} */ (element)).dataset, value);
    else if (name === "value") /** @type {HTMLInputElement} */ (/** @type {unknown} */ (element)).value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  return element;
}
