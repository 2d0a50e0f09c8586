"""Supervise workers on any machine until all have ended, and stop them together.

One wait covers everything: workers' output, workers' ends and signals; nothing is polled. When a worker
fails the others get SIGTERM and, after a grace period, SIGKILL.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_launch.local.output.console import has_colour
from accel_launch.local.output.destinations import Output
from accel_launch.local.output.streams import TRACEBACK, Stream
from accel_launch.local.signals import ENDING, SignalPipe, signal_name
from accel_launch.local.supervised_worker import SupervisedWorker
from accel_launch.plan.plan import LaunchPlan

if TYPE_CHECKING:
    from accel_launch.local.failures.summary import Failure

# After a failure the others wait in a collective, with nothing to save; after a request to end they may save.
_FAILURE_GRACE_S = 5.0
_REQUEST_GRACE_S = 30.0
# Processes that a worker left behind: loader workers, trackers' processes.
_LEFTOVER_GRACE_S = 2.0
_SAVED = 75  # EX_TEMPFAIL: the exit code of workers that have saved their state to be restarted
# Time for a failing worker to end, before the SIGTERM that would cut its traceback off.
_TRACEBACK_S = 2.0
# The same for all if a watchdog is on, at most half of the grace period (2.5 s by default): they notice
# the lost worker, and report where each process is.
_REPORT_S = 3.0
# After SIGKILL: a process that waits for a disk or a GPU driver handles no signal.
_ABANDON_S = 3.0


@dataclass
class Member:
    """A worker with its streams and its end.

    Args:
        worker: The worker.
        streams: Its streams, stderr first.
        failed_at: When the failure that ended it began, from time.time().
        terminated: Whether it was running when another failed, and is sent SIGTERM.
        stopped: Whether that signal ended it.
        stderr_tail: The end of its stderr, if it failed.
        is_hidden: Whether that tail has not been shown.
    """

    worker: SupervisedWorker
    streams: list[Stream]
    failed_at: float | None = None
    terminated: bool = False
    stopped: bool = False
    stderr_tail: bytes = b""
    is_hidden: bool = False

    @property
    def stderr(self) -> Stream:
        """The stream of tracebacks."""
        return self.streams[0]


@dataclass
class Supervisor:
    """The state of a run.

    Args:
        plan: What runs.
        output: Where the output goes.
        members: The workers.
        failed: Whether one failed.
        stop_signal: The signal that requested the end of the run.
    """

    plan: LaunchPlan
    output: Output
    members: list[Member] = field(default_factory=list)
    failed: bool = False
    stop_signal: int | None = None

    def loop(self, signals: SignalPipe, forget: Callable[[int], None]) -> None:
        """Wait and react until all workers and their groups have ended.

        Args:
            signals: Where signals arrive.
            forget: Called with the process id of a worker whose group has ended.
        """
        while not all(member.worker.gone for member in self.members):
            self._wait(signals)
            self._on_signals(signals.read(), forget)
            self._on_time(time.monotonic(), forget)

    def _wait(self, signals: SignalPipe) -> None:
        """Sleep until a signal, output or a deadline, and pass output on."""
        # Built again each time: streams end, and those of a full console are left out.
        poll = select.poll()
        poll.register(signals.descriptor, select.POLLIN)
        readers = {}
        for stream in self._streams():
            # Output for a full console is not read: the pipe fills, and the worker waits for its reader.
            if not stream.closed and not (stream.console and stream.console.full):
                readers[stream.descriptor] = stream
                poll.register(stream.descriptor, select.POLLIN)
        for console in self.output.consoles:
            if console.pending:
                poll.register(console.descriptor, select.POLLOUT)
        deadline = self._deadline()
        # Milliseconds.
        timeout = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
        for descriptor, _ in poll.poll(timeout):
            if descriptor in readers:
                readers[descriptor].read(time.monotonic())
        for console in self.output.consoles:
            console.flush()

    def _streams(self) -> list[Stream]:
        return [stream for member in self.members for stream in member.streams]

    def _deadline(self) -> float | None:
        times = [stream.deadline() for stream in self._streams()]
        for worker in (member.worker for member in self.members if not member.worker.gone):
            times += [worker.term_at, worker.kill_at]
        return min((at for at in times if at is not None), default=None)

    def _on_time(self, now: float, forget: Callable[[int], None]) -> None:
        for stream in self._streams():
            stream.tick(now)
        for member in self.members:
            worker = member.worker
            if worker.term_at is not None and now >= worker.term_at:
                worker.term_at = None
                worker.signal(signal.SIGTERM)
            if worker.kill_at is None or now < worker.kill_at or worker.gone:
                continue
            if worker.killed:
                worker.abandon()
                forget(worker.pid)
            else:
                worker.kill(now + _ABANDON_S)

    def _on_signals(self, numbers: list[int], forget: Callable[[int], None]) -> None:
        for number in numbers:
            if number in ENDING:
                self._request_end(number)
            elif number == signal.SIGTSTP:
                self._suspend()
            elif number == signal.SIGWINCH:
                self.output.resize(self._streams())
            elif number != signal.SIGCHLD:
                for member in self.members:
                    member.worker.signal(number)
        # Signals of one kind merge, so every wake-up looks at every worker. All are reaped before acting
        # on the first failure: a worker that has also ended was not stopped for it.
        running = [member for member in self.members if not member.worker.gone]
        ended = [member for member in running if member.worker.reap()]
        now = time.monotonic()
        for member in ended:
            self._on_end(member, now)
        for member in running:
            if member.worker.gone:
                forget(member.worker.pid)

    def _on_end(self, member: Member, now: float) -> None:
        """React to a worker's end: keep its stderr tail, clear its group, stop the others on failure."""
        # Before its output is examined: the end may still be in the pipe.
        for stream in member.streams:
            stream.drain(now)
        worker = member.worker
        if worker.returncode:
            self._record_failure(member, now)
        if not worker.gone:  # a process that it started is still running
            worker.signal_group(signal.SIGTERM)
            worker.kill_by(now + _LEFTOVER_GRACE_S)
        if worker.returncode and not self.failed and self.stop_signal is None:
            self.failed = True
            self._stop(now)

    def _record_failure(self, member: Member, now: float) -> None:
        worker, delayed_since = member.worker, member.stderr.delayed_since
        by_sigterm, by_sigkill = (worker.returncode == -end for end in (signal.SIGTERM, signal.SIGKILL))
        member.stopped = (by_sigterm and self.failed) or (by_sigkill and worker.killed)
        member.is_hidden = delayed_since is not None
        member.stderr_tail = member.stderr.take_delayed() or member.stderr.tail()
        if worker.raised is not None:
            member.failed_at = worker.raised.at
            if TRACEBACK not in member.stderr_tail:  # stopped before it showed it
                member.is_hidden, member.stderr_tail = True, worker.raised.text.encode()
        elif not member.stopped:
            member.failed_at = time.time() - (now - (delayed_since or now))

    def _stop(self, now: float) -> None:
        grace = self.plan.settings.value("grace_period")
        grace = _FAILURE_GRACE_S if grace is None else grace
        watched = self.plan.settings.value("watch") is not None
        saved = any(member.worker.returncode == _SAVED for member in self.members)
        for member in self.members:
            worker = member.worker
            member.terminated = worker.running
            # A failing worker ends on its own, and may be the root cause.
            # If one has saved its state and ended, the others are about to.
            is_ending = member.stderr.is_failing or saved
            patience = _REPORT_S if watched else _TRACEBACK_S if is_ending else 0.0
            worker.term_at = now + min(patience, grace / 2)
            worker.kill_by(now + grace)

    def _request_end(self, number: int) -> None:
        """Forward a request to end; a second one kills at once."""
        now = time.monotonic()
        if self.stop_signal is not None or self.failed:
            for member in self.members:
                member.worker.kill_by(now)
            return
        self.stop_signal = number
        grace = self.plan.settings.value("grace_period")
        grace = _REQUEST_GRACE_S if grace is None else grace
        self.output.say(
            f"accel launch: {signal_name(number)}: waiting up to {grace:g} s for the workers to end; send it "
            "again to end them at once.\n"
        )
        for member in self.members:
            if number == signal.SIGTERM:
                member.worker.signal(number)  # like kill: the worker decides about its children
            else:
                member.worker.signal_group(number)  # like the terminal
            member.worker.kill_by(now + grace)

    def _suspend(self) -> None:
        """Ctrl-Z: stop the workers with the launcher, and continue them with it."""
        for member in self.members:
            member.worker.signal_group(signal.SIGSTOP)
        # SIGSTOP, as this process catches SIGTSTP; the next line runs after a SIGCONT.
        os.kill(os.getpid(), signal.SIGSTOP)
        for member in self.members:
            member.worker.signal_group(signal.SIGCONT)

    def conclude(self) -> int:
        """Show delayed tracebacks and the summary.

        Returns:
            0, or the exit code of the worker that failed first; 128 + n if signal n ended it or the run.
            75 if every worker ended with 75, which is not a failure.
        """
        now = time.monotonic()
        # The summary shows the stderr of the first failure; it is not shown twice.
        quiet = self.plan.settings.value("quiet")
        saved = all(member.worker.returncode == _SAVED for member in self.members)
        reported = self.failed and not saved and not quiet
        for member in self.members:
            if member.is_hidden and not (reported and member.failed_at is not None):
                member.stderr.show(member.stderr_tail)
            for stream in member.streams:
                stream.drain(now)
                stream.show(stream.take_delayed())
                stream.close()
        if saved:
            if not quiet:
                self.output.say(
                    f"accel launch: all {len(self.members)} processes ended with exit code {_SAVED}: "
                    "they have saved their state. Start the same command again to continue.\n"
                )
            return _SAVED
        if self.failed:
            return self._report()
        if self.stop_signal is not None and any(member.worker.returncode for member in self.members):
            return 128 + self.stop_signal
        return 0

    def _report(self) -> int:
        """Show the summary and return the exit code of the worker that failed first."""
        from accel_launch.local.failures.summary import Report, failure_summary, first_failure

        failures = [_failure(member, at) for member in self.members if (at := member.failed_at) is not None]
        value = self.plan.settings.value
        if not value("quiet"):
            report = Report(
                "accel launch",
                len(self.members),
                sum(member.terminated and member.failed_at is None for member in self.members),
                self.plan.command,
                self.output.folder,
                debug=value("debug"),
                colour=has_colour(self.output.stderr.descriptor),
            )
            self.output.say(failure_summary(failures, report))
        return first_failure(failures).exit_code


def _failure(member: Member, at: float) -> Failure:
    from accel_launch.local.failures.summary import Failure
    from accel_launch.local.failures.tracebacks import clean

    worker = member.worker
    return Failure(
        worker.rank,
        worker.host,
        worker.returncode or 0,
        at,
        clean(member.stderr_tail),
        shown=not member.is_hidden,
        stopped=member.stopped,
        terminated=member.terminated,
    )
