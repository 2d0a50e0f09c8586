"""The data of the examples: scikit-learn's handwritten digits, 1797 images of 8x8 pixels."""

__all__ = ["load_digits"]

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    from accel_state.imports.packages import install_hint

    raise ImportError(
        f"The examples need scikit-learn. Install it with: {install_hint('examples')}"
    ) from None
