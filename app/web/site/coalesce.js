/**
 * Has something be done one at a time: who asks while it is being done has it done once more afterwards. So what was asked for
 * last is what is shown last, however the answers come.
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
