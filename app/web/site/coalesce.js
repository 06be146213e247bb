import { attempt } from "./notify.js";

/**
 * Return a function that runs `work`, one run at a time, and shows its errors. A call during a run leads to one more run
 * afterwards, so the newest state is shown last.
 * @param {() => Promise<void>} work
 * @returns {() => Promise<void>}
 */
export function coalesce(work) {
  /** @type {Promise<void> | null} */
  let going = null;
  let again = false;
  const all = async () => {
    do {
      again = false;
      await attempt(work);
    } while (again);
    going = null;
  };
  return () => {
    again = true;
    going ??= all();
    return going;
  };
}
