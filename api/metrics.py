"""What /metrics tells beside HTTP counts: the queue, its workers and how long things took, as Redis has them.

Every API process tells the same of these: scrape one, or take the maximum, never the sum.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from d3serve.schemas import FINAL_STATUSES, Lane
from d3serve.store.records import QueueStats, WorkerInfo
from d3serve.store.tally import Counted, Times

OF_LANES: Final = (
    ("queued_jobs", "Jobs that wait."),
    ("ready_states", "States that wait with jobs on them."),
    ("queued_tokens", "Tokens that wait."),
    ("queued_bytes", "Bytes of requests that wait."),
    ("oldest_age_s", "Age of the oldest waiting job, in seconds."),
)
OF_WORK: Final = (
    ("tokens", "kind", "Prompt tokens of answered jobs: as asked, and as read.", ("asked", "read")),
    ("states", "source", "States of answered jobs: read, or found in a cache.", ("cached", "read")),
)
LANES: Final = get_args(Lane)
# What `observe` in the scripts counts: its name there and here, what it is, its label and the values that always show.
OF_TIMES: Final = (
    ("queue", "d3serve_queue_wait_seconds", "From a job's submission to its last start.", "lane", LANES),
    ("tokenize", "d3serve_tokenize_seconds", "To make tokens of an answered job's texts.", "lane", LANES),
    ("pass", "d3serve_pass_seconds", "The passes that an answered job was in.", "lane", LANES),
    ("total", "d3serve_job_seconds", "From a job's submission to its end by a worker.", "lane", LANES),
    ("webhook", "d3serve_webhook_age_seconds", "From an event to the end of its delivery.", "state", ("delivered",)),
)  # fmt: skip
OF_WORKERS: Final = (
    (GaugeMetricFamily, "tokens_per_s", "Tokens of states and questions a second, of late."),
    (CounterMetricFamily, "busy_s", "Seconds that passes have taken."),
    (GaugeMetricFamily, "cached_states", "States that need not be read again."),
    (GaugeMetricFamily, "cached_bytes", "Memory of the device that they take."),
    (GaugeMetricFamily, "peak_memory_bytes", "Most host memory that the process has held."),
)
NAMED: Final = {"busy_s": "busy_seconds"}  # where an attribute's name is no metric's


class QueueMetrics(Collector):
    """One look at everything; no names of tenants, models or jobs."""

    def __init__(self, stats: QueueStats, tally: Counted, workers: Sequence[WorkerInfo]) -> None:
        self._stats, self._tally, self._workers = stats, tally, workers

    def collect(self) -> Iterable[Metric]:
        """All metrics, those that have counted nothing yet at nought."""
        yield from self._queue()
        yield from self._times()
        yield from self._work()
        yield from self._webhooks()
        for family, field, help_text in OF_WORKERS:
            metric = family(f"d3serve_worker_{NAMED.get(field, field)}", help_text, labels=["worker"])
            for worker in self._workers:
                metric.add_metric([worker.id], getattr(worker, field) or 0)
            yield metric

    def _queue(self) -> Iterable[Metric]:
        stats = self._stats
        for field, help_text in OF_LANES:
            gauge = GaugeMetricFamily(f"d3serve_queue_{field}", help_text, labels=["lane"])
            for lane, of_lane in stats.lanes.items():
                gauge.add_metric([lane], getattr(of_lane, field))
            yield gauge
        yield GaugeMetricFamily("d3serve_running_jobs", "Jobs that run.", value=stats.running_jobs)
        yield GaugeMetricFamily("d3serve_workers", "Live workers.", value=stats.workers)
        ready = sum(worker.ready for worker in self._workers)
        yield GaugeMetricFamily("d3serve_workers_ready", "Live workers with their model loaded.", value=ready)
        yield GaugeMetricFamily("d3serve_tokens_per_s", "Tokens read a second.", value=stats.tokens_per_s)

    def _times(self) -> Iterable[Metric]:
        for what, name, help_text, label, always in OF_TIMES:
            histogram = HistogramMetricFamily(name, help_text, labels=[label])
            found = self._tally.times.get(what, {})
            for value in sorted({*always, *found}):
                times = found.get(value) or Times()
                histogram.add_metric([value], times.buckets(), times.sum_s)
            yield histogram

    def _work(self) -> Iterable[Metric]:
        # A count that only shows once it is one never grows, as Prometheus sees it: the first failure would be missed.
        finished = dict.fromkeys(sorted(FINAL_STATUSES), 0) | dict(self._stats.finished)
        yield _counts("finished_jobs", "Jobs by how they ended.", "status", finished)
        for name, label, help_text, kinds in OF_WORK:
            told = {kind: self._stats.work.get(f"{name}_{kind}", 0) for kind in kinds}
            yield _counts(name, help_text, label, told)
        counts = self._tally.counts
        help_text = "Starts of jobs, and those that were lost or given back."
        attempts = {"begun": 0, "lost": 0, "returned": 0} | dict(counts.get("attempts", {}))
        yield _counts("attempts", help_text, "kind", attempts)
        reaped = counts.get("leases", {}).get("reaped", 0)
        yield CounterMetricFamily("d3serve_reaped_leases", "Leases that ran out.", value=reaped)

    def _webhooks(self) -> Iterable[Metric]:
        pending, late_s = self._tally.webhooks_pending, self._tally.webhooks_late_s
        yield GaugeMetricFamily("d3serve_webhooks_pending", "Events not delivered yet.", value=pending)
        yield GaugeMetricFamily("d3serve_webhook_late_s", "Seconds that the first is overdue.", value=late_s)


def _counts(name: str, help_text: str, label: str, told: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(f"d3serve_{name}", help_text, labels=[label])
    for value, count in told.items():
        metric.add_metric([value], count)
    return metric
