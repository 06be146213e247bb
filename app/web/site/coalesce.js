/**
 * Return a function that runs `work`, one run at a time. A call during a run leads to one more run afterwards, so the newest
 * state is shown last.
 * @param {() => Promise<void>} work must not throw
 * @returns {() => Promise<void>}
 */
export function coalesce(work) {
  /** @type {Promise<void> | null} */
  let going = null;
  let again = false;
  const all = async () => {
    do {
      again = false;
      await work();
    } while (again);
    going = null;
  };
  return () => {
    again = true;
    going ??= all();
    return going;
  };
}
