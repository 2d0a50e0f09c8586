"""Why two runs are not the same training: the known causes that the records show."""

from __future__ import annotations

from collections.abc import Iterator

from accel.observe.verify.recorded_runs import RecordedRuns, is_close, mean_loss


def find_causes(runs: RecordedRuns, kind: str, step: int) -> Iterator[str]:
    """Known causes of the first difference of two runs that were found in their records.

    Args:
        runs: What was recorded.
        kind: What differs; see `Difference`.
        step: The step in which it does, from 1.
    """
    unprepared = {
        item: sorted({name for record in runs.many for name in record["unprepared"][item]})
        for item in ("model", "optimizer", "loader")
    }
    if kind == "samples":
        yield from _causes_of_samples(runs, step, unprepared["loader"])
    if kind == "initial weights":
        yield (
            "The weights are drawn without a seed, or after other draws. Call set_seed(n) before the "
            "model is made."
        )
    if kind in ("loss", "gradients", "parameters") and unprepared["model"]:
        yield (
            f"{' and '.join(unprepared['model'])} is not prepared: its gradients are not averaged, so "
            "that each process trains different weights. Pass it to accelerator.prepare(), and use what "
            "comes back."
        )
    elif kind in ("loss", "gradients", "parameters") and unprepared["optimizer"]:
        yield (
            f"{' and '.join(unprepared['optimizer'])} is not prepared: it steps in the middle of an "
            "accumulation window too, where each process has different gradients. Pass it to "
            "accelerator.prepare(), and use what comes back."
        )
    elif kind in ("loss", "gradients"):
        yield from _causes_of_losses(runs, kind, step)


def _causes_of_samples(runs: RecordedRuns, step: int, unprepared: list[str]) -> Iterator[str]:
    if unprepared:
        yield (
            f"The {' and '.join(unprepared)} is not prepared, so that its samples are not shared out "
            "over the processes. Pass it to accelerator.prepare(), and iterate over what comes back."
        )
        return
    steps = runs.one["steps"]
    place = step - 1
    # Fewer samples than in other steps: the end of an epoch.
    if place < len(steps) and len(steps[place]["samples"]) < max(len(item["samples"]) for item in steps):
        yield (
            "The step is the last of an epoch and is not full: it is completed with samples from the "
            "start, so that all processes have equally many (even_batches)."
        )
        return
    yield (
        "The order is drawn without a seed, or by a generator that is not the same in each run. Call "
        "set_seed(n) before the loader is prepared."
    )


def _causes_of_losses(runs: RecordedRuns, kind: str, step: int) -> Iterator[str]:
    place = step - 1
    found = 0
    if runs.one["batch_norm"]:
        found += 1
        yield (
            f"{runs.one['batch_norm'][0]} is batch norm in training: it normalizes by the mean and "
            "variance of the batch of one process, not of the global batch. Use "
            "torch.nn.SyncBatchNorm (on GPUs), group or layer norm."
        )
    if runs.one["dropout"]:
        found += 1
        yield (
            f"{runs.one['dropout'][0]} is dropout, and draws other numbers on each process. That is as "
            "it should be; `accel verify --without_dropout` verifies everything else."
        )
    elif runs.one["draws"]:
        found += 1
        yield (
            "A step draws random numbers (noise, masks, dropout by a function), which are others on "
            "each process. --without_dropout switches dropout off, and nothing else."
        )
    one, many = mean_loss([runs.one["steps"][place]]), runs.loss(place)
    of_each = [mean_loss([record["steps"][place]]) for record in runs.shards]
    # The sum over a batch is N times the mean of the sums over its N parts.
    if not found and kind == "loss" and many and is_close(one / many, len(of_each), 1e-3):
        yield (
            "The loss is a sum over the batch, and gradients are averaged over the processes. Pass a "
            "mean, or accelerator.backward(loss, weight=n) with the number of items that the sum is over."
        )
    # A mean over all lies between the means of the parts, whatever their weights.
    elif not found and kind == "loss" and min(of_each) <= one <= max(of_each):
        yield (
            "The loss is a mean over items of which processes have unequal numbers (tokens, say), and a "
            "mean of means is not the mean over all. Pass the sum, and how many items it is over: "
            "accelerator.backward(loss_sum, weight=num_items)."
        )
