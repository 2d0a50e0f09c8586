"""Launch functions, under their documented path: re-exports of accel-launch."""

from accel_launch.commands.embedding import test_launch as test_launch
from accel_launch.notebook import debug_launcher as debug_launcher
from accel_launch.notebook import notebook_launcher as notebook_launcher
