"""Local SGD, under its documented path: a re-export of accel-optim."""

from accel_optim.local_sgd import LocalSGD as LocalSGD
