"""Run learns: take each user's lease, and build new revisions from the lowest layer up.

Invariants: a user has one learn at a time. It holds a lease, which a dead process loses.
A layer is planned when those below it are settled. A refusal is an outcome, and not an error. What
fails for one user, also by a bug, fails for no other. An error that the caller's own functions
raise ends the learn of all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace

from personalpeft.adapters.types import Adapter
from personalpeft.backends.error_mapping import to_serving_error
from personalpeft.base_models.types import ModelCard
from personalpeft.errors import (
    Cancelled,
    NotFound,
    NothingCause,
    NothingToLearn,
    PersonalPeftError,
    format_origin,
    get_error_type,
)
from personalpeft.learning.candidate import propose
from personalpeft.learning.data.lesson_assignment import load_assignments
from personalpeft.learning.data.scrubber import find_personal_data
from personalpeft.learning.evaluate.eval_job import ThrottledScorer
from personalpeft.learning.evaluate.evaluation import revalidate
from personalpeft.learning.gate.gate import Margins, load_margins
from personalpeft.learning.gate.probation import review_probation
from personalpeft.learning.layers import (
    VALID_ON,
    LayerState,
    inspect_live_layer,
    known_layers,
    layer_order,
    root_revision,
    trained_on,
    valid_stacks,
)
from personalpeft.learning.options import LearnOptions, cancelled_error
from personalpeft.learning.outcomes import (
    LearnOutcome,
    MoveCause,
    Reason,
    ReasonCode,
    SignalUse,
    reason,
    text_reason,
)
from personalpeft.learning.pipeline import BuildResult, TrainingPipeline
from personalpeft.learning.plan import MIN_LESSONS, VERIFIER, Plan, build_plan
from personalpeft.learning.report import LearnReport, signal_usage
from personalpeft.learning.report_builder import head_moved_report, record, report_of
from personalpeft.learning.rl.loop import RESUME_HINT, plan_practice
from personalpeft.learning.status import pending
from personalpeft.learning.train.config import (
    RLConfig,
    TrainingConfigs,
    load_training_configs,
    override_config,
    read_training_tables,
)
from personalpeft.plugins import CheckedRewardShaper, CheckedVerifier
from personalpeft.services import Services
from personalpeft.store.locks import learn_lease
from personalpeft.types import Json, Revision, Stack

_log = logging.getLogger(__name__)

MAX_CONCURRENT_USERS = 8
"""A larger group makes no user's build quicker, and each user takes memory."""


def kept_recipe(revision: Revision | None) -> Json:
    """Return the fields of the recipe that a learn set, and that later ones of the layer keep."""
    overrides: Json = revision.recipe.get("overrides", {}) if revision else {}
    return overrides


def kept_verifier(services: Services, revision: Revision | None) -> CheckedVerifier | None:
    """Return the verifier that judged a revision, if a learn gave it by its name.

    Raises:
        NotFound: It is not installed here, or may not be loaded.
        PluginError: It cannot be loaded.
    """
    name = revision.scores.get(VERIFIER) if revision else None
    if revision is None or name is None:
        return None
    try:
        return services.plugins.verifier(str(name))
    except NotFound as error:
        raise NotFound(
            f"{revision.layer} is judged by the verifier {name!a}, which cannot be loaded.",
            hint="Install its plugin, and name it in PERSONALPEFT_PLUGINS if that is set. "
            "In Python, learn(layer, recipe={}) returns to the gate's own measure.",
        ) from error


def check_card(card: ModelCard) -> None:
    """Check what a card says of learning, without its base.

    Raises:
        CardError: A table has a wrong value.
        InvalidInput: Personal data of an unknown country is to be replaced.
        MissingPackage: Personal data is to be replaced, and the extra ``scrub`` is not installed.
    """
    load_margins(card.name, card.gate)
    for fields in read_training_tables(card.name, card.learning).values():
        if countries := fields.get("scrub"):
            find_personal_data("", countries)
    RLConfig.read_table(card.name, "rl", card.practice)


@dataclass(frozen=True, slots=True)
class Learner:
    """Learns for the users of one home on one base."""

    services: Services
    margins: Margins
    recipes: TrainingConfigs

    @classmethod
    def from_services(cls, services: Services) -> Learner:
        """Return a learner configured by the card of the open base. Raises ``CardError``."""
        card, projections = services.base.card, services.base.architecture.projections
        is_random = card.source.kind == "random"
        return cls(
            services,
            load_margins(card.name, card.gate, random=is_random),
            load_training_configs(card.name, card.learning, projections),
        )

    def learn(self, user: str, layer: str | None, options: LearnOptions) -> LearnReport:
        """See ``User.learn``."""
        return _report_or_raise(self._learn_users([user], layer, options)[user])

    def learn_many(
        self, users: Sequence[str], layer: str | None, options: LearnOptions
    ) -> tuple[LearnReport, ...]:
        """See ``Runtime.learn_many``."""
        results = self._learn_users(users, layer, options)
        return tuple(
            _failed_report(self.services, user, layer or "", result)
            if isinstance(result := results[user], Exception)
            else result
            for user in users
        )

    def practice(
        self,
        user: str,
        layer: str,
        verifier: CheckedVerifier,
        shaping: CheckedRewardShaper | None,
        rounds: int | None,
        options: LearnOptions,
    ) -> LearnReport:
        """See ``User.practice``. Raises ``CardError``."""
        services, card = self.services, self.services.base.card
        config = RLConfig(**RLConfig.read_table(card.name, "rl", card.practice))
        if rounds is not None:
            config = config.model_copy(update={"rounds": rounds})

        try:
            with self._learning(user, layer, options) as (pipeline, state):
                recipe, began = self.recipes.for_layer(layer), pipeline.started
                plan = plan_practice(services, state, recipe, config, verifier, shaping, began)
                return _report_or_raise(pipeline.build({user: plan})[user])
        except Cancelled as error:
            # The error of a stage would say that the next learn goes on from there.
            raise Cancelled(error.message, hint=RESUME_HINT) from error

    def propose(self, user: str, adapter: Adapter, options: LearnOptions) -> LearnReport:
        """See ``User.propose_peft``."""
        layer = adapter.manifest.layer
        recipe = self.recipes.for_layer(layer)
        with self._learning(user, layer, options) as (pipeline, state):
            candidate = propose(self.services, state, recipe, adapter, pipeline.started)
            return _report_or_raise(pipeline.judge_and_promote(candidate))

    @contextmanager
    def _learning(
        self, user: str, layer: str, options: LearnOptions
    ) -> Iterator[tuple[TrainingPipeline, LayerState]]:
        """Yield the pipeline and the layer for one build of one user, under the user's lease."""
        services = self.services
        pipeline = TrainingPipeline(services, self.margins, options, services.clock.timer())
        with services.model.learning(), services.store.leases.acquire(learn_lease(user)):
            review_probation(services, user)
            yield pipeline, inspect_live_layer(services, user, layer)

    def _learn_users(
        self, users: Sequence[str], layer: str | None, options: LearnOptions
    ) -> dict[str, BuildResult]:
        """Learn for several users: the next layers of all are built together, group after group."""
        raised: list[Exception] = []
        options = options.capturing_errors(raised)
        started = self.services.clock.timer()
        pipeline = TrainingPipeline(self.services, self.margins, options, started)
        learns: dict[str, Generator[Plan, BuildResult | None, LearnReport]] = {}
        plans: dict[str, Plan] = {}
        results: dict[str, BuildResult] = {}

        def advance(user: str, built: BuildResult | None = None) -> None:
            """Advance a user to the next build, or to the end."""
            try:
                plans[user] = learns[user].send(built)
            except StopIteration as ended:
                results[user] = ended.value
            except Exception as error:  # noqa: BLE001 - an error of any kind is a result
                results[user] = error

        waiting = deque(users)
        with self.services.model.learning(), ExitStack() as running:
            while waiting or plans:
                # A user joins as soon as another ends, so that groups stay full.
                while waiting and len(plans) < MAX_CONCURRENT_USERS:
                    user = waiting.popleft()
                    learn = _UserLearn(pipeline, self.recipes, user, layer).run()
                    learns[user] = running.enter_context(closing(learn))
                    advance(user)
                group = dict(plans)
                plans.clear()
                for user, built in pipeline.build(group).items():
                    advance(user, built)
                if raised:
                    raise raised[0]
        return results


class _UserLearn:
    """The learn of one user, layer by layer."""

    def __init__(
        self, pipeline: TrainingPipeline, recipes: TrainingConfigs, user: str, layer: str | None
    ) -> None:
        self._services, self._margins, self._recipes = pipeline.services, pipeline.margins, recipes
        self._store = self._services.store
        self._user, self._layer, self._options = user, layer, pipeline.options
        self._began = 0.0

    def run(self) -> Generator[Plan, BuildResult | None, LearnReport]:
        """Yield each plan to build, which is sent its result, under the user's lease.

        The builds of several users are trained together in between.

        Returns:
            The report of the lowest layer, with those above.

        Raises:
            Busy: Another learn of the user runs.
            NothingToLearn: No layer has anything to learn.
        """
        is_dry_run = self._options.dry_run
        reports: list[LearnReport] = []
        nothing: NothingToLearn | None = None
        with self._lease():
            if not is_dry_run:
                review_probation(self._services, self._user)
            for layer in self._list_layers():
                self._began = self._services.clock.timer()
                try:
                    built: Plan | BuildResult | None
                    built = self._decide_build(layer)
                    if isinstance(built, Plan):
                        is_built = built.has_enough and not is_dry_run
                        plan = self._with_verifier(built) if is_built else built
                        built = (yield plan) if is_built else self._report_unbuilt(plan)
                except Exception as error:  # noqa: BLE001 - an error of any kind is a result
                    built = error
                if isinstance(built, NothingToLearn) and built.signals and not is_dry_run:
                    built = self._record_unusable(layer, built) or built
                if built is None:
                    continue
                if isinstance(built, NothingToLearn):
                    if nothing is None or built.cause is NothingCause.NOT_LIVE:
                        nothing = built
                    if layer == self._layer:
                        break
                    continue
                if isinstance(built, Exception):
                    if not reports:
                        raise built
                    # What lower layers learned stays.
                    built = _failed_report(self._services, self._user, layer, built)
                reports.append(built)
                if built.is_unfinished or built.outcome is LearnOutcome.FAILED:
                    # Layers above would be built on what is about to change.
                    break
        if not reports:
            raise nothing or NothingToLearn(
                f"There is nothing to learn for {self._user}.", cause=NothingCause.NO_FEEDBACK
            )
        return replace(reports[0], above=tuple(reports[1:]))

    def _lease(self) -> AbstractContextManager[None]:
        # A lease is a file. A dry run writes nothing, so it needs none where no file can be written.
        if self._options.dry_run and self._store.read_only:
            return nullcontext()
        return self._store.leases.acquire(learn_lease(self._user))

    def _list_layers(self) -> Sequence[str]:
        """Return the requested layers, lowest first, and those above, which are revalidated only."""
        names = known_layers(self._store, self._user, load_assignments(self._store, self._user))
        if self._layer is None:
            return names
        order = layer_order(self._layer)
        return [self._layer, *(each for each in names if layer_order(each) > order)]

    def _plan(self, state: LayerState, *, force: bool = False) -> Plan:
        start = "auto" if force else self._options.start
        is_requested = state.layer == self._layer
        overrides = self._options.recipe if is_requested else None
        if overrides is None:
            overrides = kept_recipe(self._latest(state.layer, state.live))
        recipe = override_config(
            self._recipes.for_layer(state.layer),
            overrides,
            self._services.base.architecture.projections,
        )
        plan = build_plan(self._services, state, recipe, start, self._began, force=force)
        return replace(plan, overrides=overrides)

    def _with_verifier(self, plan: Plan) -> Plan:
        """Return a plan that is built now, with the verifier of this learn or of the layer.

        Raises ``NotFound``, ``PluginError``: a plugin that is missing hinders only such a build.
        """
        options, is_requested = self._options, plan.layer == self._layer
        verifier = options.verifier if is_requested else None
        if verifier is None and not (is_requested and options.recipe == {}):
            verifier = kept_verifier(self._services, self._latest(plan.layer, plan.live))
        return replace(plan, answer_verifier=verifier)

    def _latest(self, layer: str, live: Stack) -> Revision | None:
        """Return the revision whose recipe and verifier a layer keeps.

        It is the head. Without one, as after a refused first build, it is the newest revision.
        """
        if head := next((each.revision for each in live.entries if each.layer == layer), None):
            return self._store.catalog.revision(self._user, head)
        wanted = (layer, live.base)
        known = reversed(self._store.catalog.revisions(self._user))
        return next((each for each in known if (each.layer, each.base) == wanted), None)

    def _decide_build(self, layer: str) -> Plan | LearnReport | None:
        """Return what to build for a layer, or what to report of it.

        Raises:
            NothingToLearn: A requested layer has nothing new, and its head is up to date or what
                would replace it was built before.
        """
        state = inspect_live_layer(self._services, self._user, layer)
        if self._layer not in (None, layer):
            return self._revalidate(state)
        head, outcome, is_auto = state.head, state.outcome, self._options.start == "auto"
        if is_auto and state.is_below_changed and not state.outdated:
            again = self._revalidate(state)
            if isinstance(again, Plan):
                return again
            try:
                # What is new is learned on top of a valid head.
                return self._plan(inspect_live_layer(self._services, self._user, layer))
            except NothingToLearn:
                return again
        try:
            return self._plan(state, force=is_auto and state.is_due)
        except NothingToLearn as nothing:
            if head is None or not state.outdated or nothing.cause is NothingCause.NO_CAPACITY:
                raise
            if outcome is None:
                return self._clear_head(head)
            if outcome.outcome is LearnOutcome.UNCHANGED:
                raise
            raise _built_before(outcome) from None

    def _report_unbuilt(self, plan: Plan) -> LearnReport:
        """Return the report of a dry run, or record that there are too few lessons."""
        is_dry_run = self._options.dry_run
        if plan.has_enough:
            parent = plan.parent.id if plan.parent else "nothing"
            steps, rank = plan.steps, plan.recipe.rank
            why = reason(ReasonCode.WOULD_TRAIN, steps=steps, parent=parent, rank=rank)
        else:
            why = reason(ReasonCode.TOO_FEW_LESSONS, count=plan.lesson_count, needed=MIN_LESSONS)
        outcome = LearnOutcome.DRY_RUN if is_dry_run else LearnOutcome.NOTHING_TO_LEARN
        report = report_of(self._services, plan, outcome, *plan.build_reasons, why)
        return report if is_dry_run else record(self._services, report)

    def _clear_head(self, head: Revision) -> LearnReport:
        """Make the root of a head live, since no lesson of the head is left."""
        root = root_revision(self._store, head)
        live = root.id if root else None
        is_dry_run = self._options.dry_run
        why = reason(ReasonCode.ALL_RETRACTED, live=live or "the base")
        outcome = LearnOutcome.DRY_RUN if is_dry_run else LearnOutcome.RETRACTED
        report = replace(self._report_head(head, outcome, why), previous_head=live, probation=False)
        if is_dry_run:
            return report
        if self._options.cancelled():
            raise cancelled_error("before the head was moved")
        return self._record_judgement(head, report, MoveCause.RETRACTED)

    def _revalidate(self, state: LayerState) -> Plan | LearnReport | None:
        """Judge a head again that was built on another stack below.

        Returns:
            None if the stack below is unchanged, the report if the head stays, else a build.
        """
        head, below = state.head, state.below
        if head is None or not state.is_below_changed:
            return None
        if self._options.dry_run:
            why = Reason(ReasonCode.WOULD_REVALIDATE)
            return self._report_head(head, LearnOutcome.DRY_RUN, why)
        reasons: tuple[Reason, ...] = (Reason(ReasonCode.NO_HOLDOUT),)
        with suppress(NothingToLearn):
            if trained_on(self._store, head):
                plan = self._plan(state, force=True)
                options, margins = self._options, self._margins
                engine = self._services.learning_engine
                is_valid, why = revalidate(
                    self._services,
                    ThrottledScorer(engine, options.paused, options.cancelled),
                    head,
                    plan,
                    max_regressed=margins.max_regressed,
                    tie_margin=margins.tie_margin,
                )
                if not is_valid and "practice" not in head.recipe:
                    return replace(plan, rebuild_reason=why)
                reasons = (why,) if is_valid else (why, Reason(ReasonCode.PRACTICE_NEEDED))
        # Stored in its scores, so that it is not judged again on the same stack.
        stacks = [*valid_stacks(head), below.digest]
        valid = replace(head, scores={**head.scores, VALID_ON: stacks})
        report = self._report_head(head, LearnOutcome.UNCHANGED, *reasons)
        return self._record_judgement(valid, report, MoveCause.REVALIDATED)

    def _report_head(self, head: Revision, outcome: LearnOutcome, *reasons: Reason) -> LearnReport:
        """Return the report of a head that was judged again, and stays. It is not recorded yet."""
        clock = self._services.clock
        return LearnReport(
            user=head.user,
            layer=head.layer,
            outcome=outcome,
            reasons=reasons,
            at=clock.now(),
            seconds=round(clock.timer() - self._began, 3),
            revision=head.id,
            previous_head=head.id,
            probation=head.probation,
        )

    def _record_judgement(
        self, head: Revision, report: LearnReport, cause: MoveCause
    ) -> LearnReport:
        """Record a judgement of a head, with its scores, and make ``report.previous_head`` live.

        Returns the report, or that another program moved the head meanwhile.
        """
        is_recorded = self._store.catalog.switch_heads(
            head.user,
            {head.layer: report.previous_head},
            expected={head.layer: head.id},
            judged=[(head, report.as_json())],
            base=head.base,
            cause=cause,
        )
        return report if is_recorded else head_moved_report(self._store, report)

    def _record_unusable(self, layer: str, nothing: NothingToLearn) -> LearnReport | None:
        """Record that a learn can use none of some signals, so that they trigger no further learn.

        Returns the report, or None if reports already list all of the signals.
        """
        is_full = nothing.cause is NothingCause.NO_CAPACITY
        use = SignalUse.NO_CAPACITY if is_full else SignalUse.TOO_LONG
        waiting = {trigger.key for trigger in pending(self._store, self._user).triggers}
        sources = tuple(
            signal_usage(each.signal, use, each.reason)
            for each in load_assignments(self._store, self._user)
            if each.signal.id in waiting.intersection(nothing.signals)
        )
        if not sources:
            return None
        report = LearnReport(
            user=self._user,
            layer=layer,
            outcome=LearnOutcome.NOTHING_TO_LEARN,
            reasons=(text_reason(nothing.message),),
            at=self._services.clock.now(),
            sources=sources,
        )
        return record(self._services, report)


def _report_or_raise(result: BuildResult) -> LearnReport:
    if isinstance(result, Exception):
        raise result
    return result


def _failed_report(services: Services, user: str, layer: str, error: Exception) -> LearnReport:
    """Return the report of an error that one user, or one layer, has alone.

    Of an unexpected error it names the kind only: its text may hold private words. ``layer`` is ""
    where the learn reached none.
    """
    if not isinstance(error, PersonalPeftError):
        kind = type(error).__name__
        _log.error("A learn ended with an unexpected %s", format_origin(error))
        error = to_serving_error(
            f"An unexpected {kind} ended this learn.",
            error,
            hint="Run personalpeft verify. The log says where it was raised; the next learn"
            " continues.",
        )
    return LearnReport(
        user=user,
        layer=layer,
        outcome=LearnOutcome.FAILED,
        reasons=(text_reason(f"{error.message} {error.hint}".strip()),),
        at=services.clock.now(),
        error=get_error_type(error).__name__,
    )


def _built_before(outcome: LearnReport) -> NothingToLearn:
    """Return the error that says how the build in a stale head's place ended."""
    is_cleared = outcome.outcome is LearnOutcome.RETRACTED
    target = (outcome.previous_head if is_cleared else outcome.revision) or "base"
    return NothingToLearn(
        f"Nothing new for {outcome.layer}. The last build of its lessons is not live; it was"
        f" {outcome.outcome}: {outcome.reason}.",
        hint=f"personalpeft rollback {outcome.layer} --to {target} --user {outcome.user} makes it"
        " live, and --to base switches the layer off; or give it more lessons.",
        cause=NothingCause.NOT_LIVE,
    )
