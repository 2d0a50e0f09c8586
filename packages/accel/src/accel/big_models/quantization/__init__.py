"""Models whose linear layers bitsandbytes quantizes to 8 or 4 bits."""
