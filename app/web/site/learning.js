/**
 * The state of learning and the Learn button, beside every view. Invariants: a learn runs in the server even if this page closes.
 * The page finds it again on load. A learn of another program is shown, and only that program can cancel it.
 */

import { button, h, inlineText } from "./dom.js";
import { coalesce } from "./coalesce.js";
import { headline } from "./report.js";
import * as notify from "./notify.js";
import { layerName, percent } from "./format.js";

/** @typedef {import("./user.js").Job} Job */
/** @typedef {import("./user.js").TrainingStatus} TrainingStatus */

// Milliseconds between two requests: during a learn of another program, otherwise, and after a failed request.
const POLL_BUSY_MS = 1000;
const POLL_IDLE_MS = 3000;
const POLL_FAILED_MS = 15000;

/**
 * @param {import("./user.js").User} user
 * @param {HTMLElement} place
 */
export function learningStrip(user, place) {
  const text = h("p", { class: "learning-text" });
  const bar = h("progress", { max: 1, value: 0, "aria-label": "How far the learn is", hidden: true });
  const press = button("Learn", () => (job ? cancel(job) : begin()), { id: "learn" });
  place.replaceChildren(text, bar, press);
  place.hidden = false;

  /** @type {Job | null} */
  let job = null;
  // The number of jobs that this page has followed. A response from before the last of them is outdated.
  let followed = 0;
  /** @type {TrainingStatus | null} a learn of another program */
  let elsewhere = null;

  function draw() {
    bar.hidden = !job && !elsewhere;
    press.textContent = job ? "Cancel" : "Learn";
    press.hidden = !job && Boolean(elsewhere);
    press.disabled = press.hidden || job?.state === "stopping";
    if (elsewhere && !job) {
      text.replaceChildren(inlineText(trainingText(elsewhere)), h("span", { class: "dim block" }, "in another program"));
      bar.value = elsewhere.steps ? elsewhere.step / elsewhere.steps : 0;
    }
    if (!job) return;
    // A stage that has only started has no progress yet.
    const done = job.progress ? ` ${percent(job.progress)}` : "";
    text.replaceChildren(job.state === "stopping" ? "Stopping after this step …" : inlineText(`${job.stage || "Starting"}${done}`));
    bar.value = job.progress;
  }

  const refresh = coalesce(async () => {
    if (job || elsewhere) return;
    try {
      const pending = await user.pending();
      if (!job && !elsewhere) text.textContent = pending.text;
    } catch (error) {
      text.textContent = "The state of learning is unknown.";
      throw error;
    }
  });

  const begin = () => notify.attempt(async () => follow(await user.learn()));

  /** @param {Job} running */
  const cancel = (running) => notify.attempt(() => user.cancel(running.id));

  /** @param {Job} begun @returns {Promise<Job>} the finished job */
  async function follow(begun) {
    // The poll found the job before the response that started it arrived.
    if (job?.id === begun.id) return begun;
    job = begun;
    elsewhere = null;
    followed += 1;
    draw();
    let now = begun;
    try {
      for await (now of user.follow(begun.id)) {
        job = now;
        draw();
      }
    } finally {
      job = null;
      draw();
    }
    ended(now);
    return now;
  }

  /** @param {Job} over */
  function ended(over) {
    if (!over.ended_at) notify.toast("The connection to the server was lost. The next learn continues from the last step.");
    else if (over.error && over.state !== "cancelled") notify.toast(`${over.error.message} ${over.error.hint}`.trim());
    else if (over.state === "cancelled") notify.toast("Stopped. The next learn continues from the last step.");
    else if (over.rebase_report) notify.toast(over.rebase_report.switched ? `Your layers are on ${over.rebase_report.name} now.` : "Both bases have answered. Nothing is changed yet.");
    else if (over.report) notify.toast([over.report, ...over.report.above].map(headline).join(". ") + ".");
    user.changed(over.kind === "forget" ? "forget" : "learn");
  }

  async function poll() {
    const at = followed;
    const now = await user.trainingStatus();
    // A job that another page of this server started can be followed and cancelled here.
    const own = now && !elsewhere ? await user.running() : null;
    if (job || followed !== at) return;
    if (own) return void (await follow(own));
    const before = elsewhere;
    elsewhere = now;
    draw();
    if (before && before.since !== now?.since) await endedElsewhere(before);
  }

  /** @param {TrainingStatus} before */
  async function endedElsewhere(before) {
    try {
      const { reports } = await user.activity(before.since);
      if (reports.length) notify.toast(`${reports.map(headline).join(". ")}.`);
    } finally {
      user.changed("learn");
    }
  }

  async function pollForever() {
    for (;;) {
      let rest = POLL_IDLE_MS;
      try {
        if (!job) await poll();
        if (elsewhere) rest = POLL_BUSY_MS;
      } catch {
        // The user's next request reports the error; a background poll does not.
        rest = POLL_FAILED_MS;
      }
      await new Promise((done) => setTimeout(done, rest));
      if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    }
  }

  user.addEventListener("changed", refresh);
  refresh();
  notify.attempt(async () => {
    const found = await user.running();
    if (found && !job) await follow(found);
  });
  pollForever();
  return { follow };
}

/** @param {TrainingStatus} learning */
function trainingText({ layer, stage, step, steps }) {
  const part = stage === "Practicing" ? "round" : "step";
  const what = stage === "Judging" || !steps ? stage.toLowerCase() || "beginning" : `${part} ${step} of ${steps}`;
  return layer ? `${layerName(layer)}: ${what}` : "Learning";
}
