/**
 * The chat view. Invariants: a prompt that was not answered can be sent again. A draft is stored at every key. One reply streams
 * at a time.
 */

import { Problem } from "./api.js";
import { openDialog } from "./dialog.js";
import { button, h, inlineText } from "./dom.js";
import { ExchangeView, fit } from "./exchange.js";
import * as notify from "./notify.js";
import { keepDraft } from "./session.js";
import { emptyConversation, newExchange, readConversation } from "./conversations.js";
import { count, excerpt, moment } from "./format.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */
/** @typedef {import("./conversations.js").Exchange} Exchange */

/** @param {import("./user.js").User} user */
export function chatView(user) {
  const field = h("textarea", { id: "ask", rows: 1, placeholder: "Ask something", "aria-label": "Your question", dir: "auto", enterkeyhint: "send" });
  const kept = keepDraft(field, "ask");
  const send = button("Ask", () => (going ? stop() : ask()), { class: "go" });
  const list = h("div", { class: "exchanges" });
  const title = h("h1", { tabindex: "-1" }, "Chat");
  const composer = h("form", { class: "composer", "aria-label": "Ask", onsubmit: (/** @type {Event} */ event) => event.preventDefault() }, field, send);
  const element = h("div", { class: "view chat" },
    h("div", { class: "row apart" }, title, h("div", { class: "row" },
      button("Conversations", showConversations, { class: "quiet" }), button("New conversation", () => open(emptyConversation()), { class: "quiet" }))),
    list, composer);

  let conversation = emptyConversation();
  /** @type {ExchangeView[]} */
  let views = [];
  /** @type {{ abort: AbortController, stream: string } | null} */
  let going = null;
  let loaded = false;
  // Whether something was forgotten while a reply streams.
  let forgot = false;

  /** @param {Conversation} next */
  function open(next) {
    if (going) return notify.toast("A reply is still streaming.");
    conversation = next;
    views = conversation.exchanges.map((exchange) => view(exchange));
    draw();
    // On a phone the keys would come up and take half of the screen.
    if (!touched()) field.focus({ preventScroll: true });
    list.lastElementChild?.scrollIntoView({ block: "start" });
    return undefined;
  }

  /** @param {Exchange} exchange */
  const view = (exchange) => new ExchangeView(user, exchange, { regenerate });

  function draw() {
    for (const each of views) {
      const last = each === views.at(-1) && !going;
      if (each.isLast !== last) {
        each.isLast = last;
        if (!each.body.querySelector("textarea")) each.show();
      }
    }
    if (views.length) list.replaceChildren(...views.map((each) => each.element));
    else list.replaceChildren(welcome());
    send.textContent = going ? "Stop" : "Ask";
  }

  function ask() {
    const text = field.value.trim();
    if (!text || going) return;
    const exchange = newExchange(text);
    const made = view(exchange);
    kept.clear();
    fit(field);
    conversation.exchanges.push(exchange);
    views.push(made);
    stream(made, {}, () => {
      conversation.exchanges.pop();
      views.pop();
      restorePrompt(text);
    });
  }

  /** @param {ExchangeView} old */
  function regenerate(old) {
    if (going || old !== views.at(-1)) return;
    const exchange = newExchange(old.exchange.prompt);
    const made = view(exchange);
    conversation.exchanges.splice(-1, 1, exchange);
    views.splice(-1, 1, made);
    stream(made, { replaces: old.turn }, () => {
      conversation.exchanges.splice(-1, 1, old.exchange);
      views.splice(-1, 1, old);
    });
  }

  /** @param {string} text */
  function restorePrompt(text) {
    field.value ||= text;
    kept.store();
    fit(field);
  }

  /**
   * @param {ExchangeView} made
   * @param {{ replaces?: string }} more
   * @param {() => void} undo runs if no reply began
   */
  async function stream(made, more, undo) {
    const { exchange } = made;
    going = { abort: new AbortController(), stream: "" };
    made.writing = true;
    made.show();
    draw();
    made.element.scrollIntoView({ block: "nearest" });
    const reader = notify.reader();
    let text = "";
    let drawn = 0;
    let gone = false;
    try {
      const chat = { prompt: exchange.prompt, conversation_id: conversation.id, ...more };
      for await (const [name, event] of user.stream(chat, going.abort.signal)) {
        if (name === "begun") going.stream = event.stream;
        else if (name === "piece") {
          text += event.text;
          reader.add(text);
          if (!drawn) {
            drawn = requestAnimationFrame(() => {
              drawn = 0;
              if (!made.writing) return;
              if (!exchange.reply) made.grow(text), made.marks();
              else made.grow(text);
              keepInView(made.element);
            });
          }
        } else if (name === "ended") {
          const { reply } = event;
          Object.assign(exchange, { reply: reply.text, turn: reply.turn_id, stopped: reply.finish_reason === "cancelled" });
          conversation.id = reply.conversation_id;
          reader.end(reply.text);
          if (reply.dropped_messages) notify.toast(`The conversation is too long for the model. It read it without the ${count(reply.dropped_messages, "oldest message", "oldest messages")}.`);
        }
      }
    } catch (error) {
      // Another program has forgotten something during the reply, or the conversation before it.
      forgot ||= error instanceof Problem && error.kind === "Forgotten";
      gone = error instanceof Problem && error.status === 404 && conversation.id !== null && !text;
      if (!gone) notify.error(error);
    }
    going = null;
    made.writing = false;
    if (exchange.turn) user.changed("chat");
    else if (text) {
      // The connection broke: the partial reply stays on the screen, and the prompt can be sent again.
      exchange.stopped = true;
      restorePrompt(exchange.prompt);
    } else undo();
    if (gone || forgot) {
      reset();
      if (gone && !more.replaces) ask();
      return;
    }
    made.show();
    draw();
  }

  /** Erased texts must not stay on the screen. */
  function reset() {
    loaded = forgot = false;
    conversation = emptyConversation();
    views = [];
    draw();
  }

  async function stop() {
    if (!going) return;
    notify.announce("Stopping.");
    // Through the server, which records the partial reply as a turn that takes feedback.
    if (going.stream) await user.stop(going.stream).catch(notify.error);
    else going.abort.abort();
  }

  async function showConversations() {
    const picks = h("ul", { class: "picks" });
    /** @type {string | null} */
    let next = null;
    const more = button("Show older", () => notify.attempt(load));
    const load = async () => {
      more.disabled = true;
      try {
        const page = await user.conversations(next);
        next = page.next;
        more.hidden = next === null;
        const rows = page.items.map(pick);
        const isFirst = !picks.children.length;
        picks.append(...rows);
        if (!isFirst) rows[0]?.querySelector("button")?.focus();
      } finally {
        more.disabled = false;
      }
    };
    /** @param {import("./user.js").ConversationSummary} each */
    const pick = (each) => h("li", {}, h("button", { type: "button", class: "pick", onclick: () => notify.attempt(async () => {
      const found = await readConversation(user, each.id);
      close();
      open(found);
    }) }, h("span", { class: "words" }, inlineText(excerpt(each.title))), h("span", { class: "dim number" }, moment(each.updated_at))));
    let close = () => {};
    await notify.attempt(async () => {
      await load();
      close = openDialog("Conversations", picks.children.length ? picks : h("p", { class: "dim" }, "There are none yet."), more);
    });
  }

  function welcome() {
    return h("div", { class: "welcome" },
      h("p", { class: "words" }, "Ask something, then rate or correct the reply."),
      h("p", { class: "dim" }, "The next learn trains on your corrections. Every learn can be undone."));
  }

  field.addEventListener("input", () => fit(field));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && (!touched() || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    } else if (event.key === "ArrowUp" && !field.value) {
      event.preventDefault();
      views.at(-1)?.element.focus();
    }
  });
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    if (going) stop();
    else field.focus();
  });

  return {
    element,
    title,
    async shown() {
      fit(field);
      if (loaded) return;
      loaded = true;
      draw();
      list.setAttribute("aria-busy", "true");
      const isRead = await notify.attempt(async () => {
        const { items } = await user.conversations(null, 1);
        const newest = items.length ? await readConversation(user, items[0].id) : null;
        // The user may have asked something meanwhile.
        if (newest && !views.length) open(newest);
      });
      if (!isRead) loaded = false;
      list.setAttribute("aria-busy", "false");
    },
    /** @param {string} about */
    changed(about) {
      if (about !== "forget") return;
      if (!going) return reset();
      // The reply goes on, with its question alone.
      forgot = true;
      conversation.exchanges.splice(0, conversation.exchanges.length - 1);
      views.splice(0, views.length - 1);
      draw();
    },
  };
}

/** Whether this is a touch screen. There Enter makes a new line. */
const touched = () => matchMedia("(pointer: coarse)").matches;

/**
 * Keeps the end of a growing reply in view, unless the user has scrolled up.
 * @param {HTMLElement} element
 */
function keepInView(element) {
  const below = element.getBoundingClientRect().bottom - innerHeight;
  if (below > -180 && below < 240) scrollBy(0, below + 180);
}
