"""The wrapped scheduler, under its documented path: re-exports of accel-optim."""

from accel_optim.scheduler import AcceleratedScheduler as AcceleratedScheduler
