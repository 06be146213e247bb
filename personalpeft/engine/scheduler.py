"""The loop: one thread that runs the batch. Requests join and leave between two steps, whatever their stacks.

A turn of it: drop what was left, cancelled, late or cannot be loaded; give slots to the stacks that are waited for; admit
whoever's turn it is and whose stack is there; make one step and hand out its pieces; with nothing to do, check a reply.

Who may touch what:

- The loop's thread alone: ``_running``, the self-check, and of the backend ``admit``, ``step``, ``leave``, ``detach``.
  It alone takes requests out of the queue and slots away from keys, so what it saw under the lock still holds when it
  acts on it without.
- Under ``_changed``: the queue, the slots, the holders, and what the loop has to hear (``_news``). The lock is held for
  bookkeeping only, never while anything is read, computed, asked of a caller or waited for.
- Callers put requests in and pin stacks that are ready. The loader says what has arrived or failed.

Why nobody waits for ever: the loader waits for nothing but its next loads, and at the end gives up those that can be given up. A slot
that is claimed comes free, since keys that are not claimed begin no new row and every row ends. Whoever holds a stack waits for
nothing meanwhile (``hold``). Whatever ends the loop's thread ends all that wait for it first.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend, Continuation, Piece
from personalpeft.backends.error_mapping import failure
from personalpeft.clock import Clock
from personalpeft.engine.adapter_cache import Slots
from personalpeft.engine.fair_queue import FairQueue, Full
from personalpeft.engine.loader import Loader
from personalpeft.engine.metrics import Metrics, Snapshot
from personalpeft.engine.request import Call, Ticket
from personalpeft.engine.self_check import SelfCheck, Written
from personalpeft.errors import (
    DeadlineExceeded,
    PersonalPeftError,
    QueueFull,
    ServingFailed,
    where_raised,
)
from personalpeft.settings import Serving
from personalpeft.types import Stack

log = logging.getLogger(__name__)

# Seconds between two looks at callers that wait while nothing runs: whether they went away, asked to stop or are late can
# be asked, but not waited for.
_LOOK = 0.05
# How much the newest reply counts in the average that hints are made of.
_NEWEST = 0.2
_AGAIN = "Close the runtime and open it again."


@dataclass(eq=False, slots=True)
class _Holder:
    """Somebody outside of the batch who waits for a stack."""

    key: str
    stack: Stack
    error: Exception | None = None


class Loop:
    """Runs the batch of one backend. Its threads begin with the first request and end with ``close``."""

    def __init__(
        self, backend: Backend, read: Callable[[str], Adapter], serving: Serving, clock: Clock
    ) -> None:
        self._backend = backend
        self._timer = clock.timer
        self._metrics = Metrics()
        self._check = SelfCheck(backend, serving.self_check, clock.entropy, self._metrics)
        self._loader = Loader(
            backend, read, serving.host_bytes, self._metrics, clock.timer, self._loaded
        )
        self._thread = threading.Thread(target=self._run, name="personalpeft-serving", daemon=True)
        self._changed = threading.Condition(threading.Lock())
        self._queue = FairQueue[Ticket](
            waiting=serving.waiting,
            waiting_per_user=serving.waiting_per_user,
            running_per_user=serving.running_per_user,
        )
        self._slots = Slots(backend.slots)
        self._holders: list[_Holder] = []
        self._failed: dict[str, Exception] = {}
        # Keys that are to leave their slots as soon as nobody uses them, and who waits for that to have begun.
        self._leaving: set[str] = set()
        self._forgetting: list[threading.Event] = []
        self._news = False
        self._started = False
        self._ended: PersonalPeftError | None = None
        self._running: dict[int, Ticket] = {}
        # Of a reply from its row to its end, in seconds, on average.
        self._reply_seconds = 0.0

    # From any thread

    def now(self) -> float:
        """The time on the clock that tickets are stamped with, in seconds."""
        return self._timer()

    def sampled(self) -> bool:
        """Draws whether the next request's reply will be checked."""
        return self._check.sampled()

    def submit(self, call: Call) -> None:
        """Puts all requests of a call into the queue, or none. Raises ``QueueFull`` with a hint when to try again, and
        ``ServingFailed`` when the loop has ended.
        """
        with self._changed:
            self._begin()
            full = self._queue.full(call.tickets)
            if full is not None:
                self._metrics.count("refusals_total")
                raise self._busy(full, len(call.tickets))
            for ticket in call.tickets:
                if ticket.key is not None:
                    self._metrics.count(
                        "stack_hits_total"
                        if self._slots.ready(ticket.key)
                        else "stack_misses_total"
                    )
            self._queue.add(call.tickets)
            self._tell()

    def hold(self, key: str, stack: Stack) -> None:
        """Waits until the stack is in a slot and pins it there. Whoever holds one must not wait for another, nor for a
        reply, before ``let_go``: the slot it waits for could be the one it holds. Raises what its load raises, and
        ``ServingFailed``.
        """
        with self._changed:
            self._begin()
            if not self._slots.ready(key):
                holder = _Holder(key, stack)
                self._holders.append(holder)
                self._tell()
                try:
                    self._changed.wait_for(
                        lambda: self._slots.ready(key) or holder.error or self._ended
                    )
                finally:
                    self._holders = [each for each in self._holders if each is not holder]
                if error := self._ended or holder.error:
                    raise error
            self._slots.pin(key)

    def let_go(self, key: str) -> None:
        """Ends a ``hold``."""
        with self._changed:
            self._slots.let_go(key)
            self._tell()

    def give_way(self, longest: float) -> None:
        """Waits while people wait or have rows, at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._queue.people, longest)

    def forget(self) -> None:
        """See ``Engine.forget``."""
        begun = threading.Event()
        with self._changed:
            if not self._started or self._ended is not None:
                return
            self._forgetting.append(begun)
            self._tell()
            self._changed.wait_for(lambda: begun.is_set() or self._ended)

    def snapshot(self) -> Snapshot:
        """All metrics as they are now."""
        occupancy = self._backend.occupancy()
        with self._changed:
            now = {
                "num_requests_running": len(self._running),
                "num_requests_waiting": len(self._queue),
                "rows": self._backend.rows,
                "slots_used": len(self._slots.taken),
                "slots": self._backend.slots,
                "host_bytes": self._loader.host_bytes,
                "kv_cache_usage_perc": occupancy.tokens_used / max(1, occupancy.tokens),
            }
        return self._metrics.snapshot(now, {"prefix_cache_hits_total": occupancy.reused})

    def close(self) -> None:
        """Ends everything that runs or waits as cancelled, takes all stacks out of their slots, and returns when both
        threads have ended. Closing twice is fine.
        """
        with self._changed:
            self._ended = self._ended or _closed()
            self._tell()
        if self._thread.is_alive():
            self._thread.join()
        # The loop's thread does that, but where it never came to run.
        self._loader.close()

    def _begin(self) -> None:
        if self._ended is not None:
            raise self._ended
        if not self._started:
            self._started = True
            try:
                self._loader.start()
                self._thread.start()
            except BaseException:
                # Ctrl-C, mostly. Whoever asked next would wait for threads of which nobody knows whether they run.
                self._ended = ServingFailed("Serving was stopped while it began.", hint=_AGAIN)
                self._tell()
                raise

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()

    def _busy(self, full: Full, asked: int) -> QueueFull:
        wait = max(1, math.ceil(full.over * self._reply_seconds / self._backend.rows))
        possible = asked <= full.bound
        return QueueFull(
            f"{full.bound} requests {'of one user ' if full.own else ''}may wait, and {full.over} more would.",
            hint=f"Try again in {wait} s." if possible else "Ask for fewer at once.",
            retry_after=float(wait) if possible else None,
        )

    def _loaded(self, key: str, error: Exception | None) -> None:
        """The loader's word on a load."""
        with self._changed:
            if error is None:
                self._slots.arrived(key)
            else:
                self._slots.failed(key)
                self._failed[key] = error
                for holder in self._holders:
                    holder.error = error if holder.key == key else None
                # Before it wakes and hears of it, the loop must not load the same again for it.
                self._holders = [holder for holder in self._holders if holder.error is None]
            self._tell()

    # The loop's thread

    def _run(self) -> None:
        failed = None
        try:
            while self._has_work():
                self._drop()
                self._let_go_of_what_is_kept()
                claims = self._give_slots()
                self._admit(claims)
                if self._running:
                    self._step()
                elif self._check and not self._queue:
                    self._check.run_one(self._slots.ready)
        except Exception as bug:  # noqa: BLE001 - each reply that waits ends with it
            log.error("serving has ended: %s", where_raised(bug))
            failed = failure("Serving has stopped after an error.", bug, hint=_AGAIN)
        finally:
            self._end(failed)

    def _has_work(self) -> bool:
        """Waits for something to do; False when it is time to end."""
        with self._changed:
            if not (
                self._news or self._running or self._ended or (self._check and not self._queue)
            ):
                self._changed.wait(_LOOK if self._queue else None)
            self._news = False
            return self._ended is None

    def _drop(self) -> None:
        """Takes out whoever shall not go on."""
        with self._changed:
            tickets = [*self._queue, *self._running.values()]
            failed, self._failed = self._failed, {}
        now = self._timer()
        stopped: dict[Call, bool | Exception] = {}
        for ticket in tickets:
            call = ticket.call
            if call not in stopped:
                stopped[call] = _asked(call)
            stop = stopped[call]
            if isinstance(stop, Exception):
                self._take_out(ticket, stop)
            elif stop:
                self._take_out(ticket)
            elif ticket.deadline is not None and ticket.deadline <= now:
                self._take_out(ticket, _late(ticket))
            elif ticket.number is None and ticket.key in failed:
                self._take_out(ticket, failed[ticket.key])

    def _let_go_of_what_is_kept(self) -> None:
        with self._changed:
            asked, self._forgetting = self._forgetting, []
            if asked:
                self._leaving |= {*self._slots.taken}
            elif not self._leaving:
                return
            idle = [key for key in self._slots.idle() if key in self._leaving]
            for key in idle:
                self._slots.leave(key)
            self._leaving = (self._leaving - {*idle}) & {*self._slots.taken}
        for key in idle:
            self._backend.detach(key)
        if asked or idle:
            self._check.forget()
            self._backend.forget()
        if asked:
            self._loader.forget()
            with self._changed:
                for each in asked:
                    each.set()
                self._tell()

    def _give_slots(self) -> Sequence[str]:
        """Has the stacks brought that are waited for, and says with which ones a row may begin."""
        stacks: dict[str, Stack] = {}

        def wanted() -> Iterator[str]:
            waiting: Iterator[_Holder | Ticket] = itertools.chain(self._holders, self._queue.line())
            for each in waiting:
                # What failed a moment ago is not tried again for those who are about to hear of it.
                if each.key is not None and each.key not in self._failed:
                    stacks[each.key] = each.stack
                    yield each.key

        with self._changed:
            claims = self._slots.claims(wanted())
            given = self._slots.give(claims)
        for each in given:
            if each.leaving is not None:
                self._metrics.count("stack_evictions_total")
                self._backend.detach(each.leaving)
            self._loader.ask(each.key, stacks[each.key])
        return claims

    def _admit(self, claims: Sequence[str]) -> None:
        """Rows for those whose turn it is, as long as there is room."""

        def ready(ticket: Ticket) -> bool:
            if ticket.call.resting:
                return False
            # Background work leaves one row free, so that a person who comes need not wait for a learn.
            if ticket.background and 0 < len(self._running) >= self._backend.rows - 1:
                return False
            return ticket.key is None or (ticket.key in claims and self._slots.ready(ticket.key))

        while True:
            with self._changed:
                ticket = self._queue.first(ready)
            if ticket is None:
                return
            try:
                number = self._backend.admit(ticket.row)
                if number is None and not self._running:
                    raise MemoryError("an empty batch has no room for this row")
            except Exception as error:  # noqa: BLE001 - whatever it is, the one whose row it is must hear it
                self._take_out(ticket, failure("The model could not take this request.", error))
                continue
            if number is None:
                return
            ticket.number, ticket.admitted = number, self._timer()
            self._running[number] = ticket
            with self._changed:
                self._queue.begin(ticket)
                if ticket.key is not None:
                    self._slots.pin(ticket.key)
            self._metrics.count("prompt_tokens_total", len(ticket.row.tokens))
            self._metrics.observe("request_queue_time_seconds", ticket.admitted - ticket.asked)

    def _step(self) -> None:
        try:
            pieces = self._backend.step()
        except Exception as error:  # noqa: BLE001 - each reply that is being written ends with it
            log.error(
                "a step failed; the replies that were being written end here: %s",
                where_raised(error),
            )
            for ticket in tuple(self._running.values()):
                self._take_out(
                    ticket, failure("The model failed while it wrote this reply.", error)
                )
            return
        now = self._timer()
        for piece in pieces:
            ticket = self._running[piece.row]
            if piece.failed is not None:
                self._take_out(
                    ticket, failure("The model failed while it wrote this reply.", piece.failed)
                )
                continue
            self._note(ticket, piece, now)
            if piece.finish is not None:
                self._free(ticket, piece.row)
            ticket.call.said.put(replace(piece, row=ticket.index))

    def _note(self, ticket: Ticket, piece: Piece, now: float) -> None:
        """What a piece says to the metrics and to the self-check."""
        count = len(piece.tokens)
        if count:
            self._metrics.count("generation_tokens_total", count)
            if ticket.last_token is None:
                self._metrics.observe("time_to_first_token_seconds", now - ticket.asked)
            else:
                self._metrics.observe(
                    "time_per_output_token_seconds", (now - ticket.last_token) / count, count
                )
            ticket.last_token = now
        if ticket.checked:
            ticket.tokens += piece.tokens
            ticket.logprobs += piece.logprobs[:count]
        if piece.finish is not None:
            self._metrics.count("request_success_total")
            self._metrics.observe("e2e_request_latency_seconds", now - ticket.asked)
            took = now - ticket.admitted
            self._reply_seconds += (took - self._reply_seconds) * (
                _NEWEST if self._reply_seconds else 1.0
            )
            if ticket.tokens:
                said = Continuation(ticket.row.tokens, tuple(ticket.tokens))
                self._check.add(Written(said, ticket.key, tuple(ticket.logprobs)))

    def _take_out(self, ticket: Ticket, error: Exception | None = None) -> None:
        """Ends a request before its time, wherever it is: with its last piece, and an error if there is one."""
        last = None
        if ticket.number is None:
            with self._changed:
                self._queue.drop(ticket)
        else:
            last = self._backend.leave(ticket.number)
            self._free(ticket, ticket.number)
        self._say_last(ticket, last, error)

    def _say_last(self, ticket: Ticket, last: Piece | None, error: Exception | None) -> None:
        """What was still held back, then how it ended."""
        if error is None:
            self._metrics.count("cancellations_total")
            last = last or Piece(ticket.index, "", (), "cancelled")
            ticket.call.said.put(replace(last, row=ticket.index))
            return
        self._metrics.count(
            "deadline_errors_total" if isinstance(error, DeadlineExceeded) else "failures_total"
        )
        if last is not None:
            ticket.call.said.put(replace(last, row=ticket.index, finish=None))
        ticket.call.said.put(error)

    def _free(self, ticket: Ticket, number: int) -> None:
        """Its row is free, and its stack one use less."""
        del self._running[number]
        with self._changed:
            self._queue.end(ticket)
            if ticket.key is not None:
                self._slots.let_go(ticket.key)
            # Somebody who waits may begin now, even if nothing else is running.
            self._tell()

    def _end(self, failed: PersonalPeftError | None) -> None:
        """The last act of the thread: nobody is left waiting, and nothing in a slot."""
        with self._changed:
            self._ended = failed or self._ended or _closed()
            waiting = tuple(self._queue)
            for ticket in waiting:
                self._queue.drop(ticket)
            self._changed.notify_all()
        for ticket in (*self._running.values(), *waiting):
            last = None
            # After a bug the backend may be in any state, and whoever waits must still hear of it.
            with suppress(Exception):
                last = None if ticket.number is None else self._backend.leave(ticket.number)
            self._say_last(ticket, last, failed)
        self._running.clear()
        self._loader.close()
        for key in self._slots.taken:
            with suppress(Exception):
                self._backend.detach(key)


def _asked(call: Call) -> bool | Exception:
    try:
        call.look()
        return call.stopped()
    except Exception as error:  # noqa: BLE001 - the caller's own function; the caller shall hear of it
        return error


def _late(ticket: Ticket) -> DeadlineExceeded:
    seconds = (ticket.deadline or ticket.asked) - ticket.asked
    where = "was not complete" if ticket.number is not None else "had not begun"
    return DeadlineExceeded(
        f"The reply {where} after {seconds:g} s.",
        hint="Give it more time, or ask for a shorter reply (max_tokens).",
    )


def _closed() -> ServingFailed:
    return ServingFailed("The engine is closed.", hint=_AGAIN)
