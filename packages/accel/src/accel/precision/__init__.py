"""Changes to models that any engine makes: precision, compilation, fp8."""
