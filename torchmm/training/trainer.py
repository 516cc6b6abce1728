"""The training loop.

A step loads a batch, agrees on its sizes with the other ranks, plans, runs forward and backward
passes, updates the parameters and calls the hooks (`torchmm.training.hooks`). The loop is
independent of model families, record formats and schedules. Every collective is unconditional, or
conditional on values that all ranks have agreed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from torch.profiler import record_function

from torchmm.common.errors import PeerError, PreemptedError
from torchmm.common.rng import restore_rng
from torchmm.data.loader import StepBatch
from torchmm.parallel.health.peers import HealthMonitor
from torchmm.training.agreement import agree_on_batch, check_losses, copy_losses
from torchmm.training.components import RunComponents
from torchmm.training.hooks.hook import FinishedStep, TrainingContext, TrainState
from torchmm.training.hooks.registry import build_hooks
from torchmm.training.metrics import StepMeter
from torchmm.training.optim import OptimizerUpdate
from torchmm.training.shutdown import StopSignal, closing_on_exit, stop_message
from torchmm.training.step import TrainStep, loss_weights


class Trainer:
    """The training loop of one rank. Construction is collective.

    Args:
        components: Components of the run.
        stop: Stop signal of this process.
        on_lost: Function that ends the process if a lost peer raises no error, see `HealthMonitor`.
    """

    def __init__(
        self,
        components: RunComponents,
        stop: StopSignal,
        on_lost: Callable[[PeerError], None] | None = None,
    ) -> None:
        recipe = components.run.recipe
        model = components.model
        mesh = components.mesh
        steps = recipe.training.steps
        self.components = components
        self.stop = stop
        self.state = TrainState.resume(components)
        self.train_step = TrainStep(components.pipeline, mesh, loss_weights(recipe.model.generator))
        self.updates = OptimizerUpdate(
            model, components.optimizer, mesh, recipe.optimizer, steps, components.average
        )
        self.meter = StepMeter(mesh, components.pipeline, recipe.metrics.peak_tflops)
        directory = components.run_dir / "heartbeats"
        raises = mesh.device.type != "cuda"
        self.health = HealthMonitor(
            directory, recipe.parallel.timeout_s, on_lost=on_lost, raises=raises
        )
        self.hooks = build_hooks(TrainingContext(components, self.state, self.health, stop))

    def run(self) -> None:
        """Train until the last step of the recipe, or until a hook or a stop signal ends the run.

        Raises:
            PreemptedError: A rank received a stop signal. The last finished step is saved.
            TorchmmError: The run failed, see the subclasses.
        """
        with closing_on_exit(self.close), self.components.checkpoints:
            without_data = self._train()
            for hook in self.hooks:
                hook.finish()
        if self.step < self.components.run.recipe.training.steps and not self.state.end_reason:
            raise PreemptedError(
                stop_message(self.step, without_data, self.components.checkpoints.status_warning)
            )

    def _train(self) -> str:
        """Run the remaining steps. Return why a stopped run did not do another step, or ""."""
        components = self.components
        steps = components.run.recipe.training.steps
        batches = components.loader.batches(lambda: self.stop.received is not None)
        if components.restored and components.restored.rng is not None:
            restore_rng(components.restored.rng)
        is_stopping = False
        while self.step < steps and not is_stopping and not self.state.end_reason:
            step = self.step + 1
            for hook in self.hooks:
                hook.before_step(step)
            with self.health.phase(step, "step"):
                done = self.run_step(batches)
            if done is None:
                return f"data for step {step} did not arrive; see the logs of the ranks"
            for hook in self.hooks:
                hook.after_step(done)
            self.health.check(step)
            is_stopping = done.is_stopping
            del done  # frees the batch before the next one is loaded
        return ""

    def run_step(self, batches: Iterator[StepBatch | None]) -> FinishedStep | None:
        """Do one optimizer step. Return None on all ranks if a stopped run has no data on one."""
        components = self.components
        step = self.step + 1
        begin_s = time.perf_counter()
        with record_function("data"), self.health.waiting_for_data():
            batch = next(batches)
        wait_ms = (time.perf_counter() - begin_s) * 1e3
        batch, totals = agree_on_batch(components, step, batch, self.stop.received is not None)
        if batch is None:
            return None
        self.state.corrupt.add(totals.corrupt_samples, totals.samples)

        planned = components.planner.plan(step, batch.microbatches, components.loader.next_metas)
        forward_backward = partial(
            self.train_step.run, planned.plan, batch.microbatches, totals.targets, totals.images
        )
        outcome = forward_backward(annotate=step == components.run.recipe.metrics.profile_step)
        # The update is queued before the host waits for the losses, so that the device is not idle.
        grad_norm = self.updates.measure(outcome.weighted_and_module_losses)
        loss_copy = copy_losses(outcome, grad_norm, components.model, components.mesh)
        lr = self.updates.apply(step)
        # Count FLOPs and plan the next step while the device computes.
        counts = self.meter.count(batch)
        components.planner.plan_ahead(components.loader.planned_metas)
        losses = check_losses(
            step, loss_copy, components.model, components.mesh, self.health, forward_backward
        )
        self.updates.finish()

        self.state.step = step
        self.state.data = batch.state
        graphs = components.compilation.log_new_graphs(step, components.logger)
        skipped = self.state.corrupt.corrupt
        local = self.meter.measure(counts, outcome, begin_s, wait_ms, skipped, graphs)
        record = self.meter.combine(local, batch, step=step, lr=lr, **losses, **planned.statistics)
        components.planner.observe_step(
            step, planned, outcome.result, batch.microbatches, record["step_ms"]
        )
        return FinishedStep(step, record, local, outcome, batch, totals.is_stopping)

    @property
    def step(self) -> int:
        """Last finished step."""
        return self.state.step

    def close(self) -> None:
        """Stop planning, heartbeat and hooks. An error does not prevent the remaining calls."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.callback(hook.close)
            stack.callback(self.health.close)
            stack.callback(self.components.planner.close)
