/**
 * The room to talk in. Invariants: a question that cannot be answered stays where it can be asked again; what is being typed is
 * kept at every key; one reply is written at a time.
 */

import { openDialog } from "./dialog.js";
import { button, h, said } from "./dom.js";
import { ExchangeView, fit } from "./exchange.js";
import * as notify from "./notify.js";
import { draft } from "./session.js";
import { messagesOf, emptyConversation, threads } from "./conversations.js";
import { excerpt, moment } from "./format.js";

/** @typedef {import("./conversations.js").Thread} Thread */

// So many turns at a time are gone through for conversations, the newest first.
const TURNS = 500;

/** @param {import("./user.js").Person} person */
export function chatView(person) {
  const kept = draft("ask");
  const field = h("textarea", { id: "ask", rows: 1, placeholder: "Ask something", "aria-label": "Your question", dir: "auto", enterkeyhint: "send", value: kept.read() });
  const send = button("Ask", () => (going ? stop() : ask()), { class: "go" });
  const list = h("div", { class: "exchanges" });
  const title = h("h1", { tabindex: "-1" }, "Talk");
  const composer = h("form", { class: "composer", "aria-label": "Ask", onsubmit: (/** @type {Event} */ event) => event.preventDefault() }, field, send);
  const element = h("div", { class: "room talk" },
    h("div", { class: "row apart" }, title, h("div", { class: "row" },
      button("Earlier", earlier, { class: "quiet" }), button("New conversation", () => open(emptyConversation()), { class: "quiet" }))),
    list, composer);

  /** @type {Thread} */
  let thread = emptyConversation();
  /** @type {ExchangeView[]} */
  let views = [];
  /** @type {{ abort: AbortController, stream: string } | null} */
  let going = null;
  let loaded = false;

  /** @param {Thread} next */
  function open(next) {
    if (going) return notify.toast("A reply is still being written.");
    thread = next;
    views = thread.exchanges.map((exchange) => view(exchange));
    draw();
    // On a phone the keys would come up and take half of the screen.
    if (!touched()) field.focus({ preventScroll: true });
    list.lastElementChild?.scrollIntoView({ block: "start" });
    return undefined;
  }

  /** @param {import("./conversations.js").Exchange} exchange */
  const view = (exchange) => new ExchangeView(person, exchange, { again });

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
    const exchange = { asked: text, reply: "", turn: null, stopped: false, rating: 0, edited: null, comments: [] };
    const made = view(exchange);
    field.value = "";
    kept.write("");
    fit(field);
    thread.exchanges.push(exchange);
    views.push(made);
    write(made, messagesOf(thread, text, thread.exchanges.length - 1), () => {
      // It could not be asked: the words go back to where they were typed, unless others stand there by now.
      thread.exchanges.pop();
      views.pop();
      if (!field.value) field.value = text;
      kept.write(field.value);
      fit(field);
    });
  }

  /** @param {ExchangeView} old */
  function again(old) {
    if (going || old !== views.at(-1)) return;
    person.observe(old.turn, "regenerated");
    const exchange = { ...old.exchange, reply: "", turn: null, stopped: false, rating: 0, edited: null, comments: [] };
    const made = view(exchange);
    thread.exchanges.splice(-1, 1, exchange);
    views.splice(-1, 1, made);
    write(made, messagesOf(thread, exchange.asked, thread.exchanges.length - 1), () => {
      thread.exchanges.splice(-1, 1, old.exchange);
      views.splice(-1, 1, old);
    });
  }

  /**
   * @param {ExchangeView} made
   * @param {import("./user.js").Message[]} messages
   * @param {() => void} undo what to do where no reply began
   */
  async function write(made, messages, undo) {
    going = { abort: new AbortController(), stream: "" };
    made.writing = true;
    made.show();
    draw();
    made.element.scrollIntoView({ block: "nearest" });
    const listening = notify.reader();
    let text = "";
    let drawn = 0;
    try {
      for await (const [name, event] of answered(messages, going)) {
        if (name === "begun") going.stream = event.stream;
        else if (name === "piece") {
          text += event.text;
          listening.heard(text);
          if (!drawn) {
            drawn = requestAnimationFrame(() => {
              drawn = 0;
              if (!made.writing) return;
              if (!made.exchange.reply) made.grow(text), made.marks();
              else made.grow(text);
              keepInSight(made.element);
            });
          }
        } else if (name === "ended") {
          Object.assign(made.exchange, { reply: event.reply.text, turn: event.reply.turn_id, stopped: event.reply.finish_reason === "cancelled" });
          listening.over(event.reply.text);
        }
      }
    } catch (error) {
      notify.error(error);
    }
    going = null;
    made.writing = false;
    if (made.exchange.turn) {
      thread.id ||= made.exchange.turn;
      person.changed("talked");
    } else if (text) {
      // The line broke in the middle: what came stays in sight, and what was asked can be asked again.
      made.exchange.stopped = true;
      field.value ||= made.exchange.asked;
      kept.write(field.value);
      fit(field);
    } else undo();
    made.show();
    draw();
  }

  /**
   * The events of a reply. A conversation that is too long loses its beginning, and the reader hears of it.
   * @param {import("./user.js").Message[]} messages
   * @param {{ abort: AbortController }} asked
   * @returns {AsyncGenerator<[string, any], void, void>}
   */
  async function* answered(messages, asked) {
    let told = messages;
    for (;;) {
      try {
        yield* person.stream(told, asked.abort.signal);
        if (told !== messages) notify.toast("The conversation is long: its beginning was left out.");
        return;
      } catch (error) {
        const first = told.findIndex((message) => message.role === "user");
        if (/** @type {any} */ (error).kind !== "PromptTooLong" || told.length - first < 3) throw error;
        told = told.toSpliced(first, 2);
      }
    }
  }

  async function stop() {
    if (!going) return;
    notify.announce("Stopping.");
    // Through the server, so that what came is kept as a turn that something can be said about.
    if (going.stream) await person.stop(going.stream).catch(notify.error);
    else going.abort.abort();
  }

  async function earlier() {
    /** @type {import("./user.js").Turn[]} */
    const turns = [];
    const picks = h("ul", { class: "picks" });
    const more = button("Show older", () => older().catch(notify.error));
    const older = async () => {
      more.disabled = true;
      try {
        const [found, signals] = await Promise.all([person.turns(TURNS, turns.at(-1)?.id), person.signals()]);
        turns.push(...found);
        more.hidden = found.length < TURNS;
        const seen = picks.children.length;
        // All anew: what was the beginning of a conversation may go on further back.
        picks.replaceChildren(...threads(turns, signals).map(pick));
        // Who works with keys goes on with what came.
        if (seen) picks.children[Math.min(seen, picks.children.length - 1)].querySelector("button")?.focus();
      } finally {
        more.disabled = false;
      }
    };
    /** @param {Thread} each */
    const pick = (each) => h("li", {}, h("button", { type: "button", class: "pick", onclick: () => {
      close();
      open(each);
    } }, h("span", { class: "words" }, said(excerpt(each.exchanges[0].asked))), h("span", { class: "dim number" }, moment(each.at))));
    let close = () => {};
    try {
      await older();
      close = openDialog("Earlier conversations", turns.length ? picks : h("p", { class: "dim" }, "There are none yet."), more);
    } catch (error) {
      notify.error(error);
    }
  }

  function welcome() {
    return h("div", { class: "welcome" },
      h("p", { class: "words" }, "Ask something, then say what you think of the answer."),
      h("p", { class: "dim" }, "Correct a reply in its place, and the next learn makes the model answer more like that. Everything can be undone."));
  }

  field.addEventListener("input", () => {
    kept.write(field.value);
    fit(field);
  });
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
      try {
        const [turns, signals] = await Promise.all([person.turns(TURNS), person.signals()]);
        const [newest] = threads(turns, signals);
        // Unless somebody was quicker.
        if (newest && !views.length) open(newest);
      } catch (error) {
        loaded = false;
        notify.error(error);
      }
      list.setAttribute("aria-busy", "false");
    },
    /** @param {string} about */
    changed(about) {
      // What was forgotten must not stay on the screen.
      if (about === "forgotten" && !going) {
        loaded = false;
        thread = emptyConversation();
        views = [];
        draw();
      }
    },
  };
}

/** Whether this is a screen to touch, where Enter makes a new line as everywhere else there. */
const touched = () => matchMedia("(pointer: coarse)").matches;

/**
 * While a reply grows its end stays in sight, unless the reader has gone up to read.
 * @param {HTMLElement} element
 */
function keepInSight(element) {
  const below = element.getBoundingClientRect().bottom - innerHeight;
  if (below > -180 && below < 240) scrollBy(0, below + 180);
}
