"""From jobs to decisions, pass by pass: who is asked before each, what becomes of jobs whose pass fails."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from d3serve.model.packing import Asked, Packer, jobs_of

J = TypeVar("J")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Decision(NamedTuple, Generic[T_co]):
    """What became of a job, by its place among those handed in: its answers, or what went wrong with it."""

    job: int
    found: T_co | Exception
    seconds: float  # of the passes that it was in, less what ran between their steps


class Watch:
    """What whoever wants decisions is asked meanwhile. This one wants all of them, and is in no hurry."""

    def starts(self, jobs: Sequence[int], done: float, part: float) -> Collection[int]:
        """Called before a pass of these jobs; those still wanted.

        `done` of their work was done before, `part` of it is done in this pass: shares of the whole.
        """
        del done, part
        return jobs

    def goes_on(self, share: float) -> bool:
        """Called between two steps of a long pass, with the share of it that is done; whether it should go on.

        If not, nothing more is asked of its jobs. From here short jobs may be decided. What this raises ends the pass
        and all that would follow.
        """
        del share
        return True

    def ends(self, jobs: Sequence[int]) -> None:
        """Called after a pass of these jobs, whatever came of it."""

    def tries_again(self, jobs: Sequence[int], error: Exception) -> None:
        """A pass of several questions failed: they are asked again in smaller parts, to find the job at fault."""


NOBODY = Watch()


class PassGivenUp(Exception):  # no fault of anything
    """Nobody wants what a pass would find out."""


class _Meter:
    """Tells a watch how far a pass is; notes the time that this takes, which is not the pass's own."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.others_s = 0.0
        self.raised: Exception | None = None

    def __call__(self, share: float) -> None:
        """Called with the share of the pass that is done.

        Raises:
            PassGivenUp: it should not go on.
        """
        began = time.perf_counter()
        try:
            goes_on = self._watch.goes_on(share)
        except Exception as error:  # not of the pass, which must not be tried again for it
            self.raised = error
            raise PassGivenUp from error
        finally:
            self.others_s += time.perf_counter() - began
        if not goes_on:
            raise PassGivenUp


Tell = Callable[[float], None]  # with the share of a pass that is done; what it raises ends the pass
# Runs a pass of these questions: how many of them, from the first on, the pools held, and what went wrong with it.
RunPass = Callable[[Sequence[Asked], Tell], tuple[int, Exception | None]]


def decide_by_passes(
    packer: Packer, run_pass: RunPass, found: Callable[[int], T], watch: Watch
) -> Iterator[list[Decision[T]]]:
    """Run passes until nothing is left to ask; yield what each of them has finished.

    Args:
        packer: decides what goes into the passes.
        run_pass: runs one; raises nothing but DeviceError.
        found: what a job's passes have found out, once all of its questions were asked.
        watch: is asked before each pass and between its steps.

    Raises:
        DeviceError: as `run_pass`.
    """
    spent = dict[int, float]()
    while choice := packer.choose():
        wanted = set(watch.starts(choice.jobs, choice.done, choice.part))
        asked = [each for each in choice.asked if each.job in wanted]
        packer.drop(set(choice.jobs) - wanted)
        if not asked:
            continue
        meter, began = _Meter(watch), time.perf_counter()
        held, error = run_pass(asked, meter)
        watch.ends(jobs_of(asked[: max(1, held)]))
        if meter.raised:
            raise meter.raised
        seconds = time.perf_counter() - began - meter.others_s
        packer.give_back(asked[max(1, held) :])  # where none was held, the first does not fit even alone
        asked = asked[: max(1, held)]
        jobs = jobs_of(asked)
        spent.update({job: spent.get(job, 0.0) + seconds for job in jobs})
        if error is None:
            if ended := packer.succeeded(asked):
                yield [Decision(job, found(job), spent[job]) for job in ended]
        elif isinstance(error, PassGivenUp):
            packer.drop(jobs)
        elif at_fault := packer.failed(asked, error):
            yield [Decision(job, error, spent[job]) for job in at_fault]
        else:
            watch.tries_again(jobs, error)


class Decides(Generic[J, T]):
    """`decide` for whoever wants all decisions at once, or none."""

    def decisions(self, jobs: Sequence[J], watch: Watch = NOBODY) -> Iterator[list[Decision[T]]]:
        """Yield decisions as passes end."""
        raise NotImplementedError

    def decide(self, jobs: Sequence[J], *, at_yield: Callable[[float], object] | None = None) -> list[T]:
        """Answer jobs; in their order.

        Args:
            jobs: as `prepare` made them.
            at_yield: called between the steps of a long pass with the share that is done of its jobs' work.

        Raises:
            Exception: what went wrong with the first job that failed; or what `at_yield` raised.
        """
        decided = dict[int, T]()
        for done in self.decisions(jobs, _CallsBack(at_yield) if at_yield else NOBODY):
            for decision in done:
                if isinstance(decision.found, Exception):
                    raise decision.found
                decided[decision.job] = decision.found
        return [decided[number] for number in range(len(jobs))]


class _CallsBack(Watch):
    def __init__(self, at_yield: Callable[[float], object]) -> None:
        self._at_yield = at_yield
        self._span = (0.0, 1.0)

    def starts(self, jobs: Sequence[int], done: float, part: float) -> Collection[int]:
        self._span = done, part
        return jobs

    def goes_on(self, share: float) -> bool:
        done, part = self._span
        self._at_yield(done + part * share)
        return True
