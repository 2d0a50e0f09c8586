"""Everything documented under `accel.utils`: lazy re-exports, each imported on first use."""

# At once, as a later import of its module would put that in the function's place: both have one name.
from accel.utils.tqdm import tqdm as tqdm
from accel_state.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
