"""Names for DeepSpeed under their documented path: re-exports."""

from accel.engines.deepspeed.config import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel.engines.deepspeed.placeholders import DummyOptim as DummyOptim
from accel.engines.deepspeed.placeholders import DummyScheduler as DummyScheduler
from accel.engines.deepspeed.runtime import GatheredParameters as GatheredParameters
from accel.engines.deepspeed.runtime import deepspeed_required as deepspeed_required
from accel.engines.deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel.engines.deepspeed.wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accel.engines.deepspeed.wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
